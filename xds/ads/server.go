package ads

import (
	"context"
	"crypto/sha256"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/xds"
)

// DefaultHoldLimit is how long a stream is held while the gate is closed. It
// lies below the 15 s after which gRPC takes an unanswered resource as absent
// (gRFC A27).
const DefaultHoldLimit = 10 * time.Second

// DefaultGrace is how long a removal waits for what may still refer to it.
const DefaultGrace = 5 * time.Second

// Options configure a [Server]. The zero Options work.
type Options struct {
	// View returns what a client may see. It is called once for each stream, at
	// its first request. An error ends the stream with INVALID_ARGUMENT and the
	// error's text. Nil means [xds.Shared] for all.
	View func(Introduction) (View, error)
	// Joined hears who is at the other end of a stream, with the node of View,
	// when that is known. It is called with the server's locks free and must not
	// block. Nil: nobody hears of it.
	Joined func(*corev3.Node, Caller)
	// Pod returns "namespace/name" of the pod that a node stands for, "" if
	// it is not known. Nil means unknown for all. It is called with the
	// server's locks free.
	Pod func(*corev3.Node) string
	// Identifier is sent as control_plane.identifier in SotW responses; Envoy
	// shows it as a statistic. Empty: not sent.
	Identifier string
	// RequireIdentity refuses clients whose pod is not proved (see
	// [Credentials]): UNAVAILABLE where it may be soon, else UNAUTHENTICATED.
	// Else they are served as the pod that their node.id names.
	RequireIdentity bool
	// IdentityWait bounds how long a client waits for its pod to be known, once
	// the gate is open. Zero means [DefaultIdentityWait].
	IdentityWait time.Duration
	// HoldLimit bounds how long a request waits for an answer that the server
	// withholds. Zero means [DefaultHoldLimit].
	HoldLimit time.Duration
	// Grace bounds how long the removal of clusters waits for a client to
	// accept listeners and routes without them. Zero means [DefaultGrace]. At
	// most a second of it is spent on requests that a client is expected to
	// send by itself.
	Grace time.Duration
	// Trial is how long resources that a client may have refused wait to be
	// sent to it again, if nothing else changes. Zero means [DefaultTrial].
	Trial time.Duration
	// Refused hears of each response that a client rejected. It is called with
	// the server's locks free and must not block. Nil: nobody hears of them.
	Refused func(Refusal)
	// Logger takes few lines; nil discards them.
	Logger *slog.Logger
	// Registerer takes the metrics; nil: they are kept unregistered.
	Registerer prometheus.Registerer
}

// Introduction is what is known of a client when its stream begins.
type Introduction struct {
	// Node is never nil. Its id is the pod's that is proved, if one is, else what
	// the client says.
	Node   *corev3.Node
	Delta  bool
	Proved bool // the pod is
}

// short is how long the server waits for a request that an Envoy sends at once.
func (o *Options) short() time.Duration { return min(o.Grace, time.Second) }

// Server answers the aggregated discovery service, SotW and delta, from one
// set of tables. See the package comment for the life of a response. All
// methods are safe for concurrent use.
type Server struct {
	discovery.UnimplementedAggregatedDiscoveryServiceServer

	// Set at creation, read-only.
	opts    Options
	log     *slog.Logger
	metrics *metrics

	// mu guards the tables and what all streams share. It is taken before a
	// stream's own lock, and never held while anything is sent or received.
	mu      sync.RWMutex
	table   table
	streams map[*stream]struct{}
	ids     map[string]*share // by key of the client
	open    bool
	spread  time.Duration
	closing chan struct{} // closed to end the streams that have it
	stopped bool
	sweepAt int
	idsAt   int // shares of ids at which those that say nothing are dropped

	// nackMu guards which refusals and claims were logged.
	nackMu sync.Mutex
	nacked map[[sha256.Size]byte]struct{}

	memory memory // has a lock of its own
	joiner joiner // the same
}

// New returns a server with empty tables and a closed gate.
func New(opts Options) *Server {
	if opts.HoldLimit <= 0 {
		opts.HoldLimit = DefaultHoldLimit
	}
	if opts.Grace <= 0 {
		opts.Grace = DefaultGrace
	}
	if opts.IdentityWait <= 0 {
		opts.IdentityWait = DefaultIdentityWait
	}
	if opts.Trial <= 0 {
		opts.Trial = DefaultTrial
	}
	if opts.View == nil {
		opts.View = func(Introduction) (View, error) { return View{Scopes: []xds.Scope{xds.Shared}}, nil }
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		opts:    opts,
		log:     opts.Logger,
		metrics: newMetrics(opts.Registerer),
		closing: make(chan struct{}),
		table:   newTable(),
		streams: map[*stream]struct{}{},
		ids:     map[string]*share{},
		sweepAt: minSweep,
		idsAt:   minSweep,
		nacked:  map[[sha256.Size]byte]struct{}{},
	}
	if opts.Registerer != nil {
		s.registerWithheld(opts.Registerer)
	}
	return s
}

// Publish applies u to the tables and marks what is dirty for each stream. It
// sends nothing, encodes nothing and waits for no client. Of an ID that is
// both removed and set, the set counts. A resource that is published with the
// version it has already changes nothing.
func (s *Server) Publish(u xds.Update) {
	if u.Empty() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	changes := make([]change, 0, len(u.Set)+len(u.Remove))
	for _, id := range u.Remove {
		if c, ok := s.table.remove(id); ok {
			changes = append(changes, c)
		}
	}
	for _, r := range u.Set {
		if c, ok := s.table.put(r); ok {
			changes = append(changes, c)
		}
	}
	for scope, ev := range u.Evidence {
		s.table.scopes[s.table.scopeID(scope)].evidence = ev
	}
	for st := range s.streams {
		if st.mark(changes) || len(u.Evidence) > 0 {
			st.wake()
		}
	}
	if s.table.dead >= s.sweepAt {
		s.sweep()
	}
}

