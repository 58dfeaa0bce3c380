package ads

import (
	"maps"
	"slices"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/fingerpost/fingerpost/xds"
)

// DeltaAggregatedResources serves one incremental stream.
func (s *Server) DeltaAggregatedResources(g discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	return s.serveDelta(g, aggregated)
}

// serveDelta serves an incremental stream of all types, or of one.
func (s *Server) serveDelta(g deltaStream, only xds.Type) error {
	st := newStream(g.Context(), s, true, only)
	return st.run(g.Context(), func() error {
		req, err := g.Recv()
		if err != nil {
			return err
		}
		return st.receiveDelta(req)
	}, func(m *message) error { return g.SendMsg(m) })
}

func (st *stream) receiveDelta(req *discovery.DeltaDiscoveryRequest) error {
	t, ok, err := st.admit(req.GetTypeUrl(), req.GetNode())
	if err != nil || !ok {
		return err
	}
	sub, unsub, have := len(req.GetResourceNamesSubscribe()), len(req.GetResourceNamesUnsubscribe()), len(req.GetInitialResourceVersions())
	if err := checkNames(t, max(sub, unsub, have), maxDeltaNames); err != nil {
		return err
	}
	demands := t == xds.Cluster && st.demands()
	if demands {
		st.ask(req.GetResourceNamesSubscribe(), true)
		// What it brings from an earlier stream it asked for then.
		st.ask(slices.Collect(maps.Keys(req.GetInitialResourceVersions())), false)
	}
	st.dial(t, req.GetResourceNamesSubscribe())
	if report := st.applyDelta(t, req); report != nil {
		report()
	}
	if demands && unsub > 0 {
		st.demand.Drop(req.GetResourceNamesUnsubscribe())
	}
	st.hangUp(t, req.GetResourceNamesUnsubscribe())
	if sub+unsub+have == 0 {
		return nil
	}
	return st.checkAbsent()
}

func (st *stream) applyDelta(t xds.Type, req *discovery.DeltaDiscoveryRequest) func() {
	st.s.mu.RLock()
	defer st.s.mu.RUnlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.began.IsZero() {
		st.began = time.Now()
	}
	ts := &st.types[t]
	first := !ts.seen
	ts.seen = true
	// Nothing is answered between two portions of a long request.
	ts.reading = true
	defer func() { ts.reading = false }()
	// A nonce that is not the latest makes the request no ACK; its
	// subscriptions count all the same (xDS protocol, incremental).
	report := st.settle(t, req.GetResponseNonce(), req.GetErrorDetail())
	for i, name := range req.GetResourceNamesUnsubscribe() {
		st.unsubscribe(t, name)
		st.breathe(i)
	}
	if first && len(req.GetResourceNamesSubscribe()) == 0 && t.HasWildcard() {
		st.enterWildcard(t, false)
	}
	for i, name := range req.GetResourceNamesSubscribe() {
		st.subscribe(t, name)
		st.breathe(i)
	}
	if first && len(req.GetInitialResourceVersions()) > 0 {
		st.returned = true
		i := 0
		for name, version := range req.GetInitialResourceVersions() {
			if st.sight.onDemand && t == xds.Cluster && !st.subscribesTo(ts, name) {
				st.resubscribe(name)
			}
			st.bring(t, name, version)
			st.breathe(i)
			i++
		}
	}
	if first {
		st.recall(t)
	}
	ts.dirty.drop(ts.withheld)
	return report
}

// resubscribe goes on to send a cluster that the client had without a
// subscription of its own; see [Server.Want].
func (st *stream) resubscribe(name string) {
	id, ok := st.s.table.names[name]
	if ok && st.s.table.resolve(xds.Cluster, id, &st.sight, false) != nil {
		return // it has that by its wildcard
	}
	if ok {
		st.types[xds.Cluster].subscribed.set(id)
	} else {
		st.types[xds.Cluster].miss(name)
	}
}

// subscribe makes the name wanted and sends it in any case: a client that
// names what it has may have forgotten it.
func (st *stream) subscribe(t xds.Type, name string) {
	ts := &st.types[t]
	if name == wildcard {
		st.enterWildcard(t, ts.wildcard)
		return
	}
	id, ok := st.s.table.names[name]
	if ok {
		ts.subscribed.set(id)
		if st.s.table.resolve(t, id, &st.sight, true) != nil {
			ts.gone.clear(id)
			ts.dirty.set(id)
			delete(ts.had, id)
			ts.absolve(id)
			delete(ts.owed, name)
			return
		}
		ts.forget(id)
	} else {
		ts.miss(name)
	}
	if _, ok := ts.brought[name]; !ok {
		ts.owe(name)
	}
}

func (st *stream) unsubscribe(t xds.Type, name string) {
	ts := &st.types[t]
	if name == wildcard {
		if ts.wildcard {
			st.leaveWildcard(t)
		}
		return
	}
	if !st.subscribesTo(ts, name) {
		return
	}
	delete(ts.missing, name)
	delete(ts.owed, name)
	id, ok := st.s.table.names[name]
	if ok {
		ts.subscribed.clear(id)
	}
	if !ts.wildcard {
		delete(ts.brought, name)
		if ok {
			ts.forget(id)
		}
		return
	}
	// The client cannot know whether the wildcard still holds the name, so it
	// is told (xDS protocol, "Unsubscribing From Resources").
	if ok && st.s.table.resolve(t, id, &st.sight, false) != nil {
		ts.dirty.set(id)
		return
	}
	if ok {
		ts.forget(id)
	}
	if _, ok := ts.brought[name]; !ok {
		ts.owe(name)
	}
}

