package nodecache_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestSubscriberHearsFirstOfEverythingThatIsThere(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	pods, kept := ownerKey("pods"), ownerKey("kept")
	must(t, d.Commit(d.UpsertPod(pod("k", "192.0.2.1", owned(kept))), serves("pkg.A")))
	d.RemovePod("k")
	d.UpsertPod(pod("a", "192.0.2.1", owned(pods)))
	d.UpsertFront(front("web", 1))
	must(t, d.UpsertRoute(route("r", 1, "to")))
	s := d.SubscribeFronts()
	t.Cleanup(s.Close)
	keys, fronts := next(t, s), s.PollFronts()
	for _, k := range []nodecache.OwnerKey{pods, kept} {
		if !slices.Contains(keys, k) {
			t.Errorf("heard of %v, not of %s", keys, k)
		}
	}
	for _, n := range []nodecache.Name{named("web"), named("to"), named("front")} {
		if !slices.Contains(fronts, n) {
			t.Errorf("heard of %v, not of %s", fronts, n)
		}
	}
	if names := subscribe(t, d).PollFronts(); names != nil {
		t.Errorf("heard of %v without asking", names)
	}
}

func TestChangesOfOneOwnerAreOneInOrderOfTheFirst(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	s := subscribe(t, d)
	var want []nodecache.OwnerKey
	for i := range 300 {
		k := ownerKey(addr(i))
		want = append(want, k)
		d.UpsertPod(pod(addr(i), addr(i), owned(k)))
	}
	for i := range 300 {
		d.RemovePod(addr(299 - i))
	}
	if got := next(t, s); !slices.Equal(got, want) {
		t.Errorf("%d keys, want each once in the order of its first change", len(got))
	}
	quiet(t, s)
	d.UpsertPod(pod("again", "192.0.2.1", owned(want[7])))
	if got := next(t, s); !slices.Equal(got, want[7:8]) {
		t.Errorf("got %v, want the owner that changed after the last call", got)
	}
}

func TestSubscriberThatDoesNotReadBlocksNobody(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	slow, quick := subscribe(t, d), subscribe(t, d)
	for i := range 1000 {
		d.UpsertPod(pod(addr(i), addr(i), owned(ownerKey(addr(i)))))
		if keys := next(t, quick); len(keys) != 1 {
			t.Fatalf("quick subscriber got %v", keys)
		}
	}
	if keys := next(t, slow); len(keys) != 1000 {
		t.Errorf("slow subscriber got %d keys, want 1000", len(keys))
	}
}

func TestCloseEndsEveryNextThatWaits(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	s := d.Subscribe()
	errs := make(chan error, 3)
	for range cap(errs) {
		go func() {
			_, err := s.Next(context.Background())
			errs <- err
		}()
	}
	s.Close()
	s.Close()
	for range cap(errs) {
		if err := receive(t, errs); !errors.Is(err, nodecache.ErrClosed) {
			t.Errorf("got %v, want ErrClosed", err)
		}
	}
	d.UpsertPod(pod("a", "192.0.2.1"))
	if keys, err := s.Next(t.Context()); !errors.Is(err, nodecache.ErrClosed) {
		t.Errorf("after Close: %v, %v", keys, err)
	}
}

func TestNextEndsWithItsContext(t *testing.T) {
	s := subscribe(t, nodecache.New(nodecache.Options{}))
	ctx, cancel := context.WithCancel(t.Context())
	var err error
	var wg sync.WaitGroup
	wg.Go(func() { _, err = s.Next(ctx) })
	cancel()
	wg.Wait()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}
