package ads

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/xds"
)

// wildcard is the name that stands for everything a client may see.
const wildcard = "*"

// maxResponse bounds the bytes of one response in bytes, but for a single
// resource that is larger and for SotW CDS and LDS, which are whole by
// protocol.
const maxResponse = 1 << 20

// stream is one client. Its handler goroutine alone sends; a second goroutine
// receives.
type stream struct {
	// Set at creation, read-only.
	s         *Server
	delta     bool
	only      xds.Type // the type of a stream that carries no other, or aggregated
	connected time.Time
	notify    chan struct{} // capacity 1
	done      chan struct{} // closed when the handler returns

	ctx     context.Context // of the call, for who is at its other end
	closing <-chan struct{} // the server's when the stream began; closed to end it

	// Guarded by the server's lock: the key by which the stream is counted.
	counted   bool
	countedBy string

	// mu guards all below. It is taken after the server's lock.
	mu     sync.Mutex
	node   *corev3.Node // nil before the first request; its id is the pod if that is proved
	id     string       // node.id as the client said it
	who    Caller
	key    string // of the client, for limits and what is remembered
	sight  sight
	demand Demand          // nil for a client that has all clusters; set once
	dialer Dialer          // nil: nobody hears of what it names; set once
	wanted func() []Wanted // what it is to have with the first answer; nil once that is known
	given  []Wanted        // that, as it was
	closed func()          // to be called at the end; may be nil
	over   bool            // that was
	warns  []string        // of the view
	began  time.Time       // of the first request of a served type
	nonce  uint64
	types  [xds.NumTypes]typeState

	sendSince    time.Time // of the response that the transport has not taken; zero: none
	returned     bool      // delta: the client brought something from an earlier stream
	removing     time.Time // since when a cluster's removal is due; zero: none is
	awaited      bitset    // clusters that were sent, and whose CLA was not asked for yet
	awaitedUntil time.Time // for how long listeners and routes wait for that
	awaitedLimit time.Time // and at most, whatever clusters are sent meanwhile
}

// typeState is what a stream knows of one type. The bitsets hold table ids; no
// id is in both dirty and gone.
type typeState struct {
	seen     bool // a request came
	reading  bool // a request is being applied
	wildcard bool

	subscribed bitset // by name
	dirty      bitset // to be sent
	gone       bitset // held, and to be removed
	held       bitset // sent on this stream, or brought and equal
	sent       bitset // sent on this stream; clusters only
	taken      taken  // acknowledged, and when

	missing map[string]struct{} // subscribed names without an id
	owed    map[string]struct{} // delta: names to be answered with a removal
	brought map[string]string   // delta: name and version that the client holds and the table has not
	had     map[uint32]string   // delta: version that the client holds of what is dirty, where it was not sent here
	answer  bool                // a response is owed even if it is empty

	named    bool              // SotW: a request held a name
	resume   string            // SotW: version of a first pure wildcard request
	gated    time.Time         // SotW: since when the type waits for evidence; zero: it does not
	retained map[uint32]*entry // SotW: clusters that stay in the set until their removal is due

	inFlight     bool      // a response is not acknowledged
	sentAt       time.Time // of the last response
	nonce        string    // of the last response
	carried      bitset    // ids that the last response newly carried
	sentVersion  string
	ackedVersion string
	nack         *Nack

	refused  bitset            // refused and not accepted since, in whatever content
	withheld bitset            // of these, what is not sent; never dirty
	q        *quarantine       // nil before the first refusal
	resumed  bool              // SotW: the client came with a version
	previous map[uint32]*entry // SotW full sets: the accepted content of what changed since
	flying   []sentEntry       // SotW full sets: what the response in flight newly carries
}

func newStream(ctx context.Context, s *Server, delta bool, only xds.Type) *stream {
	return &stream{
		ctx: ctx, s: s, delta: delta, only: only, connected: time.Now(),
		notify: make(chan struct{}, 1), done: make(chan struct{}),
	}
}

func (st *stream) kind() string {
	if st.delta {
		return "delta"
	}
	return "sotw"
}

// sending notes since when a response waits for the client to read.
func (st *stream) sending(since time.Time) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.sendSince = since
}

// wake tells the sending goroutine to look. It never blocks.
func (st *stream) wake() {
	select {
	case st.notify <- struct{}{}:
	default:
	}
}

