package nodecache

import (
	"cmp"
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
	Entries   []RouteEntry
}

// RouteEntry is one match of a route that leads to an owner.
type RouteEntry struct {
	Route string // UID of the route; set by the directory
	Rule  int    // index of the rule in the route
	Match int    // index of the match in the rule
	Owner OwnerKey
	Verb  string // HTTP method; empty for any
	Path  string
}

// UpsertRoute puts the route in place of what the directory held under its
// UID, and touches no other route. An owner that is not there yet needs no
// record of its own: it is visible by its routes. It returns [ErrOldRoute] if
// a newer generation is held. Nobody is told of a route whose entries are held
// already.
func (d *Directory) UpsertRoute(r *Route) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	old := d.routes[r.UID]
	if old != nil && old.Generation > r.Generation {
		return ErrOldRoute
	}
	if old != nil && old.equal(r) {
		d.routes[r.UID] = r
		return nil
	}
	d.unlinkRoute(old)
	d.routes[r.UID] = r
	for _, e := range r.Entries {
		set := d.routesOf[e.Owner]
		if set == nil {
			set = map[string]struct{}{}
			d.routesOf[e.Owner] = set
		}
		set[r.UID] = struct{}{}
		d.changed(e.Owner)
	}
	return nil
}

// equal tells whether owners have the same entries of both routes.
func (r *Route) equal(o *Route) bool {
	return slices.EqualFunc(r.Entries, o.Entries, func(a, b RouteEntry) bool {
		a.Route, b.Route = "", ""
		return a == b
	})
}

// RemoveRoute forgets the route, and nothing that other routes said.
func (d *Directory) RemoveRoute(uid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unlinkRoute(d.routes[uid])
	delete(d.routes, uid)
}

// unlinkRoute needs mu.
func (d *Directory) unlinkRoute(r *Route) {
	if r == nil {
		return
	}
	for _, e := range r.Entries {
		set := d.routesOf[e.Owner]
		delete(set, r.UID)
		if len(set) == 0 {
			delete(d.routesOf, e.Owner)
		}
		d.changed(e.Owner)
	}
}

// routeEntries needs mu, for reading at least.
func (d *Directory) routeEntries(key OwnerKey) []RouteEntry {
	var es []RouteEntry
	for uid := range d.routesOf[key] {
		for _, e := range d.routes[uid].Entries {
			if e.Owner == key {
				e.Route = uid
				es = append(es, e)
			}
		}
	}
	slices.SortFunc(es, func(a, b RouteEntry) int {
		return cmp.Or(cmp.Compare(a.Route, b.Route), cmp.Compare(a.Rule, b.Rule), cmp.Compare(a.Match, b.Match))
	})
	return es
}