// minSweep is the number of dead names below which no sweep is worth its cost.
const minSweep = 256

// sweep gives back the ids of names that nobody has and nobody holds. A stream
// that is subscribed to such a name keeps the name itself. Called with mu held.
func (s *Server) sweep() {
	var used, dropped bitset
	for st := range s.streams {
		st.uses(&used)
	}
	for id := range s.table.slots {
		sl := &s.table.slots[id]
		if sl.name != "" && sl.live == 0 && !used.has(uint32(id)) {
			dropped.set(uint32(id))
		}
	}
	for st := range s.streams {
		st.release(dropped)
	}
	dropped.each(bitset{}, func(id uint32) bool { s.table.drop(id); return true })
	s.sweepAt = max(minSweep, 2*s.table.dead)
}

// OpenGate lets the server answer. Before, requests are noted and held. It may
// be called more than once.
func (s *Server) OpenGate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open {
		return
	}
	s.open = true
	s.metrics.gate.Set(1)
	for st := range s.streams {
		st.wake()
	}
}

// Shutdown ends the service: new streams are refused, running ones are closed
// with UNAVAILABLE at random moments within spread, so that not all clients
// come back at once. It returns when no stream is left, or ctx's error when
// ctx ends first. The caller then stops the gRPC server with Stop, since
// GracefulStop would wait for streams that never end.
func (s *Server) Shutdown(ctx context.Context, spread time.Duration) error {
	s.mu.Lock()
	if !s.stopped {
		s.stopped = true
		s.disperse(spread)
	}
	running := s.running()
	s.mu.Unlock()
	return wait(ctx, running)
}

// Disperse closes the running streams as Shutdown does, and goes on to serve
// those that begin from now on: the clients are to come back to another agent,
// which has taken the socket over, or to this one if that agent has died.
func (s *Server) Disperse(ctx context.Context, spread time.Duration) error {
	s.mu.Lock()
	s.disperse(spread)
	running := s.running()
	s.mu.Unlock()
	return wait(ctx, running)
}

// disperse ends the streams of now within spread. Called with mu held.
func (s *Server) disperse(spread time.Duration) {
	s.spread = spread
	close(s.closing)
	s.closing = make(chan struct{})
}

// running are the streams of now. Called with mu held.
func (s *Server) running() []*stream {
	running := make([]*stream, 0, len(s.streams))
	for st := range s.streams {
		running = append(running, st)
	}
	return running
}

func wait(ctx context.Context, running []*stream) error {
	for _, st := range running {
		select {
		case <-st.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// jitter is how long a stream lives on after the server began to stop.
func (s *Server) jitter() time.Duration {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.spread <= 0 {
		return 0
	}
	return rand.N(s.spread)
}

// begin enters a stream; false if the server stops.
func (s *Server) begin(st *stream) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	st.closing = s.closing
	s.streams[st] = struct{}{}
	s.metrics.streams.WithLabelValues(st.kind()).Inc()
	return true
}

func (s *Server) end(st *stream) {
	st.mu.Lock()
	closed, dialer := st.closed, st.dialer
	st.over = true
	st.mu.Unlock()
	s.mu.Lock()
	delete(s.streams, st)
	if st.counted {
		s.leave(st.countedBy)
	}
	s.mu.Unlock()
	if closed != nil {
		closed()
	}
	if dialer != nil {
		dialer.Close()
	}
	s.metrics.streams.WithLabelValues(st.kind()).Dec()
	close(st.done)
}

// see gives the scopes of a view their ids.
func (s *Server) see(v *View) sight {
	s.mu.Lock()
	defer s.mu.Unlock()
	sees := sight{scopes: make([]uint32, len(v.Scopes)), onDemand: v.Demand != nil, fallback: noScope}
	for i, sc := range v.Scopes {
		sees.scopes[i] = s.table.scopeID(sc)
	}
	if v.Fallback != xds.Shared {
		sees.fallback = s.table.scopeID(v.Fallback)
		sees.scopes = append(sees.scopes, sees.fallback)
	}
	return sees
}

// Refusal is a response that a client rejected.
type Refusal struct {
	Node *corev3.Node // of the client
	Type xds.Type
	Nack
	// Withheld are the names of the resources that are withheld because of it,
	// without those that are merely suspects.
	Withheld []string
	// Said is set where the client has said the same of the type before.
	Said bool

	resources int // carried
}

// maxNacked bounds the memory of logged refusals.
const maxNacked = 1024

// refused counts a NACK and tells of it, the log once for each distinct message.
func (s *Server) refused(r Refusal) {
	client := r.Node.GetId()
	s.metrics.nacks.WithLabelValues(r.Type.String()).Inc()
	s.metrics.refused.WithLabelValues(r.Type.String()).Add(float64(r.resources))
	r.Said = !s.logOnce(r.Type.String()+"\x00"+client+"\x00"+r.Error, func() {
		s.log.Warn("client refused a response", "client", client, "type", r.Type.String(),
			"version", r.Version, "resources", r.resources, "error", r.Error)
	})
	if s.opts.Refused != nil {
		s.opts.Refused(r)
	}
}

// logOnce calls log if it was not called for the text before, and tells whether
// it did.
func (s *Server) logOnce(text string, log func()) bool {
	key := sha256.Sum256([]byte(text))
	s.nackMu.Lock()
	_, known := s.nacked[key]
	if len(s.nacked) >= maxNacked {
		clear(s.nacked)
	}
	s.nacked[key] = struct{}{}
	s.nackMu.Unlock()
	if !known {
		log()
	}
	return !known
}
