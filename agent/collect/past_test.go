package collect

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// restarts runs one collector after the other, each for so long and with what
// the one before left, and returns when connections were made.
func restarts(t *testing.T, n int, each time.Duration, class Class) (calls []time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		var past []nodecache.SavedPast
		for range n {
			sched := schedule.New(schedule.Options{})
			dir := nodecache.New(nodecache.Options{})
			c := New(Options{Directory: dir, Scheduler: sched, Past: past})
			c.reflect = func(_ context.Context, _ netip.AddrPort, opened func()) (Result, error) {
				opened()
				calls = append(calls, time.Since(begun))
				return Result{}, &Failure{Class: class, Detail: "x"}
			}
			ctx, cancel := context.WithCancel(context.Background())
			var running sync.WaitGroup
			running.Go(func() { sched.Run(ctx) })
			running.Go(func() { c.Run(ctx) })
			dir.UpsertPod(testPod("p", "a", "192.0.2.1"))
			dir.UpsertPod(testPod("q", "a", "192.0.2.2"))
			time.Sleep(each) // of the bubble's clock
			synctest.Wait()
			if o := dir.Owner(testKey("a")); o.Knowledge != nodecache.Failed || o.NextTry.Before(time.Now()) {
				t.Errorf("after %s the owner is %s, next try %s", time.Since(begun), o.Knowledge, o.NextTry)
			}
			past = c.Past()
			cancel()
			running.Wait()
		}
	})
	return calls
}

func TestConnectionsAreLimitedOverRestarts(t *testing.T) {
	for _, each := range []time.Duration{time.Second / 2, 3 * time.Minute, 40 * time.Minute} {
		n := int(6 * time.Hour / each)
		calls := restarts(t, min(n, 2000), each, Unavailable)
		if len(calls) < 5 {
			t.Errorf("only %d connections", len(calls))
		}
		for i := 5; i < len(calls); i++ {
			if d := calls[i] - calls[i-5]; d < time.Hour {
				t.Fatalf("restarts each %s: six connections within %s: %v", each, d, calls)
			}
		}
	}
}

func TestServerIsLeftAloneOverRestarts(t *testing.T) {
	calls := restarts(t, 120, time.Minute, Deadline)
	if len(calls) < 3 || len(calls) > 4 { // after 10, 20 and 40 minutes, and a fifth more
		t.Errorf("%d connections in two hours: %v", len(calls), calls)
	}
	for i := range min(1, len(calls)-1) {
		if calls[i+1]-calls[i] < heavyLeast {
			t.Errorf("asked again after %s", calls[i+1]-calls[i])
		}
	}
}

// What a clock that went ahead has left binds no longer than what happens now.
func TestPastOfAClockThatWentAheadEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		ahead := now.Add(100 * time.Hour)
		c := New(Options{Directory: nodecache.New(nodecache.Options{}), Scheduler: schedule.New(schedule.Options{}), Past: []nodecache.SavedPast{{
			Key: testKey("a"), Calls: map[uint16][]time.Time{1: slices.Repeat([]time.Time{ahead}, 7)},
			Failure: &nodecache.SavedFailure{Since: ahead, Count: 1, Class: string(Deadline), Next: ahead},
		}}})
		if got := c.calls.free(callKey{testKey("a"), 1}, now).Sub(now); got != callWindow {
			t.Errorf("the next connection is made after %s", got)
		}
		if f, held := c.held(testKey("a")); !held || f.next.Sub(now) > heavyMost*2 || f.since.After(now) {
			t.Errorf("held: %t, %+v", held, f)
		}
		for _, p := range c.Past() {
			if p.Until.Sub(now) > heavyMost*2 {
				t.Errorf("ends %s", p.Until)
			}
		}
	})
}
