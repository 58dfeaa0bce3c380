package report

import (
	"context"
	"encoding/json"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
)

const (
	// settleStatus is the time for which what concerns a route gathers before
	// it is judged: a Service often comes right after its route.
	settleStatus = time.Second
	// Requests about statuses a second, and how many at once. A route costs two.
	statusRate, statusBurst = 10, 20
	// againStatus is after what time a route is tried again that could not be
	// written; it doubles, up to the time of the Lease.
	againStatus = time.Second
	// inARow failures of different routes are likely one of all.
	inARow = 3
)

// StatusOptions configures [Statuses].
type StatusOptions struct {
	Directory *nodecache.Directory
	Routes    *gateway.Table // that feeds the directory
	// Current tells whether Services and routes are known as they are now. As
	// long as they are not, nothing is said of routes.
	Current func() bool
	Writer  *Writer               // says who is elected
	Metrics prometheus.Registerer // nil: none
}

// Statuses writes into status.parents of routes what [Judge] says, as long as
// this agent is elected. What is right already, by the watch of the routes, is
// not even read. Each route is judged as the directory has it at that moment;
// nothing is remembered but which routes are due.
type Statuses struct {
	o      StatusOptions
	api    rest.Interface // limited to statusRate
	writes *prometheus.CounterVec
	wake   chan struct{} // capacity 1: heard has grown

	// mu guards what follows. It is taken under the lock of the table.
	mu    sync.Mutex
	heard map[string]struct{} // UIDs of routes; nil while not elected
}

// NewStatuses returns a writer of statuses for the API server of the config. It
// is made before the table's first object, and does nothing before
// [Statuses.Run].
func NewStatuses(config *rest.Config, o StatusOptions) (*Statuses, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = statusRate, statusBurst
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	api, err := client(config, "/apis", schema.GroupVersion{Group: gateway.Group, Version: gateway.Versions[0]}, func(s *runtime.Scheme) error {
		metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"}) // errors come as such
		return nil
	})
	if err != nil {
		return nil, err
	}
	s := &Statuses{
		o: o, api: api, wake: make(chan struct{}, 1),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fingerpost_route_statuses_total", Help: "Statuses of routes that this agent had to write, by result: written, conflict (somebody else wrote meanwhile; it is tried again) or failed.",
		}, []string{"result"}),
	}
	for _, result := range []string{"written", "conflict", "failed"} {
		s.writes.WithLabelValues(result)
	}
	if o.Metrics != nil {
		o.Metrics.MustRegister(s.writes)
	}
	o.Routes.OnStatus(s.hear)
	return s, nil
}

