package kube

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unique"

	goyaml "go.yaml.in/yaml/v2"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
)

// world is what a file source says of the cluster at one moment.
type world struct {
	pods     map[name]*Record
	services map[name]*nodecache.Front
	slices   map[name]*nodecache.Slice
	gateway  map[gatewayKey]*gateway.Object
	optedOut map[string]struct{} // namespaces
	nodes    map[string]topology
	ignored  map[string]int

	where map[name]string // of pods, for errors
	uids  map[string]name
	// gatewayUIDs has the objects of the Gateway API, for the same.
	gatewayUIDs map[string]gatewayKey
}

// gatewayKey names an object of the Gateway API.
type gatewayKey struct {
	kind string
	nodecache.Name
}

func newWorld() *world {
	return &world{
		pods:     map[name]*Record{},
		services: map[name]*nodecache.Front{},
		slices:   map[name]*nodecache.Slice{},
		gateway:  map[gatewayKey]*gateway.Object{},
		optedOut: map[string]struct{}{},
		nodes:    map[string]topology{},
		ignored:  map[string]int{},
		where:    map[name]string{},
		uids:     map[string]name{},

		gatewayUIDs: map[string]gatewayKey{},
	}
}

// The kinds that are recognised, by API group.
var knownKinds = map[string]map[string]bool{
	"":                          {"Pod": true, "Namespace": true, "Service": true, "Node": true},
	"discovery.k8s.io":          {"EndpointSlice": true},
	"gateway.networking.k8s.io": {"HTTPRoute": true, "GRPCRoute": true, "ReferenceGrant": true},
}

// maxDepth bounds Lists within Lists.
const maxDepth = 4

var errEmpty = errors.New("is empty; an empty world is `items: []`")

// add reads the objects of a file: JSON values one after another, or YAML
// documents. Errors say where in the file, not which file; file stands in those
// that name two places.
func (w *world) add(file string, data []byte) error {
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	docs, err := documents(data)
	if err != nil {
		return err
	}
	for i, doc := range docs {
		where := fmt.Sprintf("document %d", i+1)
		if err := w.addObject(file, where, doc, typeMeta{}, 0); err != nil {
			return err
		}
	}
	if len(docs) == 0 {
		return errEmpty
	}
	return nil
}

// documents splits a file into JSON values, without empty ones.
func documents(data []byte) ([]json.RawMessage, error) {
	if first := bytes.TrimSpace(data); len(first) > 0 && first[0] == '{' {
		docs, err := jsonDocuments(data)
		if err == nil {
			return docs, nil
		}
		// A flow mapping is YAML too; what is neither is most likely JSON.
		if docs, yerr := yamlDocuments(data); yerr == nil {
			return docs, nil
		}
		return nil, err
	}
	return yamlDocuments(data)
}

func jsonDocuments(data []byte) ([]json.RawMessage, error) {
	var docs []json.RawMessage
	dec := json.NewDecoder(bytes.NewReader(data))
	for {
		var doc json.RawMessage
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil {
			offset := dec.InputOffset()
			var syntax *json.SyntaxError
			if errors.As(err, &syntax) {
				offset = syntax.Offset
			}
			line := 1 + bytes.Count(data[:min(int(offset), len(data))], []byte("\n"))
			return nil, fmt.Errorf("line %d: %s", line, oneLine(err))
		}
		docs = append(docs, doc)
	}
}

func yamlDocuments(data []byte) ([]json.RawMessage, error) {
	var docs []json.RawMessage
	for start, text := range yamlSplit(data) {
		doc, err := yaml.YAMLToJSON(text)
		if err == nil {
			err = ends(text)
		}
		if err != nil {
			return nil, errors.New(shiftLines(oneLine(err), start))
		}
		if doc = bytes.TrimSpace(doc); !bytes.Equal(doc, []byte("null")) {
			docs = append(docs, doc)
		}
	}
	return docs, nil
}

var documentEnd = regexp.MustCompile(`(?m)^\.\.\.`)

// ends refuses a text in which something stands behind its one document, which
// the conversion to JSON does not look at. That can only be where the document
// is in flow style, as JSON is, or has an end marker.
func ends(text []byte) error {
	if first := bytes.TrimSpace(text)[0]; first != '{' && first != '[' && !documentEnd.Match(text) {
		return nil
	}
	dec := goyaml.NewDecoder(bytes.NewReader(text))
	var v any
	if err := dec.Decode(&v); err != nil {
		return err
	}
	if err := dec.Decode(&v); err != nil && !errors.Is(err, io.EOF) {
		return err
	} else if err == nil {
		return errors.New("something stands behind the end of the document")
	}
	return nil
}

