package nodecache_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

const keep = 10 * time.Minute // the default

func TestInfoOutlivesLastPodForKeep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := nodecache.New(nodecache.Options{})
		must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1")), serves("pkg.A")))
		d.RemovePod("a")
		gone := time.Now()
		if n := d.Expire(gone.Add(keep - 1)); n != 0 {
			t.Errorf("%d expired early", n)
		}
		o := d.Owner(key)
		if o == nil || !slices.Equal(o.Services(), []string{"pkg.A"}) || o.Knowledge != nodecache.Known ||
			len(o.Pods) != 0 || o.Generation != 0 || o.Workload.Name != "a" {
			t.Errorf("owner without pods: %+v", o)
		}
		if os := d.Owners(); len(os) != 0 {
			t.Errorf("owners with pods: %v", os)
		}
		if os := d.Retained("default"); len(os) != 0 {
			t.Errorf("retained in another namespace: %v", os)
		}
		if os := d.Retained(o.Workload.Namespace); len(os) != 1 || os[0].Key != key {
			t.Errorf("retained: %v", os)
		}
		if n := d.Counts().Retained; n != 1 {
			t.Errorf("%d retained, want 1", n)
		}
		s := subscribe(t, d)
		next(t, s)
		if n := d.Expire(gone.Add(keep)); n != 1 {
			t.Errorf("%d expired, want 1", n)
		}
		next(t, s)
		if o, os := d.Owner(key), d.Retained("prod"); o != nil || len(os) > 0 {
			t.Errorf("owner after expiry: %+v, %v", o, os)
		}
	})
}

func TestPodThatReturnsBeforeExpiryNeedsNoCollect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := nodecache.New(nodecache.Options{})
		old := d.UpsertPod(pod("a", "192.0.2.1"))
		must(t, d.Commit(old, serves("pkg.A")))
		d.RemovePod("a")
		time.Sleep(keep / 2)
		if r := d.UpsertPod(pod("b", "192.0.2.2")); r.Generation == old.Generation {
			t.Error("the ended generation goes on")
		}
		wantKnowledge(t, d, nodecache.Known)
		if n := d.Expire(time.Now().Add(2 * keep)); n != 0 {
			t.Errorf("%d expired of an owner with pods", n)
		}
		// The time starts anew with the next last pod.
		d.RemovePod("b")
		if n := d.Expire(time.Now().Add(keep - 1)); n != 0 {
			t.Errorf("%d expired early", n)
		}
	})
}

func TestPodThatReturnsAfterExpiryIsUnknown(t *testing.T) {
	d := nodecache.New(nodecache.Options{Keep: time.Minute})
	must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1")), serves("pkg.A")))
	d.RemovePod("a")
	d.Expire(time.Now().Add(time.Minute))
	d.UpsertPod(pod("a", "192.0.2.1"))
	wantKnowledge(t, d, nodecache.Unknown)
}

func TestNoneOutlivesLastPod(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1")), nil))
	d.RemovePod("a")
	d.UpsertPod(pod("b", "192.0.2.2"))
	wantKnowledge(t, d, nodecache.None)
}

// A declaration is knowledge too: a flap must not take its cluster away.
func TestDeclarationOutlivesLastPod(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1", declaring(1, "pkg.D"))), serves("pkg.A")))
	d.RemovePod("a")
	o := d.Owner(key)
	if !slices.Equal(o.Services(), []string{"pkg.A", "pkg.D"}) || o.Origin != nodecache.OriginSelf {
		t.Errorf("owner without pods: %+v", o)
	}
	d.UpsertPod(pod("b", "192.0.2.2"))
	if got := d.Owner(key).Services(); !slices.Equal(got, []string{"pkg.A"}) {
		t.Errorf("services %v of a pod that declares nothing", got)
	}
}

func TestDeclarationAloneOutlivesLastPodButNotTheNext(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("a", "192.0.2.1", declaring(1, "pkg.D")))
	d.RemovePod("a")
	o := d.Owner(key)
	if o == nil || o.Knowledge != nodecache.Known || o.Origin != nodecache.OriginDeclared ||
		!slices.Equal(o.Services(), []string{"pkg.D"}) {
		t.Errorf("owner without pods: %+v", o)
	}
	d.UpsertPod(pod("b", "192.0.2.2"))
	wantKnowledge(t, d, nodecache.Unknown)
	if o := d.Owner(key); o.Info != nil {
		t.Errorf("info %+v, but nothing was collected", o.Info)
	}
	d.RemovePod("b")
	if left := d.Sizes(); len(left) > 0 {
		t.Errorf("left behind %v", left)
	}
}

func TestNothingIsLeftBehind(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	s := d.SubscribeFronts()
	for i := range 100 {
		k := ownerKey(addr(i / 3))
		r := d.UpsertPod(pod(addr(i), addr(i%50), owned(k), created(i%60)))
		if i%2 == 0 {
			must(t, d.Commit(r, serves("pkg.A")))
		}
		serve(d, addr(i/3), addr(i/3*3), addr(i/3*3+1), addr(i/3*3+2))
		must(t, d.UpsertRoute(route(addr(i), 1, addr(i/3), "nowhere")))
	}
	for i := range 100 {
		d.RemovePod(addr(i))
		d.RemoveRoute(addr(i))
	}
	for i := range 34 {
		d.RemoveSlice(named(addr(i) + "-1"))
		d.RemoveFront(named(addr(i)))
	}
	s.Close()
	if n := d.Expire(time.Now().Add(time.Hour)); n != 33 { // the last pod stood alone and was not collected
		t.Errorf("%d expired, want 33", n)
	}
	if left := d.Sizes(); len(left) > 0 {
		t.Errorf("left behind %v", left)
	}
}
