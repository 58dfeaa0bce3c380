package nodecache_test

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

func atNode(node string) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) { p.Node = node }
}

// told is what the agent of another node says that it learned at a time.
func told(at time.Time, services ...string) *nodecache.Info {
	info := serves(services...)
	info.Origin, info.Collected = nodecache.OriginPeer, at
	return info
}

func wantError(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("error %v, want %v", got, want)
	}
}

func wantServices(t *testing.T, d *nodecache.Directory, want ...string) {
	t.Helper()
	if got := d.Owner(key).Services(); !slices.Equal(got, want) {
		t.Errorf("services %v, want %v", got, want)
	}
}

func TestPeerIsHeardOnlyOfOwnersOnItsNode(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	now := time.Now()
	wantError(t, d.Learn(key, "n1", told(now, "pkg.A")), nodecache.ErrStale)
	d.UpsertPod(pod("a", "192.0.2.1", atNode("n1")))
	d.UpsertPod(pod("draining", "192.0.2.2", atNode("n2"), func(p *nodecache.Pod) { p.State = nodecache.Draining }))
	d.UpsertPod(pod("off", "192.0.2.3", atNode("n3"), func(p *nodecache.Pod) { p.CollectOff = true }))
	d.UpsertPod(pod("other", "192.0.2.4", atNode("n4"), func(p *nodecache.Pod) {
		c := *p.Common
		c.Owner.Revision += "x"
		p.Common = &c
	}))
	for _, node := range []string{"n2", "n3", "n4", "", "n9"} {
		wantError(t, d.Learn(key, node, told(now, "pkg.A")), nodecache.ErrNotHosted)
		wantError(t, d.LearnFailure(key, node, nodecache.Failure{Reason: "no"}), nodecache.ErrNotHosted)
	}
	wantKnowledge(t, d, nodecache.Unknown)
	must(t, d.Learn(key, "n1", told(now, "pkg.A")))
	wantKnowledge(t, d, nodecache.Known)
	if nodes, there := d.Hosts(key); !there || !slices.Equal(nodes, []string{"n1"}) {
		t.Errorf("hosts %v, %v", nodes, there)
	}
}

func TestPeerNeverReplacesWhatWasCollectedLater(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	r := d.UpsertPod(pod("a", "192.0.2.1", atNode("n1")))
	now := time.Now()
	own := serves("pkg.Own")
	own.Origin, own.Collected = nodecache.OriginSelf, now
	must(t, d.Commit(r, own))
	wantError(t, d.Learn(key, "n1", told(now.Add(-time.Hour), "pkg.Old")), nodecache.ErrOlder)
	wantError(t, d.Learn(key, "n1", told(now, "pkg.Same")), nodecache.ErrOlder)
	wantError(t, d.LearnFailure(key, "n1", nodecache.Failure{Reason: "no"}), nodecache.ErrOlder)
	wantServices(t, d, "pkg.Own")
	must(t, d.Learn(key, "n1", told(now.Add(time.Second), "pkg.New")))
	wantServices(t, d, "pkg.New")
	if o := d.Owner(key); o.Origin != nodecache.OriginPeer {
		t.Errorf("origin %s", o.Origin)
	}
}

// A peer's answer that comes between Begin and the end of a collect of one's own
// is neither lost nor in its way.
func TestPeerAnswersDuringACollectOfOnesOwn(t *testing.T) {
	for name, tc := range map[string]struct {
		end  func(*nodecache.Directory, nodecache.Reservation) error
		want string
	}{
		"it succeeds":  {func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Commit(r, serves("pkg.Own")) }, "pkg.Own"},
		"it fails":     {func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Fail(r, "no", time.Now()) }, "pkg.Peer"},
		"it hangs":     {func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Hang(r, "no", time.Now()) }, "pkg.Peer"},
		"it is let go": {func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Abandon(r) }, "pkg.Peer"},
	} {
		t.Run(name, func(t *testing.T) {
			d := nodecache.New(nodecache.Options{})
			d.UpsertPod(pod("a", "192.0.2.1", atNode("n1")))
			r, err := d.Begin(key)
			must(t, err)
			wantError(t, d.LearnFailure(key, "n1", nodecache.Failure{Reason: "no"}), nodecache.ErrBusy)
			must(t, d.Learn(key, "n1", told(time.Now(), "pkg.Peer")))
			must(t, tc.end(d, r))
			wantKnowledge(t, d, nodecache.Known)
			wantServices(t, d, tc.want)
		})
	}
}