// yamlSplit yields the documents of a stream with the number of lines before
// each. The marker between them stands at the start of a line (YAML 1.2,
// section 9.1.2).
func yamlSplit(data []byte) func(yield func(int, []byte) bool) {
	return func(yield func(int, []byte) bool) {
		start, startLine, line := 0, 0, 0
		for pos := 0; pos < len(data); line++ {
			end := len(data)
			if i := bytes.IndexByte(data[pos:], '\n'); i >= 0 {
				end = pos + i + 1
			}
			if rest, ok := bytes.CutPrefix(data[pos:end], []byte("---")); ok && (len(rest) == 0 || strings.IndexByte(" \t\r\n", rest[0]) >= 0) {
				if len(bytes.TrimSpace(data[start:pos])) > 0 && !yield(startLine, data[start:pos]) {
					return
				}
				start, startLine = pos+3, line
			}
			pos = end
		}
		if len(bytes.TrimSpace(data[start:])) > 0 {
			yield(startLine, data[start:])
		}
	}
}

var lineNumber = regexp.MustCompile(`\bline (\d+)`)

func shiftLines(text string, by int) string {
	return lineNumber.ReplaceAllStringFunc(text, func(s string) string {
		n, err := strconv.Atoi(strings.TrimPrefix(s, "line "))
		if err != nil {
			return s
		}
		return fmt.Sprintf("line %d", n+by)
	})
}

// oneLine is the text of an error without its library's prefixes and breaks.
func oneLine(err error) string {
	text := err.Error()
	for _, prefix := range []string{"error converting YAML to JSON: ", "error unmarshaling JSON: ", "yaml: ", "json: "} {
		text = strings.TrimPrefix(text, prefix)
	}
	return strings.Join(strings.Fields(text), " ")
}

type typeMeta struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

func (t typeMeta) group() string {
	group, _, found := strings.Cut(t.APIVersion, "/")
	if !found {
		return ""
	}
	return group
}

func (t typeMeta) String() string {
	if g := t.group(); g != "" {
		return t.Kind + "." + g
	}
	return t.Kind
}

// addObject adds one object, or those of a List. The items of a typed list may
// leave their type to it.
func (w *world) addObject(file, where string, doc json.RawMessage, list typeMeta, depth int) error {
	var head struct {
		typeMeta
		Items *[]json.RawMessage `json:"items"`
	}
	if !bytes.HasPrefix(doc, []byte("{")) {
		return fmt.Errorf("%s: is not a Kubernetes object", where)
	}
	if err := kjson.Unmarshal(doc, &head); err != nil {
		return fmt.Errorf("%s: is not a Kubernetes object: %s", where, oneLine(err))
	}
	if head.Kind == "" {
		head.Kind = list.Kind
	}
	if head.APIVersion == "" {
		head.APIVersion = list.APIVersion
	}
	element, isList := strings.CutSuffix(head.Kind, "List")
	switch {
	case head.Items != nil || isList && head.group() == "" && (element == "" || knownKinds[""][element]):
		if depth == maxDepth {
			return fmt.Errorf("%s: has Lists more than %d deep", where, maxDepth)
		}
		if head.Kind == "" && head.APIVersion != "" && len(*head.Items) > 0 {
			// kubectl writes apiVersion, items, kind: the rest is still to come.
			return fmt.Errorf("%s: has items and no kind; it may be cut off", where)
		}
		if head.Items == nil { // most likely the rest is still to be written
			return fmt.Errorf("%s: %s has no items; an empty one has `items: []`", where, head.Kind)
		}
		of := typeMeta{}
		if isList && element != "" {
			of = typeMeta{APIVersion: head.APIVersion, Kind: element}
		}
		for i, item := range *head.Items {
			if err := w.addObject(file, fmt.Sprintf("%s, item %d", where, i+1), item, of, depth+1); err != nil {
				return err
			}
		}
		return nil
	case head.Kind == "":
		return fmt.Errorf("%s: has no kind", where)
	case !knownKinds[head.group()][head.Kind]:
		w.ignored[head.String()]++
		return nil
	case head.Kind == "Pod":
		return w.addPod(file, where, doc)
	case head.Kind == "Namespace":
		return w.addNamespace(where, doc)
	case head.Kind == "Service":
		return w.addService(where, doc)
	case head.Kind == "EndpointSlice":
		return w.addSlice(where, doc)
	case head.Kind == "Node":
		return w.addNode(where, doc)
	}
	return w.addGateway(where, head.typeMeta, doc)
}

