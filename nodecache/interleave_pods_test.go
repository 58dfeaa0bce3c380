package nodecache_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// The last old pod goes while the collect of the first new one is under way.
func TestRemovalOfLastOldPodDuringCollectKeepsNewPod(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	d.UpsertPod(pod("b", "192.0.2.2"))
	s := subscribe(t, d)
	next(t, s)

	a := async(d, c, pod("a", "192.0.2.1"))
	held := c.held(t)
	next(t, s)
	wantUIDs(t, d, key, "a", "b")
	d.RemovePod("b")
	next(t, s)
	wantUIDs(t, d, key, "a")

	held.answer <- answer{info: serves("pkg.A")}
	must(t, receive(t, a))
	next(t, s)
	wantUIDs(t, d, key, "a")
	wantKnowledge(t, d, nodecache.Known)
}

// The other order: the last old pod goes while it is being collected, then the
// new one comes. What is learned of the old generation does not count.
func TestNewPodAfterRemovalOfLastOldPodDuringCollectIsKept(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	b := async(d, c, pod("b", "192.0.2.2"))
	heldB := c.held(t)
	s := subscribe(t, d)
	next(t, s)

	d.RemovePod("b")
	a := async(d, c, pod("a", "192.0.2.1"))
	heldA := c.held(t)
	next(t, s)
	wantUIDs(t, d, key, "a")

	heldB.answer <- answer{info: serves("pkg.Old")}
	if err := receive(t, b); !errors.Is(err, nodecache.ErrStale) {
		t.Errorf("commit for the ended generation: %v, want ErrStale", err)
	}
	quiet(t, s)
	wantKnowledge(t, d, nodecache.Collecting)

	heldA.answer <- answer{info: serves("pkg.New")}
	must(t, receive(t, a))
	if got := d.Owner(key).Services(); !slices.Equal(got, []string{"pkg.New"}) {
		t.Errorf("services %v, want those of the new generation", got)
	}
}

// Upsert and removal at the same moment, often: whichever is first, the new
// pod stays and its owner is told of.
func TestUpsertRacingRemovalOfLastPodLosesNothing(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		d.UpsertPod(pod("b", "192.0.2.2"))
		s := d.Subscribe()
		next(t, s)
		a := pod("a", "192.0.2.1")
		var r nodecache.Reservation
		together(
			func() { r = d.UpsertPod(a) },
			func() { d.RemovePod("b") },
		)
		keys := next(t, s)
		s.Close()
		o := d.Owner(key)
		if !slices.Equal(uids(o), []string{"a"}) || d.PodAt(a.Addr) != a || !slices.Contains(keys, key) {
			t.Fatalf("round %d: owner %+v, notified of %v", i, o, keys)
		}
		if o.Generation != r.Generation {
			t.Fatalf("round %d: generation %d, but %d is reserved", i, o.Generation, r.Generation)
		}
	}
}

// A commit and the removal of the last pod at the same moment: it lands whole
// and is retained, or it is refused and leaves nothing.
func TestCommitRacingRemovalOfLastPodLandsOrIsRefused(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		r := d.UpsertPod(pod("a", "192.0.2.1"))
		var err error
		together(
			func() { err = d.Commit(r, serves("pkg.A")) },
			func() { d.RemovePod("a") },
		)
		o := d.Owner(key)
		if landed := err == nil; landed != (o != nil) || !landed && !errors.Is(err, nodecache.ErrStale) {
			t.Fatalf("round %d: commit %v, owner %+v", i, err, o)
		}
	}
}

// A commit races the removal and return of the pod: it lands in the generation
// it was made for or nowhere. The info outlives that generation only if it
// landed.
func TestCommitRacingRecreationNeverLandsInNewGeneration(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		r := d.UpsertPod(pod("a", "192.0.2.1"))
		var err error
		together(
			func() { err = d.Commit(r, serves("pkg.Old")) },
			func() {
				d.RemovePod("a")
				d.UpsertPod(pod("b", "192.0.2.2"))
			},
		)
		o := d.Owner(key)
		if o.Generation == r.Generation {
			t.Fatalf("round %d: the ended generation goes on", i)
		}
		if (err == nil) != (o.Info != nil) {
			t.Fatalf("round %d: commit %v, info %+v", i, err, o.Info)
		}
	}
}