// run serves the stream until it ends. receive takes and applies one request.
func (st *stream) run(ctx context.Context, receive func() error, send func(*message) error) error {
	if !st.s.begin(st) {
		return errStopping
	}
	defer st.s.end(st)
	// The goroutine ends when the handler has returned, which fails receive.
	failed := make(chan error, 1)
	go func() {
		for {
			if err := receive(); err != nil {
				failed <- err
				return
			}
			st.wake()
		}
	}()
	hold := time.NewTimer(time.Hour)
	defer hold.Stop()
	closing := st.closing
	var stop <-chan time.Time
	for {
		st.wantFirst()
		msgs, until, again := st.collect()
		for i := range msgs {
			st.sending(time.Now())
			if err := send(&msgs[i]); err != nil {
				return err
			}
			st.sending(time.Time{})
			st.s.metrics.responses.WithLabelValues(msgs[i].t.String()).Inc()
			st.s.metrics.resources.WithLabelValues(msgs[i].t.String()).Add(float64(msgs[i].count))
		}
		hold.Stop()
		if !until.IsZero() {
			left := time.Until(until)
			if left <= 0 {
				st.s.metrics.held.Inc()
				return st.heldError()
			}
			hold.Reset(left)
		}
		if !again.IsZero() && (until.IsZero() || again.Before(until)) {
			hold.Reset(time.Until(again))
		}
		select {
		case <-st.notify:
		case <-hold.C:
		case err := <-failed:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case <-closing:
			closing = nil
			stop = time.After(st.s.jitter())
		case <-stop:
			return errStopping
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

var errStopping = status.Error(codes.Unavailable, "the agent is stopping or has a successor; connect again")

func (st *stream) heldError() error {
	st.s.mu.RLock()
	open := st.s.open
	st.s.mu.RUnlock()
	if !open {
		return status.Errorf(codes.Unavailable,
			"the agent is still starting: it has not learned the cluster's pods within %v; connect again", st.s.opts.HoldLimit)
	}
	return status.Errorf(codes.Unavailable,
		"the agent is still starting: some owner's services are not known after %v, and an answer now could remove what this client holds; connect again",
		st.s.opts.HoldLimit)
}

// settle takes a request as ACK or NACK of the response in flight if it names
// its nonce. Called with mu held; the returned function, which may be nil, is
// to be called without.
func (st *stream) settle(t xds.Type, nonce string, detail *rpcstatus.Status) func() {
	ts := &st.types[t]
	if !ts.inFlight || nonce != ts.nonce {
		return nil
	}
	ts.inFlight = false
	if t == xds.Cluster {
		st.awaitedUntil = earlier(st.awaitedUntil, time.Now().Add(st.s.opts.short()))
	}
	if detail == nil {
		st.accept(t)
		return nil
	}
	r := Refusal{Node: st.node, Type: t, resources: ts.carried.count()}
	r.Withheld = st.refuse(t, clip(detail.GetMessage()))
	r.Nack = *ts.nack
	return func() { st.s.refused(r) }
}

// mark notes what changes mean for this stream; true if it should look.
// Called with the server's lock held for writing.
func (st *stream) mark(changes []change) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	look := false
	for i := range changes {
		if st.types[changes[i].t].seen && st.markOne(&changes[i]) {
			look = true
		}
	}
	return look
}

func (st *stream) markOne(c *change) bool {
	tb, ts := &st.s.table, &st.types[c.t]
	name := ""
	if len(ts.missing)+len(ts.owed)+len(ts.brought) > 0 {
		name = tb.slots[c.id].name
	}
	if _, ok := ts.missing[name]; ok {
		delete(ts.missing, name)
		ts.subscribed.set(c.id)
	}
	at := rank(st.sight.scopes, c.scope)
	if at < 0 {
		return false
	}
	named := ts.subscribed.has(c.id)
	if !named && (!ts.wildcard || tb.hides(&st.sight, c.t, c.scope)) {
		return false
	}
	e := tb.resolve(c.t, c.id, &st.sight, named)
	if e != nil {
		if rank(st.sight.scopes, e.scope) < at {
			return false // an earlier scope hides the change
		}
		if !st.delta && fullSet(c.t) {
			ts.remember(c.id, c.old)
		}
		if ts.withheld.has(c.id) {
			ts.absolve(c.id)
		}
		delete(ts.retained, c.id)
		ts.gone.clear(c.id)
		delete(ts.owed, name)
		if version, ok := ts.brought[name]; ok {
			delete(ts.brought, name)
			ts.held.set(c.id)
			ts.taken.ids.set(c.id)
			ts.remind(c.id, version)
		}
		// A table that is still being made may come to what the client has.
		if version, ok := ts.had[c.id]; ok && version == e.res.Version && !st.warming(c.t, c.id) {
			delete(ts.had, c.id)
			ts.dirty.clear(c.id)
			return false
		}
		ts.dirty.set(c.id)
		return true
	}
	ts.dirty.clear(c.id)
	old := c.old
	if ts.refused.has(c.id) {
		old = ts.instead(c.id, old)
		ts.pardon(c.id)
	}
	switch {
	case ts.held.has(c.id):
		ts.gone.set(c.id)
		if !st.delta && c.t == xds.Cluster && old != nil {
			if ts.retained == nil {
				ts.retained = map[uint32]*entry{}
			}
			if ts.retained[c.id] == nil {
				ts.retained[c.id] = old
			}
		}
		return true
	case named && st.delta:
		ts.owe(tb.slots[c.id].name)
		return true
	}
	return false
}

// uses adds the ids that the stream still has to speak of.
func (st *stream) uses(used *bitset) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for t := range st.types {
		used.add(st.types[t].dirty)
		used.add(st.types[t].gone)
		used.add(st.types[t].held)
	}
}

// release goes on to know the names of dropped ids by the names alone, since
// the ids will mean others. Called with the server's lock held for writing.
func (st *stream) release(dropped bitset) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for t := range st.types {
		ts := &st.types[t]
		ts.subscribed.each(bitset{}, func(id uint32) bool {
			if dropped.has(id) {
				ts.miss(st.s.table.slots[id].name)
			}
			return true
		})
		for _, b := range []bitset{ts.subscribed, ts.sent, ts.taken.ids, ts.carried, ts.refused, ts.withheld} {
			b.drop(dropped)
		}
		ts.flying = slices.DeleteFunc(ts.flying, func(f sentEntry) bool { return dropped.has(f.id) })
		maps.DeleteFunc(ts.previous, func(id uint32, _ *entry) bool { return dropped.has(id) })
		maps.DeleteFunc(ts.had, func(id uint32, _ string) bool { return dropped.has(id) })
	}
	st.awaited.drop(dropped)
}

