package report

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/nodecache"
)

// gather is the time for which changes of the directory gather: a rollout is
// many of the same owners.
const gather = 300 * time.Millisecond

// Options configures a [Follower].
type Options struct {
	Directory *nodecache.Directory
	// Claimants names the provider of a service of a namespace, and returns the
	// owners of other workloads that serve it as well. It is as new as the
	// directory.
	Claimants func(namespace, service string) (provider string, claimants []*nodecache.Owner)
	Say       func(Event) // hears of what is worth an Event; it must not block
	Logger    *slog.Logger
	Metrics   prometheus.Registerer // nil: none
}

// Follower compares what owners serve with what the revisions before them
// served, and with what other workloads serve.
type Follower struct {
	o       Options
	changes *prometheus.CounterVec

	// claims is who was a claimant of which service; of Run alone.
	claims map[service]map[nodecache.OwnerKey]struct{}
	// ignored is what was told of owners some of whose annotations are ignored; of
	// Run alone.
	ignored map[nodecache.OwnerKey][]string

	// mu guards what follows; the directory is read under it. Run writes.
	mu        sync.Mutex
	of        map[nodecache.OwnerKey]*revision
	revisions map[nodecache.Workload][]*revision
}

// service is a gRPC service of one namespace.
type service struct{ namespace, name string }

// revision is what is remembered of an owner. Its lists are shared and never
// changed.
type revision struct {
	age
	workload nodecache.Workload
	name     string
	services []string
	origin   nodecache.Origin
	pods     bool
	known    bool // services are what a collect or a declaration said
	complete bool // and all of it
	mute     bool // it was asked, and did not say what it serves
	*history      // nil: it was not compared yet, as most owners never are
}

// history is what a revision that is compared is compared with.
type history struct {
	first, held []string // services that it had at first, and ever
	// previous is what it is compared with and since when that was there, base
	// what it served; zero until there is one.
	previous nodecache.OwnerKey
	since    time.Time
	base     []string
	change   Change
	said     map[string]struct{} // names that were told as added (+) or dropped (-)
}

// NewFollower returns a follower, which does nothing before [Follower.Run].
func NewFollower(o Options) *Follower {
	f := &Follower{
		o: o,
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fingerpost_contract_changes_total", Help: "gRPC services that a revision of a workload serves and the one before it did not, or the other way: added or dropped.",
		}, []string{"kind"}),
		claims:    map[service]map[nodecache.OwnerKey]struct{}{},
		ignored:   map[nodecache.OwnerKey][]string{},
		of:        map[nodecache.OwnerKey]*revision{},
		revisions: map[nodecache.Workload][]*revision{},
	}
	for _, kind := range []string{"added", "dropped"} {
		f.changes.WithLabelValues(kind)
	}
	if o.Metrics != nil {
		o.Metrics.MustRegister(f.changes)
	}
	return f
}

// Run follows the directory until ctx ends. What the directory holds when it is
// called is where it begins: differences among that are shown, and not told,
// save where one side is new since the checkpoint.
func (f *Follower) Run(ctx context.Context) {
	sub := f.o.Directory.Subscribe()
	defer sub.Close()
	f.handle(sub.Poll(), true)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-sub.Changed():
		case <-ctx.Done():
			return
		}
		timer.Reset(gather)
		select {
		case <-timer.C:
			f.handle(sub.Poll(), false)
		case <-ctx.Done():
			return
		}
	}
}

// Change returns how what an owner serves differs from the revision before it.
func (f *Follower) Change(key nodecache.OwnerKey) Change {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.of[key]; r != nil && r.history != nil {
		return r.change
	}
	return Change{}
}

// handle takes in the owners that changed. At the start nothing is told that an
// earlier process has told, or that nobody saw happen.
func (f *Follower) handle(keys []nodecache.OwnerKey, start bool) {
	services, workloads := map[service]struct{}{}, map[nodecache.Workload]struct{}{}
	var events []Event
	f.mu.Lock()
	for _, key := range keys {
		o := f.o.Directory.Owner(key)
		f.take(key, o, services, workloads)
		events = append(events, f.ignores(key, o)...)
	}
	for w := range workloads {
		for _, r := range f.revisions[w] {
			events = append(events, f.judge(w, r, start)...)
		}
	}
	f.mu.Unlock()
	for s := range services {
		events = append(events, f.claim(s)...)
	}
	for _, e := range events {
		f.o.Say(e)
	}
}

// ignores returns what to say of the annotations of an owner, nil for one that is
// gone.
func (f *Follower) ignores(key nodecache.OwnerKey, o *nodecache.Owner) []Event {
	told := f.ignored[key]
	delete(f.ignored, key)
	if o == nil || len(o.Ignored) == 0 {
		return nil
	}
	f.ignored[key] = o.Ignored
	var events []Event
	for _, text := range o.Ignored {
		if !slices.Contains(told, text) {
			events = append(events, Event{Object: objectOf(o), Warning: true, Reason: ReasonIgnored, Message: clip(text, maxText)})
		}
	}
	return events
}

