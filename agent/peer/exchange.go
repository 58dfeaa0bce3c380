package peer

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
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

// entry is a record that came by way of a node, empty for one's own.
type entry struct {
	rec *Record
	via string
}

// arrival is an entry that is not good yet.
type arrival struct {
	entry
	at time.Time
}

// local is what this agent knows of an owner that it may speak for.
type local struct {
	seen *nodecache.Info // what was last compared with the record held
	// contested is set where others hold what this agent knows better.
	contested bool
}

// contact is how it stands with another agent.
type contact struct {
	failures int
	until    time.Time // it is left alone
	reason   string
	// gone is set where a Fetch failed: until the time is over, others collect
	// in its place. A stream may end for many a reason.
	gone    bool
	streams int           // that it has open to this agent
	limiter *rate.Limiter // of its fetches
	last    time.Time     // it answered
}

// New returns an exchange that knows no members yet: until SetMembers is called,
// no owner is this agent's to collect.
func New(o Options) *Exchange {
	x := &Exchange{
		node: o.Node, dir: o.Directory, id: o.Identity, net: o.Network, sched: o.Scheduler, trust: o.Trust, remote: o.Remote,
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
		for _, q := range x.quests {
			q.due = q.due.Add(waited) // nobody has collected meanwhile
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

// live needs mu. It tells whether the node has an agent that could be asked when
// it last was.
func (x *Exchange) live(node string) bool {
	if node == x.node {
		return true
	}
	c := x.peers[node]
	return x.roster != nil && x.roster.byNode[node] != nil && !(c != nil && c.gone && time.Now().Before(c.until))
}

// avoided needs mu. It tells whether the peer is left alone for now.
func (x *Exchange) avoided(node string) bool {
	c := x.peers[node]
	return c != nil && time.Now().Before(c.until)
}

// contact needs mu.
func (x *Exchange) contact(node string) *contact {
	c := x.peers[node]
	if c == nil {
		c = &contact{limiter: rate.NewLimiter(servePeerRate, servePeerBurst)}
		x.peers[node] = c
	}
	return c
}

// failed notes that a peer misbehaved, or that it could not be asked: for
// records, where it is gone, else for a stream.
func (x *Exchange) failed(node string, gone bool, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := x.contact(node)
	was := x.live(node)
	c.gone = c.gone || gone
	c.reason = line(err.Error())
	wait := min(backoffLeast<<min(c.failures, 16), backoffMost)
	if errors.Is(err, errJunk) || errors.Is(err, errTooMuch) {
		wait = max(wait, misbehaved)
	}
	c.failures++
	c.until = time.Now().Add(wait/2 + rand.N(wait))
	x.relinkAt = time.Time{}
	x.log.Debug("peer is left alone for a while", "node", node, "reason", c.reason, "failures", c.failures)
	if was && !x.live(node) {
		x.relocate()
	}
	x.told()
}

// worked notes that a peer answered.
func (x *Exchange) worked(node string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := x.contact(node)
	c.last = time.Now()
	if c.failures > 0 {
		was := x.live(node)
		c.failures, c.until, c.reason, c.gone = 0, time.Time{}, "", false
		x.relinkAt = time.Time{}
		if !was {
			x.relocate()
		}
	}
}

// speaks needs mu. It tells whether the record's key speaks for its node.
func (x *Exchange) speaks(r *Record) bool {
	if r.print == x.id.Fingerprint() {
		return r.node == x.node
	}
	if x.trust != nil {
		node, ok := x.trust(r.print, r.raw.GetCertificate())
		return ok && node == r.node
	}
	return x.roster != nil && x.roster.byKey[r.print] == r.node
}

// valid needs mu. It tells whether a record that is held would be taken today.
func (x *Exchange) valid(r *Record, hosts []string) bool {
	return x.speaks(r) && slices.Contains(hosts, r.node)
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

// relook looks at the owners for which somebody asked.
func (x *Exchange) relook() {
	x.mu.Lock()
	again := x.again
	if len(again) > 0 {
		x.again = map[nodecache.OwnerKey]struct{}{}
	}
	x.mu.Unlock()
	for key := range again {
		x.look(key)
		x.collector.Consider(key)
	}
}

// look does what the state of an owner demands: say what is known of it, take
// what others said, or go and ask.
func (x *Exchange) look(key nodecache.OwnerKey) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.lookAt(key)
}

// lookAt is look; it needs mu.
func (x *Exchange) lookAt(key nodecache.OwnerKey) {
	hosts, there := x.dir.Hosts(key)
	if w, ok := x.waiting[key]; ok {
		delete(x.waiting, key)
		if len(hosts) == 0 {
			if there {
				x.waiting[key] = w
			}
		} else if reason := x.admit(w.rec, w.via); reason.passes() {
			x.waiting[key] = w // no longer than before
		}
	}
	if len(hosts) == 0 {
		x.forget(key)
		delete(x.partial, key)
		delete(x.local, key)
		x.settle(key)
		return
	}
	l := x.dir.Learned(key)
	if slices.Contains(hosts, x.node) {
		if x.local[key] == nil {
			x.local[key] = &local{}
		}
		x.speak(key, l, hosts)
	} else {
		delete(x.local, key)
	}
	x.seek(key, l, hosts)
}

// hold needs mu. It keeps a record, in place of the one held, and passes it on.
func (x *Exchange) hold(r *Record, via string) {
	x.files.retain(r.all)
	x.forget(r.key)
	x.records[r.key] = r
	x.sums[bucketOf(r.key)] += r.id
	if len(x.journal) >= maxLog {
		drop := maxLog / 2
		x.journal = slices.Clone(x.journal[drop:])
		x.base += drop
	}
	x.journal = append(x.journal, entry{r, via})
	if via != "" {
		x.metrics.taken.Inc()
	}
	x.told()
}

// forget needs mu. It drops the record of an owner.
func (x *Exchange) forget(key nodecache.OwnerKey) {
	if r := x.records[key]; r != nil {
		delete(x.records, key)
		x.sums[bucketOf(key)] -= r.id
		x.files.release(r.all)
	}
}

func bucketOf(key nodecache.OwnerKey) int { return int(hashOfOwner(key) % buckets) }

// speak needs mu. It signs what this agent knows of an owner with a pod here, if
// it is its own word and new, or if it is in charge and nobody else's word
// counts any more.
func (x *Exchange) speak(key nodecache.OwnerKey, l nodecache.Learned, hosts []string) {
	mine, held := x.local[key], x.records[key]
	good := held != nil && x.valid(held, hosts)
	if good && mine.seen == l.Info && l.Info != nil && !mine.contested {
		return
	}
	inCharge := x.ready && first(key, hosts, x.live) == x.node
	var st *peerv1.Statement
	switch {
	case l.Info != nil:
		own := l.Info.Origin == nodecache.OriginSelf
		if !own && !inCharge {
			mine.seen = l.Info
			return
		}
		st = state(key, x.node, l.Info, x.files)
		if good && held.failure == nil {
			same := content(st) == content(held.statement())
			mine.seen = l.Info
			if !mine.contested && (same || !own) {
				return
			}
			if !same && st.CollectedMs <= held.collected {
				// What was learned since is of images or pods alone.
				st.CollectedMs = held.collected + 1
			}
		}
		mine.seen, mine.contested = l.Info, false
	case l.Knowledge == nodecache.Failed:
		f := l.Failure
		if !inCharge || good && (held.failure == nil || held.failure.Reason == line(f.Reason) && held.failure.Hung == f.Hung &&
			f.Next.Sub(held.failure.Next) < failureNews) {
			return
		}
		st = &peerv1.Statement{
			Owner: ownerKey(key), Node: x.node, CollectedMs: time.Now().UnixMilli(),
			Failure: &peerv1.Failure{Reason: line(f.Reason), NextMs: f.Next.UnixMilli(), Hung: f.Hung},
		}
	default:
		return
	}
	st.SignedMs = time.Now().UnixMilli()
	r, err := sign(x.id, st)
	if err != nil {
		x.log.Warn("what an owner serves cannot be told to other agents", "owner", key.String(), "error", err)
		x.metrics.rejected.WithLabelValues(string(unfit)).Inc()
		return
	}
	x.metrics.signed.Inc()
	x.hold(r, "")
}

// failureNews is how much later the next attempt has to be for others to be
// told: the waits after light failures are shorter.
const failureNews = 6 * time.Minute

// reason says why a record was not taken; empty: it was, or is known already.
type reason string

const (
	taken        reason = ""
	unknownOwner reason = "unknown-owner" // our directory has no pods of it
	notHosted    reason = "not-hosted"    // none of them on the node that speaks
	unknownKey   reason = "unknown-key"   // the key is not that of the node's agent
	stale        reason = "stale"         // older than what is known
	future       reason = "future"        // collected later than now
	malformed    reason = "malformed"
	forged       reason = "bad-signature"
	unasked      reason = "unasked" // an answer to no question
	tooMuch      reason = "too-much"
	noFiles      reason = "no-files" // its files did not come
	unfit        reason = "unfit"    // our own, that others would not take
)

// passes tells whether the reason may pass: watches are not at the same place.
func (r reason) passes() bool { return r == unknownOwner || r == notHosted || r == unknownKey }

// take looks at records that a peer brought. Its error says that the peer
// misbehaves.
func (x *Exchange) take(via string, raws []*peerv1.Record) error {
	for _, raw := range raws {
		r, err := x.decode(raw)
		if err != nil {
			x.metrics.rejected.WithLabelValues(string(malformed)).Inc()
			return err
		}
		if reason := x.receive(r, via); reason != taken {
			x.metrics.rejected.WithLabelValues(string(reason)).Inc()
			if reason == forged {
				return junk("the record of owner %s is not signed by the key that it names", r.key)
			}
		}
	}
	return nil
}

// receive looks at one record that came from a peer.
func (x *Exchange) receive(r *Record, via string) reason {
	x.mu.Lock()
	defer x.mu.Unlock()
	if held := x.records[r.key]; held != nil && held.id == r.id {
		return taken
	}
	if w, ok := x.waiting[r.key]; ok && w.rec.id == r.id {
		return taken
	}
	now := time.Now()
	if r.collected > now.Add(maxAhead).UnixMilli() || r.signed > now.Add(maxAhead).UnixMilli() {
		return future
	}
	reason := unknownKey
	if x.speaks(r) {
		if !r.verified.Load() {
			x.mu.Unlock()
			ok := r.verify()
			x.mu.Lock()
			if !ok {
				return forged
			}
		}
		reason = x.admit(r, via)
	}
	if reason.passes() {
		if len(x.waiting) >= maxWaiting {
			for key := range x.waiting {
				delete(x.waiting, key)
				break
			}
		}
		x.waiting[r.key] = arrival{entry{r, via}, now}
	}
	return reason
}

// admit needs mu. It takes a record if it counts.
func (x *Exchange) admit(r *Record, via string) reason {
	hosts, there := x.dir.Hosts(r.key)
	switch {
	case !there:
		return unknownOwner
	case !slices.Contains(hosts, r.node):
		return notHosted
	case !x.speaks(r):
		return unknownKey
	case !r.verify():
		return forged
	}
	if held := x.records[r.key]; held != nil && x.valid(held, hosts) && !r.newer(held) {
		if held.id == r.id {
			return taken
		}
		return stale
	}
	if missing := x.files.missing(r.all); len(missing) > 0 {
		if p, ok := x.partial[r.key]; !ok || r.newer(p.rec) {
			x.partial[r.key] = arrival{entry{r, via}, time.Now()}
			for _, h := range missing {
				x.lacking[h] = append(x.lacking[h], r.key)
			}
		} else if p.rec.id != r.id {
			return stale
		}
		if l := x.links[via]; l != nil {
			l.want(missing)
		}
		return taken
	}
	return x.apply(r, via)
}

// apply needs mu. It puts a record into the directory.
func (x *Exchange) apply(r *Record, via string) reason {
	var err error
	if r.failure != nil {
		err = x.dir.LearnFailure(r.key, r.node, *r.failure)
	} else {
		err = x.dir.Learn(r.key, r.node, r.complete(x.files))
	}
	switch {
	case err == nil:
	case errors.Is(err, nodecache.ErrStale):
		return unknownOwner
	case errors.Is(err, nodecache.ErrNotHosted):
		return notHosted
	case errors.Is(err, nodecache.ErrBusy):
		return stale // this agent's own attempt will tell
	default: // ErrOlder
		known := x.dir.Learned(r.key).Info
		if r.failure != nil || known == nil || latest(known).UnixMilli() > r.collected {
			if mine := x.local[r.key]; mine != nil && r.failure == nil {
				mine.contested = true
				x.again[r.key] = struct{}{}
				x.rouse()
			}
			return stale
		}
		// The same, and somebody vouches for it anew.
	}
	delete(x.partial, r.key)
	x.hold(r, via)
	x.settle(r.key)
	return taken
}

// takeFiles looks at files that a peer brought, and returns how many bytes
// nobody had asked for.
func (x *Exchange) takeFiles(files []*peerv1.File) (useless int) {
	for _, f := range files {
		content, h := intern(f.GetContent())
		x.mu.Lock()
		wanted := false
		for _, key := range x.lacking[h] {
			p, ok := x.partial[key]
			if !ok || !slices.Contains(p.rec.all, h) {
				continue
			}
			wanted = true
			x.files.put(h, content)
			if len(x.files.missing(p.rec.all)) == 0 {
				delete(x.partial, key)
				if reason := x.admit(p.rec, p.via); reason != taken {
					x.metrics.rejected.WithLabelValues(string(reason)).Inc()
				}
			}
		}
		delete(x.lacking, h)
		x.mu.Unlock()
		if !wanted {
			x.metrics.rejected.WithLabelValues(string(unasked)).Inc()
			useless += len(f.GetContent())
		}
	}
	return useless
}

// expire drops what waited in vain.
func (x *Exchange) expire(now time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for key, w := range x.waiting {
		if now.Sub(w.at) > waitingTime {
			delete(x.waiting, key)
		}
	}
	for key, p := range x.partial {
		if now.Sub(p.at) > filesTime {
			delete(x.partial, key)
			x.metrics.rejected.WithLabelValues(string(noFiles)).Inc()
		}
	}
}

// sweep forgets files that no record names.
func (x *Exchange) sweep() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.partial) == 0 {
		clear(x.lacking)
		x.files.sweep()
	}
}

// errStranger indicates a peer whose key is not that of the node's agent.
var errStranger = errors.New("its key is not that of the node's agent")

// refused counts what an error of a peer means, if it is a reason.
func (x *Exchange) refused(err error) {
	switch {
	case errors.Is(err, errTooMuch):
		x.metrics.rejected.WithLabelValues(string(tooMuch)).Inc()
	case errors.Is(err, errStranger):
		x.metrics.rejected.WithLabelValues(string(unknownKey)).Inc()
	}
}

// errTooMuch indicates a peer that sends more than anybody has.
var errTooMuch = errors.New("it sent more than there can be")

// ended is the error of a stream for a log; nil where it ended as it should.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// State is that of a [PeerStatus].
type State string

// The states.
const (
	StateSelf      State = "self"
	StateConnected State = "connected" // its records come in by a stream
	StateIdle      State = "idle"
	StateBackoff   State = "backoff" // it is left alone
)

// PeerStatus is how it stands with one member.
type PeerStatus struct {
	Member
	State State
	// Serving tells whether the peer has a stream open to this agent.
	Serving bool
	// Reason is the last error in one line, Until when the peer is asked again;
	// both are zero after it has answered.
	Reason string
	Until  time.Time
	// Last is when it answered last; zero: never.
	Last time.Time
	// Records is how many of the records held are this peer's word.
	Records int
}

// Status is how it stands with every member, sorted by node.
func (x *Exchange) Status() []PeerStatus {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.roster == nil {
		return nil
	}
	words := map[string]int{}
	for _, r := range x.records {
		words[r.node]++
	}
	out := make([]PeerStatus, 0, len(x.roster.ring))
	for _, s := range x.roster.ring {
		p := PeerStatus{Member: s.Member, State: StateIdle, Records: words[s.Node]}
		if l := x.links[s.Node]; l != nil && l.open {
			p.State = StateConnected
		}
		if c := x.peers[s.Node]; c != nil {
			p.Serving, p.Reason, p.Until, p.Last = c.streams > 0, c.reason, c.until, c.last
			if x.avoided(s.Node) {
				p.State = StateBackoff
			}
		}
		if s.Node == x.node {
			p.State = StateSelf
		}
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b PeerStatus) int {
		if a.Node < b.Node {
			return -1
		}
		return 1
	})
	return out
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
