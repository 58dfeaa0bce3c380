package schedule

import (
	"cmp"
	"container/list"
	"context"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Group names a kind of work with a maximum of its own.
type Group string

// The groups of the agent. Work of another group is bound by the global
// ceiling alone.
const (
	Collect   Group = "collect"
	PeerFetch Group = "peer-fetch"
	Transcode Group = "transcode"
)

// Priority orders the waiting work of a group; higher goes first. Any value is
// allowed, these have names.
type Priority int

// The priorities. Normal is the zero value.
const (
	Background Priority = -1 // nobody would notice
	Normal     Priority = 0
	Wanted     Priority = 1 // a caller of this node waits for it
)

// Options configures a [Scheduler]. The zero Options has no limit.
type Options struct {
	Limits Limits
	// Queue is how many jobs of one group may wait; 0 is 65,536. One more
	// drops the oldest of the lowest priority.
	Queue int
	// Metrics registers the scheduler's metrics; nil registers none.
	Metrics prometheus.Registerer
}

// Scheduler is the one coordinator of the agent's work. Its methods are safe
// for concurrent use, and none but Run blocks.
type Scheduler struct {
	// Set at creation and read-only.
	ceiling  int
	queueMax int
	dropped  *prometheus.CounterVec

	running sync.WaitGroup // the goroutines of running work

	// mu guards everything below, and of every Job the fields it names. Nothing
	// that can block is called under it.
	mu      sync.Mutex
	ctx     context.Context // of the work; nil before Run
	stopped bool
	groups  []*group // in the order of their first use
	turn    int      // index of the group whose turn is next
	active  int      // running work of all groups
	orders  uint64
}

type group struct {
	name   Group
	max    int // 0: none
	active int
	queue  queue
}

// Job is one submitted piece of work. Its methods are safe for concurrent use.
type Job struct {
	s         *Scheduler
	namespace string
	work      func(context.Context)
	done      chan struct{}
	err       error // read-only once done is closed

	// Guarded by Scheduler.mu.
	group    *group
	priority Priority
	order    uint64
	place    *list.Element // in its queue; nil if it does not wait
}

// New returns a scheduler that starts nothing before Run.
func New(o Options) *Scheduler {
	s := &Scheduler{
		ceiling:  o.Limits.Total,
		queueMax: cmp.Or(o.Queue, 1<<16),
		groups: []*group{
			{name: Collect, max: o.Limits.Collect},
			{name: PeerFetch, max: o.Limits.PeerFetch},
			{name: Transcode, max: o.Limits.Transcode},
		},
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fingerpost_work_dropped_total",
			Help: "Pieces of work dropped because the queue of their group was full.",
		}, []string{"group"}),
	}
	if o.Metrics != nil {
		o.Metrics.MustRegister(s.dropped, gauges{s})
	}
	return s
}

// Run lets work start, until ctx ends. Then it starts no more, ends the
// context of what runs, drops what waits with [ErrStopped], and returns when
// the last piece of work has returned. It is called once.
func (s *Scheduler) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.mu.Lock()
	s.ctx = ctx
	s.dispatch()
	s.mu.Unlock()

	<-ctx.Done()

	s.mu.Lock()
	s.stopped = true
	for _, g := range s.groups {
		for j := g.queue.pop(); j != nil; j = g.queue.pop() {
			j.finish(ErrStopped)
		}
	}
	s.mu.Unlock()
	s.running.Wait()
}

// Submit hands in work. It runs once, in a goroutine of its own, as soon as
// the limits and the turn of its group, priority and namespace allow; its
// context ends when the scheduler stops. Submit never blocks; work that cannot
// be taken is a job that is done with an error.
func (s *Scheduler) Submit(name Group, priority Priority, namespace string, work func(context.Context)) *Job {
	j := &Job{s: s, priority: priority, namespace: namespace, work: work, done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		j.finish(ErrStopped)
		return j
	}
	j.group = s.group(name)
	s.orders++
	j.order = s.orders
	j.group.queue.push(j)
	s.dispatch()
	if j.group.queue.size > s.queueMax {
		victim := j.group.queue.leastNeeded()
		j.group.queue.remove(victim)
		victim.finish(ErrOverflow)
		s.dropped.WithLabelValues(string(name)).Inc()
	}
	return j
}