// take needs mu. It remembers an owner as it is, nil for one that is gone, and
// adds its workload and services, those that it has lost too.
func (f *Follower) take(key nodecache.OwnerKey, o *nodecache.Owner, services map[service]struct{}, workloads map[nodecache.Workload]struct{}) {
	r := f.of[key]
	touch := func(r *revision) {
		for _, name := range r.services {
			services[service{r.workload.Namespace, name}] = struct{}{}
		}
	}
	if r != nil {
		touch(r)
	}
	if o == nil || o.Name == "" { // one that only a route names has no name
		if r != nil {
			delete(f.of, key)
			mates := f.revisions[r.workload]
			if mates = slices.DeleteFunc(mates, func(m *revision) bool { return m == r }); len(mates) > 0 {
				f.revisions[r.workload] = mates
			} else {
				delete(f.revisions, r.workload)
			}
		}
		return
	}
	if r == nil {
		r = &revision{age: age{key: key}, workload: o.Workload, name: o.Name}
		f.of[key] = r
		f.revisions[r.workload] = append(f.revisions[r.workload], r)
	}
	workloads[r.workload] = struct{}{}
	if !o.Created.IsZero() {
		r.created = o.Created
	}
	if o.Info != nil {
		r.learned = o.Info.Collected
	}
	r.origin, r.pods = o.Origin, len(o.Pods) > 0
	now, known, complete := evidence(o)
	if slices.Equal(now, r.services) {
		now = r.services
	}
	r.services, r.known, r.complete = now, known, complete
	r.mute = !known && (o.Knowledge == nodecache.Failed || o.Knowledge == nodecache.None)
	touch(r)
}

// judge needs mu. It compares a revision with the one before it.
func (f *Follower) judge(w nodecache.Workload, r *revision, start bool) []Event {
	if !r.known || !r.pods || w.Kind == "Pod" {
		return nil
	}
	if r.history == nil {
		r.history = &history{}
	}
	before := f.before(w, r)
	if before != nil && before.known && before.key != r.previous && (r.previous == (nodecache.OwnerKey{}) || before.created.After(r.since)) {
		// The first comparison; or a way back, by which the revision that came
		// after this one is now the one before it.
		r.previous, r.since, r.held, r.said = before.key, before.created, nil, nil
	}
	previous := r.previous
	switch {
	case previous == nodecache.OwnerKey{}:
		if r.first == nil {
			r.first = r.services
		}
		r.base, previous = r.first, r.key
	case before != nil && before.key == previous && before.known:
		r.base = before.services
	}
	r.held = union(r.held, r.services)
	added, dropped := compare(r.base, r.held, r.services, r.complete)
	r.change = Change{}
	if len(added)+len(dropped) > 0 {
		r.change = Change{Previous: previous, Added: added, Dropped: dropped}
	}
	added, dropped = r.news("+", added), r.news("-", dropped)
	if len(added)+len(dropped) == 0 {
		return nil
	}
	// An earlier process knew the one, this one has asked the other.
	fresh := before != nil && before.origin == nodecache.OriginCheckpoint && (r.origin == nodecache.OriginSelf || r.origin == nodecache.OriginPeer)
	if start && !fresh {
		return nil
	}
	return f.tell(w, r, previous, added, dropped)
}

// news returns those of the names that were not told yet with the sign.
func (r *revision) news(sign string, names []string) []string {
	var fresh []string
	for _, name := range names {
		if _, ok := r.said[sign+name]; ok {
			continue
		}
		if r.said == nil {
			r.said = map[string]struct{}{}
		}
		r.said[sign+name] = struct{}{}
		fresh = append(fresh, name)
	}
	return fresh
}

// before needs mu. It is the youngest revision that is older than r, of those
// that could say what they serve: what callers lose over one that could not, they
// lose all the same.
func (f *Follower) before(w nodecache.Workload, r *revision) *revision {
	var found *revision
	for _, o := range f.revisions[w] {
		if !o.mute && o.compare(r.age) < 0 && (found == nil || o.compare(found.age) > 0) {
			found = o
		}
	}
	return found
}

// tell logs and counts, and returns what to say to others.
func (f *Follower) tell(w nodecache.Workload, r *revision, previous nodecache.OwnerKey, added, dropped []string) []Event {
	f.changes.WithLabelValues("added").Add(float64(len(added)))
	f.changes.WithLabelValues("dropped").Add(float64(len(dropped)))
	level, what := slog.LevelInfo, "a new revision serves other services"
	than := "the revision before it, " + previous.String() + ", served"
	if previous == r.key {
		what, than = "an owner serves other services than before", "it served before"
	}
	if len(dropped) > 0 {
		level = slog.LevelWarn
	}
	f.o.Logger.Log(context.Background(), level, what, "owner", r.key.String(), "namespace", w.Namespace, "name", r.name, "previous", previous.String(), "added", added, "dropped", dropped)
	object := objectOf(&nodecache.Owner{Key: r.key, Name: r.name, Workload: w})
	var events []Event
	if len(dropped) > 0 {
		events = append(events, Event{Object: object, Warning: true, Reason: ReasonDropped, Message: fmt.Sprintf("serves no longer what %s: %s", than, list(dropped))})
	}
	if len(added) > 0 {
		events = append(events, Event{Object: object, Reason: ReasonAdded, Message: fmt.Sprintf("serves what %s not: %s", than, list(added))})
	}
	return events
}

// claim returns what to say of those that newly claim a service.
func (f *Follower) claim(s service) []Event {
	provider, claimants := f.o.Claimants(s.namespace, s.name)
	before := f.claims[s]
	if delete(f.claims, s); len(claimants) == 0 {
		return nil
	}
	now := map[nodecache.OwnerKey]struct{}{}
	f.claims[s] = now
	var events []Event
	for _, o := range claimants {
		now[o.Key] = struct{}{}
		if _, ok := before[o.Key]; !ok {
			events = append(events, Event{
				Object: objectOf(o), Warning: true, Reason: ReasonClaimed,
				Message: fmt.Sprintf("serves %s, which %s provides in this namespace: calls that name nothing but the service go there", s.name, provider),
			})
		}
	}
	return events
}
