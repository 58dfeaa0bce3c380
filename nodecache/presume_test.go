package nodecache_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

func revision(n int) nodecache.OwnerKey {
	return nodecache.OwnerKey{UID: fmt.Sprint("rs", n), Revision: fmt.Sprint(n)}
}

// of makes a pod one of a revision, which is as old as its number says.
func of(n int) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) {
		p.Owner, p.OwnerName = revision(n), fmt.Sprint("ReplicaSet/a-", n)
		created(n)(p)
	}
}

func hinting(ports ...uint16) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) {
		p.Hints = nil
		for _, port := range ports {
			p.Hints = append(p.Hints, nodecache.Hint{Port: port, Why: "port name"})
		}
	}
}

// rollout returns a directory in which revision 1 serves, on its pod r1.
func rollout(t *testing.T, services ...string) *nodecache.Directory {
	t.Helper()
	d := nodecache.New(nodecache.Options{})
	must(t, d.Commit(d.UpsertPod(pod("r1", "192.0.2.1", of(1))), serves(services...)))
	return d
}

// add adds a pod of a later revision.
func add(d *nodecache.Directory, n int, edits ...func(*nodecache.Pod)) nodecache.Reservation {
	return d.UpsertPod(pod(fmt.Sprint("r", n), fmt.Sprint("192.0.2.", n), append([]func(*nodecache.Pod){of(n)}, edits...)...))
}

// wantPresumed wants the pods of a revision to be presumed to serve these, each
// written as service:port<revision.
func wantPresumed(t *testing.T, d *nodecache.Directory, n int, want ...string) {
	t.Helper()
	o := d.Owner(revision(n))
	if o == nil {
		t.Fatalf("there is no revision %d", n)
	}
	var got []string
	for _, name := range o.Names() {
		for _, target := range o.Targets(name) {
			if p := target.Presumed; p != nil {
				got = append(got, fmt.Sprintf("%s:%d<%s", name, target.Addr.Port(), p.From.Revision))
			}
		}
	}
	slices.Sort(want)
	if slices.Sort(got); !slices.Equal(slices.Compact(got), want) {
		t.Errorf("presumed of revision %d: %v, want %v", n, got, want)
	}
}

// What the new revision's own collect brings decides: only an answer without the
// name disproves it.
func TestOnlyAnAnswerEndsAPresumption(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(d *nodecache.Directory, r nodecache.Reservation) error
		stay bool
	}{
		{"nobody asked", func(*nodecache.Directory, nodecache.Reservation) error { return nil }, true},
		{"is being asked", func(d *nodecache.Directory, r nodecache.Reservation) error { _, err := d.Begin(r.Key); return err }, true},
		{"refused", func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Fail(r, "refused", time.Now()) }, true},
		{"silent", func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Hang(r, "deadline", time.Now()) }, true},
		{"no reflection", committing(heard(50051, nodecache.PortNoReflection)), true},
		{"denied", committing(heard(50051, nodecache.PortDenied)), true},
		{"another port answered", committing(heard(9090, nodecache.PortServes, "pkg.Other")), true},
		{"nothing found", committing(), true},
		{"tls", committing(heard(50051, nodecache.PortTLS)), false},
		{"not gRPC", committing(heard(50051, nodecache.PortNotGRPC)), false},
		{"empty", committing(heard(50051, nodecache.PortEmpty)), false},
		{"another service", committing(heard(50051, nodecache.PortServes, "pkg.Other")), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := rollout(t, "pkg.A")
			must(t, c.do(d, add(d, 2)))
			if c.stay {
				wantPresumed(t, d, 2, "pkg.A:50051<1")
			} else {
				wantPresumed(t, d, 2)
			}
			o := d.Owner(revision(2))
			if slices.Contains(o.Services(), "pkg.A") || slices.Contains(o.Names(), "pkg.A") != c.stay {
				t.Errorf("services %v, names %v", o.Services(), o.Names())
			}
			if got := d.Owner(revision(1)); len(got.Presumed) > 0 {
				t.Errorf("the old revision is presumed to serve %v", got.Presumed)
			}
		})
	}
}

