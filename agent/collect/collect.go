package collect

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// Scope says which pods may be asked.
type Scope string

// The scopes. The empty Scope is ScopeCluster.
const (
	ScopeNode    Scope = "node"    // those of this node
	ScopeCluster Scope = "cluster" // all, those of this node first
)

// Options configures a [Collector].
type Options struct {
	Directory *nodecache.Directory // required
	Scheduler *schedule.Scheduler  // required
	// Node is the name of this node.
	Node  string
	Scope Scope
	// Placement shares the owners out among the agents of the cluster; nil: this
	// one collects all of which Scope lets it ask a pod.
	Placement Placement
	// Budget bounds the attempt on one port.
	Budget Budget
	// Past is what an earlier collector of this node left; see Collector.Past.
	Past []nodecache.SavedPast
	// Cost is what a connection to a pod takes from this node, and whether it
	// comes about at all, as far as is known: pods that cost less are asked
	// before others that may be asked as well. It is called under no lock; nil:
	// all cost the same.
	Cost func(*nodecache.Pod) (takes time.Duration, reachable bool)
	// Dial opens the connections; nil is a plain TCP dial.
	Dial DialFunc
	// Logger gets state changes only; nil is none.
	Logger *slog.Logger
	// Metrics registers the metrics; nil registers none.
	Metrics prometheus.Registerer
	// Witness is told what becomes of attempts; nil: nobody is.
	Witness Witness
}

// Witness is told of attempts to collect, for the record. It must not wait.
type Witness interface {
	CollectBegun(o *nodecache.Owner)
	// CollectEnded gets the result by the name that the metric gives it, and a
	// line that says more, which may be empty.
	CollectEnded(o *nodecache.Owner, result, detail string)
}

// Collector collects what the owners of a directory serve. Its methods are
// safe for concurrent use.
type Collector struct {
	// Set at creation and read-only.
	dir     *nodecache.Directory
	sched   *schedule.Scheduler
	node    string
	only    string    // the one node whose pods may be asked; empty: all
	place   Placement // nil: everything is here
	cost    func(*nodecache.Pod) (time.Duration, bool)
	log     *slog.Logger
	metrics *metrics
	witness Witness // nil: nobody
	// reflect asks one port; opened is called if a connection came about.
	reflect func(ctx context.Context, addr netip.AddrPort, opened func()) (Result, error)

	started chan struct{} // closed when Run begins
	stopped chan struct{} // closed when Run ends
	wake    chan struct{} // capacity 1: the timeline has a new first

	// mu guards everything below. Scheduler.mu may be taken under it, the
	// directory's not.
	mu       sync.Mutex
	ctx      context.Context // of Run; nil before
	flights  map[nodecache.OwnerKey]*schedule.Job
	failed   map[nodecache.OwnerKey]*failures
	plans    map[nodecache.OwnerKey]*plan
	timeline timeline
	calls    callLog

	pastChanges uint64
}

// New returns a collector that does nothing before Run.
func New(o Options) *Collector {
	c := &Collector{
		dir:     o.Directory,
		sched:   o.Scheduler,
		node:    o.Node,
		place:   o.Placement,
		cost:    o.Cost,
		log:     o.Logger,
		metrics: newMetrics(o.Metrics),
		witness: o.Witness,
		started: make(chan struct{}),
		stopped: make(chan struct{}),
		wake:    make(chan struct{}, 1),
		flights: map[nodecache.OwnerKey]*schedule.Job{},
		failed:  map[nodecache.OwnerKey]*failures{},
		plans:   map[nodecache.OwnerKey]*plan{},
		calls:   callLog{},
	}
	if c.cost == nil {
		c.cost = func(*nodecache.Pod) (time.Duration, bool) { return 0, true }
	}
	if o.Scope == ScopeNode {
		c.only = o.Node
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.recall(o.Past, time.Now())
	dial := o.Dial
	if dial == nil {
		dial = dialTCP
	}
	c.reflect = func(ctx context.Context, addr netip.AddrPort, opened func()) (Result, error) {
		return Reflect(ctx, addr, o.Budget, func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
			conn, err := dial(ctx, addr)
			if err == nil {
				opened()
			}
			return conn, err
		})
	}
	return c
}

// sweepEvery is how often what is left over is looked for: dropped flights,
// and records of owners that went.
const sweepEvery = time.Minute

