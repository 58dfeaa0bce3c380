package resources

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// A gRPC program asks for the listener of the name that it dials, and the names
// by which a Service can be dialled are without end. So these listeners, and the
// clusters to which their routes lead, are made when a program asks for them:
//
//	xds:///users.prod:50051 ──▶ Listener users.prod:50051
//	                              /pkg.Service/ ──▶ Cluster backend/prod/users/50051/pkg.Service
//	                              /             ──▶ Cluster backend/prod/users/50051
//
// gRPC waits for 15 s for a name that nobody has, since a set without a name
// that it has just asked for says nothing to it (gRFC A27, resource timeout),
// and one that it was told of is never taken back (gRFC A53,
// ignore_resource_deletion). So a name that nobody has is answered too: by a
// listener that leads to a cluster without endpoints. Calls fail at once, those
// that are to wait for a server wait. A call stays with the cluster that its
// route named when it began; so that is the one which would be somebody's.
//
// A cluster is there for as long as a program asks for it, be it without
// endpoints: C-core lets go of one only after it has accepted the listener that
// does not lead there any more, and takes the removal of what it still asks for
// as an error.

// dialID is what a program asks for: a listener or a cluster.
type dialID struct {
	namespace string // of the program
	t         xds.Type
	name      string
}

// dial is what is there under a name that programs of a namespace ask for.
type dial struct {
	want // by which it is looked up; its users are the streams
	id   dialID

	// Of a listener: whether the name is that of a Service, and if so which of
	// its gRPC services have routes; listener is nil where nothing is published
	// under the name, or where it is that of a gRPC service alone.
	service  bool
	backend  backendID
	routes   []string
	listener *xds.Resource
	// Of a cluster: itself; of the listener of a gRPC service that nobody has: the
	// cluster of the service.
	cluster *backend
}

// nobodyPrefix begins the names of clusters without endpoints: clients show the
// names in their errors. No namespace has a colon.
const nobodyPrefix = "nobody:"

// Dialled tells whether a program may ask for the name, so that something is to
// be there for it.
func Dialled(t xds.Type, name string) bool {
	switch {
	case name == "" || !utf8.ValidString(name):
		return false
	case t == xds.Listener:
		return len(name) <= longestAuthority && !taken(name)
	case t == xds.Cluster:
		_, ok := parseBackend(name)
		return ok || strings.HasPrefix(name, nobodyPrefix) && len(name) <= len(nobodyPrefix)+longestAuthority
	}
	return false
}

// parseBackend reads the name of a backend's cluster.
func parseBackend(name string) (backendID, bool) {
	parts := strings.Split(name, "/")
	if len(parts) < 4 || len(parts) > 5 || !label.MatchString(parts[1]) || !label.MatchString(parts[2]) {
		return backendID{}, false
	}
	port, err := strconv.ParseUint(parts[3], 10, 16)
	id := backendID{service: nodecache.Name{Namespace: parts[1], Name: parts[2]}, port: uint16(port)}
	if len(parts) == 5 {
		if id.grpc = parts[4]; len(id.grpc) > longestService || !serviceName.MatchString(id.grpc) {
			return backendID{}, false
		}
	}
	return id, err == nil && port > 0 && id.String() == name
}

// Dial makes what is to be there under the names for one more gRPC program of
// the namespace. All of them must be [Dialled]; no name may repeat. It costs what
// the names cost.
func (c *Compiler) Dial(dir Services, namespace string, t xds.Type, names []string) (u xds.Update) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.refresh(dir)
	for _, name := range names {
		id := dialID{namespace, t, name}
		d := c.dials[id]
		if d == nil {
			d = &dial{id: id, want: want{wantID: wantID{namespace, name}}}
			d.dial = d
			c.dials[id] = d
			r.makeDial(d, &u)
		}
		d.users++
	}
	sortSet(&u)
	return u
}

// Hangup takes back what [Compiler.Dial] said for names.
func (c *Compiler) Hangup(namespace string, t xds.Type, names []string) (u xds.Update) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range names {
		id := dialID{namespace, t, name}
		d := c.dials[id]
		if d == nil {
			continue
		}
		if d.users--; d.users == 0 {
			c.wants.depend(&d.want, place{})
			delete(c.wants.stale, &d.want)
			c.publishDial(d, nil, nil, &u)
			delete(c.dials, id)
		}
	}
	return u
}

// Current says that the directory has heard of everything that happened before
// the agent started. Before that no program is told that nobody has a name.
func (c *Compiler) Current() (u xds.Update) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current = true
	for _, d := range c.dials {
		c.standIn(d, &u)
	}
	sortSet(&u)
	return u
}

// makeDial needs mu. It finds out what is under the name, and publishes that.
func (r *refresh) makeDial(d *dial, u *xds.Update) {
	if d.id.t == xds.Cluster {
		r.makeDialledCluster(d, u)
		return
	}
	p := place{reason: "only a gRPC service has such a name"}
	if host, port := splitAuthority(d.name); port != "" || d.name == strings.ToLower(d.name) {
		p = r.find(d.namespace, host, port)
	}
	r.c.wants.depend(&d.want, p)
	if p.reason != "" || p.one {
		r.c.vacate(d, u)
		return
	}
	was := d.routes
	if d.backend != (backendID{service: p.service, port: p.port}) {
		was = nil
	}
	d.service, d.backend = true, backendID{service: p.service, port: p.port}
	crowd := r.crowd(&p, "")
	d.routes = crowd.services()
	for _, service := range was {
		if !slices.Contains(d.routes, service) && !crowd.refuses(service) {
			d.routes = append(d.routes, service)
		}
	}
	slices.Sort(d.routes)
	routes := make([]*routev3.Route, 0, len(d.routes)+1)
	for _, service := range d.routes {
		routes = append(routes, apiRoute("/"+service+"/", d.backend.calling(service).String()))
	}
	routes = append(routes, apiRoute("/", d.backend.String()))
	r.c.publishDial(d, routes, nil, u)
}

