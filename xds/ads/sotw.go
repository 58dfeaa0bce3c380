package ads

import (
	"maps"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/fingerpost/fingerpost/xds"
)

// StreamAggregatedResources serves one state-of-the-world stream.
func (s *Server) StreamAggregatedResources(g discovery.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	return s.serveSotW(g, aggregated)
}

// serveSotW serves a state-of-the-world stream of all types, or of one.
func (s *Server) serveSotW(g sotwStream, only xds.Type) error {
	st := newStream(g.Context(), s, false, only)
	return st.run(g.Context(), func() error {
		req, err := g.Recv()
		if err != nil {
			return err
		}
		return st.receiveSotW(req)
	}, func(m *message) error { return g.SendMsg(m) })
}

func (st *stream) receiveSotW(req *discovery.DiscoveryRequest) error {
	t, ok, err := st.admit(req.GetTypeUrl(), req.GetNode())
	if err != nil || !ok {
		return err
	}
	if err := checkNames(t, len(req.GetResourceNames()), maxSotWNames); err != nil {
		return err
	}
	st.dial(t, req.GetResourceNames())
	report, dropped := st.applySotW(t, req)
	if report != nil {
		report()
	}
	st.hangUp(t, dropped)
	if len(req.GetResourceNames()) == 0 {
		return nil
	}
	return st.checkAbsent()
}

// fullSet tells that each response of the type is all that the client has, so
// that absence removes (xDS protocol, "Deleting Resources": LDS and CDS).
func fullSet(t xds.Type) bool { return t == xds.Cluster || t == xds.Listener }

// applySotW also returns the names that the client asks for no more.
func (st *stream) applySotW(t xds.Type, req *discovery.DiscoveryRequest) (report func(), dropped []string) {
	st.s.mu.RLock()
	defer st.s.mu.RUnlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.began.IsZero() {
		st.began = time.Now()
	}
	ts, tb := &st.types[t], &st.s.table
	first := !ts.seen
	if !first && req.GetResponseNonce() != ts.nonce {
		return nil, nil // stale: the client repeats it with the latest nonce
	}
	ts.seen = true
	report = st.settle(t, req.GetResponseNonce(), req.GetErrorDetail())

	names := req.GetResourceNames()
	// Without names a request means everything until the first name was sent.
	all := len(names) == 0 && !ts.named && t.HasWildcard()
	ts.named = ts.named || len(names) > 0
	var subscribed bitset
	missing := ts.missing
	ts.missing = nil
	for _, name := range names {
		if name == wildcard {
			all = true
		} else if id, ok := tb.names[name]; ok {
			subscribed.set(id)
		} else {
			ts.miss(name)
		}
	}
	was := ts.subscribed
	ts.subscribed = subscribed
	if t.HasWildcard() {
		was.each(subscribed, func(id uint32) bool { dropped = append(dropped, tb.slots[id].name); return true })
		for name := range missing {
			if !st.subscribesTo(ts, name) {
				dropped = append(dropped, name)
			}
		}
	}
	switch {
	case ts.wildcard && !all:
		st.leaveWildcard(t)
	case !ts.wildcard:
		was.each(subscribed, func(id uint32) bool { ts.forget(id); return true })
		if all {
			st.enterWildcard(t, false)
		}
	}
	subscribed.each(was, func(id uint32) bool {
		if tb.resolve(t, id, &st.sight, true) != nil {
			ts.absolve(id)
			ts.dirty.set(id)
		}
		return true
	})
	if first {
		// What a client brings is what it accepted last. Ours are this short.
		if v := req.GetVersionInfo(); len(v) <= 2*len(sum{}.String()) {
			ts.ackedVersion = v
		}
		st.resume(t, req.GetVersionInfo())
		st.recall(t)
	}
	ts.dirty.drop(ts.withheld)
	return report, dropped
}

// resume takes note of the version that a client brings from an earlier stream.
func (st *stream) resume(t xds.Type, version string) {
	ts := &st.types[t]
	if version == "" {
		return
	}
	if st.s.table.evidence(st.sight.scopes) == xds.Pending || !st.s.open {
		ts.gated = time.Now()
	}
	if !fullSet(t) {
		return
	}
	ts.resumed = true
	// An equal version proves an equal set only where the set is not of the
	// client's choosing (xDS protocol, "Resource Type Instance Version").
	if ts.wildcard && ts.subscribed.empty() && len(ts.missing) == 0 && len(version) == len(sum{}.String()) {
		ts.resume = version
	}
	ts.answer = true
}

