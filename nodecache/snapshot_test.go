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

// Of an owner without pods nobody says again what the last of them declared and
// exported, and behind which Service it stood.
func TestRestoredOwnerWithoutPodsIsWhatItWas(t *testing.T) {
	declared := nodecache.OwnerKey{UID: "declared"}
	start := func() *nodecache.Directory {
		d := nodecache.New(nodecache.Options{})
		exports := func(p *nodecache.Pod) { p.Export = "other" }
		must(t, d.Commit(d.UpsertPod(pod("a", "10.0.0.1", declaring(1, "pkg.D"), exports)), serves("pkg.A")))
		d.UpsertPod(pod("b", "10.0.0.2", owned(declared), declaring(2, "pkg.E")))
		d.UpsertFront(front("web", 1))
		d.UpsertSlice(slice("web-1", "web", "a", "b"))
		return d
	}
	for name, gone := range map[string]bool{"they went before": true, "they go meanwhile": false} {
		t.Run(name, func(t *testing.T) {
			d := start()
			if gone {
				d.RemovePod("a")
				d.RemovePod("b")
				d.UpsertSlice(slice("web-1", "web"))
			}
			next := reborn(d, time.Now())
			s := subscribe(t, next)
			o := next.Owner(key)
			if !slices.Equal(o.Services(), []string{"pkg.A", "pkg.D"}) || !slices.Equal(o.Export, []string{"other"}) || o.Origin != nodecache.OriginCheckpoint {
				t.Errorf("owner %+v", o)
			}
			if len(o.Behind) != 0 {
				t.Errorf("it stands behind a Service that nobody has seen yet: %+v", o.Behind[0])
			}
			_ = s.Poll()
			next.UpsertFront(front("web", 7))
			if keys := s.Poll(); !slices.Contains(keys, key) {
				t.Errorf("told of %v when its Service came", keys)
			}
			wantBehind(t, next, "web[50051]")
			if o := next.Owner(key); !o.Behind[0].Created.Equal(front("web", 7).Created) {
				t.Errorf("behind %+v, want the Service as it is now", o.Behind[0])
			}
			if e := next.Owner(declared); gone != (e != nil) || gone && (e.Origin != nodecache.OriginDeclared ||
				!slices.Equal(e.Services(), []string{"pkg.E"}) || len(e.Behind) != 1) {
				t.Errorf("the owner that only declared: %+v", e)
			}
			// The next pod has its own word.
			next.UpsertPod(pod("c", "10.0.0.3"))
			if got := next.Owner(key).Services(); !slices.Equal(got, []string{"pkg.A"}) {
				t.Errorf("services %v of a pod that declares nothing", got)
			}
			next.RemovePod("c")
			next.RemoveFront(nodecache.Name{Namespace: "prod", Name: "web"})
			next.Expire(time.Now().Add(2 * keep))
			s.Close()
			if left := next.Sizes(); len(left) > 0 {
				t.Errorf("left behind %v", left)
			}
		})
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
	d.UpsertFront(front("web", 1))
	d.UpsertSlice(slice("web-1", "web", "c"))
	want(true, "a pod that stands behind a Service")
	d.UpsertSlice(slice("web-1", "web", "c", "d"))
	want(false, "another pod of the slice")
	d.RemovePod("c")
	want(true, "the last pod that goes")
	d.Expire(time.Now().Add(2 * keep))
	want(true, "the end")
}
