package nodecache_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

// route returns a route that leads to the owners, by one match each.
func route(uid string, generation int64, owners ...nodecache.OwnerKey) *nodecache.Route {
	r := &nodecache.Route{UID: uid, Generation: generation, Namespace: "prod", Name: "name-" + uid}
	for i, o := range owners {
		r.Entries = append(r.Entries, nodecache.RouteEntry{
			Rule: 0, Match: i, Owner: o, Verb: "GET", Path: fmt.Sprintf("/%s/%d", uid, generation),
		})
	}
	return r
}

// paths returns the paths that routes give the owner, in their order.
func paths(d *nodecache.Directory, key nodecache.OwnerKey) []string {
	var ps []string
	if o := d.Owner(key); o != nil {
		for _, e := range o.Routes {
			ps = append(ps, e.Path)
		}
	}
	return ps
}

func wantPaths(t *testing.T, d *nodecache.Directory, key nodecache.OwnerKey, want ...string) {
	t.Helper()
	if got := paths(d, key); !slices.Equal(got, want) {
		t.Errorf("paths of %s: %v, want %v", key, got, want)
	}
}

// The last pod goes during its collect, before the route comes: the route
// needs no record.
func TestRouteAfterRemovalOfLastPodDuringCollectIsKept(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	done := async(d, c, pod("a", "192.0.2.1"))
	held := c.held(t)
	s := subscribe(t, d)
	next(t, s)
	d.RemovePod("a")
	must(t, d.UpsertRoute(route("r", 1, key)))
	next(t, s)
	wantPaths(t, d, key, "/r/1")
	held.answer <- answer{info: serves("pkg.A")}
	if err := receive(t, done); !errors.Is(err, nodecache.ErrStale) {
		t.Errorf("commit: %v, want ErrStale", err)
	}
	wantPaths(t, d, key, "/r/1")
}

// The other order: the route is there, then the pods go and come again.
func TestRouteBeforeRemovalOfLastPodDuringCollectIsKept(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	done := async(d, c, pod("a", "192.0.2.1"))
	held := c.held(t)
	must(t, d.UpsertRoute(route("r", 1, key)))
	d.RemovePod("a")
	wantPaths(t, d, key, "/r/1")
	held.answer <- answer{info: serves("pkg.A")}
	_ = receive(t, done)
	d.UpsertPod(pod("b", "192.0.2.2"))
	wantPaths(t, d, key, "/r/1")
	wantUIDs(t, d, key, "b")
}

func TestRouteUpsertRacingRemovalOfLastPodLosesNothing(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		d.UpsertPod(pod("a", "192.0.2.1"))
		s := d.Subscribe()
		next(t, s)
		var err error
		together(
			func() { err = d.UpsertRoute(route("r", 1, key)) },
			func() { d.RemovePod("a") },
		)
		keys := next(t, s)
		s.Close()
		if err != nil || !slices.Equal(paths(d, key), []string{"/r/1"}) || !slices.Contains(keys, key) {
			t.Fatalf("round %d: %v, paths %v, notified of %v", i, err, paths(d, key), keys)
		}
	}
}

func TestConcurrentRoutesOfOneOwnerLoseNothing(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		together(
			func() { _ = d.UpsertRoute(route("r", 1, key)) },
			func() { _ = d.UpsertRoute(route("s", 1, key)) },
		)
		if got := paths(d, key); !slices.Equal(got, []string{"/r/1", "/s/1"}) {
			t.Fatalf("round %d: paths %v", i, got)
		}
	}
}

func TestConcurrentRouteUpsertAndRemovalOfAnotherTouchOnlyTheirOwn(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		must(t, d.UpsertRoute(route("old", 1, key)))
		together(
			func() { _ = d.UpsertRoute(route("new", 1, key)) },
			func() { d.RemoveRoute("old") },
		)
		if got := paths(d, key); !slices.Equal(got, []string{"/new/1"}) {
			t.Fatalf("round %d: paths %v", i, got)
		}
	}
}

// Two writers of one route: the newer generation stays, whoever is first.
func TestConcurrentGenerationsOfOneRouteLeaveTheNewer(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		together(
			func() { _ = d.UpsertRoute(route("r", 2, key)) },
			func() { _ = d.UpsertRoute(route("r", 3, key)) },
		)
		if got := paths(d, key); !slices.Equal(got, []string{"/r/3"}) {
			t.Fatalf("round %d: paths %v", i, got)
		}
	}
}
