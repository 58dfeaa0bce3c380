package nodecache

import (
	"reflect"
	"slices"
	"time"
)

// Route is what one HTTPRoute or GRPCRoute of the cluster says, in a small
// record. It is immutable once given to a [Directory].
type Route struct {
	UID        string
	Generation int64 // metadata.generation
	Kind       RouteKind
	Namespace  string
	Name       string
	Created    time.Time // creationTimestamp; zero if unknown
	Parents    []RouteParent
	// Hostnames is of interest for parents of kind Gateway alone: a Service has
	// its own names (GEP-1294).
	Hostnames []string
	Rules     []RouteRule
}

// Key is the name of the route, within its kind.
func (r *Route) Key() Name { return Name{r.Namespace, r.Name} }

// Equal tells whether two routes are the same in every field.
func (r *Route) Equal(s *Route) bool {
	if !r.Created.Equal(s.Created) {
		return false
	}
	a, b := *r, *s
	a.Created, b.Created = time.Time{}, time.Time{}
	return reflect.DeepEqual(&a, &b)
}

// parents returns the names of the Services that the route is attached to,
// each once.
func (r *Route) parents() []Name {
	var names []Name
	for _, p := range r.Parents {
		if p.Service() && !slices.Contains(names, p.Name) {
			names = append(names, p.Name)
		}
	}
	return names
}

// backends returns the names of the Services that the route's rules name, each
// once, also those to which no call may go.
func (r *Route) backends() []Name {
	var names []Name
	for _, rule := range r.Rules {
		for _, b := range rule.Backends {
			if b.Service != (Name{}) && !slices.Contains(names, b.Service) {
				names = append(names, b.Service)
			}
		}
	}
	return names
}

// RouteEntry is one match of a route that leads to an owner: a pod of it
// stands, or stood, behind a Service to which the rule sends calls.
type RouteEntry struct {
	Route string // UID of the route
	Rule  int    // index of the rule in the route
	Match int    // index of the match in the rule
	Verb  string // HTTP method; empty for any
	Path  string // as in [RouteMatch]
	// Service and Method are of a GRPCRoute; empty for any.
	Service, Method string
}

// entries returns the matches of the rules that send calls to the Services.
func (r *Route) entries(to []*Standing) []RouteEntry {
	leads := func(b RouteBackend) bool {
		return b.Refused == "" && b.Weight > 0 &&
			slices.ContainsFunc(to, func(st *Standing) bool { return st.Key() == b.Service })
	}
	var es []RouteEntry
	for i, rule := range r.Rules {
		if rule.Refused != "" || !slices.ContainsFunc(rule.Backends, leads) {
			continue
		}
		for j, m := range rule.Matches {
			es = append(es, RouteEntry{
				Route: r.UID, Rule: i, Match: j, Verb: m.Verb, Path: m.Path, Service: m.Service, Method: m.Method,
			})
		}
	}
	return es
}
