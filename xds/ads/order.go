package ads

import (
	"strconv"
	"time"

	"github.com/fingerpost/fingerpost/xds"
)

// collect takes what may be sent now, in order. The first time is until when
// the stream may go on to wait for something that is withheld, the second when
// it has to look again though nothing happened (zero: never). All types are
// looked at in one piece, so that a stream of endpoint changes never keeps a
// route waiting.
func (st *stream) collect() (msgs []message, until, again time.Time) {
	st.s.mu.RLock()
	defer st.s.mu.RUnlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.began.IsZero() {
		return nil, until, again
	}
	if !st.s.open {
		return nil, st.began.Add(st.s.opts.HoldLimit), again
	}
	if st.wants() {
		return nil, until, time.Now() // it was not answered a moment ago
	}
	now, evidence := time.Now(), st.s.table.evidence(st.sight.scopes)
	until = st.ungate(evidence == xds.Pending && st.lacking())
	build := st.buildSotW
	if st.delta {
		build = st.buildDelta
	}
	cds, eds := &st.types[xds.Cluster], &st.types[xds.Endpoint]
	if evidence == xds.Complete {
		st.fallBack()
	}
	due := !cds.gone.empty() || evidence == xds.Complete && len(cds.brought) > 0
	arriving := st.arriving(now)
	for t := range xds.Type(xds.NumTypes) {
		again = earlier(again, st.try(t, now))
	}
	add := func(t xds.Type, p part) {
		ts := &st.types[t]
		if ts.busy() {
			return
		}
		p.complete = evidence == xds.Complete
		if arriving && (!ts.gone.empty() || p.complete && len(ts.brought) > 0) {
			again = earlier(again, st.began.Add(st.s.opts.short()))
			return
		}
		if m, ok := build(t, p); ok {
			msgs = append(msgs, m)
		}
	}
	overdue := st.overdue(due, now)
	add(xds.Cluster, part{additions: true, removals: overdue || st.unreferenced()})
	add(xds.Endpoint, part{additions: true, removals: true, without: cds.dirty})
	for _, t := range []xds.Type{xds.Listener, xds.Route} {
		ready := cds.dirty.empty() && eds.dirty.empty() && !st.following(now)
		add(t, part{additions: ready, removals: ready})
	}
	if st.unreferenced() && cds.dirty.empty() {
		add(xds.Cluster, part{removals: true})
		add(xds.Endpoint, part{removals: true})
	}
	if due && !overdue && !st.unreferenced() {
		again = earlier(again, st.removing.Add(st.s.opts.Grace))
	}
	if !st.awaited.empty() {
		again = earlier(again, st.awaitedUntil)
	}
	return msgs, until, again
}

// ungate lets types go whose wait for evidence is over, and returns until when
// the others may wait.
func (st *stream) ungate(wait bool) (until time.Time) {
	for t := range st.types {
		ts := &st.types[t]
		switch {
		case ts.gated.IsZero():
		case !wait:
			ts.gated = time.Time{}
		default:
			until = earlier(until, ts.gated.Add(st.s.opts.HoldLimit))
		}
	}
	return until
}

// earlier is the first of two times, of which zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// part says what a response may hold.
type part struct {
	additions bool
	removals  bool
	without   bitset // ids that have to wait
	complete  bool   // the evidence: brought names may be removed
}

// unreferenced tells that nothing which could still refer to a removed cluster
// waits to be sent, or to be accepted.
func (st *stream) unreferenced() bool {
	if !st.types[xds.Endpoint].dirty.empty() {
		return false
	}
	for _, t := range []xds.Type{xds.Listener, xds.Route} {
		ts := &st.types[t]
		if ts.inFlight || !ts.dirty.empty() || !ts.gone.empty() || !ts.refused.empty() {
			return false
		}
	}
	return true
}

// overdue tells that a removal which is due has waited for the whole grace.
func (st *stream) overdue(due bool, now time.Time) bool {
	if !due {
		st.removing = time.Time{}
		return false
	}
	if st.removing.IsZero() {
		st.removing = now
	}
	return now.Sub(st.removing) >= st.s.opts.Grace
}

// arriving tells that a client which came back has not yet asked for all that
// it asked for before, so that its routes may be older than the clusters that
// are known here. An Envoy sends the first requests of all types at once.
func (st *stream) arriving(now time.Time) bool {
	if !st.returned || st.only != aggregated || now.Sub(st.began) >= st.s.opts.short() {
		return false
	}
	return !st.types[xds.Cluster].seen || !st.types[xds.Listener].seen || !st.types[xds.Route].seen
}

// following tells that the client got clusters whose CLAs it has not asked for
// yet: Envoy names a CLA only once it has its cluster.
func (st *stream) following(now time.Time) bool {
	if st.awaited.empty() {
		return false
	}
	if !now.Before(st.awaitedUntil) {
		st.awaited.reset()
		return false
	}
	return true
}

// follow notes what was newly sent of a type.
func (st *stream) follow(t xds.Type, ids bitset) {
	if st.only != aggregated {
		return
	}
	switch t {
	case xds.Cluster:
		st.types[t].sent.add(ids)
		st.followUp(ids)
	case xds.Endpoint:
		st.awaited.drop(ids)
	}
}

// followUp marks the CLAs of clusters that were sent: Envoy takes a cluster
// into service only after a CLA that comes after it (envoy#13009). Those that
// the client does not ask for yet are waited for.
func (st *stream) followUp(clusters bitset) {
	eds := &st.types[xds.Endpoint]
	clusters.each(bitset{}, func(id uint32) bool {
		named := eds.subscribed.has(id)
		asked := eds.seen && (named || eds.wildcard)
		switch {
		case st.s.table.resolve(xds.Endpoint, id, &st.sight, named || !asked) == nil:
		case asked:
			eds.absolve(id) // even a refusal ends the warming
			eds.dirty.set(id)
		default:
			end := time.Now().Add(st.s.opts.Grace)
			if st.awaited.empty() {
				st.awaitedLimit = end
			}
			st.awaited.set(id)
			st.awaitedUntil = earlier(st.awaitedLimit, end)
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
	ts.sentAt = time.Now()
	ts.sentVersion = version
	return ts.nonce
}