// Run collects until ctx ends. Then it takes back what waits, abandons what
// runs, and returns when the last connection is closed. It is called once; the
// scheduler has to run beside it.
func (c *Collector) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	sub := c.dir.Subscribe()
	c.mu.Lock()
	c.ctx = ctx
	c.mu.Unlock()
	close(c.started)

	var changes sync.WaitGroup
	changes.Go(func() {
		for {
			keys, err := sub.Next(ctx)
			if err != nil {
				return
			}
			for _, key := range keys {
				c.consider(key, schedule.Normal)
			}
		}
	})
	c.keepTime(ctx)

	cancel()
	sub.Close()
	changes.Wait()
	c.land()
	close(c.stopped)
}

// keepTime considers owners again when their time has come, until ctx ends.
func (c *Collector) keepTime(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	sweep := time.NewTicker(sweepEvery)
	defer sweep.Stop()
	for {
		c.mu.Lock()
		due, next := c.timeline.due(time.Now())
		c.mu.Unlock()
		for _, key := range due {
			c.consider(key, schedule.Normal)
		}
		timer.Stop()
		if !next.IsZero() {
			timer.Reset(time.Until(next))
		}
		select {
		case <-timer.C:
		case <-c.wake:
		case <-sweep.C:
			c.sweep(time.Now())
		case <-ctx.Done():
			return
		}
	}
}

// land waits for the end of all flights. Run's context has ended.
func (c *Collector) land() {
	c.mu.Lock()
	jobs := make([]*schedule.Job, 0, len(c.flights))
	for key, j := range c.flights {
		if j.Cancel() {
			delete(c.flights, key)
			continue
		}
		jobs = append(jobs, j)
	}
	c.mu.Unlock()
	for _, j := range jobs {
		<-j.Done()
	}
}

// Want says that a caller needs to know what the owner serves: its collect
// goes before those that nobody waits for. It does not block, and does not
// hurry an owner whose last attempt failed. Of an owner that is collected
// elsewhere the wish is passed on.
func (c *Collector) Want(key nodecache.OwnerKey) {
	if c.place != nil {
		c.place.Want(key)
	}
	c.consider(key, schedule.Wanted)
}

// Consider looks at owners again: they may have been placed anew.
func (c *Collector) Consider(keys ...nodecache.OwnerKey) {
	for _, key := range keys {
		c.consider(key, schedule.Normal)
	}
}

// Wait returns when the collect of the owner that is under way, or waits for
// its turn, has ended, and at once if there is none. It returns the error of
// ctx as soon as that ends, which does no harm to the collect nor to others who
// wait for it; [ErrStopped] if the collector stopped. What came out is in the
// directory.
func (c *Collector) Wait(ctx context.Context, key nodecache.OwnerKey) error {
	select {
	case <-c.started:
	case <-ctx.Done():
		return ctx.Err()
	}
	// The change may not have been heard of yet.
	c.consider(key, schedule.Normal)
	c.mu.Lock()
	j := c.flights[key]
	c.mu.Unlock()
	if j == nil {
		if c.over() {
			return ErrStopped
		}
		return ctx.Err()
	}
	select {
	case <-j.Done():
	case <-ctx.Done():
		return ctx.Err()
	case <-c.stopped:
	}
	if c.over() {
		return ErrStopped
	}
	return nil
}

// over tells whether Run was told to stop.
func (c *Collector) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ctx != nil && c.ctx.Err() != nil
}

// FirstAttempts returns when every owner that the directory holds at the
// moment of the call is known, has failed once, or has no pod that may be
// asked. Of an owner that is collected elsewhere it is the attempt to learn it
// that may fail. Its errors are those of Wait.
func (c *Collector) FirstAttempts(ctx context.Context) error {
	sub := c.dir.Subscribe()
	keys := sub.Poll()
	sub.Close()
	only := c.only
	if c.place != nil {
		only = ""
	}
	for _, key := range keys {
		if _, may := c.dir.Askable(key, only); !may {
			continue
		}
		// An attempt that ends without a word, as when the owner was created
		// again meanwhile, is followed by another; not without end.
		for range 3 {
			o := c.dir.Owner(key)
			if o == nil || o.Knowledge != nodecache.Unknown && o.Knowledge != nodecache.Collecting {
				break
			}
			var err error
			if len(c.eligible(o)) > 0 {
				err = c.Wait(ctx, key)
			} else if c.place != nil {
				err = c.place.Wait(ctx, key)
			} else {
				break
			}
			if err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}