// bring takes note of a resource that the client has from an earlier stream.
func (st *stream) bring(t xds.Type, name, version string) {
	ts, tb := &st.types[t], &st.s.table
	named := st.subscribesTo(ts, name)
	if !named && !ts.wildcard {
		return
	}
	id, ok := tb.names[name]
	if ok {
		if e := tb.resolve(t, id, &st.sight, named); e != nil {
			ts.held.set(id)
			ts.taken.ids.set(id)
			switch {
			case e.res.Version != version && e.scope == st.sight.fallback && !tb.removedHere(t, id, st.sight.scopes):
				// It goes once it is certain that nobody has what it has.
				ts.dirty.clear(id)
				ts.doubted(name, version)
			case e.res.Version != version:
				ts.remind(id, version)
			case !st.warming(t, id):
				ts.dirty.clear(id)
			}
			return
		}
		if tb.removedHere(t, id, st.sight.scopes) {
			delete(ts.owed, name)
			ts.held.set(id)
			ts.gone.set(id)
			return
		}
	}
	delete(ts.owed, name)
	ts.doubted(name, version)
}

// doubted notes what the client has and the table has not.
func (ts *typeState) doubted(name, version string) {
	if ts.brought == nil {
		ts.brought = map[string]string{}
	}
	ts.brought[name] = version
}

// fallBack sends what stands in for the clusters that the client brought and of
// which it is certain by now that nobody has them. Called with both locks held.
func (st *stream) fallBack() {
	ts := &st.types[xds.Cluster]
	if st.sight.fallback == noScope || len(ts.brought) == 0 {
		return
	}
	for name, version := range ts.brought {
		id, ok := st.s.table.names[name]
		if !ok || st.s.table.resolve(xds.Cluster, id, &st.sight, ts.subscribed.has(id)) == nil {
			continue
		}
		delete(ts.brought, name)
		ts.remind(id, version)
		ts.dirty.set(id)
	}
}

// buildDelta makes the next response of a type; false if there is nothing to
// say. Called with both locks held.
func (st *stream) buildDelta(t xds.Type, p part) (message, bool) {
	ts, tb := &st.types[t], &st.s.table
	var removed []string
	var entries []*entry
	size, bodies := 0, 0
	fits := func(n int) bool {
		if size > 0 && size+n > maxResponse {
			return false
		}
		size += n
		return true
	}
	ts.carried.reset()
	if n := ts.dirty.count(); p.additions && n > 0 {
		entries = make([]*entry, 0, min(n, 2048)) // more do not fit as a rule
		ts.dirty.each(p.without, func(id uint32) bool {
			e := tb.resolve(t, id, &st.sight, ts.subscribed.has(id))
			if e == nil {
				ts.dirty.clear(id)
				return true
			}
			if !fits(e.delta.Len()) {
				return false
			}
			ts.dirty.clear(id)
			delete(ts.had, id)
			ts.held.set(id)
			ts.carried.set(id)
			bodies, entries = size, append(entries, e)
			return true
		})
	}
	count, resources := len(entries), st.s.joiner.join(entries, bodies, true)
	st.follow(t, ts.carried)
	for name := range ts.owed {
		if !fits(len(name) + 4) {
			break
		}
		delete(ts.owed, name)
		removed = append(removed, name)
	}
	if p.removals {
		// A CLA is not removed before its cluster.
		var without bitset
		var later map[string]string
		if cds := &st.types[xds.Cluster]; t == xds.Endpoint {
			without, later = cds.gone, cds.brought
		}
		ts.gone.each(without, func(id uint32) bool {
			name := tb.slots[id].name
			if !fits(len(name) + 4) {
				return false
			}
			ts.forget(id)
			ts.carried.set(id)
			removed = append(removed, name)
			return true
		})
		for name := range ts.brought {
			if _, ok := later[name]; ok {
				continue
			}
			if !p.complete || !fits(len(name)+4) {
				break
			}
			delete(ts.brought, name)
			removed = append(removed, name)
		}
	}
	version := tb.version(t, st.sight.scopes)
	if owed := ts.answer && p.additions; !owed && count+len(removed) == 0 {
		if ts.sentVersion == "" && st.hasAll(ts) {
			ts.sentVersion, ts.ackedVersion = version, version
		}
		return message{}, false
	}
	return message{t: t, version: version, resources: resources, count: count, removed: removed, nonce: st.dispatch(ts, version)}, true
}

// hasAll tells that a client which came back has all that it asked for, so that
// nothing is sent to it.
func (st *stream) hasAll(ts *typeState) bool {
	return !ts.held.empty() && ts.dirty.empty() && ts.gone.empty() && ts.withheld.empty() &&
		len(ts.owed)+len(ts.brought)+len(ts.missing) == 0
}
