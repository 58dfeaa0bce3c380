package collect

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// bench is a collector in a synctest bubble whose ports are a function.
type bench struct {
	*Collector
	mu    sync.Mutex
	begun time.Time
	calls []call
}

type call struct {
	at   time.Duration // since the beginning
	addr netip.Addr
}

// port answers one attempt on a port; opened says that a connection came
// about.
type port func(addr netip.AddrPort, opened func()) (Result, error)

// inBubble runs a test with the clock of a bubble.
func inBubble(t *testing.T, o Options, limits schedule.Options, answer port, test func(b *bench)) {
	synctest.Test(t, func(t *testing.T) {
		sched := schedule.New(limits)
		o.Directory, o.Scheduler = nodecache.New(nodecache.Options{}), sched
		b := &bench{Collector: New(o), begun: time.Now()}
		b.reflect = func(ctx context.Context, addr netip.AddrPort, opened func()) (Result, error) {
			b.mu.Lock()
			b.calls = append(b.calls, call{time.Since(b.begun), addr.Addr()})
			b.mu.Unlock()
			return answer(addr, opened)
		}
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { sched.Run(ctx) })
		running.Go(func() { b.Run(ctx) })
		test(b)
		cancel()
		running.Wait()
	})
}

// after lets time pass and returns the calls so far.
func (b *bench) after(d time.Duration) []call {
	time.Sleep(d) // of the bubble's clock
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.calls)
}

func testKey(owner string) nodecache.OwnerKey { return nodecache.OwnerKey{UID: owner} }

func testPod(uid, owner, addr string) *nodecache.Pod {
	return &nodecache.Pod{
		UID: uid, Name: uid, State: nodecache.Serving, Addr: netip.MustParseAddr(addr),
		Common: &nodecache.Common{Namespace: "prod", Owner: testKey(owner), Hints: []nodecache.Hint{{Port: 50051}}},
	}
}

func refuse(netip.AddrPort, func()) (Result, error) {
	return Result{}, &Failure{Class: Refused, Detail: "nobody listens"}
}

func serving(addr netip.AddrPort, opened func()) (Result, error) {
	opened()
	return Result{PortInfo: nodecache.PortInfo{
		Port: addr.Port(), State: nodecache.PortServes, Services: []nodecache.Service{{Name: "a.B", Undescribed: true}},
	}}, nil
}

func TestFailuresAreTriedAgainEverLater(t *testing.T) {
	inBubble(t, Options{}, schedule.Options{}, refuse, func(b *bench) {
		b.dir.UpsertPod(testPod("p", "a", "192.0.2.1"))
		calls := b.after(20 * time.Minute)
		waits := []time.Duration{time.Second, 5 * time.Second, 30 * time.Second, 5 * time.Minute, 5 * time.Minute}
		if len(calls) < len(waits)+1 {
			t.Fatalf("%d attempts: %v", len(calls), calls)
		}
		for i, w := range waits {
			if got := calls[i+1].at - calls[i].at; got < w || got > w+w/5 {
				t.Errorf("wait %d is %s, want %s and up to a fifth more", i, got, w)
			}
		}
	})
}

func TestHeavyFailureIsLeftAloneForTenMinutesInEveryGeneration(t *testing.T) {
	for _, class := range []Class{Deadline, Exhausted} {
		t.Run(string(class), func(t *testing.T) {
			fail := func(_ netip.AddrPort, opened func()) (Result, error) {
				opened()
				return Result{}, &Failure{Class: class, Detail: "x"}
			}
			inBubble(t, Options{}, schedule.Options{}, fail, func(b *bench) {
				// Three pods: the others run the same program.
				for i := range 3 {
					b.dir.UpsertPod(testPod(fmt.Sprint(i), "a", fmt.Sprint("192.0.2.", i+1)))
				}
				b.after(time.Minute)
				for i := range 3 {
					b.dir.RemovePod(fmt.Sprint(i))
				}
				b.dir.UpsertPod(testPod("new", "a", "192.0.2.9"))
				if calls := b.after(8 * time.Minute); len(calls) != 1 {
					t.Errorf("attempts within ten minutes: %v", calls)
				}
				o := b.dir.Owner(testKey("a"))
				if o.Knowledge != nodecache.Failed || o.NextTry.Sub(b.begun) < 10*time.Minute || o.Reason == "" {
					t.Errorf("the new generation is %s: %q, next %s", o.Knowledge, o.Reason, o.NextTry.Sub(b.begun))
				}
				calls := b.after(3 * time.Hour)
				if len(calls) < 4 {
					t.Fatalf("attempts: %v", calls)
				}
				for i := range 3 {
					w := 10 * time.Minute << i
					if got := calls[i+1].at - calls[i].at; got < w || got > w+w/5 {
						t.Errorf("wait %d is %s, want %s and up to a fifth more", i, got, w)
					}
				}
			})
		})
	}
}

