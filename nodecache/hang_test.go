package nodecache_test

import (
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestHungOwnerIsFailedAndSaysSoUntilItAnswersOrFailsOtherwise(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	next := time.Now().Add(time.Minute)
	r := d.UpsertPod(pod("a", "192.0.2.1"))
	begun := func() {
		t.Helper()
		if _, err := d.Begin(r.Key); err != nil {
			t.Fatal(err)
		}
	}
	want := func(k nodecache.Knowledge, hung bool) {
		t.Helper()
		if o := d.Owner(r.Key); o.Knowledge != k || o.Hung != hung {
			t.Errorf("%s, hung %v; want %s, %v", o.Knowledge, o.Hung, k, hung)
		}
	}
	begun()
	must(t, d.Hang(r, "no answer", next))
	want(nodecache.Failed, true)
	begun()
	want(nodecache.Collecting, false)
	must(t, d.Abandon(r))
	want(nodecache.Failed, true)
	begun()
	must(t, d.Fail(r, "refused", next))
	want(nodecache.Failed, false)
	begun()
	must(t, d.Hang(r, "no answer", next))
	must(t, d.Commit(r, serves("pkg.A")))
	want(nodecache.Known, false)
	if err := d.Hang(nodecache.Reservation{Key: r.Key, Generation: r.Generation + 1}, "late", next); err == nil {
		t.Error("a hang of another generation was recorded")
	}
}
