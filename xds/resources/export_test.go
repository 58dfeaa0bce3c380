package resources_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// of puts an owner into a namespace and exports it.
func of(namespace string, o *nodecache.Owner, export ...string) *nodecache.Owner {
	o.Workload.Namespace, o.Export = namespace, export
	return o
}

// client makes the namespace one that has clients.
func (w *world) client(namespace string) {
	w.t.Helper()
	u, err := w.c.Namespace(namespace, resources.ShapeOne)
	if err != nil {
		w.t.Fatal(err)
	}
	w.take(u)
}

func TestExportedServiceIsThereForThoseWhoHaveNone(t *testing.T) {
	w := newWorld(t)
	w.client("web")
	prod := of("prod", known("p1", "p", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving)), "web", "other")
	w.set(prod)
	is := func(ns string, want ...string) {
		t.Helper()
		for i := range want {
			want[i] += ":50051 HEALTHY"
		}
		if got := w.addrs(ns, "pkg.S"); !slices.Equal(got, want) {
			t.Errorf("%s: endpoints %v, want %v", ns, got, want)
		}
		if got := w.c.Lookup(ns, "pkg.S").Served; got != (len(want) > 0) {
			t.Errorf("%s: served %v", ns, got)
		}
		if w.cluster(ns, "pkg.S") == nil && len(want) > 0 || w.published[xds.ID{Type: xds.Listener, Name: "pkg.S", Scope: xds.APIScope(ns)}] == nil && len(want) > 0 {
			t.Errorf("%s has endpoints and no cluster or no listener", ns)
		}
	}
	is("prod", "10.0.0.1")
	is("web", "10.0.0.1")
	is("other") // no client
	w.client("other")
	w.client("stranger")
	is("other", "10.0.0.1")
	is("stranger")
	if v := w.c.Services(); len(v) != 1 || strings.Join(v[0].Exported, " ") != "other web" {
		t.Errorf("services %+v", v)
	}
	if got := w.c.Providers("web", "pkg.S"); len(got) != 1 || got[0].Key != prod.Key {
		t.Errorf("providers %v", got)
	}
	if got := w.c.Names("web"); !slices.Equal(got, []string{"pkg.S"}) {
		t.Errorf("names %v", got)
	}

	// One's own goes first, also when it comes later, and is no claimant.
	own := of("web", known("w1", "w", []string{"pkg.S"}, pod("10.0.0.2", nodecache.Serving)))
	w.set(own)
	is("web", "10.0.0.2")
	is("prod", "10.0.0.1")
	is("other", "10.0.0.1")
	w.remove(own.Key)
	is("web", "10.0.0.1")

	// A pod more, and the word taken back.
	w.set(of("prod", known("p1", "p", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving), pod("10.0.0.3", nodecache.Serving)), "web"))
	is("web", "10.0.0.1", "10.0.0.3")
	is("other")
	w.set(of("prod", known("p1", "p", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving)), "-"))
	is("web")
	w.set(prod)
	is("web", "10.0.0.1")
	w.remove(prod.Key)
	is("web")
	is("prod")
	for id := range w.published {
		if id.Type != xds.Route {
			t.Errorf("left over: %v", id)
		}
	}
}

func TestOfSeveralExportsOneIsTheProvider(t *testing.T) {
	w := newWorld(t)
	w.client("web")
	late, early := front("s", 2), front("t", 1)
	late.Namespace, early.Namespace = "a", "b"
	w.set(
		of("a", standing(known("a1", "a", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving)), late), "*"),
		of("b", standing(known("b1", "b", []string{"pkg.S"}, pod("10.0.0.2", nodecache.Serving)), early), "*"),
		of("c", known("c1", "c", []string{"pkg.S"}, pod("10.0.0.3", nodecache.Serving)), "*"),
	)
	if got := w.addrs("web", "pkg.S"); !slices.Equal(got, []string{"10.0.0.2:50051 HEALTHY"}) {
		t.Errorf("endpoints %v", got)
	}
	// In its own namespace each is the provider.
	for ns, addr := range map[string]string{"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"} {
		w.client(ns)
		if got := w.addrs(ns, "pkg.S"); !slices.Equal(got, []string{addr + ":50051 HEALTHY"}) {
			t.Errorf("%s: endpoints %v", ns, got)
		}
	}
}

func TestExportByDefaultYieldsToThePodsWord(t *testing.T) {
	c, err := resources.New(resources.Options{ExportAll: true})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	w.c = c
	w.client("web")
	w.set(
		of("a", known("a1", "a", []string{"pkg.A"}, pod("10.0.0.1", nodecache.Serving))),
		of("b", known("b1", "b", []string{"pkg.B"}, pod("10.0.0.2", nodecache.Serving)), "-"),
		of("c", known("c1", "c", []string{"pkg.C"}, pod("10.0.0.3", nodecache.Serving)), "other"),
	)
	if got := w.c.Names("web"); !slices.Equal(got, []string{"pkg.A"}) {
		t.Errorf("names %v", got)
	}
}

// What might be exported is open as long as what its owner serves is.
func TestExportingOwnerInDoubtIsDoubtForOthers(t *testing.T) {
	w := newWorld(t)
	w.client("web")
	w.client("other")
	o := of("prod", owner("p1", "p", nodecache.Unknown, pod("10.0.0.1", nodecache.Serving)), "web")
	w.set(o)
	web := xds.NamespaceScope("web")
	if w.evidence[web] != xds.Pending || w.evidence[xds.NamespaceScope("other")] != xds.Complete {
		t.Errorf("evidence %v", w.evidence)
	}
	a := w.c.Lookup("web", "pkg.S")
	if a.Served || len(a.Suspects) != 1 || a.Suspects[0].Key != o.Key {
		t.Fatalf("answer %+v", a)
	}
	if a := w.c.Lookup("other", "pkg.S"); len(a.Suspects) != 0 {
		t.Errorf("suspects of a namespace that it does not export to: %v", a.Suspects)
	}
	w.set(of("prod", known("p1", "p", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving)), "web"))
	select {
	case <-a.Changed:
	default:
		t.Error("who waits is not woken")
	}
	if w.evidence[web] != xds.Complete || !w.c.Lookup("web", "pkg.S").Served {
		t.Errorf("evidence %v", w.evidence)
	}
}
