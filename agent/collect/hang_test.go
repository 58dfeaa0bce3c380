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
	for _, test := range []struct {
		class       Class
		opens, hung bool
	}{
		{Deadline, true, true},
		{Silent, true, true},
		{Silent, false, false}, // no answer to the connect
		{Refused, false, false},
		{Exhausted, true, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			sched, dir := schedule.New(schedule.Options{}), nodecache.New(nodecache.Options{})
			c := New(Options{Directory: dir, Scheduler: sched})
			c.reflect = func(_ context.Context, _ netip.AddrPort, opened func()) (Result, error) {
				if test.opens {
					opened()
				}
				return Result{}, &Failure{Class: test.class, Detail: "tried"}
			}
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { sched.Run(ctx) })
			running.Go(func() { c.Run(ctx) })
			key := dir.UpsertPod(&nodecache.Pod{
				UID: "a", Name: "a", State: nodecache.Serving, Addr: netip.MustParseAddr("192.0.2.1"),
				Common: &nodecache.Common{Namespace: "prod", Owner: nodecache.OwnerKey{UID: "o"}, Hints: []nodecache.Hint{{Port: 50051}}},
			}).Key
			synctest.Wait()
			if o := dir.Owner(key); o.Knowledge != nodecache.Failed || o.Hung != test.hung {
				t.Errorf("%+v: %s, hung %v", test, o.Knowledge, o.Hung)
			}
			time.Sleep(20 * time.Minute) // of the bubble's clock
			synctest.Wait()
			if o := dir.Owner(key); o.Knowledge != nodecache.Failed || o.Hung {
				t.Errorf("%+v: after 20 minutes %s, hung %v", test, o.Knowledge, o.Hung)
			}
			cancel()
			running.Wait()
		})
	}
}
