package resources

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// DefaultEgressPort is the port of the sidecar to which applications call.
const DefaultEgressPort = 15001

// maxNamespaces bounds the route tables that clients can cause by the
// namespaces that they claim.
const maxNamespaces = 10000

// Options configures a [Compiler]. The zero Options works.
type Options struct {
	// EgressPort is the TCP port of the listener egress; 0 is
	// [DefaultEgressPort].
	EgressPort uint16
	// CapturePort is the TCP port of the listener capture; 0 is
	// [DefaultCapturePort].
	CapturePort uint16
	// Destination says which destination has the number, a loopback address, to
	// which a connection was redirected; nil: none has one. It must return at
	// once, and must not call the compiler. See [Compiler.Renumbered].
	Destination func(netip.Addr) (netip.AddrPort, bool)
	// Tracing is otlp:HOST:PORT, the OpenTelemetry collector to which sidecars
	// send spans over gRPC; empty for none.
	Tracing string
	// Locality is even (or empty), zone or node: which endpoints are called first
	// where their pods do not say.
	Locality string
	// ExportAll exports every service whose pods say nothing of it to all
	// namespaces.
	ExportAll bool
	// Here is the node of the clients; empty if it is not known.
	Here string
	// Node is the one node whose pods are asked what they serve; empty if those
	// of all nodes are.
	Node string
	// Report is told of each resource that could not be built and is left
	// out. It is called with the compiler's lock held and must not call the
	// compiler. Nil: nobody is told.
	Report func(id xds.ID, err error)
	// Witness is told what was decided; nil: nobody is.
	Witness Witness
}

// Directory is what the compiler reads; [nodecache.Directory] is one.
type Directory interface {
	// Owner returns the current view, nil if there is none.
	Owner(nodecache.OwnerKey) *nodecache.Owner
}

// Compiler turns changed owners into changed resources. It is driven from
// outside: every method returns at once. All methods are safe for concurrent
// use; the updates of [Compiler.Apply], [Compiler.Fronts],
// [Compiler.Relocate] and [Compiler.Namespace] must be
// published in the order in which they were made, that of [Compiler.Initial]
// touches other resources and may be published at any time.
type Compiler struct {
	report  func(xds.ID, error)
	initial []*xds.Resource                          // read-only
	capture func(series uint32) *listenerv3.Listener // read-only
	all     bool                                     // Options.ExportAll; read-only
	node    string                                   // Options.Node; read-only
	witness Witness                                  // read-only
	// destination is Options.Destination; read-only.
	destination func(netip.Addr) (netip.AddrPort, bool)

	// mu guards what follows. Nothing that can block happens under it.
	mu         sync.RWMutex
	owners     map[nodecache.OwnerKey]*owner
	services   map[serviceID]*service
	namespaces map[string]*namespace
	routes     map[string]map[Form]*xds.Resource // by the namespace of clients
	exports    exports
	fronts     map[nodecache.Name]*front
	named      map[string]map[backendID]*backend // what tables name, by the namespace of clients
	programs   map[string]*program               // that backends have, by hash
	unlinked   []*nodecache.PortInfo             // of programs, and not handed out yet
	// aliases are the clusters by Service names of clients that have all, by
	// scope, then by Service and name. declared are the scopes of what such clients'
	// pods declare; of the others each is of a namespace.
	aliases  map[xds.Scope]map[nodecache.Name]map[string]*backend
	declared map[xds.Scope]*declaration
	wants    wants
	dials    map[dialID]*dial // what gRPC programs ask for
	current  bool             // see Current
	locality locality
}

// owner is what was last compiled of an owner.
type owner struct {
	view     *nodecache.Owner
	services []string
}

