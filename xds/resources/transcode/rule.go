package transcode

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// register checks a method's rule with its further bindings (google/api/http.proto)
// and notes in taken what requests it takes; nothing if it returns an error.
func register(md protoreflect.MethodDescriptor, rule *annotations.HttpRule, taken map[string]string) error {
	var shapes []string
	for _, r := range append([]*annotations.HttpRule{rule}, rule.GetAdditionalBindings()...) {
		if r != rule && len(r.GetAdditionalBindings()) > 0 {
			return errors.New("a further binding has further bindings")
		}
		shape, err := check(md, r)
		if err != nil {
			return err
		}
		if other := taken[shape]; other != "" {
			return fmt.Errorf("%s is taken by %s", shape, other)
		}
		shapes = append(shapes, shape)
	}
	for i, shape := range shapes {
		for _, before := range shapes[:i] {
			if shape == before {
				return fmt.Errorf("%s is there twice", shape)
			}
		}
	}
	for _, shape := range shapes {
		taken[shape] = string(md.FullName())
	}
	return nil
}

var verb = regexp.MustCompile(`^[A-Z]+$`)

// check returns the requests that one binding takes, as verb and template
// without the names of variables.
func check(md protoreflect.MethodDescriptor, r *annotations.HttpRule) (string, error) {
	var method, path string
	switch p := r.GetPattern().(type) {
	case *annotations.HttpRule_Get:
		method, path = "GET", p.Get
	case *annotations.HttpRule_Put:
		method, path = "PUT", p.Put
	case *annotations.HttpRule_Post:
		method, path = "POST", p.Post
	case *annotations.HttpRule_Delete:
		method, path = "DELETE", p.Delete
	case *annotations.HttpRule_Patch:
		method, path = "PATCH", p.Patch
	case *annotations.HttpRule_Custom:
		method, path = p.Custom.GetKind(), p.Custom.GetPath()
	}
	if !verb.MatchString(method) {
		return "", fmt.Errorf("no HTTP method %q", method)
	}
	shape, fields, err := parseTemplate(path)
	if err != nil {
		return "", fmt.Errorf("path %q: %w", path, err)
	}
	for _, f := range fields {
		if err := scalar(md.Input(), f); err != nil {
			return "", fmt.Errorf("path %q: %w", path, err)
		}
	}
	if b := r.GetBody(); b != "" && b != "*" && md.Input().Fields().ByName(protoreflect.Name(b)) == nil {
		return "", fmt.Errorf("%s has no field %q for the body", md.Input().FullName(), b)
	}
	if b := r.GetResponseBody(); b != "" && !httpBody(md.Output().Fields().ByName(protoreflect.Name(b))) {
		return "", fmt.Errorf("%s has no field %q of google.api.HttpBody for the response body", md.Output().FullName(), b)
	}
	return method + " " + shape, nil
}

// httpBody tells whether the field is one of the only kind that Envoy takes for
// a response body.
func httpBody(f protoreflect.FieldDescriptor) bool {
	return f != nil && f.Message() != nil && f.Cardinality() != protoreflect.Repeated && f.Message().FullName() == "google.api.HttpBody"
}

// scalar returns an error unless the path leads to one value within the message.
func scalar(m protoreflect.MessageDescriptor, path string) error {
	parts := strings.Split(path, ".")
	for i, name := range parts {
		f := m.Fields().ByName(protoreflect.Name(name))
		switch last := i == len(parts)-1; {
		case f == nil:
			return fmt.Errorf("%s has no field %q", m.FullName(), name)
		case f.Cardinality() == protoreflect.Repeated:
			return fmt.Errorf("field %s is repeated", f.FullName())
		case last != (f.Message() == nil):
			return fmt.Errorf("field %s is no place for a variable", f.FullName())
		case !last:
			m = f.Message()
		}
	}
	return nil
}

var (
	literal   = regexp.MustCompile(`^[A-Za-z0-9._~!$&'()+,;@%-]+$`)
	fieldPath = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$`)
)

// parseTemplate reads a path template (google/api/http.proto, "Path template
// syntax"). It returns it without the names of its variables, and these names.
func parseTemplate(t string) (shape string, fields []string, err error) {
	rest, ok := strings.CutPrefix(t, "/")
	if !ok {
		return "", nil, errors.New("it does not begin with a slash")
	}
	rest, custom, hasVerb := cutVerb(rest)
	if hasVerb && !literal.MatchString(custom) {
		return "", nil, fmt.Errorf("bad verb %q", custom)
	}
	var segments []string
	for rest != "" || segments == nil {
		var one string
		if strings.HasPrefix(rest, "{") {
			end := strings.IndexByte(rest, '}')
			if end < 0 {
				return "", nil, errors.New("a brace is not closed")
			}
			name, pattern, has := strings.Cut(rest[1:end], "=")
			if !has {
				pattern = "*"
			}
			if !fieldPath.MatchString(name) {
				return "", nil, fmt.Errorf("bad variable %q", name)
			}
			fields, one, rest = append(fields, name), pattern, rest[end+1:]
			if rest != "" && rest[0] != '/' {
				return "", nil, errors.New("something follows a variable")
			}
			if rest == "/" {
				return "", nil, errors.New("it ends with a slash")
			}
			rest = strings.TrimPrefix(rest, "/")
		} else {
			var more bool
			if one, rest, more = strings.Cut(rest, "/"); more && rest == "" {
				return "", nil, errors.New("it ends with a slash")
			}
		}
		segments = append(segments, strings.Split(one, "/")...)
	}
	for i, s := range segments {
		switch {
		case s == "**" && i != len(segments)-1:
			return "", nil, errors.New("** is not the last segment")
		case s != "*" && s != "**" && !literal.MatchString(s):
			return "", nil, fmt.Errorf("bad segment %q", s)
		}
	}
	shape = "/" + strings.Join(segments, "/")
	if hasVerb {
		shape += ":" + custom
	}
	return shape, fields, nil
}

// cutVerb splits off the verb: what follows a colon behind the last segment.
func cutVerb(t string) (rest, verb string, ok bool) {
	i := strings.LastIndexByte(t, ':')
	if i < 0 || i < strings.LastIndexAny(t, "/}") {
		return t, "", false
	}
	return t[:i], t[i+1:], true
}
