package report_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/agent/report"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// world is a directory with a follower, in a synctest bubble.
type world struct {
	t        *testing.T
	dir      *nodecache.Directory
	follower *report.Follower
	registry *prometheus.Registry
	said     []string // "reason object message"
}

func newWorld(t *testing.T) *world {
	return &world{t: t, dir: nodecache.New(nodecache.Options{}), registry: prometheus.NewRegistry()}
}

// follow starts the follower on what the directory holds.
func (w *world) follow() *world {
	c, err := resources.New(resources.Options{EgressPort: 15001, Locality: "even"})
	if err != nil {
		w.t.Fatal(err)
	}
	sub := w.dir.Subscribe()
	w.follower = report.NewFollower(report.Options{
		Directory: w.dir, Logger: slog.New(slog.DiscardHandler), Metrics: w.registry,
		Claimants: func(namespace, service string) (string, []*nodecache.Owner) {
			c.Apply(w.dir, sub.Poll())
			return c.Claimants(namespace, service)
		},
		Say: func(e report.Event) {
			w.said = append(w.said, fmt.Sprintf("%s %s/%s %s", e.Reason, e.Object.Kind, e.Object.Name, e.Message))
		},
	})
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() { w.follower.Run(ctx); close(done) }()
	w.t.Cleanup(func() { cancel(); <-done; sub.Close() })
	synctest.Wait() // it has begun
	return w
}

// pod is one of a revision of Deployment web, named by a letter, the later the
// younger.
func pod(revision, pod string, declared ...string) *nodecache.Pod {
	p := &nodecache.Pod{
		UID: revision + pod, Name: "web-" + revision + "-" + pod, Node: "n1",
		State: nodecache.Serving, Addr: netip.AddrFrom4([4]byte{10, 0, revision[0], pod[0]}),
		Created: time.Date(2026, 5, 1, 12, int(revision[0]), 0, 0, time.UTC),
		Common: &nodecache.Common{
			Namespace: "prod", Owner: key(revision), OwnerName: "ReplicaSet/web-" + revision,
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "web"},
			Hints:    []nodecache.Hint{{Port: 50051, Why: "port name"}},
		},
	}
	if declared != nil {
		p.Declared = []nodecache.Declared{{Port: 50051, Services: declared}}
	}
	return p
}

func key(revision string) nodecache.OwnerKey {
	return nodecache.OwnerKey{UID: "rs-" + revision, Revision: revision}
}

func info(state nodecache.PortState, services ...string) *nodecache.Info {
	port := nodecache.PortInfo{Port: 50051, State: state}
	for _, name := range services {
		port.Services = append(port.Services, nodecache.Service{Name: name})
	}
	return &nodecache.Info{Ports: []nodecache.PortInfo{port}, Origin: nodecache.OriginSelf, Collected: time.Now()}
}