// New returns a compiler that knows no owner. It returns an error if an option
// makes no sense.
func New(o Options) (*Compiler, error) {
	unsaid, err := parseLocality(o.Locality)
	if err != nil {
		return nil, err
	}
	traces, err := parseTracing(o.Tracing)
	if err != nil {
		return nil, err
	}
	c := &Compiler{
		report:  o.Report,
		all:     o.ExportAll,
		node:    o.Node,
		witness: o.Witness,

		destination: o.Destination,

		exports:    newExports(),
		owners:     map[nodecache.OwnerKey]*owner{},
		services:   map[serviceID]*service{},
		namespaces: map[string]*namespace{},
		routes:     map[string]map[Form]*xds.Resource{},
		fronts:     map[nodecache.Name]*front{},
		named:      map[string]map[backendID]*backend{},
		programs:   map[string]*program{},
		declared:   map[xds.Scope]*declaration{},
		aliases:    map[xds.Scope]map[nodecache.Name]map[string]*backend{},
		wants:      newWants(),
		locality:   locality{unsaid: unsaid, node: o.Here},
		dials:      map[dialID]*dial{},
	}
	if c.destination == nil {
		c.destination = func(netip.Addr) (netip.AddrPort, bool) { return netip.AddrPort{}, false }
	}
	port := cmp.Or(o.EgressPort, DefaultEgressPort)
	constants := []struct {
		id xds.ID
		m  proto.Message
	}{
		{xds.ID{Type: xds.Listener, Name: egressName, Scope: xds.Shared}, egress(egressName, "127.0.0.1", port, traces.provider(), false)},
		{xds.ID{Type: xds.Listener, Name: egress6Name, Scope: scopeIPv6}, egress(egress6Name, "::1", port, traces.provider(), false)},
		{xds.ID{Type: xds.Listener, Name: egressName, Scope: scopeOnDemand}, egress(egressName, "127.0.0.1", port, traces.provider(), true)},
		{xds.ID{Type: xds.Listener, Name: egress6Name, Scope: scopeOnDemandIPv6}, egress(egress6Name, "::1", port, traces.provider(), true)},
	}
	c.capture = func(series uint32) *listenerv3.Listener {
		return capture(cmp.Or(o.CapturePort, DefaultCapturePort), traces.provider(), series)
	}
	if traces != nil {
		constants = append(constants, struct {
			id xds.ID
			m  proto.Message
		}{xds.ID{Type: xds.Cluster, Name: tracingCluster, Scope: xds.Shared}, traces.cluster()})
	}
	for _, k := range constants {
		r, err := xds.NewResource(k.id, k.m)
		if err != nil {
			return nil, err
		}
		c.initial = append(c.initial, r)
	}
	return c, nil
}

// Initial returns the resources that follow from the options alone. Publish
// them before the first client is served.
func (c *Compiler) Initial() xds.Update {
	return xds.Update{Set: slices.Clone(c.initial)}
}

