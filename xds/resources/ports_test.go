package resources_test

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"

	"github.com/fingerpost/fingerpost/nodecache"
)

// anyPod serves pkg.S on ports 1000, 2000 and 3000.
func (m *mesh) anyPod(uid, addr string, edits ...func(*nodecache.Pod)) {
	m.t.Helper()
	key := nodecache.OwnerKey{UID: "rs-" + uid}
	p := &nodecache.Pod{
		UID: uid, Name: uid, State: nodecache.Serving, Addr: netip.MustParseAddr(addr),
		Common: &nodecache.Common{
			Namespace: "prod", Owner: key, OwnerName: "ReplicaSet/" + uid,
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: uid},
			Hints:    []nodecache.Hint{{Port: 1000, Why: "port name"}, {Port: 2000, Why: "port name"}, {Port: 3000, Why: "port name"}},
		},
	}
	for _, edit := range edits {
		edit(p)
	}
	info := &nodecache.Info{}
	for _, port := range []uint16{1000, 2000, 3000} {
		info.Ports = append(info.Ports, nodecache.PortInfo{Port: port, State: nodecache.PortServes, Services: []nodecache.Service{{Name: "pkg.S"}}})
	}
	if err := m.dir.Commit(m.dir.UpsertPod(p), info); err != nil {
		m.t.Fatal(err)
	}
}

func portNamed(p *nodecache.Pod) { p.Hints[2].Why = nodecache.WhyAnnotation } // port 3000

// leads puts a Service in front of pods that leads to their port.
func (m *mesh) leads(name string, target uint16, pods ...string) {
	m.dir.UpsertFront(&nodecache.Front{UID: name, Namespace: "prod", Name: name, Type: "ClusterIP", Selects: true, Ports: []nodecache.FrontPort{api}})
	s := &nodecache.Slice{UID: name, Namespace: "prod", Name: name + "-1", Service: name, Ports: []nodecache.SlicePort{{Name: "api", Port: target}}}
	for _, uid := range pods {
		s.Endpoints = append(s.Endpoints, nodecache.Endpoint{Pod: uid, Ready: true, Serving: true})
	}
	m.dir.UpsertSlice(s)
}

// called are the addresses of pkg.S by its path alone.
func (m *mesh) called() string { return strings.Join(m.addrs("prod", "pkg.S"), " ") }

func TestPortOfTheNamedServiceGoesBeforeAllOthers(t *testing.T) {
	m := newMesh(t, "prod")
	m.anyPod("a", "10.0.0.1", portNamed)
	m.leads("web", 2000, "a")
	m.route(httpRoute("prod", "r", web, to(web, 80)))
	m.flush()
	m.want("by the Service", m.backends("prod"), "prod/web/80 [10.0.0.1:2000 HEALTHY]")
	m.want("by the path alone", m.called(), "10.0.0.1:3000 HEALTHY")
}

func TestPortOfTheAnnotationGoesBeforeOneBehindAService(t *testing.T) {
	m := newMesh(t, "prod")
	m.anyPod("a", "10.0.0.1", portNamed)
	m.leads("web", 2000, "a")
	m.flush()
	m.want("called", m.called(), "10.0.0.1:3000 HEALTHY")
}

func TestPortBehindAServiceGoesBeforeTheLowest(t *testing.T) {
	m := newMesh(t, "prod")
	m.anyPod("a", "10.0.0.1")
	m.leads("web", 2000, "a")
	m.flush()
	m.want("called", m.called(), "10.0.0.1:2000 HEALTHY")
}

func TestLowestPortThatAnsweredIsTheLastChoice(t *testing.T) {
	m := newMesh(t, "prod")
	m.anyPod("a", "10.0.0.1")
	m.flush()
	m.want("called", m.called(), "10.0.0.1:1000 HEALTHY")
}

// It has three ports, two addresses, and two Services in front of two of them.
func TestPodHasOneAddressInACluster(t *testing.T) {
	m := newMesh(t, "prod")
	m.anyPod("a", "10.0.0.1", func(p *nodecache.Pod) { p.More = []netip.Addr{netip.MustParseAddr("fd00::1")} })
	m.leads("web", 3000, "a")
	m.leads("canary", 2000, "a")
	six := *m.dir.Front(web).Slices[0]
	six.Name, six.UID = "web-6", "web-6"
	m.dir.UpsertSlice(&six)
	m.route(httpRoute("prod", "r", web, to(web, 80)))
	m.flush()
	m.want("called", m.called(), "10.0.0.1:2000 HEALTHY")
	m.want("backends", m.backends("prod"), "prod/web/80 [10.0.0.1:3000 HEALTHY]")
}

// headless is a Service whose name means its pods.
func (m *mesh) headless(name string, ports []nodecache.FrontPort, s *nodecache.Slice) {
	m.dir.UpsertFront(&nodecache.Front{UID: name, Namespace: "prod", Name: name, Type: "ClusterIP", Selects: true, Headless: true, Ports: ports})
	s.UID, s.Namespace, s.Name, s.Service = name, "prod", name+"-1", name
	m.dir.UpsertSlice(s)
}