// makeDialledCluster needs mu. What is known only narrows what the Service
// means: without a gRPC service it is all that is ready behind the port.
func (r *refresh) makeDialledCluster(d *dial, u *xds.Update) {
	id, _ := parseBackend(d.name) // none where nobody has a name
	var p place
	v, port, listed := (*nodecache.FrontView)(nil), nodecache.FrontPort{}, false
	if id != (backendID{}) {
		p = place{port: id.port, asked: []nodecache.Name{id.service}}
		if v = r.view(id.service); v != nil {
			port, listed = portOf(v.Front, id.port)
			r.findService(&p, v)
		}
	}
	r.c.wants.depend(&d.want, p)
	policy := r.policyBehind(id.service, d.cluster)
	d.cluster = r.c.pairOf(d.name, xds.DialScope(d.namespace), func() *clusterv3.Cluster {
		if listed {
			return backendCluster(id, port, policy)
		}
		return cluster(d.name, policy)
	}, r.crowd(&p, id.grpc).endpoints(id.grpc), policy, d.cluster, u)
}

// vacate needs mu. No Service has the name any more, or yet.
func (c *Compiler) vacate(d *dial, u *xds.Update) {
	d.backend, d.routes = backendID{}, nil
	c.standIn(d, u)
}

// standIn needs mu. Where no Service has the name of a listener it publishes
// that nobody has it, unless a gRPC service has, or may have. What was there
// stays while that is open.
func (c *Compiler) standIn(d *dial, u *xds.Update) {
	if d.id.t != xds.Listener || d.backend != (backendID{}) {
		return
	}
	if s := c.services[serviceID{d.namespace, d.name}]; s != nil && s.api != nil {
		d.service = false
		c.publishDial(d, nil, nil, u)
		return
	}
	if !c.current || !d.service && !c.nowhere(d.namespace, d.name) {
		return
	}
	if id, ok := meant(d.namespace, d.name); ok {
		c.publishDial(d, []*routev3.Route{apiRoute("/", id.String())}, nil, u)
		return
	}
	if unservable(d.name) {
		c.publishDial(d, []*routev3.Route{apiRoute("/", nobodyPrefix+d.name)}, nil, u)
		return
	}
	name := clusterName(d.namespace, d.name)
	pair := c.pair(name, xds.DialScope(d.namespace), nil, nil, d.cluster, u)
	c.publishDial(d, []*routev3.Route{apiRoute("/"+d.name+"/", name)}, pair, u)
}

// meant is what a name would lead to if there were a Service of it; false if it
// could be none's. Which port that would have is not known where none is named.
func meant(namespace, name string) (backendID, bool) {
	host, port := splitAuthority(name)
	id := backendID{port: 80}
	if port != "" {
		n, err := strconv.ParseUint(port[1:], 10, 16)
		if err != nil || n == 0 {
			return backendID{}, false
		}
		id.port = uint16(n)
	}
	for _, c := range searched(namespace, host) {
		if c.pod == "" && (port != "" || name == strings.ToLower(name)) {
			id.service = c.service
			return id, true
		}
	}
	return backendID{}, false
}

// dialled needs mu. It looks again at the name of a gRPC service that came or
// went.
func (c *Compiler) dialled(id serviceID, u *xds.Update) {
	if d := c.dials[dialID{id.namespace, xds.Listener, id.name}]; d != nil {
		c.standIn(d, u)
	}
}

// nowhere needs mu. It tells whether a name that nobody is known to serve is
// served by nobody in the namespace.
func (c *Compiler) nowhere(namespace, name string) bool {
	ns := c.namespaces[namespace]
	return ns == nil || ns.evidence == xds.Complete || !serviceName.MatchString(name)
}

// standInAll needs mu. It looks again at the namespace's names that nobody has.
func (c *Compiler) standInAll(namespace string, u *xds.Update) {
	for _, id := range slices.SortedFunc(maps.Keys(c.dials), func(a, b dialID) int { return strings.Compare(a.name, b.name) }) {
		if id.namespace == namespace {
			c.standIn(c.dials[id], u)
		}
	}
}

// publishDial needs mu. It publishes a listener with the routes, and a cluster of
// its own; without any it ends what was there.
func (c *Compiler) publishDial(d *dial, routes []*routev3.Route, pair *backend, u *xds.Update) {
	if pair == nil && d.cluster != nil {
		u.Remove = append(u.Remove, d.cluster.cluster.ID, d.cluster.cla.ID)
	}
	d.cluster = pair
	id := xds.ID{Type: xds.Listener, Name: d.name, Scope: xds.DialScope(d.namespace)}
	if len(routes) > 0 {
		d.listener = c.build(id, func() proto.Message { return apiListener(d.name, routes) }, d.listener, u)
	} else if d.listener != nil {
		u.Remove = append(u.Remove, id)
		d.listener = nil
	}
}
