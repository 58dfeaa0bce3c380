package nodecache_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

// route returns a route of the Service front that leads to the Services, by one
// rule each.
func route(uid string, generation int64, services ...string) *nodecache.Route {
	r := &nodecache.Route{
		UID: uid, Generation: generation, Namespace: "prod", Name: "name-" + uid,
		Parents: []nodecache.RouteParent{{Kind: "Service", Name: named("front")}},
	}
	for _, s := range services {
		lead(r, s)
	}
	return r
}

// lead gives the route a rule that sends calls to the Service.
func lead(r *nodecache.Route, service string) {
	r.Rules = append(r.Rules, nodecache.RouteRule{
		Matches:  []nodecache.RouteMatch{{Path: fmt.Sprintf("/%s/%d", r.UID, r.Generation)}},
		Backends: []nodecache.RouteBackend{{Service: named(service), Port: 80, Weight: 1, Granted: true}},
	})
}

func named(name string) nodecache.Name { return nodecache.Name{Namespace: "prod", Name: name} }

// serve puts a Service in front of the pods.
func serve(d *nodecache.Directory, service string, pods ...string) {
	d.UpsertFront(front(service, 1))
	d.UpsertSlice(slice(service+"-1", service, pods...))
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

func subscribeFronts(t *testing.T, d *nodecache.Directory) *nodecache.Subscription {
	s := d.SubscribeFronts()
	t.Cleanup(s.Close)
	return s
}

// The last pod goes during its collect, before the route comes: the route
// needs no owner, and the next pod has it.
func TestRouteAfterRemovalOfLastPodDuringCollectIsKept(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	serve(d, "web", "a", "b")
	done := async(d, c, pod("a", "192.0.2.1"))
	held := c.held(t)
	s := subscribeFronts(t, d)
	next(t, s)
	s.PollFronts()
	d.RemovePod("a")
	must(t, d.UpsertRoute(route("r", 1, "web")))
	if told := s.PollFronts(); !slices.Contains(told, named("web")) || !slices.Contains(told, named("front")) {
		t.Errorf("told of the Services %v", told)
	}
	next(t, s)
	held.answer <- answer{info: serves("pkg.A")}
	if err := receive(t, done); !errors.Is(err, nodecache.ErrStale) {
		t.Errorf("commit: %v, want ErrStale", err)
	}
	d.UpsertPod(pod("b", "192.0.2.2"))
	if told := next(t, s); !slices.Contains(told, key) {
		t.Errorf("told of %v", told)
	}
	wantPaths(t, d, key, "/r/1")
}

// The other order: the route is there, then the pods go and come again.
func TestRouteBeforeRemovalOfLastPodDuringCollectIsKept(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	serve(d, "web", "a", "b")
	done := async(d, c, pod("a", "192.0.2.1"))
	held := c.held(t)
	must(t, d.UpsertRoute(route("r", 1, "web")))
	wantPaths(t, d, key, "/r/1")
	d.RemovePod("a")
	held.answer <- answer{info: serves("pkg.A")}
	_ = receive(t, done)
	d.UpsertPod(pod("b", "192.0.2.2"))
	wantPaths(t, d, key, "/r/1")
	wantUIDs(t, d, key, "b")
}

// What is known of an owner outlives its pods, and what leads to it does so.
func TestRouteToOwnerThatHasOnlyItsKnowledgeIsSeen(t *testing.T) {
	for _, first := range []bool{true, false} {
		d := nodecache.New(nodecache.Options{})
		serve(d, "web", "a")
		must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1")), serves("pkg.A")))
		if first {
			must(t, d.UpsertRoute(route("r", 1, "web")))
		}
		d.RemovePod("a")
		d.UpsertSlice(slice("web-1", "web"))
		s := subscribe(t, d)
		next(t, s)
		if !first {
			must(t, d.UpsertRoute(route("r", 1, "web")))
			next(t, s)
		}
		wantPaths(t, d, key, "/r/1")
		d.RemoveRoute("r")
		next(t, s)
		wantPaths(t, d, key)
	}
}

func TestRouteUpsertRacingRemovalOfLastPodLosesNothing(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		serve(d, "web", "a", "b")
		d.UpsertPod(pod("a", "192.0.2.1"))
		s := d.SubscribeFronts()
		next(t, s)
		s.PollFronts()
		var err error
		together(
			func() { err = d.UpsertRoute(route("r", 1, "web")) },
			func() { d.RemovePod("a") },
		)
		keys, fronts := next(t, s), s.PollFronts()
		d.UpsertPod(pod("b", "192.0.2.2"))
		s.Close()
		if err != nil || !slices.Equal(paths(d, key), []string{"/r/1"}) || !slices.Contains(keys, key) ||
			!slices.Contains(fronts, named("web")) {
			t.Fatalf("round %d: %v, paths %v, told of %v and %v", i, err, paths(d, key), keys, fronts)
		}
	}
}

// Two who come at once see one another, and who follows sees both.
func TestRouteUpsertRacingFirstPodIsSeenByWhoFollows(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		serve(d, "web", "a")
		s := d.Subscribe()
		together(
			func() { _ = d.UpsertRoute(route("r", 1, "web")) },
			func() { d.UpsertPod(pod("a", "192.0.2.1")) },
		)
		keys := next(t, s)
		s.Close()
		if got := paths(d, key); !slices.Contains(keys, key) || !slices.Equal(got, []string{"/r/1"}) {
			t.Fatalf("round %d: told of %v, paths %v", i, keys, got)
		}
	}
}

func TestConcurrentRoutesOfOneOwnerLoseNothing(t *testing.T) {
	for i := range rounds() {
		d := routed()
		together(
			func() { _ = d.UpsertRoute(route("r", 1, "web")) },
			func() { _ = d.UpsertRoute(route("s", 1, "web")) },
		)
		if got := paths(d, key); !slices.Equal(got, []string{"/r/1", "/s/1"}) {
			t.Fatalf("round %d: paths %v", i, got)
		}
	}
}

func TestConcurrentRouteUpsertAndRemovalOfAnotherTouchOnlyTheirOwn(t *testing.T) {
	for i := range rounds() {
		d := routed()
		must(t, d.UpsertRoute(route("old", 1, "web")))
		together(
			func() { _ = d.UpsertRoute(route("new", 1, "web")) },
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
		d := routed()
		together(
			func() { _ = d.UpsertRoute(route("r", 2, "web")) },
			func() { _ = d.UpsertRoute(route("r", 3, "web")) },
		)
		if got := paths(d, key); !slices.Equal(got, []string{"/r/3"}) {
			t.Fatalf("round %d: paths %v", i, got)
		}
	}
}

// routed returns a directory with the pod a behind the Service web.
func routed() *nodecache.Directory {
	d := nodecache.New(nodecache.Options{})
	serve(d, "web", "a")
	d.UpsertPod(pod("a", "192.0.2.1"))
	return d
}
