package resources_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// dial lets a program of prod ask for names, of listeners if they are no
// clusters'.
func (m *mesh) dial(names ...string) {
	m.t.Helper()
	for _, name := range names {
		t := typeOf(name)
		if !resources.Dialled(t, name) {
			m.t.Errorf("%s may not be dialled", name)
		}
		m.take(m.c.Dial(m.dir, "prod", t, []string{name}))
	}
}

func (m *mesh) hangUp(names ...string) {
	for _, name := range names {
		m.take(m.c.Hangup("prod", typeOf(name), []string{name}))
	}
}

func typeOf(name string) xds.Type {
	if strings.HasPrefix(name, "backend/") || strings.HasPrefix(name, "nobody:") {
		return xds.Cluster
	}
	return xds.Listener
}

// dials says where the routes of what is dialled lead, as a client sees it that
// looks into the scopes of prod.
func (m *mesh) dials(name string) string {
	m.t.Helper()
	for _, scope := range []xds.Scope{xds.DialScope("prod"), xds.APIScope("prod")} {
		r := m.published[xds.ID{Type: xds.Listener, Name: name, Scope: scope}]
		if r == nil {
			continue
		}
		hcm := &hcmv3.HttpConnectionManager{}
		if err := decode(m.t, r, &listenerv3.Listener{}).GetApiListener().GetApiListener().UnmarshalTo(hcm); err != nil {
			m.t.Fatal(err)
		}
		var out []string
		for _, route := range hcm.GetRouteConfig().GetVirtualHosts()[0].GetRoutes() {
			out = append(out, route.GetMatch().GetPrefix()+" "+route.GetRoute().GetCluster())
		}
		return strings.Join(out, ", ")
	}
	return "silence"
}

// behind are the endpoints of a dialled cluster.
func (m *mesh) behind(name string) string {
	m.t.Helper()
	r := m.published[xds.ID{Type: xds.Endpoint, Name: name, Scope: xds.DialScope("prod")}]
	if r == nil {
		return "silence"
	}
	var out []string
	for _, l := range decode(m.t, r, &endpointv3.ClusterLoadAssignment{}).GetEndpoints() {
		for _, e := range l.GetLbEndpoints() {
			a := e.GetEndpoint().GetAddress().GetSocketAddress()
			out = append(out, fmt.Sprintf("%s:%d", a.GetAddress(), a.GetPortValue()))
		}
	}
	return strings.Join(out, " ")
}

// A Service of two pods, of which one serves what the other does not.
func dialled(t *testing.T) *mesh {
	m := newMesh(t)
	one := m.pod("web-0", "10.0.0.1", nodecache.Serving)
	two := m.pod("web-1", "10.0.0.2", nodecache.Serving)
	grpc := nodecache.FrontPort{Name: "grpc", Port: 50051}
	m.named("prod/web", "10.96.0.1", grpc)
	m.slices("prod", "web", grpc, "web-0", "web-1") // their ports are 1000 and 1001
	m.learn(one, serves(1000, "pkg.A", "pkg.B", "grpc.health.v1.Health"))
	m.learn(two, serves(1001, "pkg.A"))
	m.flush()
	m.take(m.c.Current())
	return m
}

