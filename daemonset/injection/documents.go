package injection

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	goyaml "go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	kjson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"
)

// document is one of a stream. The stream is the befores and texts of all.
type document struct {
	number    int    // from 1; of one without content that of the next
	line      int    // of the stream, where text begins
	before    []byte // a marker, with its line's end
	text      []byte
	json      bool
	root      goyaml.Node // read if there are workloads
	workloads []*workload
}

func (d *document) String() string { return fmt.Sprintf("document %d (line %d)", d.number, d.line) }

// marker begins or ends a document (YAML 1.2, 9.1.2). No text of a document can
// look like it, not in a string over several lines either.
var marker = regexp.MustCompile(`(?m)^(---|\.\.\.)(?:[ \t].*)?\r?(?:\n|\z)`)

// bare is a marker that has nothing of the document on its line.
var bare = regexp.MustCompile(`^(---|\.\.\.)[ \t]*(#.*)?\r?\n?\z`)

// empty is a text without content: comments, directives.
var empty = regexp.MustCompile(`\A(?:[ \t]*(?:[#%].*)?\r?(?:\n|\z))*\z`)

// split makes documents of a stream.
func split(in []byte) []*document {
	var list []*document
	line, number := 1, 1
	add := func(before, text []byte) {
		line += bytes.Count(before, []byte("\n"))
		for _, part := range splitJSON(text) {
			list = append(list, &document{number: number, line: line, before: before, text: part.text, json: part.json})
			line += bytes.Count(part.text, []byte("\n"))
			before = nil
			if !empty.Match(part.text) {
				number++
			}
		}
	}
	var before []byte
	at := 0
	for _, m := range marker.FindAllIndex(in, -1) {
		add(before, in[at:m[0]])
		before, at = in[m[0]:m[1]], m[1]
		if !bare.Match(before) {
			before, at = in[m[0]:m[0]+4], m[0]+4 // the document begins behind "--- "
		}
	}
	add(before, in[at:])
	return list
}

type part struct {
	text []byte
	json bool
}

// splitJSON returns the JSON objects of which a text consists, each with the
// space in front of it, or the text as it is.
func splitJSON(text []byte) []part {
	whole := []part{{text: text}}
	if trimmed := bytes.TrimLeft(text, " \t\r\n"); len(trimmed) == 0 || trimmed[0] != '{' {
		return whole
	}
	var parts []part
	d := json.NewDecoder(bytes.NewReader(text))
	for at := 0; ; {
		var v json.RawMessage
		switch err := d.Decode(&v); {
		case errors.Is(err, io.EOF):
			last := &parts[len(parts)-1]
			last.text = text[at-len(last.text):]
			return parts
		case err != nil || v[0] != '{':
			return whole
		}
		end := int(d.InputOffset())
		parts = append(parts, part{text[at:end], true})
		at = end
	}
}

// read finds the workloads of the document, and notes namespaces.
func (d *document) read(namespaces map[string]*corev1.Namespace) error {
	if empty.Match(d.text) {
		return nil
	}
	text, err := d.text, error(nil)
	if !d.json {
		if text, err = yaml.YAMLToJSON(d.text); err != nil {
			return fmt.Errorf("cannot be read: %w", err)
		}
	}
	var object any
	if err := kjson.Unmarshal(text, &object); err != nil {
		return fmt.Errorf("cannot be read: %w", err)
	}
	found, err := find(object, "", "", nil, namespaces)
	if err != nil || len(found) == 0 {
		return err
	}
	root, err := d.parse()
	if err != nil {
		return fmt.Errorf("cannot be read: %w", err)
	}
	for _, f := range found {
		w := f.workload
		if w.node, err = at(root, f.path); err != nil {
			return fmt.Errorf("%s: %w", w, err)
		}
		d.workloads = append(d.workloads, w)
	}
	return nil
}

// parse reads the document as a tree whose parts can be changed.
func (d *document) parse() (*goyaml.Node, error) {
	if d.json {
		root, err := parseJSON(d.text)
		if err != nil {
			return nil, err
		}
		d.root = *root
		return &d.root, nil
	}
	if err := goyaml.Unmarshal(d.text, &d.root); err != nil {
		return nil, err
	}
	if d.root.Kind != goyaml.DocumentNode || len(d.root.Content) != 1 {
		return nil, errors.New("no object")
	}
	if err := expand(&d.root); err != nil {
		return nil, err
	}
	return d.root.Content[0], nil
}