func members(pods ...string) (es []nodecache.Endpoint) {
	for _, uid := range pods {
		es = append(es, nodecache.Endpoint{Pod: uid, Ready: true, Serving: true})
	}
	return es
}

func TestHeadlessServiceIsAllItsPods(t *testing.T) {
	m := newMesh(t, "prod")
	m.service("prod", "web", api)
	for i, uid := range []string{"a", "b", "c"} {
		m.pod(uid, "10.0.0."+string(rune('1'+i)), []nodecache.PodState{nodecache.Serving, nodecache.Serving, nodecache.Draining}[i])
	}
	m.headless("canary", []nodecache.FrontPort{rpc}, &nodecache.Slice{
		Ports: []nodecache.SlicePort{{Name: "grpc", Port: 1000}}, Endpoints: members("a", "b", "c"),
	})
	m.route(httpRoute("prod", "r", web, to(canary, 80)))
	m.flush()
	m.want("backends", m.backends("prod"), "prod/canary/80 [10.0.0.1:1000 HEALTHY 10.0.0.2:1000 HEALTHY 10.0.0.3:1000 DRAINING]")
	if o := m.dir.Owner(nodecache.OwnerKey{UID: "rs-b"}); len(o.Behind) != 1 || len(o.Behind[0].Hints) != 1 || o.Behind[0].Hints[0].Port != 1000 {
		t.Errorf("a headless Service hints as another one: %+v", o.Behind)
	}
}

func TestHeadlessServiceWithoutPortsHasEveryPort(t *testing.T) {
	m := newMesh(t, "prod")
	m.service("prod", "web", api)
	m.anyPod("a", "10.0.0.1")
	m.pod("b", "10.0.0.2", nodecache.Serving)
	m.headless("canary", nil, &nodecache.Slice{AnyPort: true, Endpoints: members("a", "b")})
	rule := to(canary, 2000)
	rule.Backends = append(rule.Backends, nodecache.RouteBackend{Service: canary, Port: 3000, Weight: 1})
	m.route(httpRoute("prod", "r", web, rule))
	m.flush()
	m.want("backends", m.backends("prod"), "prod/canary/2000 [10.0.0.1:2000 HEALTHY 10.0.0.2:2000 HEALTHY] prod/canary/3000 [10.0.0.1:3000 HEALTHY 10.0.0.2:3000 HEALTHY]")
	m.want("called", m.called(), "10.0.0.1:1000 HEALTHY")
	// It is that of the Service alone: one with ports has those.
	m.headless("canary", []nodecache.FrontPort{{Port: 2000}}, &nodecache.Slice{AnyPort: true, Endpoints: members("a")})
	m.flush()
	m.want("backends", m.backends("prod"), "prod/canary/2000 [10.0.0.1:2000 HEALTHY]")
}

// The directory holds a pod that is not Ready where Services publish it.
func TestPublishedPodsAreBackends(t *testing.T) {
	m := newMesh(t, "prod")
	m.service("prod", "web", api)
	m.anyPod("a", "10.0.0.1", func(p *nodecache.Pod) { p.Unready = true })
	m.pod("b", "10.0.0.2", nodecache.Serving)
	m.headless("canary", []nodecache.FrontPort{api}, &nodecache.Slice{Ports: []nodecache.SlicePort{{Name: "api", Port: 2000}}, Endpoints: members("a", "b")})
	m.route(httpRoute("prod", "r", web, to(canary, 80)))
	m.flush()
	m.want("backends", m.backends("prod"), "prod/canary/80 [10.0.0.1:2000 HEALTHY 10.0.0.2:2000 HEALTHY]")
	m.want("called", m.called(), "10.0.0.1:2000 HEALTHY")
}

func TestAddressesOfAServiceWithoutASelectorAreBackendsAndAnOwner(t *testing.T) {
	m := newMesh(t, "prod")
	m.service("prod", "web", api)
	m.dir.UpsertFront(&nodecache.Front{
		UID: "uid-bank", Namespace: "prod", Name: "canary", Type: "ClusterIP", Ports: []nodecache.FrontPort{api},
		Declared: []nodecache.Declared{{Services: []string{"pkg.S"}}},
	})
	m.dir.UpsertSlice(&nodecache.Slice{
		UID: "s", Namespace: "prod", Name: "s", Service: "canary", Ports: []nodecache.SlicePort{{Name: "api", Port: 2000}},
		Endpoints: []nodecache.Endpoint{{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Ready: true, Serving: true}},
	})
	m.route(httpRoute("prod", "r", web, to(canary, 80)))
	m.flush()
	m.want("backends", m.backends("prod"), "prod/canary/80 [192.0.2.1:2000 HEALTHY]")
	m.want("called", m.called(), "192.0.2.1:2000 HEALTHY")
}

// outside is an ExternalName Service of the minute that declares pkg.S.
func outside(minute int, host string) *nodecache.Front {
	return &nodecache.Front{
		UID: "uid-outside", Namespace: "prod", Name: "outside", Type: "ExternalName", External: host,
		Created:  time.Date(2026, 5, 1, 12, minute, 0, 0, time.UTC),
		Declared: []nodecache.Declared{{Port: 443, Services: []string{"pkg.S"}}},
	}
}