func TestDialledServiceHasARouteForEachServiceAndOneForAllElse(t *testing.T) {
	m := dialled(t)
	const web = "/pkg.A/ backend/prod/web/50051/pkg.A, /pkg.B/ backend/prod/web/50051/pkg.B, / backend/prod/web/50051"
	for _, name := range []string{"web.prod:50051", "web", "web.prod", "web.prod.svc:50051", "web.prod.svc.cluster.local", "web.prod.svc.cluster.local.:50051", "10.96.0.1:50051"} {
		m.dial(name)
		m.want(name, m.dials(name), web)
	}
	m.dial("backend/prod/web/50051/pkg.A", "backend/prod/web/50051/pkg.B", "backend/prod/web/50051", "backend/prod/web/50051/pkg.Else")
	m.want("of both", m.behind("backend/prod/web/50051/pkg.A"), "10.0.0.1:1000 10.0.0.2:1001")
	m.want("of one", m.behind("backend/prod/web/50051/pkg.B"), "10.0.0.1:1000")
	m.want("of all that is ready", m.behind("backend/prod/web/50051"), "10.0.0.1:1000 10.0.0.2:1001")
	m.want("of nobody", m.behind("backend/prod/web/50051/pkg.Else"), "")

	// A pod that comes changes endpoints alone, whatever is known of it.
	m.pod("web-2", "10.0.0.3", nodecache.Serving)
	m.slices("prod", "web", nodecache.FrontPort{Name: "grpc", Port: 50051}, "web-0", "web-1", "web-2")
	for _, r := range m.flush().Set {
		if r.Type != xds.Endpoint {
			t.Errorf("%v changes", r.ID)
		}
	}
	m.want("with the new one", m.behind("backend/prod/web/50051/pkg.B"), "10.0.0.1:1000 10.0.0.3:1002")
	m.learn(nodecache.OwnerKey{UID: "rs-web-2"}, serves(1002, "pkg.C"))
	m.flush()
	m.want("web", m.dials("web"), "/pkg.A/ backend/prod/web/50051/pkg.A, /pkg.B/ backend/prod/web/50051/pkg.B, /pkg.C/ backend/prod/web/50051/pkg.C, / backend/prod/web/50051")
	m.want("without the new one", m.behind("backend/prod/web/50051/pkg.B"), "10.0.0.1:1000")
}

func TestNothingStaysOfWhatNobodyDialsAnyMore(t *testing.T) {
	m := dialled(t)
	before := len(m.published)
	names := []string{"web.prod:50051", "nosuch:1", "pkg.A", "Pkg.Nosuch", "backend/prod/web/50051", "backend/prod/web/50051/pkg.A", "nobody:nosuch:1"}
	m.dial(names...)
	m.dial("web.prod:50051")
	m.hangUp(names...)
	m.want("still dialled", fmt.Sprint(len(m.published)-before), "1")
	m.hangUp("web.prod:50051", "web.prod:50051", "never.dialled")
	m.want("left", fmt.Sprint(len(m.published)-before), "0")
	m.named("prod/nosuch", "10.96.0.2", nodecache.FrontPort{Port: 1})
	m.want("changes", fmt.Sprint(len(m.flush().Set)), "0")
}

func TestWhatNobodyHasIsSaidOnceItIsCertain(t *testing.T) {
	m := newMesh(t)
	key := m.pod("web-0", "10.0.0.1", nodecache.Serving)
	m.flush()
	names := []string{"web.prod:50051", "web.prod", "pkg.A", "pkg.B"}
	m.dial(names...)
	for _, name := range names {
		m.want(name+" before all is heard of", m.dials(name), "silence")
	}
	m.take(m.c.Current())
	// With a port it is no name of a gRPC service.
	m.want("a Service", m.dials("web.prod:50051"), "/ backend/prod/web/50051")
	for _, name := range names[1:] {
		m.want(name+" while a pod may serve it", m.dials(name), "silence")
	}
	m.learn(key, serves(1000, "pkg.A"))
	m.flush()
	m.want("served", m.dials("pkg.A"), "/pkg.A/ prod/pkg.A")
	m.want("served by nobody", m.dials("pkg.B"), "/pkg.B/ prod/pkg.B")
	m.want("no Service", m.dials("web.prod"), "/ backend/prod/web/80")
	m.want("its endpoints", m.behind("prod/pkg.B"), "")
	m.dial("10.96.7.7:80", "nobody:10.96.7.7:80", "Pkg_X:80")
	m.want("an address", m.dials("10.96.7.7:80"), "/ nobody:10.96.7.7:80")
	m.want("its endpoints", m.behind("nobody:10.96.7.7:80"), "")
	m.want("no name of anybody", m.dials("Pkg_X:80"), "/ nobody:Pkg_X:80")

	// It comes, goes, and comes back.
	for range 2 {
		two := m.pod("web-1", "10.0.0.2", nodecache.Serving)
		m.flush()
		m.want("while the new pod may serve it", m.dials("pkg.B"), "/pkg.B/ prod/pkg.B")
		m.learn(two, serves(1000, "pkg.B"))
		m.flush()
		m.want("new", m.dials("pkg.B"), "/pkg.B/ prod/pkg.B")
		m.learn(two, serves(1000, "pkg.C"))
		m.flush()
		m.want("gone", m.dials("pkg.B"), "/pkg.B/ prod/pkg.B")
		m.dir.RemovePod("web-1")
		m.flush()
	}
	grpc := nodecache.FrontPort{Name: "grpc", Port: 50051}
	for range 2 {
		m.named("prod/web", "10.96.0.1", grpc)
		m.flush()
		m.want("a new Service", m.dials("web.prod:50051"), "/ backend/prod/web/50051")
		m.slices("prod", "web", grpc, "web-0")
		m.flush()
		m.want("with pods", m.dials("web.prod"), "/pkg.A/ backend/prod/web/50051/pkg.A, / backend/prod/web/50051")
		m.dir.RemoveFront(nodecache.Name{Namespace: "prod", Name: "web"})
		m.flush()
		m.want("a Service that went", m.dials("web.prod:50051"), "/ backend/prod/web/50051")
		m.dir.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-web-0"})
		m.want("a Service that went, without a port", m.dials("web.prod"), "/ backend/prod/web/80")
	}
}

