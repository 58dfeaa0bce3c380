package nodecache_test

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// collector stands for the slow call over the network: it holds every caller
// until the test answers it.
type collector struct {
	started chan *call
	calls   atomic.Int32
}

// call is one caller that is held.
type call struct {
	key    nodecache.OwnerKey
	answer chan answer
}

type answer struct {
	info *nodecache.Info
	err  error
}

func newCollector() *collector { return &collector{started: make(chan *call, 64)} }

func (c *collector) collect(key nodecache.OwnerKey) (*nodecache.Info, error) {
	c.calls.Add(1)
	held := &call{key, make(chan answer, 1)}
	c.started <- held
	a := <-held.answer
	return a.info, a.err
}

// held waits until a caller is held.
func (c *collector) held(t *testing.T) *call {
	t.Helper()
	return receive(t, c.started)
}

func receive[T any](t *testing.T, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatal("nothing came")
		panic("unreachable")
	}
}

// handle does with a pod event what an agent does: it upserts, and collects
// if nobody else is at it. It returns what became of the collect.
func handle(d *nodecache.Directory, c *collector, p *nodecache.Pod) error {
	d.UpsertPod(p)
	r, err := d.Begin(p.Owner)
	if err != nil {
		return err
	}
	info, err := c.collect(p.Owner)
	if err != nil {
		return errors.Join(err, d.Fail(r, err.Error(), time.Time{}))
	}
	return d.Commit(r, info)
}

// async runs handle beside the test and returns where its result comes.
func async(d *nodecache.Directory, c *collector, p *nodecache.Pod) <-chan error {
	done := make(chan error, 1)
	go func() { done <- handle(d, c, p) }()
	return done
}

// together runs the functions at the same moment, as near as can be, and waits
// for all.
func together(fs ...func()) {
	var ready atomic.Int32
	var wg sync.WaitGroup
	for _, f := range fs {
		wg.Go(func() {
			ready.Add(1)
			// Closer than a channel: no wake-up between the last to come and
			// the others, unless there is no CPU for them.
			for i := 1; ready.Load() < int32(len(fs)); i++ {
				if i%1000 == 0 {
					runtime.Gosched()
				}
			}
			f()
		})
	}
	wg.Wait()
}

// rounds is how often a race is run that no barrier can force through the
// public API alone.
func rounds() int {
	if testing.Short() {
		return 500
	}
	return 5000
}
