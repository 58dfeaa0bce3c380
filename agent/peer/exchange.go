package peer

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/fingerpost/fingerpost/agent/collect"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// Directory is what an [Exchange] needs of [nodecache.Directory]; [Over] makes
// one of it.
type Directory interface {
	// Changes returns a feed that first yields every owner of the moment.
	Changes() Feed
	// The others are those of nodecache.Directory.
	Hosts(key nodecache.OwnerKey) (nodes []string, there bool)
	Learned(key nodecache.OwnerKey) nodecache.Learned
	Learn(key nodecache.OwnerKey, node string, info *nodecache.Info) error
	LearnFailure(key nodecache.OwnerKey, node string, f nodecache.Failure) error
}

// Feed yields owners that changed. See [nodecache.Subscription].
type Feed interface {
	Next(context.Context) ([]nodecache.OwnerKey, error)
	Close()
}

// Collector is the part of [collect.Collector] that an [Exchange] uses.
type Collector interface {
	// Consider looks at the owners again: another agent is in charge now, or
	// this one.
	Consider(keys ...nodecache.OwnerKey)
}

// Trust says for which node a key speaks, by the certificate that came with it
// (DER, may be nil). It is called often, by many goroutines and under locks: it
// must not wait, nor call back.
type Trust func(key Fingerprint, certificate []byte) (node string, ok bool)

// Options configures an [Exchange].
type Options struct {
	Node      string              // required
	Directory Directory           // required
	Identity  *Identity           // required
	Network   Network             // required
	Scheduler *schedule.Scheduler // required: fetches run in its group peer-fetch
	// Trust is nil where the members' Keys decide.
	Trust Trust
	// Remote lets this agent ask pods of other nodes, where no agent stands on
	// any node that has one and a caller of this node waits. [collect.ScopeCluster]
	// is needed for it as well.
	Remote bool
	// Cost is what a connection to a peer takes; nil: all the same. Of those whose
	// word is wanted the cheapest is asked first, for everything; who they are is
	// not its matter, nor is who is in charge of an owner. It is called under no
	// lock.
	Cost   func(Member) time.Duration
	Logger *slog.Logger // nil: none
	// Metrics registers the metrics; nil registers none.
	Metrics prometheus.Registerer

	// decode is nil, or lets exchanges of one process share what they decoded.
	decode func(*peerv1.Record) (*Record, error)
}

// Exchange shares what the agents of a cluster collected. Its methods are safe
// for concurrent use, and only Run, Wait and the Serve methods block.
type Exchange struct {
	// Set at creation and read-only.
	node    string
	dir     Directory
	id      *Identity
	net     Network
	sched   *schedule.Scheduler
	trust   Trust // nil: by the roster
	remote  bool
	cost    func(Member) time.Duration // nil: all the same
	log     *slog.Logger
	metrics *metrics
	decode  func(*peerv1.Record) (*Record, error)
	wanted  *rate.Limiter // fetches that somebody waits for
	overdue *rate.Limiter // and others
	linking *rate.Limiter // streams that are opened
	serving *rate.Limiter // fetches of others
	wake    chan struct{} // capacity 1: something is due

	collector Collector // set by Attach, before Run

	// mu guards everything below. The directory's locks may be taken under it.
	mu       sync.Mutex
	roster   *roster       // nil before the first members
	since    time.Time     // of the first members
	moved    time.Time     // when their nodes changed last
	synced   bool          // it is known what others know, or nobody says it
	ready    bool          // to collect: synced, and the nodes are quiet
	news     chan struct{} // closed and replaced when something below changed
	records  map[nodecache.OwnerKey]*Record
	sums     [buckets]uint64 // of the ids of records
	journal  []entry         // of records in the order in which they came
	base     int             // how many were dropped from the front of it
	files    *fileStore
	local    map[nodecache.OwnerKey]*local // that have an eligible pod here
	quests   map[nodecache.OwnerKey]*quest
	waiting  map[nodecache.OwnerKey]arrival    // records that may count soon
	partial  map[nodecache.OwnerKey]arrival    // records that lack files
	lacking  map[fileHash][]nodecache.OwnerKey // whose partial record does, or did
	peers    map[string]*contact
	links    map[string]*link
	linked   *roster                         // by which links were made
	relinkAt time.Time                       // when they are to be looked at all the same
	again    map[nodecache.OwnerKey]struct{} // to be looked at
}

// New returns an exchange that knows no members yet: until SetMembers is called,
// no owner is this agent's to collect.
func New(o Options) *Exchange {
	x := &Exchange{
		node: o.Node, dir: o.Directory, id: o.Identity, net: o.Network, sched: o.Scheduler, trust: o.Trust, remote: o.Remote, cost: o.Cost,
		log: o.Logger, decode: o.decode,
		wanted:  rate.NewLimiter(rate.Limit(wantedRate)/60, wantedBurst),
		overdue: rate.NewLimiter(rate.Limit(overdueRate)/60, overdueBurst),
		linking: rate.NewLimiter(linkRate, linkBurst),
		serving: rate.NewLimiter(serveRate, serveBurst),
		wake:    make(chan struct{}, 1),
		news:    make(chan struct{}),
		records: map[nodecache.OwnerKey]*Record{},
		files:   newFileStore(),
		local:   map[nodecache.OwnerKey]*local{},
		quests:  map[nodecache.OwnerKey]*quest{},
		waiting: map[nodecache.OwnerKey]arrival{},
		partial: map[nodecache.OwnerKey]arrival{},
		lacking: map[fileHash][]nodecache.OwnerKey{},
		peers:   map[string]*contact{},
		links:   map[string]*link{},
		again:   map[nodecache.OwnerKey]struct{}{},
	}
	if x.log == nil {
		x.log = slog.New(slog.DiscardHandler)
	}
	if x.decode == nil {
		x.decode = decode
	}
	x.metrics = newMetrics(o.Metrics, x)
	return x
}