// group needs mu.
func (s *Scheduler) group(name Group) *group {
	i := slices.IndexFunc(s.groups, func(g *group) bool { return g.name == name })
	if i < 0 {
		i = len(s.groups)
		s.groups = append(s.groups, &group{name: name})
	}
	return s.groups[i]
}

// dispatch starts what may start. It needs mu.
func (s *Scheduler) dispatch() {
	if s.ctx == nil || s.ctx.Err() != nil {
		return
	}
	for s.ceiling == 0 || s.active < s.ceiling {
		j := s.next()
		if j == nil {
			return
		}
		s.active++
		j.group.active++
		s.running.Go(func() { s.run(s.ctx, j) })
	}
}

// next takes the job whose turn it is, nil if none may start. It needs mu.
func (s *Scheduler) next() *Job {
	for i := range s.groups {
		at := (s.turn + i) % len(s.groups)
		g := s.groups[at]
		if g.max > 0 && g.active >= g.max {
			continue
		}
		if j := g.queue.pop(); j != nil {
			s.turn = (at + 1) % len(s.groups)
			return j
		}
	}
	return nil
}

func (s *Scheduler) run(ctx context.Context, j *Job) {
	// Deferred, so that work that ends its goroutine gives its place back.
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.active--
		j.group.active--
		j.finish(nil)
		s.dispatch()
	}()
	j.work(ctx)
}

// finish is called once for every job, by whoever took it from the queue.
func (j *Job) finish(err error) {
	j.err = err
	j.work = nil
	close(j.done)
}

// Done is closed when the work has returned or will never run.
func (j *Job) Done() <-chan struct{} { return j.done }

// Err is nil as long as Done is open and if the work ran, else why it did not:
// [ErrStopped], [ErrOverflow] or [ErrCancelled].
func (j *Job) Err() error {
	select {
	case <-j.done:
		return j.err
	default:
		return nil
	}
}

// Raise moves waiting work up to the priority, behind what waits there
// already. It never lowers, and changes nothing for work that runs.
func (j *Job) Raise(p Priority) {
	j.s.mu.Lock()
	defer j.s.mu.Unlock()
	if j.place == nil || p <= j.priority {
		return
	}
	j.group.queue.remove(j)
	j.priority = p
	j.group.queue.push(j)
}

// Cancel takes waiting work out of the queue and tells whether it did: false
// means that the work runs, ran or was dropped.
func (j *Job) Cancel() bool {
	j.s.mu.Lock()
	defer j.s.mu.Unlock()
	if j.place == nil {
		return false
	}
	j.group.queue.remove(j)
	j.finish(ErrCancelled)
	return true
}

// Stats is the load of one group.
type Stats struct {
	Group   Group
	Waiting int
	Running int
	Limit   int // 0: none
}

// Stats returns the load of every group.
func (s *Scheduler) Stats() []Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Stats, len(s.groups))
	for i, g := range s.groups {
		all[i] = Stats{Group: g.name, Waiting: g.queue.size, Running: g.active, Limit: g.max}
	}
	return all
}

// gauges reads Stats at every scrape.
type gauges struct{ s *Scheduler }

var (
	waitingDesc = prometheus.NewDesc("fingerpost_work_waiting", "Pieces of work that wait for their turn.", []string{"group"}, nil)
	runningDesc = prometheus.NewDesc("fingerpost_work_running", "Pieces of work that run.", []string{"group"}, nil)
)

func (gauges) Describe(ch chan<- *prometheus.Desc) { ch <- waitingDesc; ch <- runningDesc }

func (g gauges) Collect(ch chan<- prometheus.Metric) {
	for _, st := range g.s.Stats() {
		ch <- prometheus.MustNewConstMetric(waitingDesc, prometheus.GaugeValue, float64(st.Waiting), string(st.Group))
		ch <- prometheus.MustNewConstMetric(runningDesc, prometheus.GaugeValue, float64(st.Running), string(st.Group))
	}
}
