package resources_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

// mesh is a world with a real directory behind it.
type mesh struct {
	*world
	dir *nodecache.Directory
	sub *nodecache.Subscription
}

func newMesh(t *testing.T, namespaces ...string) *mesh {
	t.Helper()
	d := nodecache.New(nodecache.Options{})
	m := &mesh{world: newWorld(t), dir: d, sub: d.SubscribeFronts()}
	for _, ns := range namespaces {
		m.client(ns)
	}
	return m
}

// client is one of the namespace that connects.
func (m *mesh) client(ns string) {
	m.t.Helper()
	u, err := m.c.Namespace(ns, resources.ShapeOne)
	if err != nil {
		m.t.Fatal(err)
	}
	m.take(u)
}

// flush compiles what changed.
func (m *mesh) flush() xds.Update {
	m.t.Helper()
	m.take(m.c.Apply(m.dir, m.sub.Poll()))
	return m.take(m.c.Fronts(m.dir, m.sub.PollFronts()))
}

// service puts a Service of one port in front of pods, whose port is 1000 and
// one more for each pod.
func (m *mesh) service(ns, name string, port nodecache.FrontPort, pods ...string) *nodecache.Front {
	f := &nodecache.Front{UID: ns + name, Namespace: ns, Name: name, Type: "ClusterIP", Selects: true, Ports: []nodecache.FrontPort{port}}
	m.dir.UpsertFront(f)
	m.slices(ns, name, port, pods...)
	return f
}

func (m *mesh) slices(ns, name string, port nodecache.FrontPort, pods ...string) {
	for i, uid := range pods {
		m.dir.UpsertSlice(&nodecache.Slice{
			UID: name + uid, Namespace: ns, Name: name + "-" + uid, Service: name,
			Ports:     []nodecache.SlicePort{{Name: "other", Port: 9}, {Name: port.Name, Port: uint16(1000 + i)}},
			Endpoints: []nodecache.Endpoint{{Pod: uid, Ready: true, Serving: true}},
		})
	}
}

// pod is one of an owner of its own.
func (m *mesh) pod(uid, addr string, state nodecache.PodState) nodecache.OwnerKey {
	key := nodecache.OwnerKey{UID: "rs-" + uid}
	m.dir.UpsertPod(&nodecache.Pod{
		UID: uid, Name: uid, Node: "n1", State: state, Addr: netip.MustParseAddr(addr),
		Common: &nodecache.Common{
			Namespace: "prod", Owner: key, OwnerName: "ReplicaSet/" + uid,
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: uid},
			Hints:    []nodecache.Hint{{Port: 1000, Why: "port name"}},
		},
	})
	return key
}

// learn commits what a pod's owner was found to serve on the port.
func (m *mesh) learn(key nodecache.OwnerKey, p nodecache.PortInfo) {
	m.t.Helper()
	r, err := m.dir.Begin(key)
	if err == nil {
		err = m.dir.Commit(r, &nodecache.Info{Ports: []nodecache.PortInfo{p}, Origin: nodecache.OriginSelf})
	}
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *mesh) route(r *nodecache.Route) {
	m.t.Helper()
	r.UID = r.Namespace + "/" + r.Name
	if err := m.dir.UpsertRoute(r); err != nil {
		m.t.Fatal(err)
	}
}

func httpRoute(ns, name string, parent nodecache.Name, rules ...nodecache.RouteRule) *nodecache.Route {
	for i := range rules {
		if rules[i].Matches == nil {
			rules[i].Matches = []nodecache.RouteMatch{{Path: "/", PathType: nodecache.MatchPrefix}}
		}
		rules[i].Timeout, rules[i].BackendTimeout = -1, -1
	}
	return &nodecache.Route{
		Namespace: ns, Name: name, Rules: rules,
		Parents: []nodecache.RouteParent{{Kind: "Service", Name: parent}},
	}
}

func to(name nodecache.Name, port uint16) nodecache.RouteRule {
	return nodecache.RouteRule{Backends: []nodecache.RouteBackend{{Service: name, Port: port, Weight: 1}}}
}

