package nodecache_test

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestAdoptionMovesPodInOneStep(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	from, to := ownerKey("from"), ownerKey("to")
	r := d.UpsertPod(pod("a", "192.0.2.1", owned(from)))
	s := subscribe(t, d)
	next(t, s)
	d.UpsertPod(pod("a", "192.0.2.1", owned(to)))
	keys := next(t, s)
	if !slices.Contains(keys, from) || !slices.Contains(keys, to) {
		t.Errorf("notified of %v, want both owners", keys)
	}
	wantUIDs(t, d, from)
	wantUIDs(t, d, to, "a")
	if err := d.Commit(r, serves("pkg.A")); !errors.Is(err, nodecache.ErrStale) {
		t.Errorf("commit for the owner left: %v, want ErrStale", err)
	}
}

// A reader beside an adoption sees the pod exactly once at every moment.
func TestAdoptionHasNoMomentWithNoneOrTwoOwners(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	owners := [2]nodecache.OwnerKey{ownerKey("from"), ownerKey("to")}
	d.UpsertPod(pod("a", "192.0.2.1", owned(owners[0])))
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		defer close(done)
		for i := range rounds() {
			d.UpsertPod(pod("a", "192.0.2.1", owned(owners[(i+1)%2])))
		}
	})
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			n := 0
			for _, o := range d.Owners() {
				n += len(o.Pods)
			}
			if n != 1 {
				t.Errorf("%d pods in all owners, want 1", n)
				return
			}
		}
	})
	wg.Wait()
}

// A DaemonSet keeps its UID over a rollout; the revision tells the owners
// apart, and the old one stays until its last pod is gone.
func TestRevisionsOfOneControllerAreOwnersOfTheirOwn(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	v1, v2 := nodecache.OwnerKey{UID: "ds", Revision: "1"}, nodecache.OwnerKey{UID: "ds", Revision: "2"}
	r := d.UpsertPod(pod("a", "192.0.2.1", owned(v1)))
	d.UpsertPod(pod("b", "192.0.2.2", owned(v1)))
	must(t, d.Commit(r, serves("pkg.A")))
	d.UpsertPod(pod("c", "192.0.2.3", owned(v2)), "a")
	wantUIDs(t, d, v1, "b")
	wantUIDs(t, d, v2, "c")
	if o := d.Owner(v1); o.Knowledge != nodecache.Known {
		t.Errorf("old revision is %s, want known", o.Knowledge)
	}
	if o := d.Owner(v2); o.Knowledge != nodecache.Unknown {
		t.Errorf("new revision is %s, want unknown", o.Knowledge)
	}
}

// A pod created again under its old name arrives as one update.
func TestOtherUIDUnderOneNameReplacesInOneStep(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	old := d.UpsertPod(pod("u1", "192.0.2.1"))
	s := subscribe(t, d)
	next(t, s)
	r := d.UpsertPod(pod("u2", "192.0.2.1"), "u1")
	wantUIDs(t, d, key, "u2")
	if keys := next(t, s); len(keys) != 1 {
		t.Errorf("notified of %v, want the owner once", keys)
	}
	if d.Pod("u1") != nil {
		t.Error("the old UID is still there")
	}
	if err := d.Commit(old, serves("pkg.Old")); !errors.Is(err, nodecache.ErrStale) {
		t.Errorf("commit against the old UID's reservation: %v, want ErrStale", err)
	}
	must(t, d.Commit(r, serves("pkg.New")))
}

func TestReplacedPodGoesAlsoIfItsSuccessorIsAbsent(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("u1", "192.0.2.1"))
	if r := d.UpsertPod(pod("u2", "192.0.2.1", in(nodecache.Absent)), "u1"); r != (nodecache.Reservation{}) {
		t.Errorf("reservation %+v for an absent pod", r)
	}
	wantUIDs(t, d, key)
}

func TestLateDeleteOfOldUIDKeepsItsSuccessor(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("u1", "192.0.2.1"))
	p := pod("u2", "192.0.2.1")
	d.UpsertPod(p, "u1")
	d.RemovePod("u1")
	wantUIDs(t, d, key, "u2")
	if got := d.PodAt(p.Addr); got != p {
		t.Errorf("pod at the address: %v, want u2", got)
	}
}

// An eviction sets Failed and clears the address in one update.
func TestAbsentPodWithoutAddressFreesItsOldAddress(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	p := pod("a", "192.0.2.1")
	d.UpsertPod(p)
	d.UpsertPod(&nodecache.Pod{UID: "a", Common: &nodecache.Common{Owner: key}, State: nodecache.Absent, Reason: "Evicted"})
	if d.PodAt(p.Addr) != nil || d.Owner(key) != nil {
		t.Error("the evicted pod is still there")
	}
}

func TestSamePodAgainIsSilentAndFree(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	p := pod("a", "192.0.2.1", declaring(1, "pkg.D"))
	r := d.UpsertPod(p)
	s := subscribe(t, d)
	next(t, s)
	again := pod("a", "192.0.2.1", declaring(1, "pkg.D"))
	if n := testing.AllocsPerRun(10, func() { d.UpsertPod(again) }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
	if got := d.UpsertPod(again); got != r {
		t.Errorf("reservation %+v, want %+v", got, r)
	}
	quiet(t, s)
	if d.Pod("a") != p {
		t.Error("the pod held was exchanged for an equal one")
	}
	d.RemovePod("unheard of")
	quiet(t, s)
}