func committing(ps ...nodecache.PortInfo) func(*nodecache.Directory, nodecache.Reservation) error {
	return func(d *nodecache.Directory, r nodecache.Reservation) error { return d.Commit(r, ports(ps...)) }
}

// A later revision's service says nothing of the pods before it.
func TestAddedServiceIsPresumedOfNoOlderPod(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	add(d, 1)
	must(t, d.Commit(add(d, 2), serves("pkg.A", "pkg.B")))
	wantPresumed(t, d, 1)
}

func TestRenamedServiceLeavesTheNewPodsAlone(t *testing.T) {
	d := rollout(t, "pkg.A", "pkg.Same")
	r := add(d, 2)
	wantPresumed(t, d, 2, "pkg.A:50051<1", "pkg.Same:50051<1")
	must(t, d.Commit(r, serves("pkg.A2", "pkg.Same")))
	wantPresumed(t, d, 2)
	if got := d.Owner(revision(2)).Names(); !slices.Equal(got, []string{"pkg.A2", "pkg.Same"}) {
		t.Errorf("the new pods serve %v", got)
	}
	if ts := d.Owner(revision(1)).Targets("pkg.A"); len(ts) != 1 || ts[0].Presumed != nil {
		t.Errorf("the old pods serve pkg.A at %v", ts)
	}
	// The next one follows what it replaces.
	add(d, 3)
	wantPresumed(t, d, 3, "pkg.A2:50051<2", "pkg.Same:50051<2")
}

func TestPresumptionReachesOverBrokenRevisions(t *testing.T) {
	d := rollout(t, "pkg.A")
	must(t, d.Fail(add(d, 2), "refused", time.Now()))
	must(t, d.Commit(add(d, 3), ports(heard(50051, nodecache.PortDenied))))
	add(d, 4)
	for n := 2; n <= 4; n++ {
		wantPresumed(t, d, n, "pkg.A:50051<1")
	}
	// One that answered stands between those after it and the first.
	must(t, d.Commit(nodecache.Reservation{Key: revision(3), Generation: d.Owner(revision(3)).Generation}, serves("pkg.B")))
	wantPresumed(t, d, 2, "pkg.A:50051<1")
	wantPresumed(t, d, 3)
	wantPresumed(t, d, 4, "pkg.B:50051<3")
	d.RemovePod("r3")
	wantPresumed(t, d, 4, "pkg.B:50051<3")
}

// A revision that turned out not to speak gRPC goes on counting after its pods,
// whatever older pods serve.
func TestWhatDisprovesIsRememberedAsLongAsItIsNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := rollout(t, "pkg.A")
		must(t, d.Commit(add(d, 2), ports(heard(50051, nodecache.PortTLS))))
		add(d, 3)
		d.RemovePod("r2")
		wantPresumed(t, d, 3)
		if n := d.Expire(time.Now().Add(2 * keep)); n != 0 {
			t.Errorf("%d expired", n)
		}
		wantPresumed(t, d, 3)
		d.RemovePod("r3")
		time.Sleep(keep)
		if n := d.Expire(time.Now()); n != 1 {
			t.Errorf("%d expired, want revision 2", n)
		}
	})
}

func TestPresumptionOutlivesItsPredecessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := rollout(t, "pkg.A")
		must(t, d.Fail(add(d, 2), "refused", time.Now()))
		d.RemovePod("r1")
		sub := subscribe(t, d)
		sub.Poll()
		for range 5 {
			time.Sleep(keep)
			if n := d.Expire(time.Now()); n != 0 {
				t.Errorf("%d expired", n)
			}
			wantPresumed(t, d, 2, "pkg.A:50051<1")
		}
		quiet(t, sub)
		// It is scaled to zero and back; then it is gone for good.
		d.RemovePod("r2")
		time.Sleep(keep - 1)
		d.Expire(time.Now())
		if o := d.Owner(revision(1)); o == nil || !slices.Equal(o.Names(), []string{"pkg.A"}) {
			t.Errorf("the name is forgotten while the workload is scaled to zero: %+v", o)
		}
		add(d, 2)
		wantPresumed(t, d, 2, "pkg.A:50051<1")
		d.RemovePod("r2")
		time.Sleep(keep)
		if n := d.Expire(time.Now()); n != 1 {
			t.Errorf("%d expired, want revision 1", n)
		}
		if left := d.Sizes(); len(left) > 1 { // the subscription
			t.Errorf("left behind %v", left)
		}
	})
}

// As soon as the pods have their own word, nothing is kept for them.
func TestPredecessorIsForgottenOnceItIsNotNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := rollout(t, "pkg.A")
		r := add(d, 2)
		d.RemovePod("r1")
		time.Sleep(2 * keep)
		d.Expire(time.Now())
		must(t, d.Commit(r, serves("pkg.A")))
		if n := d.Expire(time.Now()); n != 1 || d.Owner(revision(1)) != nil {
			t.Errorf("%d expired, want revision 1", n)
		}
		if ts := d.Owner(revision(2)).Targets("pkg.A"); len(ts) != 1 || ts[0].Presumed != nil {
			t.Errorf("targets %+v", ts)
		}
	})
}

func TestPresumptionOutlivesTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := rollout(t, "pkg.A")
		must(t, d.Fail(add(d, 2), "refused", time.Now()))
		d.RemovePod("r1")
		saved := d.InfoChanges()
		time.Sleep(2 * keep)
		d.Expire(time.Now())
		if d.InfoChanges() != saved {
			t.Error("what is saved changed by the time alone")
		}
		k := &nodecache.Checkpoint{Dir: t.TempDir()}
		must(t, k.Save(nodecache.Saved{Infos: d.Snapshot()}))
		time.Sleep(time.Hour) // nobody runs
		file, err := k.Load()
		must(t, err)
		d = nodecache.New(nodecache.Options{})
		if n := d.Restore(file.Infos, time.Now()); n != 1 {
			t.Fatalf("restored %d owners, want 1", n)
		}
		add(d, 2)
		wantPresumed(t, d, 2, "pkg.A:50051<1")
		time.Sleep(2 * keep)
		d.Expire(time.Now())
		wantPresumed(t, d, 2, "pkg.A:50051<1")
	})
}

func TestPodThatLeansOnAnOwnerWithoutPodsIsAChangeOfWhatIsSaved(t *testing.T) {
	d := rollout(t, "pkg.A")
	d.RemovePod("r1")
	if s := d.Snapshot(); len(s) != 1 || s[0].Until.IsZero() {
		t.Errorf("saved %+v", s)
	}
	changes := d.InfoChanges()
	add(d, 2)
	if s := d.Snapshot(); d.InfoChanges() == changes || len(s) != 1 || !s[0].Until.IsZero() {
		t.Errorf("%d changes, saved %+v", d.InfoChanges()-changes, s)
	}
}

// The checkpoint remembers how old a revision is: pods of an old one that were
// created again, on other nodes, do not make it the new one.
func TestAgeOutlivesPodsAndAgent(t *testing.T) {
	d := rollout(t, "pkg.A")
	add(d, 2)
	again := pod("r1b", "192.0.2.9", of(1), created(30))
	d.UpsertPod(again, "r1")
	d.RemovePod("r1b")
	d.UpsertPod(again)
	wantPresumed(t, d, 2, "pkg.A:50051<1")

	saved := d.Snapshot()
	d = nodecache.New(nodecache.Options{})
	d.Restore(saved, time.Now())
	d.UpsertPod(again)
	add(d, 2)
	wantPresumed(t, d, 2, "pkg.A:50051<1")

	d = nodecache.New(nodecache.Options{})
	d.UpsertPod(again)
	add(d, 2)
	d.Restore(saved, time.Now())
	wantPresumed(t, d, 2, "pkg.A:50051<1")
}

