package nodecache_test

import (
	"errors"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestKnowledgeFollowsFromCollectAndPods(t *testing.T) {
	off := func(p *nodecache.Pod) { p.CollectOff = true }
	on := func(p *nodecache.Pod) { p.CollectOn = true }
	noHints := func(p *nodecache.Pod) { p.Hints = nil }
	commit := func(info *nodecache.Info) func(*nodecache.Directory, nodecache.Reservation) error {
		return func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Commit(r, info) }
	}
	nothing := func(*nodecache.Directory, nodecache.Reservation) error { return nil }
	fail := func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Fail(r, "refused", time.Time{}) }
	begin := func(d *nodecache.Directory, r nodecache.Reservation) error { _, err := d.Begin(r.Key); return err }
	empty := &nodecache.Info{
		Ports:  []nodecache.PortInfo{{Port: 50051, State: nodecache.PortTLS, Detail: "needs a certificate"}},
		Origin: nodecache.OriginPeer,
	}
	type edits = []func(*nodecache.Pod)
	tests := []struct {
		name   string
		pod    edits
		do     func(*nodecache.Directory, nodecache.Reservation) error
		want   nodecache.Knowledge
		reason string
		origin nodecache.Origin
	}{
		{"not asked", nil, nothing, nodecache.Unknown, "", ""},
		{"being asked", nil, begin, nodecache.Collecting, "", ""},
		{"services", nil, commit(serves("pkg.A")), nodecache.Known, "", nodecache.OriginSelf},
		{"no services", nil, commit(empty), nodecache.None, "port 50051: tls: needs a certificate", nodecache.OriginPeer},
		{"failed", nil, fail, nodecache.Failed, "refused", ""},
		{"no hint", edits{noHints}, nothing, nodecache.None, "no port has a gRPC hint", ""},
		{"opted out", edits{off}, nothing, nodecache.None, "collect is turned off by annotation", ""},
		{"failed, then opted out", edits{off}, fail, nodecache.None, "collect is turned off by annotation", ""},
		{"host network", edits{onHost}, nothing, nodecache.None, "hostNetwork pods are not asked unless they opt in", ""},
		{"host network opted in", edits{onHost, on}, nothing, nodecache.Unknown, "", ""},
		{"declared all", edits{declaring(50051, "pkg.D")}, nothing, nodecache.Known, "", nodecache.OriginDeclared},
		{"declared one of two", edits{declaring(1, "pkg.D")}, nothing, nodecache.Unknown, "", ""},
		{"declared one, other empty", edits{declaring(1, "pkg.D")}, commit(empty), nodecache.Known, "", nodecache.OriginDeclared},
		{"declared one, other serves", edits{declaring(1, "pkg.D")}, commit(serves("pkg.A")), nodecache.Known, "", nodecache.OriginSelf},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			d := nodecache.New(nodecache.Options{})
			must(t, test.do(d, d.UpsertPod(pod("a", "192.0.2.1", test.pod...))))
			o := d.Owner(key)
			if o.Knowledge != test.want || o.Reason != test.reason || o.Origin != test.origin {
				t.Errorf("%s, reason %q, origin %q; want %s, %q, %q",
					o.Knowledge, o.Reason, o.Origin, test.want, test.reason, test.origin)
			}
			if n := d.Counts().Owners[test.want]; n != 1 {
				t.Errorf("counted %v", d.Counts().Owners)
			}
		})
	}
}

func TestBeginOfOwnerWithoutPodsIsStale(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1")), serves("pkg.A")))
	d.RemovePod("a")
	if _, err := d.Begin(key); !errors.Is(err, nodecache.ErrStale) {
		t.Errorf("got %v, want ErrStale", err)
	}
	for _, err := range []error{
		d.Commit(nodecache.Reservation{}, nil),
		d.Fail(nodecache.Reservation{}, "", time.Time{}),
		d.Abandon(nodecache.Reservation{}),
	} {
		if !errors.Is(err, nodecache.ErrStale) {
			t.Errorf("zero reservation: %v, want ErrStale", err)
		}
	}
}

func TestAbandonGivesBackTheFailureBeforeIt(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	retry := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	must(t, d.Fail(d.UpsertPod(pod("a", "192.0.2.1")), "refused", retry))
	r, err := d.Begin(key)
	must(t, err)
	if o := d.Owner(key); o.Knowledge != nodecache.Collecting || o.Reason != "" || !o.NextTry.IsZero() {
		t.Errorf("while collecting: %+v", o)
	}
	must(t, d.Abandon(r))
	if o := d.Owner(key); o.Knowledge != nodecache.Failed || o.Reason != "refused" || !o.NextTry.Equal(retry) {
		t.Errorf("after abandon: %+v", o)
	}
}

// A peer's answer lands while our own collect runs; its end must not hide it.
func TestEndOfCollectDoesNotHideWhatAnotherCommitted(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("a", "192.0.2.1"))
	r, err := d.Begin(key)
	must(t, err)
	must(t, d.Commit(r, serves("pkg.A")))
	must(t, d.Fail(r, "refused", time.Time{}))
	wantKnowledge(t, d, nodecache.Known)
	must(t, d.Abandon(r))
	wantKnowledge(t, d, nodecache.Known)
}

func TestFailureOfSecondCollectKeepsWhatWasLearned(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	must(t, d.Commit(d.UpsertPod(pod("a", "192.0.2.1")), serves("pkg.A")))
	r, err := d.Begin(key)
	must(t, err)
	must(t, d.Fail(r, "refused", time.Time{}))
	o := d.Owner(key)
	if o.Knowledge != nodecache.Failed || len(o.Targets("pkg.A")) != 1 {
		t.Errorf("owner %+v", o)
	}
}
