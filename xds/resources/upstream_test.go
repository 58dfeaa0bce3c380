package resources_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

func upstreams(entries ...string) (ups []nodecache.Upstream) {
	for _, e := range entries {
		authority, service, _ := strings.Cut(e, "/")
		ups = append(ups, nodecache.Upstream{Authority: authority, Service: service})
	}
	return ups
}

func TestUpstreamsHaveTheNamesByWhichTheyAreCalled(t *testing.T) {
	m := newMesh(t, "prod")
	port := nodecache.FrontPort{Name: "grpc", Port: 80}
	m.named("prod/web", "10.96.0.1", port)
	m.named("prod/mute", "10.96.0.2", port)
	m.pod("a", "10.0.0.1", nodecache.Serving)
	m.pod("b", "10.0.0.2", nodecache.Serving)
	m.slices("prod", "web", port, "a")
	m.slices("prod", "mute", port, "b")
	m.learn(nodecache.OwnerKey{UID: "rs-a"}, serves(1000, "pkg.A", "pkg.B"))
	m.flush()
	for entry, want := range map[string]string{
		"/pkg.A":           "prod/pkg.A",
		"/pkg.No":          "prod/pkg.No: nobody is known to serve it",
		"web":              "at/web/pkg.A at/web/pkg.B",
		"web.prod:80":      "at/web.prod:80/pkg.A at/web.prod:80/pkg.B",
		"10.96.0.1/pkg.A":  "at/10.96.0.1/pkg.A",
		"web:80/pkg.No":    "at/web:80/pkg.No: nobody there serves it",
		"web:81":           ": Service prod/web has no TCP port 81, it has 80",
		"web:81/pkg.A":     "at/web:81/pkg.A: Service prod/web has no TCP port 81, it has 80",
		"mute":             ": nobody there says what he serves: name the gRPC service as well",
		"mute/pkg.A":       "at/mute/pkg.A",
		"none.prod/pkg.No": "at/none.prod/pkg.No: no Service and no pod of a headless Service has the name",
	} {
		names, reason := m.c.Upstream(m.dir, "prod", upstreams(entry)[0])
		if got := strings.TrimSuffix(strings.Join(names, " ")+": "+reason, ": "); got != want {
			t.Errorf("%s: got %q, want %q", entry, got, want)
		}
		// A name leads where what was declared does.
		for _, name := range names {
			if got := m.c.Leads(m.dir, "prod", name); got != (reason == "") {
				t.Errorf("%s leads somewhere: %t", name, got)
			}
		}
	}
	for _, name := range []string{"", "prod", "prod/", "other/pkg.A", "at/web", "backend/prod/web/80"} {
		if m.c.Leads(m.dir, "prod", name) {
			t.Errorf("%q leads somewhere", name)
		}
	}
}

// far is a pod of namespace far, behind a Service of its name.
func (m *mesh) far(name, addr string) nodecache.OwnerKey {
	key := nodecache.OwnerKey{UID: "rs-" + name}
	m.dir.UpsertPod(&nodecache.Pod{
		UID: name, Name: name, Node: "n1", State: nodecache.Serving, Addr: netip.MustParseAddr(addr),
		Common: &nodecache.Common{
			Namespace: "far", Owner: key, OwnerName: "ReplicaSet/" + name,
			Workload: nodecache.Workload{Namespace: "far", Kind: "ReplicaSet", Name: name},
			Hints:    []nodecache.Hint{{Port: 1000, Why: "port name"}},
		},
	})
	m.service("far", name, nodecache.FrontPort{Name: "grpc", Port: 80}, name)
	return key
}

func (m *mesh) declare(entries ...string) xds.Scope {
	m.t.Helper()
	scope, u := m.c.Declare(m.dir, "prod", upstreams(entries...))
	m.take(u)
	return scope
}

func TestDeclaredServicesOfOtherNamespacesAreThereAsLongAsSomebodyDeclaresThem(t *testing.T) {
	m := newMesh(t, "prod")
	m.pod("near", "10.0.0.9", nodecache.Serving)
	m.service("prod", "near", nodecache.FrontPort{Name: "grpc", Port: 80}, "near")
	m.far("web", "10.0.0.1")
	m.flush()
	if scope := m.declare("near.prod:80", "near/pkg.A", "/pkg.A", "10.96.0.1:80", "a.web.far:80", "web.far:x"); scope != xds.Shared {
		t.Errorf("what every client has, or nobody can call, stands in %s", scope)
	}
	scope := m.declare("web.far.svc/pkg.A", "late.far:80", "web.far:81")
	if again := m.declare("late.far:80", "web.far:81", "WEB.far:80"); again != scope {
		t.Errorf("those who declare the same have %s and %s", scope, again)
	}
	other := m.declare("web.far:81")
	shown := func(scope xds.Scope) string { return m.listed(scope, func(name string) string { return name }) }
	step := func(what, want string, pending xds.Evidence) {
		t.Helper()
		m.flush()
		if got := shown(scope); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
		if got := m.evidence[scope]; got != pending {
			t.Errorf("%s: the evidence is %d, want %d", what, got, pending)
		}
		if got := shown(other); got != "" {
			t.Errorf("%s: of a port that is not there clients have %s", what, got)
		}
	}
	step("before it is asked", "", xds.Pending)
	m.learn(nodecache.OwnerKey{UID: "rs-web"}, serves(1000, "pkg.A"))
	step("once it has answered", "at/web.far:80/pkg.A=10.0.0.1:1000", xds.Complete)
	key := m.far("late", "10.0.0.2")
	step("another one that comes", "at/web.far:80/pkg.A=10.0.0.1:1000", xds.Pending)
	m.learn(key, serves(1000, "pkg.L"))
	step("has answered", "at/late.far:80/pkg.L=10.0.0.2:1000 at/web.far:80/pkg.A=10.0.0.1:1000", xds.Complete)
	if !m.c.Declares("prod", upstreams("web.far:81", "web.far", "late.far"), "at/web.far:80/pkg.A") ||
		m.c.Declares("prod", upstreams("web.far"), "at/web.far:80/pkg.A") || m.c.Declares("prod", nil, "at/web.far:80/pkg.A") {
		t.Error("who has the cluster is mistaken")
	}
	m.far("open", "10.0.0.3")
	step("a third that is not declared", "at/late.far:80/pkg.L=10.0.0.2:1000 at/web.far:80/pkg.A=10.0.0.1:1000", xds.Pending)
	m.take(m.c.Undeclare(scope))
	step("of two clients one has gone", "at/late.far:80/pkg.L=10.0.0.2:1000 at/web.far:80/pkg.A=10.0.0.1:1000", xds.Pending)
	m.take(m.c.Undeclare(scope))
	step("both have", "", xds.Complete)
	m.take(m.c.Undeclare(scope))
	if back := m.declare("web.far:80", "late.far", "web.far:81"); back != scope {
		t.Errorf("who comes back has %s", back)
	}
	step("one comes back", "at/late.far:80/pkg.L=10.0.0.2:1000 at/web.far:80/pkg.A=10.0.0.1:1000", xds.Pending)
	if ids := m.scopes(); slices.Contains(ids, xds.DemandScope("prod")) {
		t.Error("a declaration asks for something in the place of clients on demand")
	}
}

// scopes are those in which something stands.
func (m *mesh) scopes() (all []xds.Scope) {
	for id := range m.published {
		if !slices.Contains(all, id.Scope) {
			all = append(all, id.Scope)
		}
	}
	return all
}