// hosts are the virtual hosts of a namespace in front of the catch-all.
func (m *mesh) hosts(ns string) []*routev3.VirtualHost {
	m.t.Helper()
	r := m.published[xds.ID{Type: xds.Route, Name: resources.RouteName, Scope: xds.NamespaceScope(ns)}]
	hosts := decode(m.t, r, &routev3.RouteConfiguration{}).GetVirtualHosts()
	if last := hosts[len(hosts)-1]; last.GetName() != "egress" {
		m.t.Fatalf("the last virtual host is %s", last.GetName())
	}
	return hosts[:len(hosts)-1]
}

// backends are the clusters behind routes that a namespace has, with the
// addresses of each.
func (m *mesh) backends(ns string) string {
	m.t.Helper()
	var out []string
	for id, r := range m.published {
		if id.Type != xds.Endpoint || id.Scope != xds.BackendScope(ns) || !strings.HasPrefix(id.Name, "backend/") {
			continue
		}
		if m.published[xds.ID{Type: xds.Cluster, Name: id.Name, Scope: id.Scope}] == nil {
			m.t.Errorf("%s is a CLA without a cluster", id.Name)
		}
		var at []string
		for _, l := range decode(m.t, r, &endpointv3.ClusterLoadAssignment{}).GetEndpoints() {
			for _, e := range l.GetLbEndpoints() {
				a := e.GetEndpoint().GetAddress().GetSocketAddress()
				at = append(at, fmt.Sprintf("%s:%d %s", a.GetAddress(), a.GetPortValue(), e.GetHealthStatus()))
			}
		}
		out = append(out, strings.TrimPrefix(id.Name, "backend/")+" ["+strings.Join(at, " ")+"]")
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func (m *mesh) want(what, got, want string) {
	m.t.Helper()
	if got != want {
		m.t.Errorf("%s: %s\nwant %s", what, got, want)
	}
}

var (
	web    = nodecache.Name{Namespace: "prod", Name: "web"}
	canary = nodecache.Name{Namespace: "prod", Name: "canary"}
	api    = nodecache.FrontPort{Name: "api", Port: 80}
	rpc    = nodecache.FrontPort{Name: "grpc", Port: 80}
)

func TestRouteBringsVirtualHostAndClustersAndTakesThemAway(t *testing.T) {
	m := newMesh(t, "prod", "shop", "third")
	plain := m.published[xds.ID{Type: xds.Route, Name: resources.RouteName, Scope: "ns/third"}].Version
	m.pod("a", "10.0.0.1", nodecache.Serving)
	m.service("prod", "web", api, "a")
	if u := m.flush(); !u.Empty() {
		t.Errorf("a Service that no route concerns changes %+v", u)
	}
	m.route(httpRoute("shop", "consumer", web, to(web, 80)))
	m.flush()
	m.want("backends of the consumer", m.backends("shop"), "prod/web/80 [10.0.0.1:1000 HEALTHY]")
	m.want("backends of others", m.backends("prod")+m.backends("third"), "")
	if v := m.published[xds.ID{Type: xds.Route, Name: resources.RouteName, Scope: "ns/third"}].Version; v != plain {
		t.Error("the table of a namespace without routes has changed")
	}
	m.route(httpRoute("prod", "producer", web, to(canary, 80)))
	m.flush()
	m.want("backends of a Service that is not there", m.backends("third"), "")
	m.service("prod", "canary", api)
	u := m.flush()
	m.want("backends of the producer", m.backends("third"), "prod/canary/80 []")
	m.want("backends of the consumer", m.backends("shop"), "prod/web/80 [10.0.0.1:1000 HEALTHY]")
	if !slices.IsSortedFunc(u.Set, func(a, b *xds.Resource) int { return int(a.Type) - int(b.Type) }) {
		t.Errorf("an update is not in the order of types: %v", u.Set)
	}
	// A client that comes later finds the same.
	m.client("late")
	m.want("backends of a late client", m.backends("late"), "prod/canary/80 []")

	m.dir.RemoveRoute("prod/producer")
	m.dir.RemoveRoute("shop/consumer")
	m.flush()
	for _, ns := range []string{"prod", "shop", "third", "late"} {
		m.want("backends without routes", m.backends(ns), "")
	}
	if v := m.published[xds.ID{Type: xds.Route, Name: resources.RouteName, Scope: "ns/third"}].Version; v != plain {
		t.Error("the table is not what it was before the routes")
	}
}

func TestPodBehindRouteChangesItsAssignmentAlone(t *testing.T) {
	m := newMesh(t, "prod", "shop")
	m.pod("a", "10.0.0.1", nodecache.Serving)
	m.service("prod", "web", api, "a", "b")
	m.route(httpRoute("prod", "r", web, to(web, 80)))
	m.flush()
	m.pod("b", "10.0.0.2", nodecache.Serving)
	u := m.flush()
	if len(u.Set) != 2 || u.Set[0].Type != xds.Endpoint || u.Set[1].Type != xds.Endpoint || len(u.Remove) != 0 {
		t.Errorf("a pod changes %v", u)
	}
	// The port of the same name differs between the pods.
	m.want("backends", m.backends("shop"), "prod/web/80 [10.0.0.1:1000 HEALTHY 10.0.0.2:1001 HEALTHY]")
	m.pod("a", "10.0.0.1", nodecache.Draining)
	m.flush()
	m.want("backends", m.backends("prod"), "prod/web/80 [10.0.0.1:1000 DRAINING 10.0.0.2:1001 HEALTHY]")
	m.dir.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-b"})
	m.flush()
	m.want("backends", m.backends("prod"), "prod/web/80 [10.0.0.1:1000 HEALTHY]")
}

func TestServicePortThatGoesFailsItsShare(t *testing.T) {
	m := newMesh(t, "prod")
	f := m.service("prod", "web", api)
	both := to(web, 80)
	both.Backends = append(both.Backends, nodecache.RouteBackend{Service: canary, Port: 80, Weight: 3})
	m.service("prod", "canary", api)
	m.route(httpRoute("prod", "r", web, both))
	m.flush()
	m.want("backends", m.backends("prod"), "prod/canary/80 [] prod/web/80 []")
	m.dir.RemoveFront(canary)
	m.flush()
	m.want("backends", m.backends("prod"), "prod/web/80 []")
	action := m.hosts("prod")[0].GetRoutes()[0].GetRoute()
	ws := action.GetWeightedClusters().GetClusters()
	if len(ws) != 2 || ws[1].GetName() != "unresolved" || ws[1].GetWeight().GetValue() != 3 ||
		action.GetClusterNotFoundResponseCode() != routev3.RouteAction_INTERNAL_SERVER_ERROR {
		t.Errorf("action %v", action)
	}
	other := *f
	other.Ports = []nodecache.FrontPort{{Name: "api", Port: 81}}
	m.dir.UpsertFront(&other)
	m.flush()
	m.want("backends", m.backends("prod"), "")
	if hosts := m.hosts("prod"); len(hosts) != 1 || hosts[0].GetName() != "prod/web/81" || hosts[0].GetRoutes()[0].GetDirectResponse().GetStatus() != 500 {
		t.Errorf("hosts %v", hosts)
	}
}

func TestGRPCBackendLeavesOutPodsKnownNotToServe(t *testing.T) {
	m := newMesh(t, "prod")
	serves := func(names ...string) nodecache.PortInfo {
		p := nodecache.PortInfo{Port: 1000, State: nodecache.PortServes}
		for _, n := range names {
			p.Services = append(p.Services, nodecache.Service{Name: n})
		}
		return p
	}
	m.learn(m.pod("has", "10.0.0.1", nodecache.Serving), serves("shop.New", "shop.Web"))
	m.learn(m.pod("lacks", "10.0.0.2", nodecache.Serving), serves("shop.Web"))
	m.learn(m.pod("silent", "10.0.0.3", nodecache.Serving), nodecache.PortInfo{Port: 1000, State: nodecache.PortNoReflection})
	m.learn(m.pod("tls", "10.0.0.4", nodecache.Serving), nodecache.PortInfo{Port: 1000, State: nodecache.PortTLS})
	m.pod("unknown", "10.0.0.5", nodecache.Serving)
	m.service("prod", "web", rpc)
	for _, uid := range []string{"has", "lacks", "silent", "tls", "unknown"} {
		m.slices("prod", "web", rpc, uid)
	}
	r := httpRoute("prod", "r", web, to(web, 80))
	r.Kind = nodecache.GRPCRoute
	r.Rules[0].Matches = []nodecache.RouteMatch{{Service: "shop.New", Method: "Get"}, {Service: "shop.New"}, {Service: "grpc.health.v1.Health"}, {Method: "Get"}}
	m.route(r)
	m.flush()
	all := "[10.0.0.1:1000 HEALTHY 10.0.0.2:1000 HEALTHY 10.0.0.3:1000 HEALTHY 10.0.0.4:1000 HEALTHY 10.0.0.5:1000 HEALTHY]"
	narrow := "[10.0.0.1:1000 HEALTHY 10.0.0.3:1000 HEALTHY 10.0.0.5:1000 HEALTHY]"
	m.want("backends", m.backends("prod"), "prod/web/80 "+all+" prod/web/80/grpc.health.v1.Health "+all+" prod/web/80/shop.New "+narrow)
	var paths []string
	for _, r := range m.hosts("prod")[0].GetRoutes() {
		p := r.GetMatch()
		paths = append(paths, p.GetPath()+p.GetPrefix()+p.GetSafeRegex().GetRegex()+" "+r.GetRoute().GetCluster())
	}
	m.want("routes", strings.Join(paths, ", "), "/grpc.health.v1.Health/ backend/prod/web/80/grpc.health.v1.Health, "+
		"/shop.New/Get backend/prod/web/80/shop.New, /shop.New/ backend/prod/web/80/shop.New, /[^/]+/Get backend/prod/web/80")
	// What is learned later narrows, too.
	m.learn(nodecache.OwnerKey{UID: "rs-unknown"}, serves("shop.Web"))
	u := m.flush()
	if len(u.Set) != 1 || u.Set[0].Name != "backend/prod/web/80/shop.New" || u.Set[0].Type != xds.Endpoint {
		t.Errorf("knowledge changes %v", u.Set)
	}
}

func TestBackendSpeaksWhatItsPortSpeaks(t *testing.T) {
	m := newMesh(t, "prod")
	h2c := nodecache.FrontPort{Name: "api", Port: 80, AppProtocol: "kubernetes.io/h2c"}
	m.service("prod", "web", api)
	m.service("prod", "canary", h2c)
	rule := to(web, 80)
	rule.Backends = append(rule.Backends, nodecache.RouteBackend{Service: canary, Port: 80, Weight: 1})
	m.route(httpRoute("prod", "r", web, rule))
	m.flush()
	for name, callers := range map[string]bool{"backend/prod/web/80": true, "backend/prod/canary/80": false} {
		c := decode(t, m.published[xds.ID{Type: xds.Cluster, Name: name, Scope: "backend/prod"}], &clusterv3.Cluster{})
		var o upstreamv3.HttpProtocolOptions
		if err := c.GetTypedExtensionProtocolOptions()["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"].UnmarshalTo(&o); err != nil {
			t.Fatal(err)
		}
		if got := o.GetUseDownstreamProtocolConfig() != nil; got != callers || (o.GetExplicitHttpConfig().GetHttp2ProtocolOptions() != nil) == callers {
			t.Errorf("%s: %v", name, &o)
		}
	}
}

func TestDomainsAreTheNamesByWhichCallersKnowTheService(t *testing.T) {
	m := newMesh(t, "prod", "shop")
	two := m.service("prod", "web", nodecache.FrontPort{Name: "a", Port: 8080})
	f := *two
	f.Ports = append(f.Ports, nodecache.FrontPort{Name: "b", Port: 9090})
	f.ClusterIPs = []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")}
	m.dir.UpsertFront(&f)
	m.service("prod", "localhost", api)
	m.route(httpRoute("prod", "r", web, to(web, 8080)))
	m.route(httpRoute("prod", "l", nodecache.Name{Namespace: "prod", Name: "localhost"}, to(web, 8080)))
	m.flush()
	got := map[string][]string{}
	for _, ns := range []string{"prod", "shop"} {
		for _, h := range m.hosts(ns) {
			got[ns+" "+h.GetName()] = h.GetDomains()
		}
	}
	long := []string{"web.prod", "web.prod.svc", "web.prod.svc.cluster.local", "web.prod.", "web.prod.svc.", "web.prod.svc.cluster.local."}
	ips := []string{"10.96.0.1", "[fd00::1]"}
	with := func(port string, bare bool, names ...string) []string {
		var out []string
		for _, n := range names {
			if bare {
				out = append(out, n)
			}
			out = append(out, n+port)
		}
		slices.Sort(out)
		return out
	}
	for key, want := range map[string][]string{
		"prod prod/web/8080": with(":8080", true, slices.Concat(long, ips, []string{"web", "web."})...),
		"prod prod/web/9090": with(":9090", false, slices.Concat(long, ips, []string{"web", "web."})...),
		"shop prod/web/8080": with(":8080", true, slices.Concat(long, ips)...),
		"shop prod/web/9090": with(":9090", false, slices.Concat(long, ips)...),
		"prod prod/localhost/80": with(":80", true, "localhost.prod", "localhost.prod.svc", "localhost.prod.svc.cluster.local",
			"localhost.prod.", "localhost.prod.svc.", "localhost.prod.svc.cluster.local."),
	} {
		if got := slices.Sorted(slices.Values(got[key])); !slices.Equal(got, want) {
			t.Errorf("%s: %v\nwant %v", key, got, want)
		}
	}
}

// A Service that is not quite gone may have the address of its successor.
func TestNoDomainIsTwoServices(t *testing.T) {
	m := newMesh(t, "prod")
	for _, name := range []string{"web", "canary"} {
		f := *m.service("prod", name, api)
		f.ClusterIPs = []netip.Addr{netip.MustParseAddr("10.96.0.1")}
		m.dir.UpsertFront(&f)
		m.route(httpRoute("prod", name, f.Key(), to(web, 80)))
	}
	m.flush()
	seen := map[string]string{}
	for _, h := range m.hosts("prod") {
		for _, d := range h.GetDomains() {
			if seen[d] != "" {
				t.Errorf("%s is a domain of %s and %s", d, seen[d], h.GetName())
			}
			seen[d] = h.GetName()
		}
	}
	m.want("owner of the address", seen["10.96.0.1"], "prod/canary/80")
}

func TestChoiceIsWhatTheTableSays(t *testing.T) {
	m := newMesh(t, "prod", "shop")
	m.service("prod", "web", api)
	m.service("prod", "canary", api)
	first := to(canary, 80)
	first.Matches = []nodecache.RouteMatch{{Path: "/new", PathType: nodecache.MatchPrefix}}
	first.Backends = append(first.Backends, nodecache.RouteBackend{Service: web, Port: 99, Weight: 4})
	second := to(web, 80)
	second.Matches = []nodecache.RouteMatch{{Path: "/old"}}
	m.route(httpRoute("prod", "r", web, first, second))
	m.flush()
	choose := func(ns, authority, path string) string {
		c, ok := m.c.Choose(ns, authority, routetable.Call{Path: path, Verb: "GET"}, false)
		if !ok {
			return "none"
		}
		if c.Route == nil {
			return fmt.Sprintf("%s:%d no match", c.Service, c.Port)
		}
		text := fmt.Sprintf("%s:%d %s %d.%d", c.Service, c.Port, c.Route.Name, c.Rule, c.Match)
		for _, s := range c.Shares {
			text += fmt.Sprintf(" %d %q", s.Weight, s.Cluster)
		}
		return text
	}
	m.want("new", choose("prod", "WEB.prod.svc:80", "/new/x"), "prod/web:80 r 0.0 1 \"backend/prod/canary/80\" 4 \"\"")
	m.want("old", choose("shop", "web.prod", "/old?a=b"), "prod/web:80 r 1.0 1 \"backend/prod/web/80\"")
	m.want("short name of another namespace", choose("shop", "web", "/old"), "none")
	m.want("no match", choose("prod", "web", "/older"), "prod/web:80 no match")
	m.want("loopback", choose("prod", "127.0.0.1:15001", "/old"), "none")
}