// A revision that was worked out before a peer's answer came is refused, so that
// it is worked out anew from that.
func TestRevisionDoesNotUndoWhatAPeerSaid(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	r := d.UpsertPod(pod("a", "192.0.2.1", atNode("n1")))
	was := told(time.Now(), "pkg.A")
	must(t, d.Learn(key, "n1", was))
	must(t, d.Learn(key, "n1", told(time.Now().Add(time.Second), "pkg.A", "pkg.B")))
	wantError(t, d.Revise(r, was, serves("pkg.A")), nodecache.ErrChanged)
	wantServices(t, d, "pkg.A", "pkg.B")
}

// The owner is removed and made again while a peer's answer is on its way, and
// while a collect of one's own runs: what ends the old generation is refused,
// what the peer says holds by the key.
func TestPeerAnswersWhenTheOwnerWasMadeAgain(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("a", "192.0.2.1", atNode("n1")))
	old, err := d.Begin(key)
	must(t, err)
	answer := told(time.Now(), "pkg.Peer")
	d.RemovePod("a")
	wantError(t, d.Learn(key, "n1", answer), nodecache.ErrStale)
	d.UpsertPod(pod("b", "192.0.2.2", atNode("n2")))
	wantError(t, d.Learn(key, "n1", answer), nodecache.ErrNotHosted)
	must(t, d.Learn(key, "n2", answer))
	wantError(t, d.Commit(old, serves("pkg.Old")), nodecache.ErrStale)
	wantServices(t, d, "pkg.Peer")
}

func TestFailureOfAPeerIsToldOnceAndGivesWay(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("a", "192.0.2.1", atNode("n1")))
	later := time.Now().Add(time.Hour)
	f := nodecache.Failure{Reason: "no answer", Next: later, Hung: true}
	sub := subscribe(t, d)
	must(t, d.LearnFailure(key, "n1", f))
	if o := d.Owner(key); o.Knowledge != nodecache.Failed || o.Reason != "no answer" || !o.NextTry.Equal(later) || !o.Hung {
		t.Errorf("owner %+v", o)
	}
	if l := d.Learned(key); l.Failure != f || l.Knowledge != nodecache.Failed || l.Namespace != "prod" || l.Generation == 0 {
		t.Errorf("learned %+v", l)
	}
	next(t, sub)
	must(t, d.LearnFailure(key, "n1", f))
	if keys := sub.Poll(); len(keys) > 0 {
		t.Errorf("told again of %v", keys)
	}
	must(t, d.Learn(key, "n1", told(time.Now(), "pkg.A")))
	if o := d.Owner(key); o.Knowledge != nodecache.Known || o.Reason != "" || o.Hung {
		t.Errorf("owner %+v", o)
	}
}

// Thousands of rounds of everything at once: the peer's answers, collects of
// one's own, pods that come and go. What is left is what came last of those that
// counted, and never less.
func TestPeerAnswersRaceCollectsAndRemovals(t *testing.T) {
	at := time.Now()
	for round := range 3000 {
		d := nodecache.New(nodecache.Options{})
		d.UpsertPod(pod("a", "192.0.2.1", atNode("n1")))
		var wg sync.WaitGroup
		wg.Go(func() {
			r, err := d.Begin(key)
			if err != nil {
				return
			}
			if d.Learned(key).Info != nil { // as the collector does
				_ = d.Abandon(r)
				return
			}
			_ = d.Fail(r, "no", at) // must not undo the answer
		})
		wg.Go(func() { d.RemovePod("a"); d.UpsertPod(pod("a", "192.0.2.1", atNode("n1"))) })
		var err error
		wg.Go(func() { err = d.Learn(key, "n1", told(at, "pkg.A")) })
		wg.Wait()
		switch o := d.Owner(key); {
		case err == nil && (o.Info == nil || !o.Info.Collected.Equal(at) || o.Knowledge != nodecache.Known):
			t.Fatalf("round %d: the answer was taken, and the owner is %+v", round, o)
		case err != nil && !errors.Is(err, nodecache.ErrStale) && !errors.Is(err, nodecache.ErrNotHosted):
			t.Fatal(err)
		}
	}
}
