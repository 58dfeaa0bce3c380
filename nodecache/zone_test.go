package nodecache_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// zones are those of the owner's pods.
func zones(o *nodecache.Owner) string {
	var out []string
	for _, m := range o.Pods {
		out = append(out, fmt.Sprintf("%s:%s", m.UID, m.Zone()))
	}
	return strings.Join(out, " ")
}

// zoned returns the slice with a zone for each endpoint.
func zoned(s *nodecache.Slice, zones ...string) *nodecache.Slice {
	for i, z := range zones {
		s.Endpoints[i].Zone = z
	}
	return s
}

func TestZoneIsThePodsWordElseThatOfItsSlice(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	s := subscribe(t, d)
	want := func(want string) {
		t.Helper()
		if got := zones(d.Owner(key)); got != want {
			t.Errorf("zones %q, want %q", got, want)
		}
	}
	d.UpsertPod(pod("a", "10.0.0.1", func(p *nodecache.Pod) { p.Zone = "own" }))
	d.UpsertPod(pod("b", "10.0.0.2"))
	d.UpsertPod(pod("c", "10.0.0.3"))
	want("a:own b: c:")

	// The slice may come before its Service.
	d.UpsertSlice(zoned(slice("web-1", "web", "a", "b", "c"), "z1", "z1", "z2"))
	d.UpsertFront(front("web", 1))
	want("a:own b:z1 c:z2")
	wantBehind(t, d, "web[50051]")
	before := d.Owner(key)
	shared := before.Pods[1].Behind[0]

	// Another zone is a change for its owner, and for nobody's old view.
	s.Poll()
	d.UpsertSlice(zoned(slice("web-1", "web", "a", "b", "c"), "z1", "z1", "z3"))
	if keys := s.Poll(); !slices.Equal(keys, []nodecache.OwnerKey{key}) {
		t.Errorf("told of %v", keys)
	}
	want("a:own b:z1 c:z3")
	if zones(before) != "a:own b:z1 c:z2" {
		t.Error("a view has changed")
	}
	if d.Owner(key).Pods[1].Behind[0] != shared {
		t.Error("pods of a zone do not share how they stand")
	}

	d.UpsertSlice(slice("web-1", "web", "b"))
	want("a:own b: c:")
	wantBehind(t, d, "web[50051]")
	d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "web-1"})
	d.RemoveFront(nodecache.Name{Namespace: "prod", Name: "web"})
	for _, uid := range []string{"a", "b", "c"} {
		d.RemovePod(uid)
	}
	d.Expire(time.Now().Add(2 * keep))
	s.Close()
	if left := d.Sizes(); len(left) > 0 {
		t.Errorf("left behind %v", left)
	}
}

// That pods of an owner are in several zones is no news of where it stands.
func TestZonesDoNotMakeAnOwnerMove(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	must(t, d.Commit(d.UpsertPod(pod("a", "10.0.0.1")), serves("pkg.A")))
	d.UpsertPod(pod("b", "10.0.0.2"))
	d.UpsertFront(front("web", 1))
	d.UpsertSlice(zoned(slice("web-1", "web", "a", "b"), "z1", "z2"))
	changes := d.InfoChanges()
	for i := range 10 {
		d.UpsertSlice(zoned(slice("web-1", "web", "a", "b"), fmt.Sprint("z", i%2), "z2"))
	}
	if n := d.InfoChanges() - changes; n != 0 {
		t.Errorf("%d changes to be saved", n)
	}
	if got := behind(d, key); got != "web[50051]" {
		t.Errorf("stands behind %q", got)
	}
}