func (ts *typeState) owe(name string) {
	if ts.owed == nil {
		ts.owed = map[string]struct{}{}
	}
	ts.owed[name] = struct{}{}
}

// remind notes the version that the client holds of what it was not sent here.
func (ts *typeState) remind(id uint32, version string) {
	if ts.had == nil {
		ts.had = map[uint32]string{}
	}
	ts.had[id] = version
}

func (ts *typeState) miss(name string) {
	if ts.missing == nil {
		ts.missing = map[string]struct{}{}
	}
	ts.missing[name] = struct{}{}
}

// busy tells that nothing may be sent for the type now.
func (ts *typeState) busy() bool {
	return !ts.seen || ts.inFlight || ts.reading || !ts.gated.IsZero()
}

// forget drops what is known of the client's copy of a resource.
func (ts *typeState) forget(id uint32) {
	ts.dirty.clear(id)
	ts.gone.clear(id)
	ts.held.clear(id)
	delete(ts.had, id)
	ts.taken.ids.clear(id)
	delete(ts.retained, id)
	delete(ts.previous, id)
	if ts.refused.has(id) {
		ts.pardon(id)
	}
}

// enterWildcard marks all that the stream may see and does not hold.
func (st *stream) enterWildcard(t xds.Type, again bool) {
	ts := &st.types[t]
	ts.wildcard, ts.answer = true, true
	if again {
		ts.had = nil
	}
	for id := range st.s.table.slots {
		id := uint32(id)
		if (again || !ts.held.has(id)) && st.s.table.resolve(t, id, &st.sight, ts.subscribed.has(id)) != nil {
			ts.dirty.set(id)
		}
	}
}

// leaveWildcard forgets what came by the wildcard alone.
func (st *stream) leaveWildcard(t xds.Type) {
	ts := &st.types[t]
	ts.wildcard, ts.answer = false, false
	ts.held.keep(ts.subscribed)
	ts.taken.ids.keep(ts.subscribed)
	ts.dirty.keep(ts.subscribed)
	ts.gone.keep(ts.subscribed)
	ts.refused.keep(ts.subscribed)
	ts.withheld.keep(ts.subscribed)
	for _, m := range []map[uint32]*entry{ts.retained, ts.previous} {
		maps.DeleteFunc(m, func(id uint32, _ *entry) bool { return !ts.subscribed.has(id) })
	}
	for name := range ts.brought {
		if !st.subscribesTo(ts, name) {
			delete(ts.brought, name)
		}
	}
}

func (st *stream) subscribesTo(ts *typeState, name string) bool {
	if _, ok := ts.missing[name]; ok {
		return true
	}
	id, ok := st.s.table.names[name]
	return ok && ts.subscribed.has(id)
}