// Namespace returns what a client of the namespace needs whether or not the
// namespace has owners: its route table in the form, and at the first call what
// others export to it. Publishing the table again changes nothing. Publish it before a client's scopes are
// handed to the server (that is, inside its Scopes function), so that the
// client never finds the table missing. Tables are made for namespaces that
// have clients, not for all, and never removed. It returns an error if the
// namespace is not one, or if too many have been named.
func (c *Compiler) Namespace(name string, form Form) (xds.Update, error) {
	if !label.MatchString(name) {
		return xds.Update{}, fmt.Errorf("namespace %.70q is not a DNS label", name)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var u xds.Update
	tables := c.routes[name]
	switch {
	case tables == nil && len(c.routes) >= maxNamespaces:
		return u, fmt.Errorf("clients have named %d namespaces; no route table for one more", maxNamespaces)
	case tables == nil:
		c.routes[name] = map[Form]*xds.Resource{form: nil}
		c.tabulate(name, &u)
		c.importAll(name, &u)
	case tables[form] == nil:
		hosts, _ := c.virtualHosts(name)
		tables[form] = c.table(name, form, hosts, &u)
	default:
		u.Set = []*xds.Resource{tables[form]}
	}
	return u, nil
}

// Apply reads the views of the owners that changed and returns what follows.
// It costs what the services of these owners cost, however many others there
// are. Keys may repeat, and may name owners that are gone.
func (c *Compiler) Apply(dir Directory, keys []nodecache.OwnerKey) xds.Update {
	c.mu.Lock()
	defer c.mu.Unlock()
	touched := map[serviceID]struct{}{}
	spaces := map[string]struct{}{}
	for _, key := range keys {
		view := dir.Owner(key)
		if view != nil && view.Workload.Namespace == "" {
			view = nil // only a route names it
		}
		c.replace(key, view, touched, spaces)
	}
	var u xds.Update
	for _, id := range sorted(touched, serviceID.compare) {
		c.compile(id, &u)
	}
	for _, name := range sorted(spaces, cmp.Compare[string]) {
		c.settle(name, &u)
	}
	sortSet(&u)
	return u
}

// sortSet puts the resources into sending order.
func sortSet(u *xds.Update) {
	slices.SortStableFunc(u.Set, func(a, b *xds.Resource) int { return cmp.Compare(a.Type, b.Type) })
}

func sorted[K comparable](set map[K]struct{}, compare func(a, b K) int) []K {
	keys := make([]K, 0, len(set))
	for k := range set {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, compare)
	return keys
}

// replace needs mu. It puts the view in place of the one held, nil for none,
// and notes what that may have changed.
func (c *Compiler) replace(key nodecache.OwnerKey, view *nodecache.Owner, touched map[serviceID]struct{}, spaces map[string]struct{}) {
	old := c.owners[key]
	c.wants.moved(old, view)
	if old != nil {
		c.moved(old.view, view)
		c.withdraw(old, touched, spaces)
		ns := old.view.Workload.Namespace
		spaces[ns] = struct{}{}
		c.namespaces[ns].drop(old.view)
		for _, name := range old.services {
			id := serviceID{ns, name}
			touched[id] = struct{}{}
			delete(c.services[id].owners, key)
		}
		delete(c.owners, key)
	}
	if view == nil {
		return
	}
	if old == nil {
		c.moved(nil, view)
	}
	o := &owner{view: view, services: slices.DeleteFunc(view.Names(), unservable)}
	c.owners[key] = o
	ns := view.Workload.Namespace
	spaces[ns] = struct{}{}
	space := c.space(ns)
	space.add(view)
	for _, name := range o.services {
		id := serviceID{ns, name}
		touched[id] = struct{}{}
		s := c.services[id]
		if s == nil {
			s = &service{owners: map[nodecache.OwnerKey]*nodecache.Owner{}}
			c.services[id] = s
			space.services[name] = s
		}
		s.owners[key] = view
	}
	c.offer(o, touched, spaces)
}

// space needs mu. It returns the namespace, made if it is not there.
func (c *Compiler) space(name string) *namespace {
	ns := c.namespaces[name]
	if ns == nil {
		ns = newNamespace(c.node)
		c.namespaces[name] = ns
	}
	return ns
}

// compile needs mu. It writes what changed of one service.
func (c *Compiler) compile(id serviceID, u *xds.Update) {
	s, from := c.services[id], c.from(id)
	if len(from) == 0 {
		if s == nil {
			return
		}
		if c.witness != nil {
			c.witness.ServiceRemoved(id.namespace, id.name, s.provider)
		}
		delete(c.services, id)
		delete(c.namespaces[id.namespace].services, id.name)
		for _, r := range []*xds.Resource{s.api, s.cluster, s.cla} {
			if r != nil {
				u.Remove = append(u.Remove, r.ID)
			}
		}
		c.dialled(id, u)
		return
	}
	if s == nil {
		s = &service{owners: map[nodecache.OwnerKey]*nodecache.Owner{}}
		c.services[id] = s
		c.space(id.namespace).services[id.name] = s
	}
	s.from = from
	name, scope := clusterName(id.namespace, id.name), xds.NamespaceScope(id.namespace)
	if s.cluster == nil && !taken(id.name) {
		s.api = c.build(xds.ID{Type: xds.Listener, Name: id.name, Scope: xds.APIScope(id.namespace)},
			func() proto.Message {
				return apiListener(id.name, []*routev3.Route{apiRoute("/"+id.name+"/", clusterName(id.namespace, id.name))})
			}, nil, u)
		c.dialled(id, u)
	}
	provider, _ := split(s.claims(id.name))
	c.provided(id, s, provider[0].Workload)
	es, host := endpoints(id.name, provider), ""
	if len(es) > 0 && es[0].host != "" {
		host = es[0].String()
	}
	if p := policyOf(provider); s.cluster == nil || s.host != host || !p.Equal(s.policy) {
		s.host, s.policy = host, p
		s.cluster = c.build(xds.ID{Type: xds.Cluster, Name: name, Scope: scope}, func() proto.Message {
			if host != "" {
				return hostCluster(name, es[0], p)
			}
			return cluster(name, p)
		}, s.cluster, u)
	}
	switch {
	case host == "":
		s.cla = c.build(xds.ID{Type: xds.Endpoint, Name: name, Scope: scope}, func() proto.Message { return c.locality.assignment(name, es) }, s.cla, u)
	case s.cla != nil:
		// A client keeps what it has until its new cluster is ready.
		u.Remove = append(u.Remove, s.cla.ID)
		s.cla = nil
	}
}

// build needs mu. It returns what is published under the id from now on: the
// resource made, or old if that is equal or the new one cannot be made.
func (c *Compiler) build(id xds.ID, make func() proto.Message, old *xds.Resource, u *xds.Update) *xds.Resource {
	r, err := xds.NewResource(id, make())
	if err != nil {
		c.leftOut(id, err)
		return old
	}
	if old != nil && old.Version == r.Version {
		return old
	}
	u.Set = append(u.Set, r)
	return r
}

func (c *Compiler) leftOut(id xds.ID, err error) {
	if c.report != nil {
		c.report(id, err)
	}
}
