package collect

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// What a client holds must not be taken from it because a server hangs while
// the agent starts; nor may one that hangs for ever keep its clients from news.
func TestServerThatHangsIsHungForAWhileAndThenFailed(t *testing.T) {
	for class, hangs := range map[Class]bool{Deadline: true, Silent: true, Refused: false, Exhausted: false} {
		synctest.Test(t, func(t *testing.T) {
			sched, dir := schedule.New(schedule.Options{}), nodecache.New(nodecache.Options{})
			c := New(Options{Directory: dir, Scheduler: sched})
			c.reflect = func(context.Context, netip.AddrPort, func()) (Result, error) {
				return Result{}, &Failure{Class: class, Detail: "tried"}
			}
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { sched.Run(ctx) })
			running.Go(func() { c.Run(ctx) })
			key := dir.UpsertPod(&nodecache.Pod{
				UID: "a", Namespace: "prod", Name: "a", Owner: nodecache.OwnerKey{UID: "o"}, State: nodecache.Serving,
				Addr: netip.MustParseAddr("192.0.2.1"), Hints: []nodecache.Hint{{Port: 50051}},
			}).Key
			synctest.Wait()
			if o := dir.Owner(key); o.Knowledge != nodecache.Failed || o.Hung != hangs {
				t.Errorf("%s: %s, hung %v, want %v", class, o.Knowledge, o.Hung, hangs)
			}
			time.Sleep(20 * time.Minute) // of the bubble's clock
			synctest.Wait()
			if o := dir.Owner(key); o.Knowledge != nodecache.Failed || o.Hung {
				t.Errorf("%s: after 20 minutes %s, hung %v", class, o.Knowledge, o.Hung)
			}
			cancel()
			running.Wait()
		})
	}
}