// collected adds a pod and what its owner was found to serve.
func (w *world) collected(p *nodecache.Pod, i *nodecache.Info) *nodecache.Info {
	w.t.Helper()
	w.dir.UpsertPod(p)
	r, err := w.dir.Begin(p.Owner)
	if err == nil {
		err = w.dir.Commit(r, i)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return i
}

// says fails unless exactly these reasons were given since the last time, each
// with the object's name and the services.
func (w *world) says(want ...string) {
	w.t.Helper()
	time.Sleep(time.Second) // of the bubble
	synctest.Wait()
	var got []string
	for _, s := range w.said {
		f := strings.SplitN(s, " ", 3)
		_, services, _ := strings.Cut(f[2], ": ")
		if f[0] == report.ReasonClaimed {
			services, _, _ = strings.Cut(strings.TrimPrefix(f[2], "serves "), ",")
		}
		got = append(got, f[0]+" "+f[1]+" "+services)
	}
	slices.Sort(got)
	if w.said = nil; !slices.Equal(got, want) {
		w.t.Errorf("said %q, want %q", got, want)
	}
}

func (w *world) change(revision, previous string, added, dropped []string) {
	w.t.Helper()
	want := report.Change{Added: added, Dropped: dropped}
	if previous != "" {
		want.Previous = key(previous)
	}
	if got := w.follower.Change(key(revision)); fmt.Sprint(got) != fmt.Sprint(want) {
		w.t.Errorf("change of %s: %+v, want %+v", revision, got, want)
	}
}

func (w *world) counted(kind string) (n float64) {
	w.t.Helper()
	families, err := w.registry.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "fingerpost_contract_changes_total" && m.GetLabel()[0].GetValue() == kind {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

func bubble(t *testing.T, run func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { run(newWorld(t)) })
}

func TestRolloutThatChangesServicesIsToldOnce(t *testing.T) {
	bubble(t, func(w *world) {
		w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.Cart", "shop.Old"))
		w.follow().says()
		w.dir.UpsertPod(pod("b", "1"))
		w.says() // not known yet
		w.collected(pod("b", "1"), info(nodecache.PortServes, "shop.Cart", "shop.New"))
		w.says("ServicesAdded ReplicaSet/web-b shop.New", "ServicesDropped ReplicaSet/web-b shop.Old")
		w.change("b", "a", []string{"shop.New"}, []string{"shop.Old"})
		w.change("a", "", nil, nil)

		w.dir.UpsertPod(pod("b", "2"))
		w.dir.RemovePod("a1")
		w.says()
		w.dir.RemovePod("b1") // and the readiness of the last flaps
		w.dir.RemovePod("b2")
		w.dir.UpsertPod(pod("b", "2"))
		w.says()
		w.dir.Expire(time.Now().Add(time.Hour)) // what the old one served is forgotten
		w.says()
		w.change("b", "a", []string{"shop.New"}, []string{"shop.Old"})
		if a, d := w.counted("added"), w.counted("dropped"); a != 1 || d != 1 {
			t.Errorf("counted %v added, %v dropped", a, d)
		}
	})
}

// What is declared is as good as what was collected, and outlives its pods.
func TestDeclaredRevisionsAreComparedAfterTheOldPodsWent(t *testing.T) {
	bubble(t, func(w *world) {
		w.dir.UpsertPod(pod("a", "1", "shop.Cart", "shop.Old"))
		w.follow().says()
		w.dir.RemovePod("a1")
		w.dir.UpsertPod(pod("b", "1", "shop.Cart"))
		w.says("ServicesDropped ReplicaSet/web-b shop.Old")
	})
}

func TestRevisionsFoundAtTheStartAreShownAndNotTold(t *testing.T) {
	bubble(t, func(w *world) {
		w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.Old"))
		w.collected(pod("b", "1"), info(nodecache.PortServes, "shop.New"))
		w.follow().says()
		w.change("b", "a", []string{"shop.New"}, []string{"shop.Old"})
	})
}

// After a restart the checkpoint has told what it holds; a revision that came
// meanwhile is news.
func TestRestartRepeatsNothingAndMissesNothing(t *testing.T) {
	saved := func(revision string, i *nodecache.Info) nodecache.SavedInfo {
		return nodecache.SavedInfo{Key: key(revision), Name: "ReplicaSet/web-" + revision, Workload: pod("a", "1").Workload, Info: i}
	}
	bubble(t, func(w *world) {
		w.dir.Restore([]nodecache.SavedInfo{
			saved("a", info(nodecache.PortServes, "shop.Old")), saved("b", info(nodecache.PortServes, "shop.New")),
		}, time.Now())
		w.dir.UpsertPod(pod("b", "1"))
		w.follow().says()
		w.change("b", "a", []string{"shop.New"}, []string{"shop.Old"})
	})
	bubble(t, func(w *world) {
		w.dir.Restore([]nodecache.SavedInfo{saved("a", info(nodecache.PortServes, "shop.Old"))}, time.Now())
		w.collected(pod("b", "1"), info(nodecache.PortServes, "shop.New"))
		w.follow().says("ServicesAdded ReplicaSet/web-b shop.New", "ServicesDropped ReplicaSet/web-b shop.Old")
	})
}

func TestWhatIsNotKnownDropsNothing(t *testing.T) {
	for _, state := range []nodecache.PortState{nodecache.PortNoReflection, nodecache.PortDenied, nodecache.PortTLS, nodecache.PortNotGRPC} {
		bubble(t, func(w *world) {
			w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.Cart"))
			w.follow()
			w.collected(pod("b", "1"), info(state))
			w.says()
			// Nor does it add anything to the next.
			w.collected(pod("c", "1"), info(nodecache.PortServes, "shop.Cart"))
			w.says()
		})
	}
	bubble(t, func(w *world) {
		w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.Cart"))
		w.follow()
		w.collected(pod("b", "1"), info(nodecache.PortEmpty)) // which is an answer
		w.says("ServicesDropped ReplicaSet/web-b shop.Cart")
	})
}

// Callers go by what was served before it.
func TestRevisionThatCouldNotSayIsPassedOver(t *testing.T) {
	for _, how := range []string{"denied", "failed", "not asked yet"} {
		bubble(t, func(w *world) {
			w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.Cart", "shop.Old"))
			w.follow()
			switch how {
			case "denied":
				w.collected(pod("b", "1"), info(nodecache.PortDenied))
			case "failed":
				w.dir.UpsertPod(pod("b", "1"))
				r, err := w.dir.Begin(key("b"))
				if err == nil {
					err = w.dir.Fail(r, "refused", time.Now().Add(time.Minute))
				}
				if err != nil {
					t.Fatal(err)
				}
			default:
				w.dir.UpsertPod(pod("b", "1"))
			}
			w.says()
			w.dir.RemovePod("a1")
			w.collected(pod("c", "1"), info(nodecache.PortServes, "shop.Cart", "shop.New"))
			if how == "not asked yet" { // it may still say
				w.says()
				w.change("c", "", nil, nil)
				return
			}
			w.says("ServicesAdded ReplicaSet/web-c shop.New", "ServicesDropped ReplicaSet/web-c shop.Old")
			w.change("c", "a", []string{"shop.New"}, []string{"shop.Old"})
		})
	}
}

func TestOwnerThatServesLessThanBeforeIsTold(t *testing.T) {
	bubble(t, func(w *world) {
		was := w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.Cart", "shop.Old"))
		w.follow().says()
		revise := func(services ...string) {
			now := info(nodecache.PortServes, services...)
			o := w.dir.Owner(key("a"))
			if err := w.dir.Revise(nodecache.Reservation{Key: o.Key, Generation: o.Generation}, was, now); err != nil {
				t.Fatal(err)
			}
			was = now
		}
		revise("shop.Cart")
		w.says("ServicesDropped ReplicaSet/web-a shop.Old")
		w.change("a", "a", nil, []string{"shop.Old"})
		revise("shop.Cart", "shop.Old")
		w.says()
		w.change("a", "", nil, nil)
		revise("shop.Cart")
		w.says() // one that comes and goes is told once
	})
}

func TestWayBackIsTold(t *testing.T) {
	bubble(t, func(w *world) {
		w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.Old"))
		w.follow()
		w.collected(pod("b", "1"), info(nodecache.PortServes, "shop.New"))
		w.says("ServicesAdded ReplicaSet/web-b shop.New", "ServicesDropped ReplicaSet/web-b shop.Old")
		w.dir.RemovePod("a1")
		back := pod("a", "2")
		back.Created = pod("c", "1").Created
		w.dir.UpsertPod(back)
		w.says("ServicesAdded ReplicaSet/web-a shop.Old", "ServicesDropped ReplicaSet/web-a shop.New")
		w.dir.RemovePod("b1")
		w.says()
	})
	bubble(t, func(w *world) {
		w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.A"))
		w.follow()
		w.collected(pod("b", "1"), info(nodecache.PortServes, "shop.B"))
		w.says("ServicesAdded ReplicaSet/web-b shop.B", "ServicesDropped ReplicaSet/web-b shop.A")
		w.collected(pod("c", "1"), info(nodecache.PortServes, "shop.C"))
		w.says("ServicesAdded ReplicaSet/web-c shop.C", "ServicesDropped ReplicaSet/web-c shop.B")
		w.dir.RemovePod("b1")
		back := pod("b", "2")
		back.Created = pod("d", "1").Created
		w.dir.UpsertPod(back)
		w.says("ServicesAdded ReplicaSet/web-b shop.B", "ServicesDropped ReplicaSet/web-b shop.C")
		w.change("b", "c", []string{"shop.B"}, []string{"shop.C"})
	})
}

func TestNewWorkloadAddsNothing(t *testing.T) {
	bubble(t, func(w *world) {
		w.follow()
		p := pod("a", "1", "shop.Declared")
		p.Hints = append(p.Hints, nodecache.Hint{Port: 50052, Why: "port name"})
		w.dir.UpsertPod(p)
		w.says()
		found := info(nodecache.PortServes, "shop.Cart")
		found.Ports[0].Port = 50052
		w.collected(p, found)
		w.says()
	})
}

// The age of a revision outlives its pods.
func TestAgeIsRememberedOfRevisionsWithoutPods(t *testing.T) {
	bubble(t, func(w *world) {
		w.follow()
		for minute, p := range []*nodecache.Pod{pod("z", "1", "shop.Z"), pod("y", "1", "shop.Y"), pod("x", "1", "shop.X")} {
			p.Created = time.Date(2026, 5, 1, 12, minute, 0, 0, time.UTC)
			w.dir.UpsertPod(p)
			synctest.Wait()
			time.Sleep(time.Second)
			if minute < 2 {
				w.dir.RemovePod(p.UID)
			}
		}
		w.says("ServicesAdded ReplicaSet/web-x shop.X", "ServicesAdded ReplicaSet/web-y shop.Y",
			"ServicesDropped ReplicaSet/web-x shop.Y", "ServicesDropped ReplicaSet/web-y shop.Z")
	})
}

// The revision before is the one by age, in every order of arrival.
func TestAgeOrdersRevisions(t *testing.T) {
	bubble(t, func(w *world) {
		w.follow()
		w.collected(pod("c", "1"), info(nodecache.PortServes, "shop.Cart"))
		w.collected(pod("b", "1"), info(nodecache.PortServes, "shop.Cart", "shop.B"))
		w.collected(pod("a", "1"), info(nodecache.PortServes, "shop.Cart", "shop.A"))
		w.says("ServicesAdded ReplicaSet/web-b shop.B", "ServicesDropped ReplicaSet/web-b shop.A", "ServicesDropped ReplicaSet/web-c shop.B")
	})
}

func TestClaimantIsNamedOnce(t *testing.T) {
	bubble(t, func(w *world) {
		other := func(uid string) *nodecache.Pod {
			p := pod("x", uid, "shop.Cart", "shop.Mine")
			p.OwnerName, p.Workload.Name = "ReplicaSet/zoo-x", "zoo"
			return p
		}
		w.dir.UpsertPod(pod("a", "1", "shop.Cart"))
		w.follow().says()
		w.dir.UpsertPod(other("1"))
		w.says("ServiceClaimed ReplicaSet/zoo-x shop.Cart")
		w.dir.UpsertPod(other("2"))
		w.dir.UpsertPod(pod("a", "2", "shop.Cart"))
		w.says()
		// A new revision of the provider changes nothing, one of the claimant is
		// another claimant.
		w.dir.UpsertPod(pod("b", "1", "shop.Cart"))
		w.says()
		next := other("3")
		next.Owner, next.OwnerName = key("y"), "ReplicaSet/zoo-y"
		next.Created = next.Created.Add(time.Minute)
		w.dir.UpsertPod(next)
		w.says("ServiceClaimed ReplicaSet/zoo-y shop.Cart")
	})
}

func TestIgnoredAnnotationsAreToldOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		bad := func(revision, name string, texts ...string) {
			p := pod(revision, name, "pkg.A")
			p.Ignored = texts
			w.dir.UpsertPod(p)
		}
		bad("a", "1", "annotation x: 1")
		w.follow()
		w.says("AnnotationIgnored ReplicaSet/web-a 1")
		bad("a", "2", "annotation x: 1")
		w.says()
		bad("a", "2", "annotation x: 1", "annotation y: 2")
		w.says("AnnotationIgnored ReplicaSet/web-a 2")
		bad("b", "1", "annotation x: 1")
		w.says("AnnotationIgnored ReplicaSet/web-b 1")
		bad("b", "1")
		w.says()
	})
}