// write makes the text anew of the tree.
func (d *document) write() error {
	if d.json {
		space := d.text[:len(d.text)-len(bytes.TrimLeft(d.text, " \t\r\n"))]
		tail := d.text[len(bytes.TrimRight(d.text, " \t\r\n")):]
		text, err := writeJSON(&d.root)
		if err != nil {
			return err
		}
		if bytes.Contains(bytes.TrimSpace(d.text), []byte("\n")) {
			var indented bytes.Buffer
			if err := json.Indent(&indented, text, "", indentOf(d.text)); err != nil {
				return err
			}
			text = indented.Bytes()
		}
		d.text = bytes.Join([][]byte{space, text, tail}, nil)
		return nil
	}
	var out bytes.Buffer
	if len(d.before) > 0 && !bytes.HasSuffix(d.before, []byte("\n")) {
		out.WriteByte('\n')
	}
	e := goyaml.NewEncoder(&out)
	e.SetIndent(2)
	if compact(&d.root) {
		e.CompactSeqIndent()
	}
	if err := e.Encode(&d.root); err != nil {
		return err
	}
	if err := e.Close(); err != nil {
		return err
	}
	d.text = out.Bytes()
	return nil
}

// indentOf returns the space in front of the first member of a JSON object.
func indentOf(text []byte) string {
	_, rest, _ := bytes.Cut(bytes.TrimSpace(text), []byte("\n"))
	return string(rest[:len(rest)-len(bytes.TrimLeft(rest, " \t"))])
}

// located is a workload and where it is in its document: keys of maps, and
// places in lists.
type located struct {
	*workload
	path []any
}

// templates says where the objects of a kind have their pod or template.
var templates = map[string][]any{
	"/Pod":                   {},
	"/PodTemplate":           {"template"},
	"/ReplicationController": {"spec", "template"},
	"apps/Deployment":        {"spec", "template"},
	"apps/StatefulSet":       {"spec", "template"},
	"apps/DaemonSet":         {"spec", "template"},
	"apps/ReplicaSet":        {"spec", "template"},
	"batch/Job":              {"spec", "template"},
	"batch/CronJob":          {"spec", "jobTemplate", "spec", "template"},
}

// find returns the workloads that a JSON value is, or has in its list of items,
// whose kind is what the list's kind says where they say none themselves.
func find(v any, apiVersion, kind string, path []any, namespaces map[string]*corev1.Namespace) ([]located, error) {
	object, ok := v.(map[string]any)
	if !ok {
		return nil, nil // nothing of Kubernetes
	}
	if s, ok := object["apiVersion"].(string); ok {
		apiVersion = s
	}
	if s, ok := object["kind"].(string); ok {
		kind = s
	}
	if list, ok := object["items"].([]any); ok && strings.HasSuffix(kind, "List") {
		var all []located
		for i, item := range list {
			found, err := find(item, apiVersion, strings.TrimSuffix(kind, "List"), append(path[:len(path):len(path)], "items", i), namespaces)
			if err != nil {
				return nil, err
			}
			all = append(all, found...)
		}
		return all, nil
	}
	if apiVersion == "v1" && kind == "Namespace" {
		var ns corev1.Namespace
		if err := decode(object, &ns); err != nil {
			return nil, fmt.Errorf("kind Namespace: %w", err)
		}
		namespaces[ns.Name] = &ns
		return nil, nil
	}
	group, _, ok := strings.Cut(apiVersion, "/")
	if !ok {
		group = ""
	}
	where, ok := templates[group+"/"+kind]
	if !ok {
		return nil, nil
	}
	w := &workload{kind: kind}
	if meta, ok := object["metadata"].(map[string]any); ok {
		w.namespace, _ = meta["namespace"].(string)
		w.name, _ = meta["name"].(string)
		if w.name == "" {
			w.name, _ = meta["generateName"].(string)
		}
	}
	var template any = object
	for _, key := range where {
		inner, ok := template.(map[string]any)
		if !ok {
			return nil, nil // a part of one, as in a patch
		}
		template = inner[key.(string)]
	}
	if _, ok := template.(map[string]any); !ok {
		return nil, nil
	}
	if err := decode(template, &w.template); err != nil {
		return nil, fmt.Errorf("%s: %w", w, err)
	}
	return []located{{w, append(path[:len(path):len(path)], where...)}}, nil
}

// decode reads what the API server would read, by names in their own case.
func decode(v, into any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return kjson.Unmarshal(text, into)
}