func TestRollbackGoesByTheOldRevisionsOwnWord(t *testing.T) {
	d := rollout(t, "pkg.A")
	must(t, d.Commit(add(d, 2), serves("pkg.B")))
	d.RemovePod("r1")
	d.UpsertPod(pod("r1b", "192.0.2.9", of(1), created(30)))
	wantPresumed(t, d, 1)
	if got := d.Owner(revision(1)).Names(); !slices.Equal(got, []string{"pkg.A"}) {
		t.Errorf("after the rollback it serves %v", got)
	}
	// It is the previous revision of the next.
	add(d, 40)
	wantPresumed(t, d, 40, "pkg.A:50051<1")
	d.RemovePod("r40")
	// Nothing is known any more of a revision that has been gone for long: it is
	// a new one.
	d.RemovePod("r1b")
	d.Expire(time.Now().Add(2 * keep))
	d.UpsertPod(pod("r1b", "192.0.2.9", of(1), created(30)))
	wantPresumed(t, d, 1, "pkg.B:50051<2")
}

// Where nothing says which revision is the older one, each may be.
func TestRevisionsOfUnknownAge(t *testing.T) {
	for _, order := range [][]int{{1, 2}, {2, 1}} {
		d := nodecache.New(nodecache.Options{})
		for _, n := range order {
			add(d, n, func(p *nodecache.Pod) { p.Created = time.Time{} })
		}
		r := nodecache.Reservation{Key: revision(1), Generation: d.Owner(revision(1)).Generation}
		must(t, d.Commit(r, serves("pkg.A")))
		wantPresumed(t, d, 2, "pkg.A:50051<1")
	}
}

func TestWhoHasRevisions(t *testing.T) {
	for _, c := range []struct {
		kind     string
		presumed bool
	}{{"ReplicaSet", true}, {"StatefulSet", true}, {"DaemonSet", true}, {"CloneSet", true}, {"Pod", false}, {"Job", false}} {
		d := nodecache.New(nodecache.Options{})
		set := func(n int) func(*nodecache.Pod) {
			return func(p *nodecache.Pod) {
				p.Owner = nodecache.OwnerKey{UID: "one", Revision: fmt.Sprint(n)} // as a StatefulSet's
				if c.kind == "Job" || c.kind == "Pod" {
					p.Owner = nodecache.OwnerKey{UID: fmt.Sprint("another", n)}
				}
				p.Workload.Kind = c.kind
			}
		}
		must(t, d.Commit(add(d, 1, set(1)), serves("pkg.A")))
		r := add(d, 2, set(2))
		if got := len(d.Owner(r.Key).Targets("pkg.A")); (got == 1) != c.presumed {
			t.Errorf("a %s: %d targets", c.kind, got)
		}
	}
	// Another workload is not a revision, even of the same kind.
	d := rollout(t, "pkg.A")
	add(d, 2, func(p *nodecache.Pod) { p.Workload.Name = "b" })
	add(d, 3, func(p *nodecache.Pod) { p.Workload.Namespace = "test" })
	wantPresumed(t, d, 2)
	wantPresumed(t, d, 3)
}

// A declaration is the word of the pod that has it, and its absence is another's.
func TestDeclarationIsPresumedOfNobody(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	add(d, 1, declaring(50051, "pkg.D"))
	add(d, 2)
	wantPresumed(t, d, 2)
	d.RemovePod("r1")
	wantPresumed(t, d, 2)

	// It ends what older ones serve, for itself and for those after it.
	d = rollout(t, "pkg.A")
	add(d, 2, declaring(50051, "pkg.D"))
	add(d, 3)
	wantPresumed(t, d, 2)
	wantPresumed(t, d, 3)
	sub := subscribe(t, d)
	sub.Poll()
	add(d, 2)
	if keys := next(t, sub); !slices.Contains(keys, revision(3)) {
		t.Errorf("told of %v", keys)
	}
	wantPresumed(t, d, 3, "pkg.A:50051<1")
	// It is remembered with the pods that are gone.
	add(d, 2, declaring(50051, "pkg.D"))
	d.RemovePod("r2")
	wantPresumed(t, d, 3)
}

