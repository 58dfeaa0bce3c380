package resources_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// to says where a call of prod goes, or why it goes nowhere.
func (m *mesh) to(authority, service string) string {
	n := m.c.Resolve(m.dir, "prod", authority, service)
	if n.Reason != "" {
		return n.Reason
	}
	out := []string{n.String()}
	for _, mv := range n.Members {
		if mv.Absent == "" {
			out = append(out, mv.Address)
		}
	}
	if n.Refused {
		out = append(out, "refused")
	}
	return strings.Join(out, " ")
}

func (m *mesh) named(name, ip string, ports ...nodecache.FrontPort) *nodecache.Front {
	ns, name, _ := strings.Cut(name, "/")
	f := &nodecache.Front{UID: ns + name, Namespace: ns, Name: name, Type: "ClusterIP", Selects: true, Ports: ports, Headless: ip == ""}
	for _, a := range strings.Fields(ip) {
		f.ClusterIPs = append(f.ClusterIPs, netip.MustParseAddr(a))
	}
	m.dir.UpsertFront(f)
	return f
}

func TestAuthoritiesNameWhatTheCallersDNSDoes(t *testing.T) {
	m := newMesh(t)
	for i, uid := range []string{"web-0", "web-1", "far-0"} {
		m.pod(uid, fmt.Sprintf("10.0.0.%d", i+1), nodecache.Serving)
	}
	m.pod("six", "fd00::6", nodecache.Draining)
	grpc := nodecache.FrontPort{Name: "grpc", Port: 50051}
	m.named("prod/web", "10.96.0.1 fd00:96::1", nodecache.FrontPort{Name: "http", Port: 80}, grpc)
	m.slices("prod", "web", grpc, "web-0", "web-1") // their ports are 1000 and 1001
	m.named("shop/web", "10.96.0.2", grpc)
	m.slices("shop", "web", grpc, "far-0")
	m.named("prod/db", "", grpc)
	m.slices("prod", "db", grpc, "web-0", "web-1")
	m.named("prod/prod", "", grpc) // a headless one of the namespace's own name
	m.slices("prod", "prod", grpc, "web-0")
	m.named("prod/outside", "10.96.0.4", grpc).External = "example.com"
	m.named("svc/odd", "10.96.0.5", grpc)
	m.slices("svc", "odd", grpc, "far-0")

	const web = "port 50051 of Service prod/web 10.0.0.1:1000 10.0.0.2:1001"
	const noName = "no Service and no pod of a headless Service has the name"
	for authority, want := range map[string]string{
		"web:50051": web, "WEB.:50051": web, "web.prod:50051": web, "web.prod.svc:50051": web,
		"web.prod.svc.cluster.local:50051": web, "Web.prod.svc.cluster.local.:50051": web,
		"10.96.0.1:50051": web, "[fd00:96::1]:50051": web, "[::ffff:10.96.0.1]:50051": web,
		// Without a port 80 is meant, and the first where there is no 80.
		"web":               "port 80 of Service prod/web",
		"web.shop":          "port 50051 of Service shop/web 10.0.0.3:1000",
		"10.96.0.2":         "port 50051 of Service shop/web 10.0.0.3:1000",
		"web.shop.svc:1":    "Service shop/web has no TCP port 1, it has 50051",
		"web:0":             "0 is no port",
		"web:65536":         "65536 is no port",
		"outside":           "Service prod/outside is but another name for example.com (ExternalName), which a sidecar does not follow",
		"odd.svc":           "port 50051 of Service svc/odd 10.0.0.3:1000",
		"nobody":            noName,
		"web.nowhere:1":     noName,
		"":                  noName,
		"web-0.web:50051":   noName, // a Service with an address is no name for its pods
		"_grpc._tcp.web":    noName,
		"web.cluster.local": noName,
		// A headless Service is but a name for its pods: their own ports count.
		"db:1000":                         "port 1000 of Service prod/db 10.0.0.1:1000",
		"db:50051":                        "port 50051 of Service prod/db 10.0.0.1:1000 10.0.0.2:1001",
		"db":                              "port 50051 of Service prod/db 10.0.0.1:1000 10.0.0.2:1001",
		"web-1.db:1001":                   "pod prod/web-1 behind Service prod/db 10.0.0.2:1001",
		"web-1.db.prod.svc":               "pod prod/web-1 behind Service prod/db 10.0.0.2:1001",
		"10-0-0-2.db.prod:1001":           "pod prod/web-1 behind Service prod/db 10.0.0.2:1001",
		"web-2.db":                        noName,
		"web-0.prod:1000":                 "pod prod/web-0 behind Service prod/prod 10.0.0.1:1000", // by the first entry of the search list
		"web-0.db.prod.svc.cluster.local": "pod prod/web-0 behind Service prod/db 10.0.0.1:1000",
		"10.0.0.2:7":                      "pod prod/web-1 10.0.0.2:7",
		"[fd00::6]:7":                     "pod prod/six [fd00::6]:7",
		"10.0.0.2":                        "pod prod/web-1 10.0.0.2:80",
		"10.9.9.9:7":                      "the address is no Service's and no pod's",
	} {
		got := m.to(authority, "pkg.A")
		if authority == "db:1000" { // the other pod does not listen there, for what is known; it has the port all the same
			want = "port 1000 of Service prod/db 10.0.0.1:1000 10.0.0.2:1000"
		}
		if got != want {
			t.Errorf("%q: %s\nwant %s", authority, got, want)
		}
	}
	// The pod's own port where none is named.
	m.learn(nodecache.OwnerKey{UID: "rs-web-1"}, serves(1001, "pkg.A"))
	if got, want := m.to("10.0.0.2", "pkg.A"), "pod prod/web-1 10.0.0.2:1001"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func serves(port uint16, names ...string) nodecache.PortInfo {
	p := nodecache.PortInfo{Port: port, State: nodecache.PortServes, Hash: strings.Join(names, " ")}
	for _, n := range names {
		p.Services = append(p.Services, nodecache.Service{Name: n})
	}
	return p
}

func TestKnowledgeOnlyNarrowsWhatAServiceNameMeans(t *testing.T) {
	m := newMesh(t)
	port := nodecache.FrontPort{Name: "grpc", Port: 80}
	m.service("prod", "web", port, "a", "b", "c")
	if got, want := m.to("web", "pkg.A"), "port 80 of Service prod/web"; got != want {
		t.Errorf("no pod: %s", got)
	}
	a := m.pod("a", "10.0.0.1", nodecache.Serving)
	b := m.pod("b", "10.0.0.2", nodecache.Serving)
	c := m.pod("c", "10.0.0.3", nodecache.Serving)
	for _, step := range []struct {
		do            func()
		known, health string
	}{
		{func() {}, "10.0.0.1:1000 10.0.0.2:1001 10.0.0.3:1002", "10.0.0.1:1000 10.0.0.2:1001 10.0.0.3:1002"},
		{func() { m.learn(a, serves(1000, "pkg.A")) }, "10.0.0.1:1000 10.0.0.2:1001 10.0.0.3:1002", "10.0.0.1:1000 10.0.0.2:1001 10.0.0.3:1002"},
		{func() { m.learn(b, serves(1001, "pkg.B")) }, "10.0.0.1:1000 10.0.0.3:1002", "10.0.0.1:1000 10.0.0.2:1001 10.0.0.3:1002"},
		{func() { m.learn(c, nodecache.PortInfo{Port: 1002, State: nodecache.PortNoReflection}) }, "10.0.0.1:1000 10.0.0.3:1002", "10.0.0.1:1000 10.0.0.2:1001 10.0.0.3:1002"},
		{func() { m.dir.RemovePod("a"); m.dir.RemovePod("c") }, "", "10.0.0.2:1001"},
	} {
		step.do()
		head := "port 80 of Service prod/web "
		if got := strings.TrimPrefix(m.to("web", "pkg.A"), head); got != step.known && got != strings.TrimSpace(head) {
			t.Errorf("%s, want %s", got, step.known)
		}
		if got := strings.TrimPrefix(m.to("web", "grpc.health.v1.Health"), head); got != step.health {
			t.Errorf("health: %s, want %s", got, step.health)
		}
	}
	m.dir.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-a"})
	m.dir.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-c"})
	if got, want := m.to("web", "pkg.A"), "port 80 of Service prod/web refused"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// aliases are the clusters by Service names of prod, with their addresses.
func (m *mesh) aliases() string {
	m.t.Helper()
	return m.listed(xds.AliasScope("prod"), func(name string) string { return name })
}

// listed are the clusters of a scope, by what their names are shown as, with
// their addresses.
func (m *mesh) listed(scope xds.Scope, shown func(string) string) string {
	m.t.Helper()
	var out []string
	for id, r := range m.published {
		if id.Type != xds.Endpoint || id.Scope != scope {
			continue
		}
		if m.published[xds.ID{Type: xds.Cluster, Name: id.Name, Scope: id.Scope}] == nil {
			m.t.Errorf("%s is a CLA without a cluster", id.Name)
		}
		var at []string
		for _, l := range decode(m.t, r, &endpointv3.ClusterLoadAssignment{}).GetEndpoints() {
			for _, e := range l.GetLbEndpoints() {
				a := e.GetEndpoint().GetAddress().GetSocketAddress()
				at = append(at, fmt.Sprintf("%s:%d", a.GetAddress(), a.GetPortValue()))
			}
		}
		out = append(out, shown(id.Name)+"="+strings.Join(at, ","))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func TestClientsWithAllClustersHaveThemByServiceNames(t *testing.T) {
	m := newMesh(t, "prod")
	port := nodecache.FrontPort{Name: "grpc", Port: 80}
	m.service("prod", "web", port, "a", "b")
	m.service("shop", "far", port, "a")
	a := m.pod("a", "10.0.0.1", nodecache.Serving)
	b := m.pod("b", "10.0.0.2", nodecache.Serving) // its port 1001 has no hint
	m.flush()
	if got := m.aliases(); got != "" {
		t.Errorf("before anybody has all clusters: %s", got)
	}
	m.take(m.c.Aliases(m.dir, "prod"))
	if u := m.c.Aliases(m.dir, "prod"); !u.Empty() {
		t.Errorf("a second time: %v", u)
	}
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"who is yet to be asked is no reason for a cluster", func() {}, ""},
		{"one is known", func() { m.learn(a, serves(1000, "pkg.A")) }, "at/web.prod:80/pkg.A=10.0.0.1:1000,10.0.0.2:1001"},
		{"of the other it is known that it lacks it", func() { m.learn(b, serves(1001, "pkg.B")) },
			"at/web.prod:80/pkg.A=10.0.0.1:1000 at/web.prod:80/pkg.B=10.0.0.2:1001"},
		{"nobody is left who has it, or has said that he has not", func() { m.dir.RemovePod("a") },
			"at/web.prod:80/pkg.A= at/web.prod:80/pkg.B=10.0.0.2:1001"},
		{"its endpoint has gone too", func() { m.dir.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-a"}) },
			"at/web.prod:80/pkg.B=10.0.0.2:1001"},
		{"one that cannot say what it serves", func() {
			m.slices("prod", "web", port, "c")
			m.learn(m.pod("c", "10.0.0.3", nodecache.Serving), nodecache.PortInfo{Port: 1000, State: nodecache.PortDenied})
		}, "at/web.prod:80/pkg.B=10.0.0.2:1001,10.0.0.3:1000 at/web.prod:80=10.0.0.3:1000"},
		{"the port is another", func() { m.service("prod", "web", nodecache.FrontPort{Name: "grpc", Port: 81}) },
			"at/web.prod:81/pkg.B=10.0.0.2:1001,10.0.0.3:1000 at/web.prod:81=10.0.0.3:1000"},
		{"the Service has gone", func() { m.dir.RemoveFront(nodecache.Name{Namespace: "prod", Name: "web"}) }, ""},
	} {
		step.do()
		m.flush()
		if got := m.aliases(); got != step.want {
			t.Errorf("%s: %s\nwant %s", step.what, got, step.want)
		}
	}
}

// A pod that comes or goes changes no cluster.
func TestPodsLeaveClustersByServiceNamesAlone(t *testing.T) {
	m := newMesh(t, "prod")
	m.take(m.c.Aliases(m.dir, "prod"))
	m.service("prod", "web", nodecache.FrontPort{Name: "grpc", Port: 80}, "a", "b")
	m.learn(m.pod("a", "10.0.0.1", nodecache.Serving), serves(1000, "pkg.A"))
	m.flush()
	for _, do := range []func(){
		func() { m.pod("b", "10.0.0.2", nodecache.Serving) },
		func() { m.pod("a", "10.0.0.1", nodecache.Draining) },
		func() { m.dir.RemovePod("a") },
		func() { m.dir.RemovePod("b") },
		func() { m.pod("a", "10.0.0.1", nodecache.Serving) },
	} {
		do()
		for _, r := range m.flush().Set {
			if r.Type != xds.Endpoint {
				t.Errorf("%v is new", r.ID)
			}
		}
	}
	if got, want := m.aliases(), "at/web.prod:80/pkg.A=10.0.0.1:1000"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
