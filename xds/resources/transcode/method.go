package transcode

import (
	"slices"
	"strings"
)

// Method returns the method, as pkg.Service/Method, to which Envoy transcodes a
// request of the HTTP method and path; empty if to none. A query does not
// count.
func (s *Set) Method(verb, path string) string {
	path, _, _ = strings.Cut(path, "?")
	var best []string
	method := ""
	for shape, full := range s.taken {
		v, template, _ := strings.Cut(shape, " ")
		if v != verb {
			continue
		}
		if rank, ok := fits(template, path); ok && (method == "" || slices.Compare(rank, best) < 0) {
			best, method = rank, full
		}
	}
	if i := strings.LastIndexByte(method, '.'); i >= 0 {
		method = method[:i] + "/" + method[i+1:]
	}
	return method
}

// fits tells whether a template without variables takes the path, and how well:
// of two, the lower goes first. A template with a verb goes before one without;
// segment by segment a literal goes before *, and that before **.
func fits(template, path string) (rank []string, ok bool) {
	template, custom, _ := cutVerb(template)
	rank = []string{"1"}
	if custom != "" {
		rank[0] = "0"
		if path, ok = strings.CutSuffix(path, ":"+custom); !ok {
			return nil, false
		}
	}
	want, have := strings.Split(template, "/"), strings.Split(path, "/")
	for i, w := range want {
		switch {
		case w == "**":
			return append(rank, "2"), true
		case i >= len(have) || w == "*" && have[i] == "" || w != "*" && w != have[i]:
			return nil, false
		case w == "*":
			rank = append(rank, "1")
		default:
			rank = append(rank, "0")
		}
	}
	return rank, len(have) == len(want)
}