// No port of an owner gets more than five connections within any hour, however
// many pods come and go.
func TestConnectionsAreLimitedPerTime(t *testing.T) {
	silent := func(_ netip.AddrPort, opened func()) (Result, error) {
		opened()
		return Result{}, &Failure{Class: Silent, Detail: "x"}
	}
	inBubble(t, Options{}, schedule.Options{}, silent, func(b *bench) {
		for i := range 360 {
			if i%7 == 0 {
				for uid := range 10 {
					b.dir.RemovePod(fmt.Sprint(uid))
				}
			}
			b.dir.UpsertPod(testPod(fmt.Sprint(i%10), "a", fmt.Sprint("192.0.2.", i%10+1)))
			b.after(time.Minute)
		}
		calls := b.after(0)
		if len(calls) < 20 {
			t.Errorf("only %d connections in six hours", len(calls))
		}
		for i := 5; i < len(calls); i++ {
			if d := calls[i].at - calls[i-5].at; d < time.Hour {
				t.Fatalf("six connections within %s: %v", d, calls)
			}
		}
	})
}

func TestNewPodIsAskedBeforeTheWaitIsOver(t *testing.T) {
	answer := func(addr netip.AddrPort, opened func()) (Result, error) {
		if addr.Addr() == netip.MustParseAddr("192.0.2.2") {
			return serving(addr, opened)
		}
		return refuse(addr, opened)
	}
	inBubble(t, Options{}, schedule.Options{}, answer, func(b *bench) {
		b.dir.UpsertPod(testPod("p", "a", "192.0.2.1"))
		n := len(b.after(2 * time.Minute)) // the next attempt is minutes away
		b.dir.UpsertPod(testPod("p", "a", "192.0.2.1"))
		if got := len(b.after(0)); got != n {
			t.Errorf("the pod that failed was asked again at once")
		}
		b.dir.UpsertPod(testPod("q", "a", "192.0.2.2"))
		b.after(0)
		if k := b.dir.Owner(testKey("a")).Knowledge; k != nodecache.Known {
			t.Errorf("the owner is %s after a pod that answers came", k)
		}
	})
}

func TestHangUpCountsAsTLSWhenItHappensTwice(t *testing.T) {
	hangUp := func(addr netip.AddrPort, opened func()) (Result, error) {
		opened()
		return Result{PortInfo: nodecache.PortInfo{Port: addr.Port(), State: nodecache.PortTLS}, Unsure: true}, nil
	}
	inBubble(t, Options{}, schedule.Options{}, hangUp, func(b *bench) {
		b.dir.UpsertPod(testPod("p", "a", "192.0.2.1"))
		b.after(0)
		if k := b.dir.Owner(testKey("a")).Knowledge; k != nodecache.Failed {
			t.Errorf("after one hang-up the owner is %s", k)
		}
		calls := b.after(2 * time.Second)
		if o := b.dir.Owner(testKey("a")); o.Knowledge != nodecache.None || o.Info.Ports[0].State != nodecache.PortTLS || len(calls) != 2 {
			t.Errorf("after two hang-ups the owner is %s, %d calls", o.Knowledge, len(calls))
		}
	})
}

func TestPodsOfThisNodeThenThoseNotAskedThenByName(t *testing.T) {
	inBubble(t, Options{Node: "n1"}, schedule.Options{}, refuse, func(b *bench) {
		for i, uid := range []string{"a", "b", "c", "d", "e"} {
			p := testPod(uid, "a", fmt.Sprint("192.0.2.", i+1))
			p.CollectOff = true
			if uid == "d" {
				p.Node = "n1"
			}
			b.dir.UpsertPod(p)
		}
		b.after(0)
		o := b.dir.Owner(testKey("a"))
		order := func() string {
			s := ""
			for _, m := range b.order(o.Key, slices.Clone(o.Pods)) {
				s += m.UID
			}
			return s
		}
		if got := order(); got != "dabce" {
			t.Errorf("order %s", got)
		}
		b.Collector.mu.Lock()
		b.failed[o.Key] = &failures{asked: map[string]bool{"d": true, "a": true, "b": true}}
		b.Collector.mu.Unlock()
		if got := order(); got != "dceab" {
			t.Errorf("order after a failure %s", got)
		}
	})
}

