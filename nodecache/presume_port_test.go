package nodecache_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestPortOfAPresumption(t *testing.T) {
	// Revision 1 serves pkg.A on 50051 and 50052, and on 50053 pkg.B.
	was := ports(heard(50051, nodecache.PortServes, "pkg.A"), heard(50052, nodecache.PortServes, "pkg.A"), heard(50053, nodecache.PortServes, "pkg.B"))
	for _, c := range []struct {
		name  string
		edits []func(*nodecache.Pod)
		found *nodecache.Info
		want  string
	}{
		{"the lowest that the pod hints at", []func(*nodecache.Pod){hinting(50051, 50052)}, nil, "pkg.A:50051<1 pkg.B:50051<1"},
		{"the one that its annotation names", []func(*nodecache.Pod){hinting(50051, 50052), annotated(50052)}, nil, "pkg.A:50052<1 pkg.B:50052<1"},
		{"only hinted ones count", []func(*nodecache.Pod){hinting(50052, 50053)}, nil, "pkg.A:50052<1 pkg.B:50053<1"},
		{"a new port", []func(*nodecache.Pod){hinting(9090)}, nil, "pkg.A:9090<1 pkg.B:9090<1"},
		{"no hint at all", []func(*nodecache.Pod){hinting()}, nil, "pkg.A:50051<1 pkg.B:50053<1"},
		{"one has answered", []func(*nodecache.Pod){hinting(50051, 50052, 50053)}, ports(heard(50051, nodecache.PortServes, "pkg.C")), "pkg.A:50052<1 pkg.B:50053<1"},
		{"its own has answered", []func(*nodecache.Pod){hinting(50051, 50053)}, ports(heard(50053, nodecache.PortEmpty)), "pkg.A:50051<1"},
		{"one is declared", []func(*nodecache.Pod){hinting(50053), declaring(50053, "pkg.D")}, nil, ""},
		{"another one is declared", []func(*nodecache.Pod){hinting(50053), declaring(50051, "pkg.D")}, nil, "pkg.B:50053<1"},
		{"it declares the service elsewhere", []func(*nodecache.Pod){hinting(50051), declaring(7000, "pkg.A", "pkg.B")}, nil, ""},
		{"nobody may ask it", []func(*nodecache.Pod){func(p *nodecache.Pod) { p.CollectOff = true }}, nil, "pkg.A:50051<1 pkg.B:50051<1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := nodecache.New(nodecache.Options{})
			must(t, d.Commit(add(d, 1, hinting(50051, 50052, 50053)), was))
			r := add(d, 2, c.edits...)
			if c.found != nil {
				must(t, d.Commit(r, c.found))
			}
			wantPresumed(t, d, 2, strings.Fields(c.want)...)
		})
	}
	// A port behind a Service goes before a lower one.
	d := nodecache.New(nodecache.Options{})
	must(t, d.Commit(add(d, 1, hinting(50051, 50052, 50053)), was))
	d.UpsertFront(front("a", 1))
	d.UpsertSlice(at(slice("a", "a", "r2"), 50052))
	add(d, 2, hinting(50051, 50052))
	wantPresumed(t, d, 2, "pkg.A:50052<1", "pkg.B:50052<1")
	if got := d.Owner(revision(2)).Ports("pkg.A"); !slices.Equal(got, []uint16{50052}) {
		t.Errorf("ports %v", got)
	}
}

func annotated(port uint16) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) {
		for i := range p.Hints {
			if p.Hints[i].Port == port {
				p.Hints[i].Why = nodecache.WhyAnnotation
			}
		}
	}
}