// addNode reads where a node is.
func (w *world) addNode(where string, doc json.RawMessage) error {
	node := &metav1.PartialObjectMetadata{}
	if err := kjson.Unmarshal(doc, node); err != nil {
		return fmt.Errorf("%s: is not a Node: %s", where, oneLine(err))
	}
	if node.Name == "" {
		return fmt.Errorf("%s: Node has no metadata.name", where)
	}
	w.nodes[node.Name] = topology{node.Labels[zoneLabel], node.Labels[regionLabel]}
	return nil
}

// settle lets pods have the labels of their nodes.
func (w *world) settle() {
	for _, r := range w.pods {
		if n := w.nodes[r.Node]; n.zone != "" {
			r.at = unique.Make(r.at.Value().on(n))
			r.Zone = r.at.Value().zone
		}
	}
}

func (w *world) addPod(file, where string, doc json.RawMessage) error {
	pod := &corev1.Pod{}
	if err := kjson.Unmarshal(doc, pod); err != nil {
		return fmt.Errorf("%s: is not a Pod: %s", where, oneLine(err))
	}
	if pod.Name == "" {
		return fmt.Errorf("%s: Pod has no metadata.name", where)
	}
	if pod.Namespace == "" {
		pod.Namespace = "default"
	}
	key := name{pod.Namespace, pod.Name}
	if pod.UID == "" {
		return fmt.Errorf("%s: Pod %s/%s has no metadata.uid", where, key.namespace, key.name)
	}
	if first, twice := w.where[key]; twice {
		return fmt.Errorf("%s: Pod %s/%s is there twice, first in %s", where, key.namespace, key.name, first)
	}
	if first, twice := w.uids[string(pod.UID)]; twice {
		return fmt.Errorf("%s: Pod %s/%s has the metadata.uid of Pod %s/%s", where, key.namespace, key.name, first.namespace, first.name)
	}
	r := Convert(pod)
	w.pods[key], w.uids[r.UID], w.where[key] = r, key, file+": "+where
	return nil
}

func (w *world) addNamespace(where string, doc json.RawMessage) error {
	ns := &corev1.Namespace{}
	if err := kjson.Unmarshal(doc, ns); err != nil {
		return fmt.Errorf("%s: is not a Namespace: %s", where, oneLine(err))
	}
	if ns.Name == "" {
		return fmt.Errorf("%s: Namespace has no metadata.name", where)
	}
	if optsOut(ns.Annotations) {
		w.optedOut[ns.Name] = struct{}{}
	}
	return nil
}

// addService and addSlice take an object that stands there twice as its last:
// Services have no identity that a second one could take.
func (w *world) addService(where string, doc json.RawMessage) error {
	s := &corev1.Service{}
	if err := kjson.Unmarshal(doc, s); err != nil {
		return fmt.Errorf("%s: is not a Service: %s", where, oneLine(err))
	}
	if s.Name == "" {
		return fmt.Errorf("%s: Service has no metadata.name", where)
	}
	s.Namespace = cmp.Or(s.Namespace, "default")
	w.services[name{s.Namespace, s.Name}] = ConvertService(s)
	return nil
}

func (w *world) addSlice(where string, doc json.RawMessage) error {
	s := &discoveryv1.EndpointSlice{}
	if err := kjson.Unmarshal(doc, s); err != nil {
		return fmt.Errorf("%s: is not an EndpointSlice: %s", where, oneLine(err))
	}
	if s.Name == "" {
		return fmt.Errorf("%s: EndpointSlice has no metadata.name", where)
	}
	s.Namespace = cmp.Or(s.Namespace, "default")
	w.slices[name{s.Namespace, s.Name}] = ConvertSlice(s)
	return nil
}

// addGateway takes an object of a version that has another form as one of an
// unknown kind. One whose spec cannot be read is left out by the table, as one of
// the API server is: pods do not wait for routes.
func (w *world) addGateway(where string, head typeMeta, doc json.RawMessage) error {
	if _, version, _ := strings.Cut(head.APIVersion, "/"); !gateway.Reads(head.Kind, version) {
		w.ignored[head.String()]++
		return nil
	}
	o, err := gateway.Decode(head.Kind, doc)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", where, err)
	case o.Name.Name == "":
		return fmt.Errorf("%s: %s has no metadata.name", where, head.Kind)
	}
	key := gatewayKey{head.Kind, o.Name}
	if first, twice := w.gatewayUIDs[o.UID]; twice && first != key {
		return fmt.Errorf("%s: %s %s has the metadata.uid of %s %s", where, head.Kind, o, first.kind, first)
	}
	w.gateway[key], w.gatewayUIDs[o.UID] = o, key
	return nil
}

// optsOut reads what a namespace says of its pods being asked.
func optsOut(annotations map[string]string) bool { return annotations[CollectAnnotation] == "false" }
