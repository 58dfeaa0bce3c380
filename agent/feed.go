package agent

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/agent/learn"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/resources/transcode"
)

// feed carries changes of the directory through the compiler to the ADS
// server, in order.
type feed struct {
	dir       *nodecache.Directory
	store     *kube.Store
	sub       *nodecache.Subscription
	compiler  *resources.Compiler
	server    *ads.Server
	scheduler *schedule.Scheduler // of what costs CPU
	learned   *learn.Upstreams
	log       *slog.Logger
	refused   prometheus.Counter // descriptors that cannot be used for transcoding

	// mu is held from compiling to publishing, so that updates are published
	// in the order in which they were made; links are the jobs of descriptors
	// that are not linked yet. The locks of the store, the
	// directory, the compiler, the server and the scheduler are taken under
	// it, one after the other.
	mu    sync.Mutex
	links []*schedule.Job
	moves uint64 // of the store, when it was last asked where the node is
	// sockets are the paths of unknown.sock that clients have named.
	sockets   map[string]struct{}
	demands   map[*demand]struct{} // of the streams that are open
	exchanged prometheus.Counter   // route tables for the form that asks for no unknown name
}

// newFeed returns the agent's, whose other parts stand already.
func newFeed(a *Agent) *feed {
	f := &feed{
		dir: a.dir, store: a.store, sub: a.dir.SubscribeFronts(), compiler: a.compiler, server: a.server, scheduler: a.scheduler, learned: a.upstreams, log: a.log,
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fingerpost_transcode_refused_total", Help: "Programs whose descriptors cannot be used for transcoding from JSON.",
		}),
	}
	f.sockets, f.demands = map[string]struct{}{}, map[*demand]struct{}{}
	f.exchanged = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "fingerpost_on_demand_exchanged_total",
		Help: "Streams whose client called so many names that nobody has that it asks for no further one.",
	})
	a.registry.MustRegister(f.refused, f.exchanged)
	f.publish(f.compiler.Initial())
	return f
}

// run publishes until ctx ends. It begins once the source has synced: nobody is
// answered before, and an owner that is compiled once, not as often as another
// of its pods comes, spares much of what a start costs.
func (f *feed) run(ctx context.Context, synced <-chan struct{}) error {
	defer f.sub.Close()
	select {
	case <-synced:
	case <-ctx.Done():
		return nil
	}
	for {
		select {
		case <-f.sub.Changed():
			f.flush()
		case <-ctx.Done():
			return nil
		}
	}
}

// flush publishes every change that the directory has seen so far.
func (f *feed) flush() {
	f.mu.Lock()
	defer f.mu.Unlock()
	keys, fronts, moves := f.sub.Poll(), f.sub.PollFronts(), f.store.Moves()
	if moves != f.moves || len(keys) > 0 || len(fronts) > 0 {
		f.moves = moves
		f.publish(f.compiler.Relocate(f.dir, f.store.Place()))
	}
	if len(keys) > 0 {
		f.publish(f.compiler.Apply(f.dir, keys))
	}
	// Also with no name: a pod's address alone may be what was asked for.
	f.publish(f.compiler.Fronts(f.dir, fronts))
	f.links = slices.DeleteFunc(f.links, func(j *schedule.Job) bool {
		select {
		case <-j.Done():
			return true
		default:
			return false
		}
	})
	for _, p := range f.compiler.Unlinked() {
		f.links = append(f.links, f.scheduler.Submit(schedule.Transcode, schedule.Normal, "", func(context.Context) { f.link(p) }))
	}
}

// publish is called with mu held, or before anybody else has the feed.
func (f *feed) publish(u xds.Update) {
	if spoil != nil {
		u = spoil(f, u)
	}
	f.server.Publish(u)
}

// settled waits until all descriptors that were asked for are linked and
// published, or ctx ends.
func (f *feed) settled(ctx context.Context) {
	f.mu.Lock()
	links := slices.Clone(f.links)
	f.mu.Unlock()
	for _, j := range links {
		select {
		case <-j.Done():
		case <-ctx.Done():
			return
		}
	}
}

// link prepares the descriptors of a port for transcoding, and publishes what
// follows.
func (f *feed) link(p *nodecache.PortInfo) {
	set, err := transcode.Link(p)
	services := make([]string, len(p.Services))
	for i, s := range p.Services {
		services[i] = s.Name
	}
	log := f.log.With("services", services)
	if err != nil {
		f.refused.Inc()
		log.Warn("calls of a program are not transcoded from JSON", "error", err)
	} else if len(set.Dropped) > 0 {
		log.Warn("methods are not transcoded from JSON", "methods", set.Dropped)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.publish(f.compiler.Linked(f.dir, p, set, err))
}

// namespace makes sure that clients of the namespace find what each of them
// needs: the route table of the form, and with AllClusters those by Service
// names. It returns an error if the namespace is none.
func (f *feed) namespace(ns string, form resources.Form) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	u, err := f.compiler.Namespace(ns, form)
	if err != nil {
		return err
	}
	f.publish(u)
	if form == resources.AllClusters {
		f.publish(f.compiler.Aliases(f.dir, ns))
	}
	return nil
}

// declare makes the clusters of what a client with all clusters declares; false
// if there are none. Who calls it calls undeclare later.
func (f *feed) declare(ns string, ups []nodecache.Upstream) (xds.Scope, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	scope, u := f.compiler.Declare(f.dir, ns, ups)
	f.publish(u)
	return scope, scope != xds.Shared
}

func (f *feed) undeclare(scope xds.Scope) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.publish(f.compiler.Undeclare(scope))
}

// follow learns of a demand from now on what it wants while it is open.
func (f *feed) follow(d *demand) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.demands[d] = struct{}{}
}

// learn notes what is in use now: names may have come to somebody since they were
// asked for.
func (f *feed) learn(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for d := range f.demands {
		d.learn(slices.Collect(maps.Keys(d.names)), now)
	}
	f.learned.Expire(now)
}

// current publishes what follows from having heard of everything that happened
// before the start.
func (f *feed) current() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.publish(f.compiler.Current())
}

// unknownSocket is where a client has unknown.sock: what it says itself, as long
// as there are not too many such places, else where the agent has it.
func (f *feed) unknownSocket(said, own string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.sockets[said]; said == "" || !ok && len(f.sockets) >= maxUnknownSockets {
		return own
	}
	f.sockets[said] = struct{}{}
	return said
}

// knowledge is what unknown.sock and explanations ask.
type knowledge struct {
	*resources.Compiler
	dir *nodecache.Directory
}

// Resolve is [resources.Compiler.Resolve] with the directory.
func (k knowledge) Resolve(namespace, authority, service string) resources.Named {
	return k.Compiler.Resolve(k.dir, namespace, authority, service)
}