const replicas = 10

// arrive lets pods of one owner arrive at the same moment and waits until all
// handlers but the one that collects have returned.
func arrive(t *testing.T, d *nodecache.Directory, c *collector) (*call, <-chan error) {
	t.Helper()
	results := make(chan error, replicas)
	var fs []func()
	for i := range replicas {
		p := pod(fmt.Sprint(i), addr(i))
		fs = append(fs, func() {
			go func() { results <- handle(d, c, p) }()
		})
	}
	together(fs...)
	held := c.held(t)
	for range replicas - 1 {
		select {
		case err := <-results:
			if !errors.Is(err, nodecache.ErrBusy) {
				t.Fatalf("a handler beside the collect: %v, want ErrBusy", err)
			}
		case <-c.started:
			t.Fatal("a second collect beside the first")
		case <-time.After(patience):
			t.Fatal("a handler waits for the collect")
		}
	}
	return held, results
}

func TestConcurrentPodsOfOneOwnerCauseOneCollect(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	held, results := arrive(t, d, c)
	held.answer <- answer{info: serves("pkg.A")}
	must(t, receive(t, results))
	if n := c.calls.Load(); n != 1 {
		t.Errorf("%d collects, want 1", n)
	}
	wantKnowledge(t, d, nodecache.Known)
}

func TestAddressesAreVisibleBeforeCollectReturns(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	held, results := arrive(t, d, c)
	if n := len(d.Owner(key).Pods); n != replicas {
		t.Errorf("%d pods while the collect is under way, want %d", n, replicas)
	}
	if os := d.Owners(); len(os) != 1 || len(os[0].Pods) != replicas {
		t.Errorf("owners while the collect is under way: %+v", os)
	}
	for i := range replicas {
		if p := pod("", addr(i)); d.PodAt(p.Addr) == nil {
			t.Errorf("no pod at %s while the collect is under way", p.Addr)
		}
	}
	held.answer <- answer{info: serves("pkg.A")}
	must(t, receive(t, results))
}

// Readiness waits for owners that are not settled: one, however many pods.
func TestConcurrentPodsHoldReadinessOnce(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	held, results := arrive(t, d, c)
	unsettled := func() (n int) {
		for k, owners := range d.Counts().Owners {
			if !k.Settled() {
				n += owners
			}
		}
		return n
	}
	if n := unsettled(); n != 1 {
		t.Errorf("%d owners not settled, want 1", n)
	}
	held.answer <- answer{info: serves("pkg.A")}
	must(t, receive(t, results))
	if n := unsettled(); n != 0 {
		t.Errorf("%d owners not settled after the collect, want 0", n)
	}
}

func TestConcurrentPodsFailOnce(t *testing.T) {
	d, c := nodecache.New(nodecache.Options{}), newCollector()
	held, results := arrive(t, d, c)
	held.answer <- answer{err: errors.New("connection refused")}
	if err := receive(t, results); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("the collecting handler: %v", err)
	}
	if n := c.calls.Load(); n != 1 {
		t.Errorf("%d collects, want 1", n)
	}
	if n := d.Counts().Owners[nodecache.Failed]; n != 1 {
		t.Errorf("%d failed owners, want 1", n)
	}
	wantUIDs(t, d, key, "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
	if o := d.Owner(key); o.Reason != "connection refused" {
		t.Errorf("reason %q", o.Reason)
	}
}

func TestOfConcurrentBeginsOneSucceeds(t *testing.T) {
	for i := range rounds() {
		d := nodecache.New(nodecache.Options{})
		d.UpsertPod(pod("a", "192.0.2.1"))
		var errs [2]error
		together(
			func() { _, errs[0] = d.Begin(key) },
			func() { _, errs[1] = d.Begin(key) },
		)
		if (errs[0] == nil) == (errs[1] == nil) {
			t.Fatalf("round %d: begins gave %v", i, errs)
		}
	}
}
