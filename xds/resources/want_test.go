package resources_test

import (
	"slices"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

const unknownSocket = "/run/fingerpost/unknown.sock"

func (m *mesh) asks(room int, names ...string) []string {
	m.t.Helper()
	u, known := m.c.Want(m.dir, "prod", unknownSocket, names, room)
	m.take(u)
	return known
}

// wanted are the clusters that clients of prod asked for, with their addresses.
func (m *mesh) wanted() string {
	m.t.Helper()
	return m.listed(xds.DemandScope("prod"), func(name string) string {
		return strings.TrimSuffix(strings.TrimPrefix(name, "at/"), "/pkg.A")
	})
}

func (m *mesh) fallbacks() (names []string) {
	for id, r := range m.published {
		if id.Scope == xds.FallbackScope("prod", unknownSocket) {
			names = append(names, id.Name)
			c := decode(m.t, r, &clusterv3.Cluster{})
			if got := c.GetLoadAssignment().GetEndpoints()[0].GetLbEndpoints()[0].GetEndpoint().GetAddress().GetPipe().GetPath(); c.GetType() != clusterv3.Cluster_STATIC || got != unknownSocket {
				m.t.Errorf("%s leads to %q", id.Name, got)
			}
		}
	}
	slices.Sort(names)
	return names
}

// Whatever a name depends on changes the cluster that was asked for by it.
func TestClusterThatWasAskedForFollowsWhatItsNameMeans(t *testing.T) {
	m := newMesh(t, "prod")
	port := nodecache.FrontPort{Name: "grpc", Port: 80}
	name := func(n string) nodecache.Name { return nodecache.Name{Namespace: "prod", Name: n} }
	m.asks(100, "at/web/pkg.A", "at/10.96.0.1:80/pkg.A", "at/10.0.0.1:7/pkg.A", "at/a.db/pkg.A")
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"nothing is there", func() {}, ""},
		{"a pod, by its address", func() { m.pod("a", "10.0.0.1", nodecache.Serving) }, "10.0.0.1:7=10.0.0.1:7"},
		{"it has another", func() { m.pod("a", "10.0.0.2", nodecache.Serving) }, ""},
		{"and the first again", func() { m.pod("a", "10.0.0.1", nodecache.Serving) }, "10.0.0.1:7=10.0.0.1:7"},
		{"a Service without pods", func() { m.named("prod/web", "10.96.0.9", port) }, "10.0.0.1:7=10.0.0.1:7 web="},
		{"its pod", func() { m.slices("prod", "web", port, "a") }, "10.0.0.1:7=10.0.0.1:7 web=10.0.0.1:1000"},
		{"it has the other address", func() { m.named("prod/web", "10.96.0.1", port) },
			"10.0.0.1:7=10.0.0.1:7 10.96.0.1:80=10.0.0.1:1000 web=10.0.0.1:1000"},
		{"a headless one", func() { m.named("prod/db", "", port); m.slices("prod", "db", port, "a") },
			"10.0.0.1:7=10.0.0.1:7 10.96.0.1:80=10.0.0.1:1000 a.db=10.0.0.1:1000 web=10.0.0.1:1000"},
		{"the pod is known to lack it, on the port of the Services", func() { m.learn(nodecache.OwnerKey{UID: "rs-a"}, serves(1000, "pkg.B")) },
			"10.0.0.1:7=10.0.0.1:7"},
		{"and to serve it", func() { m.learn(nodecache.OwnerKey{UID: "rs-a"}, serves(1000, "pkg.A")) },
			"10.0.0.1:7=10.0.0.1:7 10.96.0.1:80=10.0.0.1:1000 a.db=10.0.0.1:1000 web=10.0.0.1:1000"},
		{"the Service has gone", func() { m.dir.RemoveFront(name("web")) }, "10.0.0.1:7=10.0.0.1:7 a.db=10.0.0.1:1000"},
		{"the headless one has an address", func() { m.named("prod/db", "10.96.0.1", port) },
			"10.0.0.1:7=10.0.0.1:7 10.96.0.1:80=10.0.0.1:1000"},
		{"the pod has gone", func() { m.dir.RemovePod("a") }, "10.96.0.1:80="},
	} {
		step.do()
		m.flush()
		if got := m.wanted(); got != step.want {
			t.Errorf("%s: %s\nwant %s", step.what, got, step.want)
		}
	}
}

func TestNamesAreKeptAsLongAsSomebodyAsksForThem(t *testing.T) {
	m := newMesh(t, "prod")
	m.named("prod/web", "10.96.0.1", nodecache.FrontPort{Name: "grpc", Port: 80})
	m.pod("a", "10.0.0.1", nodecache.Serving)
	m.slices("prod", "web", nodecache.FrontPort{Name: "grpc", Port: 80}, "a")
	m.flush()
	names := []string{"at/web/pkg.A", "prod/pkg.Nobody"}
	if got := m.asks(1, names...); !slices.Equal(got, names) {
		t.Errorf("known are %v", got)
	}
	if got := m.asks(1, names...); !slices.Equal(got, names) {
		t.Errorf("of another client known are %v", got)
	}
	if got := len(names) - len(m.c.Found("prod", names)); got != 1 {
		t.Errorf("%d names are nobody's", got)
	}
	if got := m.fallbacks(); !slices.Equal(got, names) {
		t.Errorf("what stands in is there for %v", got)
	}
	// Nobody's names from the room'th on, and what no sidecar asks for.
	if got := m.asks(1, "prod/x.A", "prod/x.B", "at/none/x.C", "at/web/x.D", "other/x.E", "unresolved", "backend/prod/web/80", "prod/x/E", "at//", "at/web/", "at/web/1x"); !slices.Equal(got, []string{"prod/x.A", "at/web/x.D"}) {
		t.Errorf("known are %v", got)
	}
	m.take(m.c.Unwant("prod", unknownSocket, []string{"prod/x.A", "at/web/x.D"}))
	m.take(m.c.Unwant("prod", unknownSocket, names))
	if got := m.fallbacks(); !slices.Equal(got, names) || m.wanted() != "web=10.0.0.1:1000" {
		t.Errorf("what stands in is there for %v, clusters are %s", got, m.wanted())
	}
	m.take(m.c.Unwant("prod", unknownSocket, names))
	if got := m.fallbacks(); len(got) != 0 || m.wanted() != "" {
		t.Errorf("left are %v and %s", got, m.wanted())
	}
	m.dir.RemovePod("a")
	if u := m.flush(); len(u.Set) != 0 {
		t.Errorf("nobody asks, and %v is made", u.Set)
	}
	if found, lost := m.c.Wanted(); found+lost != 0 {
		t.Errorf("%d found and %d lost", found, lost)
	}
}
