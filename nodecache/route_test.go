package nodecache_test

import (
	"errors"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestRemovalOfRouteRemovesOnlyItsOwn(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	other := ownerKey("other")
	must(t, d.UpsertRoute(route("r", 1, key, other)))
	must(t, d.UpsertRoute(route("s", 1, key)))
	d.RemoveRoute("r")
	wantPaths(t, d, key, "/s/1")
	wantPaths(t, d, other)
	d.RemoveRoute("unheard of")
	wantPaths(t, d, key, "/s/1")
}

func TestRouteThatMovesLeavesItsOldOwner(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	other := ownerKey("other")
	must(t, d.UpsertRoute(route("r", 1, key)))
	s := subscribe(t, d)
	next(t, s)
	must(t, d.UpsertRoute(route("r", 2, other)))
	if keys := next(t, s); len(keys) != 2 {
		t.Errorf("notified of %v, want both owners", keys)
	}
	wantPaths(t, d, key)
	wantPaths(t, d, other, "/r/2")
}

func TestOldGenerationOfRouteIsRefused(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	must(t, d.UpsertRoute(route("r", 2, key)))
	if err := d.UpsertRoute(route("r", 1, key)); !errors.Is(err, nodecache.ErrOldRoute) {
		t.Errorf("got %v, want ErrOldRoute", err)
	}
	wantPaths(t, d, key, "/r/2")
}

// The owners behind a route change without its generation.
func TestSameGenerationOfRouteWithOtherOwnersIsTaken(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	other := ownerKey("other")
	must(t, d.UpsertRoute(route("r", 1, key)))
	must(t, d.UpsertRoute(route("r", 1, other)))
	wantPaths(t, d, key)
	wantPaths(t, d, other, "/r/1")
}

func TestSameRouteAgainIsSilent(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	must(t, d.UpsertRoute(route("r", 1, key)))
	s := subscribe(t, d)
	next(t, s)
	must(t, d.UpsertRoute(route("r", 1, key)))
	quiet(t, s)
}
