package nodecache_test

import (
	"slices"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// reborn returns a directory that got what d would save.
func reborn(d *nodecache.Directory, now time.Time) *nodecache.Directory {
	next := nodecache.New(nodecache.Options{})
	next.Restore(d.Snapshot(), now)
	return next
}

func TestRestoredOwnerNeedsNoCollect(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1")), serves("pkg.A")))
	next := reborn(d, time.Now())
	o := next.Owner(key)
	if o == nil || o.Origin != nodecache.OriginCheckpoint || o.Name != "ReplicaSet/a-1" || o.Workload.Name != "a" || len(o.Pods) != 0 {
		t.Fatalf("owner before its pods: %+v", o)
	}
	if len(next.Owners()) != 0 {
		t.Error("it counts as one that has pods")
	}
	next.UpsertPod(pod("b", "192.0.2.2"))
	wantKnowledge(t, next, nodecache.Known)
	if o := next.Owner(key); o.Origin != nodecache.OriginCheckpoint || !slices.Equal(o.Services(), []string{"pkg.A"}) {
		t.Errorf("owner %+v", o)
	}
	if n := next.Expire(time.Now().Add(2 * keep)); n != 0 {
		t.Error("the info of an owner with pods has ended")
	}
}

func TestRestoreAfterThePods(t *testing.T) {
	saved := []nodecache.SavedInfo{{Key: key, Info: serves("pkg.A")}}
	restore := func(begin func(d *nodecache.Directory), want nodecache.Knowledge, n int) {
		t.Helper()
		d := nodecache.New(nodecache.Options{})
		d.UpsertPod(pod("a", "192.0.2.1"))
		begin(d)
		s := subscribe(t, d)
		next(t, s)
		if got := d.Restore(saved, time.Now()); got != n {
			t.Errorf("restored %d, want %d", got, n)
		}
		wantKnowledge(t, d, want)
		if n == 1 {
			next(t, s)
		} else {
			quiet(t, s)
		}
	}
	begin := func(d *nodecache.Directory) nodecache.Reservation {
		r, err := d.Begin(key)
		must(t, err)
		return r
	}
	restore(func(*nodecache.Directory) {}, nodecache.Known, 1)
	restore(func(d *nodecache.Directory) { must(t, d.Hang(begin(d), "x", time.Now())) }, nodecache.Known, 1)
	restore(func(d *nodecache.Directory) { begin(d) }, nodecache.Collecting, 0)
	restore(func(d *nodecache.Directory) { must(t, d.Commit(begin(d), nil)) }, nodecache.None, 0)
}

func TestRestoredOwnerWithoutPodsEnds(t *testing.T) {
	now := time.Now()
	at := func(d time.Duration) time.Time { return now.Add(d) }
	for _, c := range []struct{ saved, until time.Time }{
		{time.Time{}, at(keep)},
		{at(time.Minute), at(time.Minute)},
		{at(time.Hour), at(keep)}, // a clock has gone back
	} {
		d := nodecache.New(nodecache.Options{})
		d.Restore([]nodecache.SavedInfo{{Key: key, Info: serves("pkg.A"), Until: c.saved}}, now)
		if n := d.Expire(c.until.Add(-1)); n != 0 {
			t.Errorf("%v: ended early", c)
		}
		if n := d.Expire(c.until); n != 1 {
			t.Errorf("%v: did not end", c)
		}
	}
	d := nodecache.New(nodecache.Options{})
	if n := d.Restore([]nodecache.SavedInfo{{Key: key, Info: serves("pkg.A"), Until: at(-1)}, {Key: key}}, now); n != 0 || d.Owner(key) != nil {
		t.Error("what had ended is back")
	}
}

func TestDeclarationsAreNotSaved(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("a", "192.0.2.1", declaring(1, "pkg.D")))
	d.RemovePod("a")
	if got := d.Snapshot(); len(got) != 0 {
		t.Errorf("saved %+v", got)
	}
	must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1", declaring(1, "pkg.D"))), serves("pkg.A")))
	d.RemovePod("a")
	got := d.Snapshot()
	if len(got) != 1 || len(got[0].Info.Ports) != 1 || got[0].Until.IsZero() || got[0].Name == "" {
		t.Errorf("saved %+v", got)
	}
}

func TestInfoChangesCountsWhatIsSaved(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	changes := d.InfoChanges()
	want := func(changed bool, what string) {
		t.Helper()
		if now := d.InfoChanges(); (now != changes) != changed {
			t.Errorf("%s: changed %t", what, !changed)
		} else {
			changes = now
		}
	}
	r := d.UpsertPod(pod("a", "192.0.2.1"))
	want(false, "a pod of an unknown owner")
	must(t, d.Commit(r, serves("pkg.A")))
	want(true, "a commit")
	d.UpsertPod(pod("b", "192.0.2.2"))
	want(false, "a pod of a known owner")
	d.RemovePod("a")
	want(false, "a pod that goes")
	d.RemovePod("b")
	want(true, "the last pod that goes")
	d.UpsertPod(pod("c", "192.0.2.2"))
	want(true, "a pod that returns")
	d.RemovePod("c")
	want(true, "the last pod that goes")
	d.Expire(time.Now().Add(2 * keep))
	want(true, "the end")
}
