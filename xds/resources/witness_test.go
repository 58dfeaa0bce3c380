package resources_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// told is what a witness heard, one line each.
type told []string

func (w *told) add(format string, args ...any) { *w = append(*w, fmt.Sprintf(format, args...)) }

func (w *told) ServiceAdded(ns, s string, by nodecache.Workload) { w.add("added %s/%s %s", ns, s, by) }
func (w *told) ServiceRemoved(ns, s string, by nodecache.Workload) {
	w.add("removed %s/%s %s", ns, s, by)
}
func (w *told) ProviderChanged(ns, s string, from, to nodecache.Workload) {
	w.add("%s/%s from %s to %s", ns, s, from, to)
}
func (w *told) PodsMoved(o *nodecache.Owner, joined, left int, last *nodecache.Pod) {
	w.add("%s +%d -%d %s", o.Name, joined, left, last.Addr)
}

func (w *told) take() []string {
	got := *w
	*w = nil
	return got
}

func TestWitnessHearsOfEachDecisionOnce(t *testing.T) {
	var heard told
	c, err := resources.New(resources.Options{Witness: &heard})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	w.c = c
	a, b := pod("10.0.0.1", nodecache.Serving), pod("10.0.0.2", nodecache.Serving)
	gone := pod("10.0.0.1", nodecache.Draining)
	shadowed := known("web", "web", []string{"pkg.S"}, a, b)
	shadowed.Pods[1].Shadowed = true
	for _, step := range []struct {
		what string
		do   func()
		want []string
	}{
		{"a workload comes", func() { w.set(known("web", "web", []string{"pkg.S"}, a)) },
			[]string{"ReplicaSet/web +1 -0 10.0.0.1", "added prod/pkg.S ReplicaSet/web"}},
		{"nothing changes", func() { w.set(known("web", "web", []string{"pkg.S"}, a)) }, nil},
		{"a pod whose address is another's", func() { w.set(shadowed) }, nil},
		{"it is its own again", func() { w.set(known("web", "web", []string{"pkg.S"}, a, b)) }, []string{"ReplicaSet/web +1 -0 10.0.0.2"}},
		{"one drains", func() { w.set(known("web", "web", []string{"pkg.S"}, gone, b)) }, []string{"ReplicaSet/web +0 -1 10.0.0.1"}},
		{"one that served less comes", func() { w.set(known("abc", "abc", []string{"pkg.T"})) }, []string{"added prod/pkg.T ReplicaSet/abc"}},
		{"it takes the name by its own", func() { w.set(known("abc", "abc", []string{"pkg.S"})) },
			[]string{"prod/pkg.S from ReplicaSet/web to ReplicaSet/abc", "removed prod/pkg.T ReplicaSet/abc"}},
		{"it goes", func() { w.remove(nodecache.OwnerKey{UID: "abc", Revision: "1"}) }, []string{"prod/pkg.S from ReplicaSet/abc to ReplicaSet/web"}},
		{"all go", func() { w.remove(nodecache.OwnerKey{UID: "web", Revision: "1"}) },
			[]string{"ReplicaSet/web +0 -1 10.0.0.2", "removed prod/pkg.S ReplicaSet/web"}},
	} {
		step.do()
		if got := heard.take(); !slices.Equal(got, step.want) {
			t.Errorf("%s: heard %q, want %q", step.what, got, step.want)
		}
	}
}

// A change that changes nothing costs the same whether or not somebody listens.
func TestWitnessCostsAnUnchangedOwnerNothing(t *testing.T) {
	allocations := func(w resources.Witness) float64 {
		c, err := resources.New(resources.Options{Witness: w})
		if err != nil {
			t.Fatal(err)
		}
		o := known("web", "web", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving), pod("10.0.0.2", nodecache.Serving))
		dir, keys := views{o.Key: o}, []nodecache.OwnerKey{o.Key}
		c.Apply(dir, keys)
		return testing.AllocsPerRun(100, func() { c.Apply(dir, keys) })
	}
	var heard told
	if with, without := allocations(&heard), allocations(nil); with > without {
		t.Errorf("%v allocations with a witness, %v without", with, without)
	}
}

func TestBehindNamesProviderAndRivals(t *testing.T) {
	w := newWorld(t)
	w.set(known("a", "a", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving)), known("b", "b", []string{"pkg.S"}))
	b, ok := w.c.Behind("prod", "pkg.S")
	if !ok || len(b.Provider) != 1 || b.Provider[0].Key.UID != "a" || len(b.Rivals) != 1 || b.Rivals[0].Key.UID != "b" || len(b.Endpoints) != 1 {
		t.Errorf("%v, %+v", ok, b)
	}
	if _, ok := w.c.Behind("prod", "pkg.T"); ok {
		t.Error("a service that nobody has has somebody behind it")
	}
}