// Attach names the collector; called once, before Run. (Each of the two needs
// the other.)
func (x *Exchange) Attach(c Collector) { x.collector = c }

// Run exchanges until ctx ends, and returns when every stream of its own has
// ended. The directory should hold the first list by then. It is called once;
// the scheduler has to run beside it.
func (x *Exchange) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	feed := x.dir.Changes()
	var running sync.WaitGroup
	running.Go(func() {
		for {
			keys, err := feed.Next(ctx)
			if err != nil {
				return
			}
			for _, key := range keys {
				x.look(key)
			}
		}
	})
	x.keepTime(ctx, &running)
	cancel()
	feed.Close()
	running.Wait()
}

// keepTime does what is due, until ctx ends.
func (x *Exchange) keepTime(ctx context.Context, running *sync.WaitGroup) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	gather := time.NewTimer(0)
	defer gather.Stop()
	swept := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-x.wake:
			gather.Reset(wantDelay)
			continue
		case <-gather.C:
		case <-ticker.C:
		}
		now := time.Now()
		x.ripen(now)
		x.relook()
		x.relink(ctx, running)
		x.settleHosts(now)
		x.pursue(now)
		x.expire(now)
		if now.Sub(swept) >= time.Minute {
			swept = now
			x.sweep()
		}
	}
}

// rouse makes keepTime look at what is due.
func (x *Exchange) rouse() {
	select {
	case x.wake <- struct{}{}:
	default:
	}
}

// told needs mu. It tells everybody who waits that something changed.
func (x *Exchange) told() {
	close(x.news)
	x.news = make(chan struct{})
}

// SetMembers replaces the members: all agents of the cluster that can be
// reached, the one of this node among them or not.
func (x *Exchange) SetMembers(ms []Member) { x.setRoster(newRoster(ms)) }

func (x *Exchange) setRoster(r *roster) {
	x.mu.Lock()
	if x.roster != nil && x.roster.equal(r) {
		x.mu.Unlock()
		return
	}
	now := time.Now()
	if x.roster == nil {
		x.since = now
	}
	if x.roster == nil || !x.roster.sameNodes(r) {
		x.moved = now
	}
	x.roster = r
	for node, c := range x.peers {
		if r.byNode[node] == nil && c.streams == 0 {
			delete(x.peers, node)
		}
	}
	if len(r.ring) == 0 || len(r.ring) == 1 && r.byNode[x.node] != nil {
		x.synced = true // there is nobody to ask
	}
	for key := range x.waiting {
		x.again[key] = struct{}{}
	}
	x.relocate()
	x.told()
	x.mu.Unlock()

	ms := make([]Member, len(r.ring))
	for i, s := range r.ring {
		ms[i] = s.Member
	}
	x.net.Retain(ms)
	x.rouse()
}

// relocate needs mu. It has all that this agent may be in charge of looked at:
// who is may have changed.
func (x *Exchange) relocate() {
	for key := range x.local {
		x.again[key] = struct{}{}
	}
	x.rouse()
}

// ripen lets this agent collect once it is known what others know, as far as they
// say it, and the nodes are quiet.
func (x *Exchange) ripen(now time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ready || x.roster == nil {
		return
	}
	waited := now.Sub(x.since)
	synced := x.synced || waited >= firstSync && x.known()
	if synced && now.Sub(x.moved) >= quietTime || waited >= quietMost {
		x.ready = true
		for key, q := range x.quests {
			q.due = q.due.Add(waited) // nobody has collected meanwhile
			hosts, _ := x.dir.Hosts(key)
			q.tried = first(key, hosts, x.live) == "" // the members were not known when it began
		}
		x.relocate()
		x.told()
	}
}

// known needs mu. It tells whether others may know this agent's key: the watch has
// shown it here.
func (x *Exchange) known() bool {
	return x.trust != nil || x.roster.byKey[x.id.Fingerprint()] == x.node
}

// Place tells who is to collect the owner. It is that of [collect.Placement].
func (x *Exchange) Place(o *nodecache.Owner) collect.Place {
	var hosts, odd []string
	var pods []nodecache.Member
	for _, m := range o.Pods {
		if m.WhyNotAsked("") == "" {
			pods = append(pods, m)
			hosts = append(hosts, m.Node)
		}
	}
	if o.Info != nil {
		// Who has pods of which nobody has asked one is in charge of them.
		for _, m := range collect.Strangers(o.Info, pods) {
			odd = append(odd, m.Node)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.roster == nil || !x.ready {
		return collect.Elsewhere
	}
	switch head := first(o.Key, hosts, x.live); {
	case head == x.node, len(odd) > 0 && first(o.Key, odd, x.live) == x.node:
		if q := x.quests[o.Key]; o.Knowledge == nodecache.Unknown && (q == nil || !q.quiet(time.Now())) {
			return collect.Elsewhere // for now
		}
		if slices.Contains(hosts, x.node) {
			return collect.OwnNode
		}
	case head == "" && x.remote:
		if q := x.quests[o.Key]; q != nil && q.wanted {
			return collect.AnyNode
		}
	}
	return collect.Elsewhere
}

// Author returns the node whose agent said what is known of the owner; empty if
// none did.
func (x *Exchange) Author(key nodecache.OwnerKey) string {
	x.mu.Lock()
	defer x.mu.Unlock()
	if r := x.records[key]; r != nil {
		return r.node
	}
	return ""
}