// What is a Service's name is not a gRPC service's, whoever came first.
func TestServiceComesBeforeAGRPCServiceOfItsName(t *testing.T) {
	m := dialled(t)
	odd := m.pod("odd", "10.0.0.9", nodecache.Serving)
	m.learn(odd, serves(1000, "web.prod", "Web.prod"))
	m.flush()
	m.dial("web.prod", "Web.prod", "Web.PROD:50051")
	if got := m.dials("web.prod"); !strings.HasSuffix(got, "/ backend/prod/web/50051") {
		t.Errorf("web.prod leads to %s", got)
	}
	m.want("by its capital letter", m.dials("Web.prod"), "/Web.prod/ prod/Web.prod")
	// No gRPC service has a port, and DNS does not look at the case.
	m.want("with a port", m.dials("Web.PROD:50051"), m.dials("web.prod"))
	m.dir.RemoveFront(nodecache.Name{Namespace: "prod", Name: "web"})
	m.flush()
	m.want("without the Service", m.dials("web.prod"), "/web.prod/ prod/web.prod")
	m.want("without the Service, with a port", m.dials("Web.PROD:50051"), "/ backend/prod/web/50051")
	m.dial("None.PROD:50051")
	m.want("of nobody, with a port", m.dials("None.PROD:50051"), "/ backend/prod/none/50051")
}

func TestNamesThatNoProgramMayDial(t *testing.T) {
	for _, c := range []struct {
		t     xds.Type
		names []string
	}{
		{xds.Listener, []string{"", "egress", "egress6", strings.Repeat("x", 301), "\xff"}},
		{xds.Cluster, []string{
			"", "prod/pkg.A", "at/web/pkg.A", "backend/prod/web", "backend/prod/web/0", "backend/prod/web/080", "backend/prod/web/65536", "backend/prod/web/80/",
			"backend/prod/web/80/pkg-A", "backend/prod/web/80/pkg.A/B", "backend/Prod/web/80", "backend/prod/web/80/" + strings.Repeat("x", 256), "nobody:" + strings.Repeat("x", 301),
		}},
		{xds.Endpoint, []string{"backend/prod/web/80"}},
		{xds.Route, []string{"egress"}},
	} {
		if i := slices.IndexFunc(c.names, func(n string) bool { return resources.Dialled(c.t, n) }); i >= 0 {
			t.Errorf("%s %.40q may be dialled", c.t, c.names[i])
		}
	}
}
