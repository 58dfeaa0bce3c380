package routetable

import (
	"cmp"
	"strings"

	"github.com/fingerpost/fingerpost/nodecache"
)

// compareMatches orders matches by what the API says of the two kinds (Gateway
// API, HTTPRouteRule.matches and GRPCRouteRule.matches; hostnames have no say
// under a Service). The fields of the other kind are empty in both.
func compareMatches(a, b *nodecache.RouteMatch) int {
	return cmp.Or(
		descending(pathRank(a), pathRank(b)),
		descending(len(Prefix(a.Path)), len(Prefix(b.Path))),
		descending(nameRank(a.Service, a.MethodType), nameRank(b.Service, b.MethodType)),
		descending(len(a.Service), len(b.Service)),
		descending(nameRank(a.Method, a.MethodType), nameRank(b.Method, b.MethodType)),
		descending(len(a.Method), len(b.Method)),
		descending(min(len(a.Verb), 1), min(len(b.Verb), 1)),
		descending(len(a.Headers), len(b.Headers)),
		descending(len(a.Query), len(b.Query)),
	)
}

func descending(a, b int) int { return cmp.Compare(b, a) }

// pathRank sorts the types of path matches. The API leaves to implementations
// where regular expressions stand: here between Exact and PathPrefix, the
// longer before the shorter.
func pathRank(m *nodecache.RouteMatch) int {
	switch {
	case m.Path == "":
		return 0
	case m.PathType == nodecache.MatchExact:
		return 3
	case m.PathType == nodecache.MatchRegex:
		return 2
	}
	return 1
}

// nameRank sorts names of services and methods: a plain one before a regular
// expression, which may have more characters, and that before none.
func nameRank(name string, t nodecache.MatchType) int {
	switch {
	case name == "":
		return 0
	case t == nodecache.MatchRegex:
		return 1
	}
	return 2
}

// compareRoutes puts the older route first, one of unknown age last; then goes
// "{namespace}/{name}".
func compareRoutes(a, b *nodecache.Route) int {
	switch {
	case a.Created.IsZero() != b.Created.IsZero():
		if a.Created.IsZero() {
			return 1
		}
		return -1
	case !a.Created.Equal(b.Created):
		return a.Created.Compare(b.Created)
	}
	// As one string, as the API has it: a-b/c is before a/c.
	return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
}

// Prefix is a path prefix without the slashes at its end, which the API
// ignores; empty for the prefix of all paths.
func Prefix(path string) string { return strings.TrimRight(path, "/") }
