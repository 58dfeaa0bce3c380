package injection

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	goyaml "go.yaml.in/yaml/v3"
)

// maxNodes bounds a document whose aliases are written out.
const maxNodes = 1 << 20

// expand puts copies in the place of aliases and merge keys, so that a change of
// one part of the tree is no change of another, and refuses keys that stand
// twice.
func expand(root *goyaml.Node) error {
	left := maxNodes
	var walk func(n *goyaml.Node, depth int) (*goyaml.Node, error)
	walk = func(n *goyaml.Node, depth int) (*goyaml.Node, error) {
		if left--; left < 0 || depth > 1000 {
			return nil, errors.New("too large with its aliases written out")
		}
		if n.Kind == goyaml.AliasNode {
			return walk(n.Alias, depth+1)
		}
		c := *n
		c.Anchor = ""
		c.Content = nil
		for _, child := range n.Content {
			e, err := walk(child, depth+1)
			if err != nil {
				return nil, err
			}
			c.Content = append(c.Content, e)
		}
		if c.Kind == goyaml.MappingNode {
			return &c, merge(&c)
		}
		return &c, nil
	}
	expanded, err := walk(root, 0)
	if err == nil {
		*root = *expanded
	}
	return err
}

// merge replaces the merge keys of a map by what they merge (YAML 1.1, type
// merge): what the map says itself goes before, and of several the first.
func merge(m *goyaml.Node) error {
	own := map[string]bool{}
	for i := 0; i < len(m.Content); i += 2 {
		key := m.Content[i]
		if key.Kind != goyaml.ScalarNode {
			return fmt.Errorf("line %d: a key that is no string", key.Line)
		}
		if own[key.Value] {
			return fmt.Errorf("line %d: the key %q stands twice", key.Line, key.Value)
		}
		own[key.Value] = true
	}
	var content []*goyaml.Node
	for i := 0; i < len(m.Content); i += 2 {
		key, value := m.Content[i], m.Content[i+1]
		if key.Tag != "!!merge" {
			content = append(content, key, value)
			continue
		}
		from := []*goyaml.Node{value}
		if value.Kind == goyaml.SequenceNode {
			from = value.Content
		}
		for _, f := range from {
			if f.Kind != goyaml.MappingNode {
				return fmt.Errorf("line %d: << of what is no map", key.Line)
			}
			for j := 0; j < len(f.Content); j += 2 {
				if k := f.Content[j].Value; !own[k] {
					own[k] = true
					content = append(content, f.Content[j], f.Content[j+1])
				}
			}
		}
	}
	m.Content = content
	return nil
}

// at returns the map at a path.
func at(n *goyaml.Node, path []any) (*goyaml.Node, error) {
	for _, step := range path {
		var next *goyaml.Node
		switch step := step.(type) {
		case string:
			next = get(n, step)
		case int:
			if n.Kind == goyaml.SequenceNode && step < len(n.Content) {
				next = n.Content[step]
			}
		}
		if next == nil {
			return nil, fmt.Errorf("%v is not where it was read", step)
		}
		n = next
	}
	if n.Kind != goyaml.MappingNode {
		return nil, errors.New("not a map")
	}
	return n, nil
}

// get returns the value of a key, nil without.
func get(m *goyaml.Node, key string) *goyaml.Node {
	if m.Kind != goyaml.MappingNode {
		return nil
	}
	for i := 0; i < len(m.Content); i += 2 {
		if m.Content[i].Value == key {
			return m.Content[i+1]
		}
	}
	return nil
}

// set sets the value of a key that is not there, or is null.
func set(m *goyaml.Node, key string, value *goyaml.Node) {
	if old := get(m, key); old != nil {
		*old = *value
		return
	}
	pair := []*goyaml.Node{nodeOf(key), value}
	pair[0].Style = plainStyle(key)
	// Init containers are read before the others.
	if key == "initContainers" {
		for i := 0; i < len(m.Content); i += 2 {
			if m.Content[i].Value == "containers" {
				m.Content = slices.Insert(m.Content, i, pair...)
				return
			}
		}
	}
	m.Content = append(m.Content, pair...)
}

// child returns the value of a key, which is made if it is not there or null.
func child(m *goyaml.Node, key string, kind goyaml.Kind, tag string) *goyaml.Node {
	v := get(m, key)
	if v == nil || v.Kind != kind {
		set(m, key, &goyaml.Node{Kind: kind, Tag: tag})
		v = get(m, key)
	}
	if len(v.Content) == 0 {
		v.Style &^= goyaml.FlowStyle // it was {} or []
	}
	return v
}

func mapping(m *goyaml.Node, key string) *goyaml.Node {
	return child(m, key, goyaml.MappingNode, "!!map")
}

// insert puts an item into a list, at the end if i is negative.
func insert(m *goyaml.Node, key string, i int, item *goyaml.Node) {
	list := child(m, key, goyaml.SequenceNode, "!!seq")
	if i < 0 {
		i = len(list.Content)
	}
	list.Content = slices.Insert(list.Content, i, item)
}