// lacking tells whether the answers that are withheld could lack something that
// the client holds: it asks for everything and does not hold just that, or for a
// name that nobody has.
func (st *stream) lacking() bool {
	for t := range st.types {
		ts := &st.types[t]
		if ts.resume != "" && ts.resume == st.version(xds.Type(t)) {
			continue
		}
		lacks := ts.wildcard || len(ts.missing) > 0
		ts.subscribed.each(bitset{}, func(id uint32) bool {
			lacks = lacks || st.s.table.resolve(xds.Type(t), id, &st.sight, true) == nil
			return !lacks
		})
		if lacks && !ts.gated.IsZero() {
			return true
		}
	}
	return false
}

// version is that of everything that the stream may have of a type.
func (st *stream) version(t xds.Type) string {
	var version sum
	st.members(t, func(_ uint32, e *entry) { version = version.plus(e.sum) })
	return version.String()
}

// members calls f for each entry that the stream is subscribed to.
func (st *stream) members(t xds.Type, f func(id uint32, e *entry)) {
	ts, tb := &st.types[t], &st.s.table
	visit := func(id uint32) bool {
		if e := tb.resolve(t, id, &st.sight, ts.subscribed.has(id)); e != nil {
			f(id, e)
		}
		return true
	}
	if !ts.wildcard {
		ts.subscribed.each(bitset{}, visit)
		return
	}
	for id := range tb.slots {
		visit(uint32(id))
	}
}

// buildSotW makes the next response of a type; false if there is nothing to
// say. Called with both locks held.
func (st *stream) buildSotW(t xds.Type, p part) (message, bool) {
	if fullSet(t) {
		return st.buildFull(t, p)
	}
	ts, tb := &st.types[t], &st.s.table
	// Nothing can be removed of these types by protocol.
	ts.gone.each(bitset{}, func(id uint32) bool { ts.forget(id); return true })
	var entries []*entry
	size := 0
	ts.carried.reset()
	if p.additions {
		ts.dirty.each(p.without, func(id uint32) bool {
			e := tb.resolve(t, id, &st.sight, ts.subscribed.has(id))
			if e != nil {
				if size > 0 && size+e.sotw.Len() > maxResponse {
					return false
				}
				size += e.sotw.Len()
				ts.held.set(id)
				ts.carried.set(id)
				entries = append(entries, e)
			}
			ts.dirty.clear(id)
			return true
		})
	}
	if len(entries) == 0 {
		return message{}, false
	}
	st.follow(t, ts.carried)
	var version sum
	st.members(t, func(_ uint32, e *entry) { version = version.plus(e.sum) })
	return st.sotw(t, version.String(), entries, size), true
}

// buildFull makes a response that holds all that the client may have. Clusters
// whose removal is not due yet stay in it.
func (st *stream) buildFull(t xds.Type, p part) (message, bool) {
	ts := &st.types[t]
	removals := p.removals && !ts.gone.empty()
	additions := p.additions && (ts.answer || !ts.dirty.empty())
	if !additions && !removals {
		return message{}, false
	}
	if p.removals {
		clear(ts.retained)
	}
	var version sum
	var all []*entry
	size := 0
	var present bitset
	var flying []sentEntry
	take := func(id uint32, e *entry) {
		version = version.plus(e.sum)
		all, size = append(all, e), size+e.sotw.Len()
		present.set(id)
	}
	st.members(t, func(id uint32, e *entry) {
		if ts.withheld.has(id) {
			if e = ts.instead(id, e); e == nil {
				return
			}
		}
		if ts.dirty.has(id) {
			flying = append(flying, sentEntry{id, e})
		}
		take(id, e)
	})
	for id, e := range ts.retained {
		take(id, e)
	}
	if ts.resume != "" {
		same := ts.resume == version.String()
		ts.resume = ""
		if same {
			ts.held, ts.answer = present, false
			ts.taken.ids.add(present)
			ts.dirty.reset()
			ts.sentVersion, ts.ackedVersion = version.String(), version.String()
			return message{}, false
		}
	}
	if len(all) == 0 && !ts.wildcard && !removals && !p.complete {
		return message{}, false // silence is not proof of absence
	}
	ts.dirty.keep(present)
	// Only what is new to the client warms: Envoy skips an equal cluster.
	st.follow(t, ts.dirty)
	ts.carried.reset()
	ts.carried.add(ts.dirty)
	ts.flying = flying
	ts.held = present
	maps.DeleteFunc(ts.previous, func(id uint32, _ *entry) bool { return !present.has(id) })
	ts.dirty.reset()
	if p.removals {
		ts.gone.reset()
	}
	return st.sotw(t, version.String(), all, size), true
}

func (st *stream) sotw(t xds.Type, version string, entries []*entry, size int) message {
	resources := st.s.joiner.join(entries, size, false)
	return message{t: t, version: version, resources: resources, count: len(entries), identifier: st.s.opts.Identifier, nonce: st.dispatch(&st.types[t], version)}
}
