package gateway

import (
	"errors"
	"log/slog"
	"slices"
	"sync"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Table holds the routes and grants of the cluster as they came, and is the
// directory's only writer of routes: it resolves each by the grants of the
// moment. All methods are safe for concurrent use.
type Table struct {
	dir *nodecache.Directory
	log *slog.Logger
	// changed is that of [Table.OnStatus]; nil: nobody hears.
	changed func(uid string)

	// mu is held over a whole change: decide, table, directory. The
	// directory's lock is taken under it.
	mu     sync.Mutex
	routes map[key]*route
	grants map[nodecache.Name]*grant
	// unread holds the UIDs of the objects that cannot be read.
	unread map[key]string
	told   map[string]struct{} // UIDs of those that were named in the log
}

// route is one as it came.
type route struct {
	*nodecache.Route
	Status
}

// Status is what a route's object says beside its spec.
type Status struct {
	APIVersion string // in which it was read, as v1
	Said       string // as in [Object]
}

type key struct {
	kind string
	nodecache.Name
}

type grant struct {
	*Grant
	uid string
}

// NewTable returns an empty table that feeds the directory.
func NewTable(dir *nodecache.Directory, log *slog.Logger) *Table {
	return &Table{
		dir: dir, log: log, routes: map[key]*route{}, grants: map[nodecache.Name]*grant{},
		unread: map[key]string{}, told: map[string]struct{}{},
	}
}

// Upsert takes the object in place of what was held under its kind and name. Of
// a route that cannot be read the last state that could stays; a grant that
// cannot be read grants nothing.
func (t *Table) Upsert(o *Object) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := key{o.Kind, o.Name}
	delete(t.unread, k)
	if o.Err != nil {
		t.unreadable(k, o)
	}
	switch {
	case o.Kind == ReferenceGrant:
		t.setGrant(o.Name, o.Grant, o.UID)
	case o.Route != nil:
		old := t.routes[k]
		if old != nil && old.UID != o.UID {
			t.dir.RemoveRoute(old.UID)
		}
		r := &route{o.Route, Status{o.APIVersion, o.Said}}
		t.routes[k] = r
		t.publish(r.Route)
		if t.changed != nil && (old == nil || old.UID != r.UID || old.Generation != r.Generation || old.Status != r.Status) {
			t.changed(r.UID)
		}
	default:
		if old := t.routes[k]; old != nil && old.UID != o.UID {
			t.removeRoute(k, old)
		}
	}
}

// Remove forgets the object of the kind and name, if its UID is one of uids;
// with no uids, whatever its UID.
func (t *Table) Remove(kind string, name nodecache.Name, uids ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := key{kind, name}
	is := func(uid string) bool { return len(uids) == 0 || slices.Contains(uids, uid) }
	if uid, there := t.unread[k]; there && is(uid) {
		delete(t.unread, k)
	}
	if g := t.grants[name]; kind == ReferenceGrant && g != nil && is(g.uid) {
		t.setGrant(name, nil, "")
	}
	if r := t.routes[k]; r != nil && is(r.UID) {
		t.removeRoute(k, r)
	}
}

// Names returns the names of all objects of the kind, in no order.
func (t *Table) Names(kind string) []nodecache.Name {
	t.mu.Lock()
	defer t.mu.Unlock()
	var names []nodecache.Name
	for k := range t.routes {
		if k.kind == kind {
			names = append(names, k.Name)
		}
	}
	for k := range t.unread {
		if k.kind == kind && t.routes[k] == nil && (kind != ReferenceGrant || t.grants[k.Name] == nil) {
			names = append(names, k.Name)
		}
	}
	if kind == ReferenceGrant {
		for name := range t.grants {
			names = append(names, name)
		}
	}
	return names
}

// OnStatus has f hear of each route that comes, or comes with another
// generation, or of which agents say something else by its status than before.
// It is called once, before the first object. f is called with the table's lock
// held: it must not block, and not call the table.
func (t *Table) OnStatus(f func(uid string)) { t.changed = f }

// Status returns what the object of a route in the directory says beside its
// spec, and false if it is there no more.
func (t *Table) Status(r *nodecache.Route) (Status, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	held := t.routes[key{r.Kind.String(), r.Key()}]
	if held == nil || held.UID != r.UID {
		return Status{}, false
	}
	return held.Status, true
}

// Counts returns how many objects are held by kind, and how many of them
// cannot be read.
func (t *Table) Counts() (held, unread map[string]int) {
	held, unread = map[string]int{}, map[string]int{}
	for _, kind := range Kinds {
		held[kind], unread[kind] = len(t.Names(kind)), 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for k := range t.unread {
		unread[k.kind]++
	}
	return held, unread
}

// unreadable needs mu. An object is named once.
func (t *Table) unreadable(k key, o *Object) {
	const most = 1024 // remembered
	t.unread[k] = o.UID
	if _, told := t.told[o.UID]; told {
		return
	}
	if len(t.told) >= most {
		clear(t.told)
	}
	t.told[o.UID] = struct{}{}
	t.log.Warn("object is left out", "kind", o.Kind, "name", o.String(), "error", o.Err)
}

// removeRoute needs mu.
func (t *Table) removeRoute(k key, r *route) {
	delete(t.routes, k)
	t.dir.RemoveRoute(r.UID)
}

// setGrant needs mu. It exchanges a grant, nil for none, and resolves the
// routes anew that refer to its namespace.
func (t *Table) setGrant(name nodecache.Name, g *Grant, uid string) {
	if g == nil {
		delete(t.grants, name)
	} else {
		t.grants[name] = &grant{g, uid}
	}
	for _, r := range t.routes {
		if r.Namespace != name.Namespace && refersTo(r.Route, name.Namespace) {
			t.publish(r.Route)
		}
	}
}

func refersTo(r *nodecache.Route, namespace string) bool {
	return slices.ContainsFunc(r.Rules, func(rule nodecache.RouteRule) bool {
		return slices.ContainsFunc(rule.Backends, func(b nodecache.RouteBackend) bool { return b.Service.Namespace == namespace })
	})
}

// publish needs mu. It makes the directory hold the route as the grants have
// it.
func (t *Table) publish(r *nodecache.Route) {
	resolved := t.resolve(r)
	if err := t.dir.UpsertRoute(resolved); errors.Is(err, nodecache.ErrOldRoute) {
		// A cluster, or a file, was put back to an earlier state: what its
		// source says last is what holds.
		t.dir.RemoveRoute(r.UID)
		_ = t.dir.UpsertRoute(resolved)
	}
}

// resolve needs mu. It returns the route with what the grants say of its
// backends. A route of the mesh alone needs none (GEP-1294).
func (t *Table) resolve(r *nodecache.Route) *nodecache.Route {
	out := *r
	out.Rules = slices.Clone(r.Rules)
	mesh := slices.ContainsFunc(r.Parents, nodecache.RouteParent.Service)
	for i := range out.Rules {
		rule := &out.Rules[i]
		rule.Backends = slices.Clone(rule.Backends)
		for j := range rule.Backends {
			b := &rule.Backends[j]
			b.Granted = b.Service.Namespace == r.Namespace || t.granted(r, b.Service)
			if b.Refused == "" && !b.Granted && !mesh {
				b.Refused = string(gatewayv1.RouteReasonRefNotPermitted)
			}
		}
	}
	return &out
}

// granted needs mu.
func (t *Table) granted(r *nodecache.Route, service nodecache.Name) bool {
	for _, g := range t.grants {
		if g.permits(r, service) {
			return true
		}
	}
	return false
}
