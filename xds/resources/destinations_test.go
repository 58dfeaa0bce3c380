package resources_test

import (
	"fmt"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
)

func TestWhatIsRedirected(t *testing.T) {
	m := newMesh(t)
	d := resources.NewDestinations(m.dir)
	port := nodecache.FrontPort{Name: "grpc", Port: 80}
	state := func(port uint16, s nodecache.PortState) nodecache.PortInfo {
		return nodecache.PortInfo{Port: port, State: s}
	}
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"nothing is known", func() {
			m.named("prod/users", "10.96.0.10 fd00:96::10", port)
			m.slices("prod", "users", port, "a", "b")
			m.pod("a", "10.0.0.1", nodecache.Serving)
			m.pod("b", "10.0.0.2", nodecache.Serving)
			m.named("prod/db", "", port)
			m.slices("prod", "db", port, "a")
		}, "[]"},
		{"one serves, of the other nothing is known", func() { m.learn(nodecache.OwnerKey{UID: "rs-a"}, serves(1000, "pkg.A")) },
			"[10.96.0.10:80 [fd00:96::10]:80 10.0.0.1:1000]"},
		{"the other speaks TLS", func() { m.learn(nodecache.OwnerKey{UID: "rs-b"}, state(1001, nodecache.PortTLS)) }, "[10.0.0.1:1000]"},
		{"it denies reflection", func() { m.learn(nodecache.OwnerKey{UID: "rs-b"}, state(1001, nodecache.PortDenied)) },
			"[10.96.0.10:80 [fd00:96::10]:80 10.0.0.1:1000]"},
		{"it speaks something else", func() { m.learn(nodecache.OwnerKey{UID: "rs-b"}, state(1001, nodecache.PortNotGRPC)) }, "[10.0.0.1:1000]"},
		{"it serves", func() { m.learn(nodecache.OwnerKey{UID: "rs-b"}, serves(1001, "pkg.B")) },
			"[10.96.0.10:80 [fd00:96::10]:80 10.0.0.1:1000 10.0.0.2:1001]"},
		{"on another port too", func() {
			m.learn(nodecache.OwnerKey{UID: "rs-b"}, serves(9, "pkg.C"))
		}, "[10.96.0.10:80 [fd00:96::10]:80 10.0.0.1:1000 10.0.0.2:9]"},
		{"a pod drains", func() { m.pod("a", "10.0.0.1", nodecache.Draining) }, "[10.96.0.10:80 [fd00:96::10]:80 10.0.0.1:1000 10.0.0.2:9]"},
		{"and has gone", func() { m.dir.RemovePod("a") }, "[10.0.0.2:9]"},
		{"all have", func() { m.dir.RemovePod("b"); m.dir.RemoveFront(nodecache.Name{Namespace: "prod", Name: "users"}) }, "[]"},
	} {
		step.do()
		keys, names := m.sub.Poll(), m.sub.PollFronts()
		was := fmt.Sprint(d.List())
		changed := d.Apply(keys, names)
		if got := fmt.Sprint(d.List()); got != step.want || changed != (got != was) {
			t.Errorf("%s: %s (changed: %t), want %s", step.what, got, changed, step.want)
		}
	}
}
