package nodecache

import (
	"cmp"
	"slices"
	"strings"
)

// routes is what the directory holds of routes. Directory.mu guards it. The
// lists are sorted by UID and never changed in place.
type routes struct {
	byUID map[string]*Route
	of    map[Name][]*Route // by parent Service
	to    map[Name][]*Route // by backend Service
}

func newRoutes() routes {
	return routes{byUID: map[string]*Route{}, of: map[Name][]*Route{}, to: map[Name][]*Route{}}
}

// UpsertRoute puts the route in place of what the directory held under its
// UID, and touches no other route. The Services that it names need not be
// there. It returns [ErrOldRoute] if a newer generation is held. Nobody is told
// of a route that is held already as given.
func (d *Directory) UpsertRoute(r *Route) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	old := d.routes.byUID[r.UID]
	switch {
	case old == nil:
	case old.Generation > r.Generation:
		return ErrOldRoute
	case old.Equal(r):
		return nil
	}
	d.setRoute(old, r)
	return nil
}

// RemoveRoute forgets the route, and nothing that other routes said.
func (d *Directory) RemoveRoute(uid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if old := d.routes.byUID[uid]; old != nil {
		d.setRoute(old, nil)
	}
}

// setRoute needs mu. It exchanges a route, either may be nil, and tells those
// whom it concerns: the Services named by either, and the owners behind its
// backends.
func (d *Directory) setRoute(old, r *Route) {
	var names, backends []Name
	for _, one := range []*Route{old, r} {
		if one != nil {
			backends = append(backends, one.backends()...)
			names = append(append(names, one.parents()...), one.backends()...)
		}
	}
	d.routes.unlink(old)
	d.routes.link(r)
	moved, keys := moves{}, map[OwnerKey]struct{}{}
	for _, name := range backends {
		for key := range d.fronts.rememberers[name] {
			keys[key] = struct{}{}
		}
		rec := d.fronts.byName[name]
		if rec == nil || rec.front == nil {
			continue
		}
		for _, s := range rec.slices {
			d.relink(s, s.slice, rec.front, moved) // what it hints at
			for uid := range s.stands() {
				if p := d.pods[uid]; p != nil {
					keys[p.Owner] = struct{}{}
				}
			}
		}
	}
	for key := range d.settle(moved) {
		keys[key] = struct{}{}
	}
	for key := range keys {
		d.changed(key)
	}
	for _, name := range names {
		d.changedFront(name)
	}
}

func (t *routes) link(r *Route) {
	if r == nil {
		return
	}
	t.byUID[r.UID] = r
	for _, name := range r.parents() {
		t.of[name] = with(t.of[name], r)
	}
	for _, name := range r.backends() {
		t.to[name] = with(t.to[name], r)
	}
}

func (t *routes) unlink(r *Route) {
	if r == nil {
		return
	}
	delete(t.byUID, r.UID)
	for _, name := range r.parents() {
		without(t.of, name, r)
	}
	for _, name := range r.backends() {
		without(t.to, name, r)
	}
}

func with(list []*Route, r *Route) []*Route {
	i, _ := slices.BinarySearchFunc(list, r, compareUID)
	return slices.Insert(slices.Clone(list), i, r)
}

func without(lists map[Name][]*Route, name Name, r *Route) {
	i := slices.Index(lists[name], r)
	if left := slices.Delete(slices.Clone(lists[name]), i, i+1); len(left) > 0 {
		lists[name] = left
	} else {
		delete(lists, name)
	}
}

func compareUID(a, b *Route) int { return strings.Compare(a.UID, b.UID) }

// grpcPorts returns the ports of the Service of which a GRPCRoute says that
// they speak gRPC: one of the Service's own namespace, or one to which that
// namespace granted the reference. Anybody else's word would have pods dialled
// that never asked for it.
func (t *routes) grpcPorts(name Name) []uint16 {
	var ports []uint16
	for _, r := range t.to[name] {
		if r.Kind != GRPCRoute {
			continue
		}
		for _, rule := range r.Rules {
			for _, b := range rule.Backends {
				if b.Service == name && b.Granted && b.Refused == "" {
					ports = append(ports, b.Port)
				}
			}
		}
	}
	return ports
}

// entries returns the matches that lead to an owner that stands so.
func (t *routes) entries(behind []*Standing) []RouteEntry {
	if len(t.to) == 0 {
		return nil
	}
	var rs []*Route
	for _, st := range behind {
		rs = append(rs, t.to[st.Key()]...)
	}
	slices.SortFunc(rs, compareUID)
	var es []RouteEntry
	for _, r := range slices.Compact(rs) {
		es = append(es, r.entries(behind)...)
	}
	return es
}

// Route returns the route with the UID, nil if it is not in the directory.
func (d *Directory) Route(uid string) *Route {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.routes.byUID[uid]
}

// Routes returns all routes, sorted by kind, namespace and name.
func (d *Directory) Routes() []*Route {
	d.mu.RLock()
	rs := make([]*Route, 0, len(d.routes.byUID))
	for _, r := range d.routes.byUID {
		rs = append(rs, r)
	}
	d.mu.RUnlock()
	slices.SortFunc(rs, func(a, b *Route) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name), compareUID(a, b))
	})
	return rs
}

// RoutesOf returns the routes that have the Service as a parent, whether or not
// it is there, sorted by UID. A parent of another kind with that name is none.
func (d *Directory) RoutesOf(parent Name) []*Route {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return slices.Clone(d.routes.of[parent])
}

// RoutesTo returns the routes of which a rule has the Service as a backend,
// whether or not it is there and calls may go to it, sorted by UID.
func (d *Directory) RoutesTo(backend Name) []*Route {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return slices.Clone(d.routes.to[backend])
}
