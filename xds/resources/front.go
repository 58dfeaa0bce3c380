package resources

import (
	"maps"
	"net/netip"
	"slices"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// Services is what [Compiler.Fronts] reads; [nodecache.Directory] is one.
type Services interface {
	Directory
	// Front returns the current view of a Service, nil if there is none.
	Front(nodecache.Name) *nodecache.FrontView
	// RoutesOf returns the routes of which the Service is a parent, sorted by
	// UID.
	RoutesOf(parent nodecache.Name) []*nodecache.Route
	// Member returns the pod with the UID, and whether there is one.
	Member(uid string) (nodecache.Member, bool)
	// MemberAt returns the pod with the address, and whether there is one.
	MemberAt(netip.Addr) (nodecache.Member, bool)
	// FrontAt returns the Service with the ClusterIP, and whether there is one.
	FrontAt(netip.Addr) (nodecache.Name, bool)
	// PolicyBehind returns what the workloads behind a Service want of calls, nil
	// for nothing, and whether that is known.
	PolicyBehind(nodecache.Name) (*nodecache.Policy, bool)
	// FrontNames returns the names of all Services, in no order.
	FrontNames() []nodecache.Name
}

// front is a Service that has routes, or to which one sends calls.
type front struct {
	front  *nodecache.Front   // nil where there is none of the name
	routes []*nodecache.Route // of which it is a parent, sorted by UID
	// uses are the backends that its routes name, users the Services whose
	// routes name a backend of this one. True is one whose calls are repeated as
	// a route says.
	uses     map[backendID]bool
	users    map[nodecache.Name]struct{}
	backends map[backendID]*backend // that are named and there
	// programs are the descriptors that count for the backends of HTTPRoutes,
	// by their hash; empty where there are none to transcode by.
	programs map[backendID]string
}

// backend is a cluster as it is for every namespace.
type backend struct {
	cluster, cla *xds.Resource
	policy       *nodecache.Policy // that the cluster has
}

func (b *backend) of(t xds.Type) *xds.Resource {
	if t == xds.Cluster {
		return b.cluster
	}
	return b.cla
}

// Fronts reads the Services that changed, with what stands behind them and
// their routes, and returns what follows. Names may repeat, and may name
// Services that are gone or that no route concerns.
func (c *Compiler) Fronts(dir Services, names []nodecache.Name) xds.Update {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.refresh(dir)
	for _, name := range names {
		r.load(name)
	}
	u := r.finish()
	for _, name := range names {
		r.alias(name, &u)
	}
	r.wanted(names, &u)
	sortSet(&u)
	return u
}

// refresh is one look at Services that changed, under mu.
type refresh struct {
	c   *Compiler
	dir Services
	// What was read of the directory.
	views  map[nodecache.Name]*nodecache.FrontView
	owners map[nodecache.OwnerKey]*nodecache.Owner
	// touched are the fronts whose backends may have changed, dirty those whose
	// tables may have.
	touched, dirty map[nodecache.Name]struct{}
}

// refresh needs mu.
func (c *Compiler) refresh(dir Services) *refresh {
	return &refresh{
		c: c, dir: dir,
		views: map[nodecache.Name]*nodecache.FrontView{}, owners: map[nodecache.OwnerKey]*nodecache.Owner{},
		touched: map[nodecache.Name]struct{}{}, dirty: map[nodecache.Name]struct{}{},
	}
}

// soil notes that the tables of Services may change.
func (r *refresh) soil(names map[nodecache.Name]struct{}) {
	for name := range names {
		r.dirty[name] = struct{}{}
	}
}

// finish draws the consequences.
func (r *refresh) finish() xds.Update {
	c := r.c
	for linked := 0; linked < len(r.dirty); { // linking may find more
		linked = len(r.dirty)
		for name := range maps.Clone(r.dirty) {
			r.link(name)
		}
	}
	changed := map[backendID]struct{}{}
	for name := range r.touched {
		r.compile(name, changed)
	}
	var u xds.Update
	if len(r.dirty)+len(changed) == 0 {
		return u
	}
	for _, ns := range slices.Sorted(maps.Keys(c.routes)) {
		if len(r.dirty) > 0 {
			c.tabulate(ns, &u)
		}
		for _, id := range sorted(changed, backendID.compare) {
			if c.named[ns][id] != nil {
				c.publish(ns, id, true, &u)
			}
		}
	}
	for name := range r.touched {
		if f := c.fronts[name]; len(f.routes) == 0 && len(f.users) == 0 {
			delete(c.fronts, name)
		}
	}
	if len(r.dirty) > 0 {
		c.forgetPrograms()
	}
	sortSet(&u)
	return u
}

// forgetPrograms needs mu.
func (c *Compiler) forgetPrograms() {
	used := map[string]bool{}
	for _, f := range c.fronts {
		for _, hash := range f.programs {
			used[hash] = true
		}
	}
	maps.DeleteFunc(c.programs, func(hash string, _ *program) bool { return !used[hash] })
}

func (r *refresh) owner(key nodecache.OwnerKey) *nodecache.Owner {
	o, ok := r.owners[key]
	if !ok {
		o = r.dir.Owner(key)
		r.owners[key] = o
	}
	return o
}

func (r *refresh) view(name nodecache.Name) *nodecache.FrontView {
	v, ok := r.views[name]
	if !ok {
		v = r.dir.Front(name)
		r.views[name] = v
	}
	return v
}

// touch returns the front, made if it is not there, with the Service as it is
// now: it may have changed without a word of that so far.
func (r *refresh) touch(name nodecache.Name) *front {
	f := r.c.fronts[name]
	if f == nil {
		f = &front{users: map[nodecache.Name]struct{}{}, backends: map[backendID]*backend{}, programs: map[backendID]string{}}
		r.c.fronts[name] = f
	}
	r.touched[name] = struct{}{}
	var now *nodecache.Front
	if v := r.view(name); v != nil {
		now = v.Front
	}
	if f.front != now {
		f.front = now
		r.dirty[name] = struct{}{}
		r.soil(f.users)
	}
	return f
}

// load notes what is new about a Service. A pod that came or went leaves the
// tables alone.
func (r *refresh) load(name nodecache.Name) {
	routes := r.dir.RoutesOf(name)
	if r.c.fronts[name] == nil && len(routes) == 0 {
		return
	}
	f := r.touch(name)
	for id, was := range f.programs {
		if hash := r.programOf(id); hash != was {
			f.programs[id] = hash
			r.soil(f.users)
		}
	}
	if !slices.Equal(f.routes, routes) {
		f.routes = routes
		r.dirty[name] = struct{}{}
	}
}

// link notes the backends that the routes of a Service name.
func (r *refresh) link(name nodecache.Name) {
	f := r.c.fronts[name]
	was := f.uses
	f.uses = map[backendID]bool{}
	for _, route := range f.routes {
		for i := range route.Rules {
			r.linkRule(f, route.Kind, &route.Rules[i])
		}
	}
	for id := range was {
		delete(r.touch(id.service).users, name)
	}
	for id := range f.uses {
		r.touch(id.service).users[name] = struct{}{}
	}
}

// linkRule notes the backends that a rule names.
func (r *refresh) linkRule(f *front, kind nodecache.RouteKind, rule *nodecache.RouteRule) {
	var ids []backendID
	for _, b := range rule.Backends {
		if rule.Refused != "" || b.Refused != "" || b.Weight == 0 {
			continue
		}
		for m := range rule.Matches {
			ids = append(ids, backendOf(kind, &rule.Matches[m], b))
		}
		if kind != nodecache.HTTPRoute {
			continue
		}
		id := backendID{service: b.Service, port: b.Port}
		if to := r.touch(b.Service); to.programs[id] == "" {
			to.programs[id] = r.programOf(id)
		}
	}
	services := []string{""}
	if p := r.c.transcodes(kind, rule); p != nil {
		services = append(services, p.set.Services...)
	}
	for _, id := range ids {
		for _, service := range services {
			id := id.calling(service)
			f.uses[id] = f.uses[id] || rule.Retry != nil
		}
	}
}

// compile writes the backends of a Service that somebody names, and forgets
// the others.
func (r *refresh) compile(name nodecache.Name, changed map[backendID]struct{}) {
	f := r.c.fronts[name]
	wanted := map[backendID]bool{}
	for user := range f.users {
		for id, own := range r.c.fronts[user].uses {
			if id.service == name {
				wanted[id] = wanted[id] || own
			}
		}
	}
	maps.DeleteFunc(f.programs, func(id backendID, _ string) bool {
		_, ok := wanted[id]
		return !ok
	})
	for id := range f.backends {
		if _, ok := portOf(f.front, id.port); !ok {
			delete(wanted, id)
		}
		if _, ok := wanted[id]; !ok {
			delete(f.backends, id)
			changed[id] = struct{}{}
		}
	}
	for id, own := range wanted {
		port, ok := portOf(f.front, id.port)
		if !ok {
			continue
		}
		old := f.backends[id]
		if old == nil {
			old = &backend{}
		}
		policy := r.policyBehind(name, old)
		p := policy
		if own {
			p = withoutRetries(p)
		}
		var u xds.Update
		b := &backend{
			cluster: r.c.build(xds.ID{Type: xds.Cluster, Name: id.String()}, func() proto.Message { return backendCluster(id, port, p) }, old.cluster, &u),
			cla: r.c.build(xds.ID{Type: xds.Endpoint, Name: id.String()}, func() proto.Message {
				return r.c.locality.assignment(id.String(), r.behind(r.view(name), port, id.grpc))
			}, old.cla, &u),
			policy: policy,
		}
		if len(u.Set) > 0 && b.cluster != nil && b.cla != nil {
			f.backends[id] = b
			changed[id] = struct{}{}
		}
	}
}

// tabulate needs mu. It writes the route tables of a namespace that has clients,
// and the clusters that it names and did not name before, or names no more.
func (c *Compiler) tabulate(namespace string, u *xds.Update) {
	hosts, named := c.virtualHosts(namespace)
	for form := range c.routes[namespace] {
		c.routes[namespace][form] = c.table(namespace, form, hosts, u)
	}
	all := maps.Clone(named)
	for id := range c.named[namespace] {
		all[id] = struct{}{}
	}
	for _, id := range sorted(all, backendID.compare) {
		_, ok := named[id]
		c.publish(namespace, id, ok, u)
	}
}

// table needs mu. It writes one form of a namespace's table.
func (c *Compiler) table(namespace string, form Form, hosts []*routev3.VirtualHost, u *xds.Update) *xds.Resource {
	id := xds.ID{Type: xds.Route, Name: RouteName, Scope: form.scope(namespace)}
	return c.build(id, func() proto.Message { return routeTable(namespace, form, hosts) }, c.routes[namespace][form], u)
}

// publish needs mu. It lets the clients of a namespace have a backend as it is
// now, or not have it any more.
func (c *Compiler) publish(namespace string, id backendID, named bool, u *xds.Update) {
	old, now := c.named[namespace][id], (*backend)(nil)
	if f := c.fronts[id.service]; named && f != nil {
		now = f.backends[id]
	}
	switch {
	case now != nil:
		for _, r := range []*xds.Resource{now.cluster, now.cla} {
			if old == nil || old.of(r.Type).Version != r.Version {
				scoped := *r
				scoped.Scope = xds.BackendScope(namespace)
				u.Set = append(u.Set, &scoped)
			}
		}
		if c.named[namespace] == nil {
			c.named[namespace] = map[backendID]*backend{}
		}
		c.named[namespace][id] = now
	case old != nil:
		for _, r := range []*xds.Resource{old.cluster, old.cla} {
			u.Remove = append(u.Remove, xds.ID{Type: r.Type, Name: r.Name, Scope: xds.BackendScope(namespace)})
		}
		delete(c.named[namespace], id)
	}
}