// hear is called under the table's lock.
func (s *Statuses) hear(uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.heard == nil {
		return
	}
	s.heard[uid] = struct{}{}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run writes until ctx ends. The directory should know the world when it is
// called. It is called once.
func (s *Statuses) Run(ctx context.Context) {
	for {
		select {
		case <-s.o.Writer.taken:
		case <-ctx.Done():
			return
		}
		if s.o.Writer.isElected() {
			s.reign(ctx)
		}
	}
}

// reign writes until this agent is not elected any more.
func (s *Statuses) reign(ctx context.Context) {
	s.mu.Lock()
	s.heard = map[string]struct{}{}
	s.mu.Unlock()
	sub := s.o.Directory.SubscribeFronts()
	defer func() {
		sub.Close()
		s.mu.Lock()
		s.heard = nil
		s.mu.Unlock()
		s.o.Writer.statusTrouble("")
	}()
	d := dues{at: map[string]time.Time{}, failed: map[string]int{}}
	for _, r := range s.o.Directory.Routes() {
		d.at[r.UID] = time.Now()
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-sub.Changed():
		case <-s.wake:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		d.add(s.changed(sub), time.Now().Add(settleStatus))
		if !s.o.Current() {
			d.hold(time.Now().Add(settleStatus))
		}
		for uid := range d.due(time.Now()) {
			if ctx.Err() != nil || !s.o.Writer.isElected() {
				return
			}
			s.attempt(ctx, uid, &d)
		}
		if !s.o.Writer.isElected() {
			return
		}
		timer.Reset(d.wait(time.Now(), s.o.Writer.o.Lease/6))
	}
}

// changed returns the UIDs of the routes with which something has changed.
func (s *Statuses) changed(sub *nodecache.Subscription) map[string]struct{} {
	sub.Poll() // owners have no say
	s.mu.Lock()
	uids := s.heard
	s.heard = map[string]struct{}{}
	s.mu.Unlock()
	for _, name := range sub.PollFronts() {
		for _, r := range slices.Concat(s.o.Directory.RoutesOf(name), s.o.Directory.RoutesTo(name)) {
			uids[r.UID] = struct{}{}
		}
	}
	return uids
}

// attempt writes the status of a route if it is not as it should be.
func (s *Statuses) attempt(ctx context.Context, uid string, d *dues) {
	err := s.settle(ctx, uid)
	lease := s.o.Writer.o.Lease
	switch {
	case ctx.Err() != nil:
	case err == nil:
		delete(d.failed, uid)
		if d.row = 0; len(d.failed) == 0 {
			s.o.Writer.statusTrouble("")
		}
	case apierrors.IsConflict(err):
		s.writes.WithLabelValues("conflict").Inc()
		d.again(uid, lease)
	default:
		s.writes.WithLabelValues("failed").Inc()
		s.o.Writer.statusTrouble(oneLine(err))
		d.again(uid, lease)
		if d.row++; d.row >= inARow {
			d.hold(time.Now().Add(lease / 3))
		}
	}
}

// settle makes the status of a route what it should be.
func (s *Statuses) settle(ctx context.Context, uid string) error {
	r := s.o.Directory.Route(uid)
	if r == nil {
		return nil
	}
	is, ok := s.o.Routes.Status(r)
	if !ok {
		return nil
	}
	say := Judge(r, s.o.Directory)
	if gateway.StatusDigest(say) == is.Said {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.o.Writer.o.Lease/6)
	defer cancel()
	path := []string{"/apis", gateway.Group, is.APIVersion, "namespaces", r.Namespace, gateway.Resource(r.Kind.String()), r.Name}
	text, err := s.api.Get().AbsPath(path...).Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return err
	}
	o := &routeObject{}
	if err := json.Unmarshal(text, o); err != nil {
		return err
	}
	if o.Metadata.UID != r.UID || o.Metadata.Generation != r.Generation {
		return nil // the watch will say so
	}
	parents, news, err := merge(o, r, say, metav1.Now())
	if err != nil || parents == nil {
		return err
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": o.Metadata.ResourceVersion},
		"status":   map[string]any{"parents": parents},
	})
	if err != nil {
		return err
	}
	if err := s.api.Patch(types.MergePatchType).AbsPath(append(path, "status")...).Body(patch).Do(ctx).Error(); err != nil {
		return err
	}
	s.writes.WithLabelValues("written").Inc()
	for _, e := range eventsOf(r, is.APIVersion, news) {
		s.o.Writer.Say(e)
	}
	return nil
}

// dues is when routes are due, by their UID. It belongs to one goroutine.
type dues struct {
	at     map[string]time.Time
	failed map[string]int // how often in a row, if ever
	row    int            // failures in a row, of any routes
	until  time.Time      // nothing is due before it
}

func (d *dues) add(uids map[string]struct{}, at time.Time) {
	for uid := range uids {
		if _, ok := d.at[uid]; !ok {
			d.at[uid] = at
		}
	}
}

func (d *dues) again(uid string, most time.Duration) {
	pause := min(againStatus<<min(d.failed[uid], 10), most)
	d.failed[uid]++
	d.at[uid] = time.Now().Add(jittered(pause))
}

// hold has nothing be due before the time.
func (d *dues) hold(until time.Time) { d.until = until }

// due takes and yields those that are due, the longest first.
func (d *dues) due(now time.Time) iter.Seq[string] {
	uids := slices.SortedFunc(maps.Keys(d.at), func(a, b string) int { return d.at[a].Compare(d.at[b]) })
	return func(yield func(string) bool) {
		for _, uid := range uids {
			if d.at[uid].After(now) || d.until.After(now) {
				return
			}
			if delete(d.at, uid); !yield(uid) {
				return
			}
		}
	}
}

// wait is the time until the next is due, and most if none is.
func (d *dues) wait(now time.Time, most time.Duration) time.Duration {
	for _, at := range d.at {
		most = min(most, max(at.Sub(now), d.until.Sub(now), 0))
	}
	return most
}
