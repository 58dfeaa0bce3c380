package routetable

import (
	"net/textproto"
	"regexp"
	"strings"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Call is what a match may look at.
type Call struct {
	Path string // with its query, if it has one
	Verb string // HTTP method
	// Headers by name; case does not count. Nil for none.
	Headers map[string]string
}

// Match returns the first entry that takes the call.
func (t *Table) Match(c Call) (Entry, bool) {
	for _, e := range t.Entries {
		if takes(e.On(), c, t.Kind) {
			return e, true
		}
	}
	return Entry{}, false
}

func takes(m *nodecache.RouteMatch, c Call, kind nodecache.RouteKind) bool {
	path, query, _ := strings.Cut(c.Path, "?")
	if kind == nodecache.GRPCRoute {
		service, method, ok := strings.Cut(strings.TrimPrefix(path, "/"), "/")
		if !ok || !named(m.Service, service, m.MethodType) || !named(m.Method, method, m.MethodType) {
			return false
		}
	} else if !onPath(m, path) || m.Verb != "" && m.Verb != c.Verb {
		return false
	}
	headers := map[string]string{}
	for name, value := range c.Headers {
		headers[textproto.CanonicalMIMEHeaderKey(name)] = value
	}
	for _, h := range m.Headers {
		value, ok := headers[textproto.CanonicalMIMEHeaderKey(h.Name)]
		if !ok || !same(h.Value, value, h.Type) {
			return false
		}
	}
	for _, q := range m.Query {
		value, ok := parameter(query, q.Name)
		if !ok || !same(q.Value, value, q.Type) {
			return false
		}
	}
	return true
}

// parameter is the first of its name, not decoded.
func parameter(query, name string) (string, bool) {
	for part := range strings.SplitSeq(query, "&") {
		if key, value, _ := strings.Cut(part, "="); key == name {
			return value, true
		}
	}
	return "", false
}

func onPath(m *nodecache.RouteMatch, path string) bool {
	if m.PathType != nodecache.MatchPrefix {
		return same(m.Path, path, m.PathType)
	}
	rest, ok := strings.CutPrefix(path, Prefix(m.Path))
	return ok && (rest == "" || rest[0] == '/')
}

func named(want, have string, t nodecache.MatchType) bool { return want == "" || same(want, have, t) }

// same compares a whole value, as Envoy does.
func same(want, have string, t nodecache.MatchType) bool {
	if t != nodecache.MatchRegex {
		return want == have
	}
	re, err := regexp.Compile(`^(?:` + want + `)$`)
	return err == nil && re.MatchString(have)
}
