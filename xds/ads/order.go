package ads

import (
	"strconv"
	"time"

	"github.com/fingerpost/fingerpost/xds"
)

// collect takes what may be sent now, in order, and returns until when the
// stream may go on to wait for something that is withheld (zero: nothing is).
// All types are looked at in one piece, so that a stream of endpoint changes
// never keeps a route waiting.
func (st *stream) collect() ([]message, time.Time) {
	st.s.mu.RLock()
	defer st.s.mu.RUnlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.began.IsZero() {
		return nil, time.Time{}
	}
	if !st.s.open {
		return nil, st.began.Add(st.s.opts.HoldLimit)
	}
	evidence := st.s.table.evidence(st.scopes)
	wait := evidence == xds.Pending && st.lacking()
	var until time.Time
	for t := range st.types {
		ts := &st.types[t]
		if ts.gated.IsZero() {
			continue
		}
		if !wait {
			ts.gated = time.Time{}
		} else if end := ts.gated.Add(st.s.opts.HoldLimit); until.IsZero() || end.Before(until) {
			until = end
		}
	}
	build := st.buildSotW
	if st.delta {
		build = st.buildDelta
	}
	var msgs []message
	add := func(t xds.Type, p part) {
		if st.types[t].busy() {
			return
		}
		p.complete = evidence == xds.Complete
		if m, ok := build(t, p); ok {
			msgs = append(msgs, m)
		}
	}
	cds, eds := &st.types[xds.Cluster], &st.types[xds.Endpoint]
	add(xds.Cluster, part{additions: true, removals: st.unreferenced()})
	add(xds.Endpoint, part{additions: true, removals: true, without: cds.dirty})
	for _, t := range []xds.Type{xds.Listener, xds.Route} {
		ready := cds.dirty.empty() && eds.dirty.empty()
		add(t, part{additions: ready, removals: ready})
	}
	if st.unreferenced() && cds.dirty.empty() {
		add(xds.Cluster, part{removals: true})
		add(xds.Endpoint, part{removals: true})
	}
	return msgs, until
}

// part says what a response may hold.
type part struct {
	additions bool
	removals  bool
	without   bitset // ids that have to wait
	complete  bool   // the evidence: brought names may be removed
}

// unreferenced tells that nothing which could still refer to a removed cluster
// waits to be sent.
func (st *stream) unreferenced() bool {
	eds, lds, rds := &st.types[xds.Endpoint], &st.types[xds.Listener], &st.types[xds.Route]
	return eds.dirty.empty() && lds.dirty.empty() && lds.gone.empty() && rds.dirty.empty() && rds.gone.empty()
}

// followUp marks the CLAs of clusters that were sent: Envoy takes a cluster
// into service only after a CLA that comes after it (envoy#13009).
func (st *stream) followUp(clusters bitset) {
	eds := &st.types[xds.Endpoint]
	if !eds.seen {
		return
	}
	clusters.each(nil, func(id uint32) bool {
		named := eds.subscribed.has(id)
		if (named || eds.wildcard) && st.s.table.resolve(xds.Endpoint, id, st.scopes, named) != nil {
			eds.dirty.set(id)
		}
		return true
	})
}

// warming tells that a CLA is needed even if the client has it: its cluster was
// sent on this stream and so is new to the client (envoy#22418).
func (st *stream) warming(t xds.Type, id uint32) bool {
	return t == xds.Endpoint && st.types[xds.Cluster].sent.has(id)
}

// dispatch notes that a response is in flight and returns its nonce.
func (st *stream) dispatch(ts *typeState, version string) string {
	st.nonce++
	ts.nonce = strconv.FormatUint(st.nonce, 10)
	ts.inFlight, ts.answer = true, false
	ts.sentVersion = version
	return ts.nonce
}