// dns says what the cluster of pkg.S follows; empty where it is one of pods.
func (m *mesh) dns(ns string) string {
	m.t.Helper()
	c := m.cluster(ns, "pkg.S")
	hasCLA := m.cla(ns, "pkg.S") != nil
	switch c.GetType() {
	case clusterv3.Cluster_EDS:
		if !hasCLA || c.GetLoadAssignment() != nil {
			m.t.Errorf("an EDS cluster with a CLA: %v, and %v", hasCLA, c.GetLoadAssignment())
		}
		return ""
	case clusterv3.Cluster_LOGICAL_DNS:
		if hasCLA || c.GetEdsClusterConfig() != nil {
			m.t.Errorf("a cluster of a DNS name with a CLA: %v, and %v", hasCLA, c.GetEdsClusterConfig())
		}
	}
	// What gRPC takes: one locality with one endpoint (gRFC A37).
	ls := c.GetLoadAssignment().GetEndpoints()
	if len(ls) != 1 || len(ls[0].GetLbEndpoints()) != 1 || ls[0].GetLoadBalancingWeight().GetValue() != 1 {
		m.t.Fatalf("load assignment %v", c.GetLoadAssignment())
	}
	a := ls[0].GetLbEndpoints()[0].GetEndpoint().GetAddress().GetSocketAddress()
	return a.GetAddress() + " " + c.GetDnsLookupFamily().String()
}

func TestExternalNameIsADNSClusterWhileItProvides(t *testing.T) {
	m := newMesh(t, "prod")
	m.anyPod("a", "10.0.0.1")
	m.leads("web", 1000, "a") // of unknown age: after every other
	m.flush()
	pods := m.cluster("prod", "pkg.S").String()
	m.dir.UpsertFront(outside(1, "bank.example.com"))
	m.flush()
	m.want("of the older Service", m.dns("prod"), "bank.example.com. ALL")
	v := m.c.Services()[0]
	if len(v.Endpoints) != 1 || v.Endpoints[0].Address != "bank.example.com:443" || v.Endpoints[0].Pod != "" || v.Endpoints[0].State != "serving" ||
		!slices.Equal(v.Owners, []string{"uid-outside/"}) || !slices.Equal(v.Claimants, []string{"rs-a/"}) {
		t.Errorf("view %+v", v)
	}

	// Pods that come and go change no byte.
	m.anyPod("b", "10.0.0.2")
	m.leads("web", 1000, "a", "b")
	m.dir.RemovePod("a")
	before := maps.Clone(m.published)
	m.flush()
	if !maps.Equal(before, m.published) {
		t.Errorf("pods change %v to %v", before, m.published)
	}
	m.dir.UpsertFront(outside(1, "localhost"))
	m.flush()
	m.want("another host", m.dns("prod"), "localhost ALL")

	// The Service in front of the pods is the older one now.
	old := *m.dir.Front(web).Front
	old.Created = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	m.dir.UpsertFront(&old)
	m.flush()
	m.want("of pods", m.dns("prod"), "")
	m.want("called", m.called(), "10.0.0.2:1000 HEALTHY")
	if got := m.cluster("prod", "pkg.S").String(); got != pods {
		t.Errorf("the cluster of pods is another one:\n%s\n%s", got, pods)
	}
	// They keep the name with their last pod gone, while it is remembered.
	m.dir.RemovePod("b")
	m.flush()
	m.want("scaled to zero", m.dns("prod")+m.called(), "")
	m.dir.Expire(time.Now().Add(time.Hour))
	m.flush()
	m.want("forgotten", m.dns("prod"), "localhost ALL")

	// Without its Service nobody is called.
	m.dir.RemoveFront(nodecache.Name{Namespace: "prod", Name: "outside"})
	m.flush()
	m.want("removed", m.dns("prod")+m.called(), "")
}

func TestExternalNameIsExportedAsItsServiceSays(t *testing.T) {
	m := newMesh(t, "prod", "shop", "other")
	f := outside(1, "bank.example.com")
	f.Export = "shop"
	m.dir.UpsertFront(f)
	m.flush()
	for ns, want := range map[string]string{"prod": "bank.example.com. ALL", "shop": "bank.example.com. ALL"} {
		m.want(ns, m.dns(ns), want)
	}
	if m.cluster("other", "pkg.S") != nil {
		t.Error("it is exported to everybody")
	}
}

// A name can point anywhere: also at what only the caller's sidecar may reach.
func TestNoRouteFollowsAnExternalName(t *testing.T) {
	m := newMesh(t, "prod")
	m.service("prod", "web", api)
	f := outside(1, "bank.example.com")
	f.Ports = []nodecache.FrontPort{api}
	m.dir.UpsertFront(f)
	m.route(httpRoute("prod", "r", web, to(f.Key(), 80)))
	m.flush()
	m.want("backends", m.backends("prod"), "")
	if got := m.hosts("prod")[0].GetRoutes()[0].GetDirectResponse().GetStatus(); got != 500 {
		t.Errorf("calls end with %d", got)
	}
}