func items(m *goyaml.Node, key string) []*goyaml.Node {
	if list := get(m, key); list != nil {
		return list.Content
	}
	return nil
}

// compact tells whether the first list of a document stands below its key, not
// to the right of it. What is injected stands in no column.
func compact(n *goyaml.Node) bool {
	found, yes := false, false
	var walk func(n *goyaml.Node)
	walk = func(n *goyaml.Node) {
		for i, c := range n.Content {
			if found {
				return
			}
			if n.Kind == goyaml.MappingNode && i%2 == 1 && c.Kind == goyaml.SequenceNode && c.Column > 0 && c.Style&goyaml.FlowStyle == 0 {
				found, yes = true, c.Column == n.Content[i-1].Column
			}
			walk(c)
		}
	}
	walk(n)
	return yes || !found
}

// nodeOf is an API object, or a string, as a tree.
func nodeOf(v any) *goyaml.Node {
	text, err := json.Marshal(v)
	if err == nil {
		var n *goyaml.Node
		if n, err = parseJSON(text); err == nil {
			return n
		}
	}
	panic(fmt.Sprintf("encode %T: %v", v, err)) // what is injected can be encoded
}

// parseJSON reads JSON as a tree that keeps the order of members and the form of
// numbers.
func parseJSON(text []byte) (*goyaml.Node, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	n, err := parseValue(d)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one JSON value")
	}
	return n, nil
}

func parseValue(d *json.Decoder) (*goyaml.Node, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch v := token.(type) {
	case json.Delim:
		n := &goyaml.Node{Kind: goyaml.MappingNode, Tag: "!!map"}
		if v == '[' {
			n = &goyaml.Node{Kind: goyaml.SequenceNode, Tag: "!!seq"}
		}
		for d.More() {
			if v == '{' {
				key, err := d.Token()
				if err != nil {
					return nil, err
				}
				if get(n, key.(string)) != nil {
					return nil, fmt.Errorf("the key %q stands twice", key)
				}
				n.Content = append(n.Content, &goyaml.Node{Kind: goyaml.ScalarNode, Tag: "!!str", Value: key.(string), Style: plainStyle(key.(string))})
			}
			value, err := parseValue(d)
			if err != nil {
				return nil, err
			}
			n.Content = append(n.Content, value)
		}
		_, err := d.Token()
		return n, err
	case string:
		return &goyaml.Node{Kind: goyaml.ScalarNode, Tag: "!!str", Value: v, Style: plainStyle(v)}, nil
	case json.Number:
		tag := "!!int"
		if strings.ContainsAny(v.String(), ".eE") {
			tag = "!!float"
		}
		return &goyaml.Node{Kind: goyaml.ScalarNode, Tag: tag, Value: v.String()}, nil
	case bool:
		return &goyaml.Node{Kind: goyaml.ScalarNode, Tag: "!!bool", Value: fmt.Sprint(v)}, nil
	}
	return &goyaml.Node{Kind: goyaml.ScalarNode, Tag: "!!null", Value: "null"}, nil
}

// plain are strings that no YAML parser takes for something else, be it one of
// YAML 1.1, to which "on" is true and "1e3" a number.
var plain = regexp.MustCompile(`^[A-Za-z/][A-Za-z0-9_./:-]*[A-Za-z0-9]$`)

func plainStyle(s string) goyaml.Style {
	switch strings.ToLower(s) {
	case "true", "false", "yes", "no", "on", "off", "null", "nan", "inf":
		return goyaml.DoubleQuotedStyle
	}
	switch {
	case plain.MatchString(s):
		return 0
	case strings.Contains(s, `"`):
		return goyaml.SingleQuotedStyle
	}
	return goyaml.DoubleQuotedStyle
}

// writeJSON writes a tree that came from JSON, on one line.
func writeJSON(n *goyaml.Node) ([]byte, error) {
	var out bytes.Buffer
	if err := appendJSON(&out, n); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

func appendJSON(out *bytes.Buffer, n *goyaml.Node) error {
	switch n.Kind {
	case goyaml.MappingNode, goyaml.SequenceNode:
		marks, step := "{}", 2
		if n.Kind == goyaml.SequenceNode {
			marks, step = "[]", 1
		}
		out.WriteByte(marks[0])
		for i := 0; i < len(n.Content); i += step {
			if i > 0 {
				out.WriteByte(',')
			}
			for j := range step {
				if j > 0 {
					out.WriteByte(':')
				}
				if err := appendJSON(out, n.Content[i+j]); err != nil {
					return err
				}
			}
		}
		out.WriteByte(marks[1])
		return nil
	case goyaml.ScalarNode:
		if n.Tag != "!!str" {
			out.WriteString(n.Value)
			return nil
		}
		e := json.NewEncoder(out)
		e.SetEscapeHTML(false)
		if err := e.Encode(n.Value); err != nil {
			return err
		}
		out.Truncate(out.Len() - 1) // the encoder ends a line
		return nil
	}
	return fmt.Errorf("a node of kind %d in JSON", n.Kind)
}