// What is known of the ways to pods decides between those that may be asked alike:
// one that cannot be reached is asked last, and one that costs less before others.
func TestPodsThatCostLessAreAskedBefore(t *testing.T) {
	cost := func(p *nodecache.Pod) (time.Duration, bool) {
		return map[string]time.Duration{"a": 300, "b": 200, "c": 100, "d": 400, "e": 200}[p.UID], p.UID != "c" && p.UID != "f"
	}
	inBubble(t, Options{Node: "n1", Cost: cost}, schedule.Options{}, refuse, func(b *bench) {
		for i, uid := range []string{"a", "b", "c", "d", "e", "f"} {
			p := testPod(uid, "a", fmt.Sprint("192.0.2.", i+1))
			p.CollectOff = true
			if uid == "d" || uid == "f" {
				p.Node = "n1"
			}
			b.dir.UpsertPod(p)
		}
		b.after(0)
		o := b.dir.Owner(testKey("a"))
		order := func() (s string) {
			for _, m := range b.order(o.Key, slices.Clone(o.Pods)) {
				s += m.UID
			}
			return s
		}
		if got := order(); got != "dbeafc" {
			t.Errorf("order %s", got)
		}
		b.Collector.mu.Lock()
		b.failed[o.Key] = &failures{asked: map[string]bool{"b": true}}
		b.Collector.mu.Unlock()
		if got := order(); got != "deabfc" {
			t.Errorf("order after a failure %s", got)
		}
	})
}

// The waiting collect of an owner that a caller wants goes first.
func TestWantedOwnerGoesFirst(t *testing.T) {
	answer := func(addr netip.AddrPort, opened func()) (Result, error) {
		time.Sleep(time.Second) // of the bubble's clock
		return serving(addr, opened)
	}
	inBubble(t, Options{}, schedule.Options{Limits: schedule.Limits{Total: 1}}, answer, func(b *bench) {
		for i := range 5 {
			b.dir.UpsertPod(testPod(fmt.Sprint(i), fmt.Sprint("o", i), fmt.Sprint("192.0.2.", i+1)))
			b.after(0)
		}
		b.Want(testKey("o3"))
		calls := b.after(time.Minute)
		if len(calls) != 5 || calls[1].addr != netip.MustParseAddr("192.0.2.4") {
			t.Errorf("calls %v, want that of o3 second", calls)
		}
	})
}

// What a full queue dropped is found again, at the latest by the sweep.
func TestDroppedFlightIsFoundAgain(t *testing.T) {
	answer := func(addr netip.AddrPort, opened func()) (Result, error) {
		time.Sleep(time.Second) // of the bubble's clock
		return serving(addr, opened)
	}
	inBubble(t, Options{}, schedule.Options{Limits: schedule.Limits{Total: 1}, Queue: 2}, answer, func(b *bench) {
		for i := range 5 {
			b.dir.UpsertPod(testPod(fmt.Sprint(i), fmt.Sprint("o", i), fmt.Sprint("192.0.2.", i+1)))
		}
		if n := len(b.after(30 * time.Second)); n == 5 {
			t.Fatal("nothing was dropped")
		}
		b.Want(testKey("o1"))
		b.after(5 * sweepEvery)
		for i := range 5 {
			if k := b.dir.Owner(testKey(fmt.Sprint("o", i))).Knowledge; k != nodecache.Known {
				t.Errorf("o%d is %s", i, k)
			}
		}
	})
}

func TestWaiterReturnsWithItsOwnContext(t *testing.T) {
	answer := func(addr netip.AddrPort, opened func()) (Result, error) {
		time.Sleep(time.Minute) // of the bubble's clock
		return serving(addr, opened)
	}
	inBubble(t, Options{}, schedule.Options{}, answer, func(b *bench) {
		b.dir.UpsertPod(testPod("p", "a", "192.0.2.1"))
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		from := time.Now()
		if err := b.Wait(ctx, testKey("a")); err == nil || time.Since(from) != time.Second {
			t.Errorf("Wait returned %v after %s", err, time.Since(from))
		}
	})
}