// Pods of a heterogeneous owner speak for themselves, as successors too, and
// as predecessors together.
func TestPresumptionAndVariants(t *testing.T) {
	running := func(images string) func(*nodecache.Pod) {
		return func(p *nodecache.Pod) { p.Images = images }
	}
	d := nodecache.New(nodecache.Options{})
	r := add(d, 1, running("x"))
	d.UpsertPod(pod("r1y", "192.0.2.11", of(1), running("y")))
	info := serves("pkg.A")
	info.Images = []string{"x"}
	info.Variants = []nodecache.Variant{
		{Images: "y", Ports: serves("pkg.B").Ports},
		{Images: "gone", Ports: serves("pkg.C").Ports},
	}
	must(t, d.Commit(r, info))
	r = add(d, 2, running("z"))
	d.UpsertPod(pod("r2w", "192.0.2.12", of(2), running("w")))
	wantPresumed(t, d, 2, "pkg.A:50051<1", "pkg.B:50051<1")

	info = ports(heard(50051, nodecache.PortDenied))
	info.Images = []string{"z"}
	info.Variants = []nodecache.Variant{{Images: "w", Ports: serves("pkg.N").Ports}}
	must(t, d.Commit(r, info))
	o := d.Owner(revision(2))
	for _, name := range []string{"pkg.A", "pkg.B"} {
		if ts := o.Targets(name); len(ts) != 1 || ts[0].Pod.UID != "r2" {
			t.Errorf("targets of %s: %v", name, ts)
		}
	}
}

// Who leans on another hears of all that changes what it leans on.
func TestMatesHearOfOneAnother(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	r1, r2 := add(d, 1), add(d, 2)
	add(d, 3)
	sub := subscribe(t, d)
	sub.Poll()
	want := func(what string, presumed ...string) {
		t.Helper()
		if keys := next(t, sub); !slices.Contains(keys, revision(3)) {
			t.Errorf("%s: told of %v", what, keys)
		}
		wantPresumed(t, d, 3, presumed...)
	}
	must(t, d.Commit(r1, serves("pkg.A")))
	want("a commit", "pkg.A:50051<1")
	must(t, d.Commit(r2, ports(heard(50051, nodecache.PortEmpty))))
	want("a commit that disproves")
	must(t, d.Revise(r2, d.Owner(revision(2)).Info, serves("pkg.B")))
	want("a revision", "pkg.B:50051<2")
	add(d, 2, hinting(9090))
	want("a pod that changes", "pkg.B:50051<2")
	d.RemovePod("r2")
	want("the last pod that goes", "pkg.B:50051<2")
	d.UpsertPod(pod("r1b", "192.0.2.9", of(1), created(59)))
	quietBut(t, sub, revision(1), revision(3))
	d = nodecache.New(nodecache.Options{})
	add(d, 3)
	sub = subscribe(t, d)
	sub.Poll()
	d.Restore([]nodecache.SavedInfo{{Key: revision(1), Workload: pod("", "192.0.2.1").Workload, Info: serves("pkg.A")}}, time.Now())
	want("a restored owner", "pkg.A:50051<1")
}

// quietBut fails if others than these were told of.
func quietBut(t *testing.T, s *nodecache.Subscription, keys ...nodecache.OwnerKey) {
	t.Helper()
	for _, key := range s.Poll() {
		if !slices.Contains(keys, key) {
			t.Errorf("told of %s", key)
		}
	}
}
