package ads

import (
	"cmp"
	"slices"
	"time"

	"github.com/fingerpost/fingerpost/xds"
)

// HoldingState says how far a resource has come at a client.
type HoldingState string

// The states.
const (
	Unasked  HoldingState = "unasked"  // the client has not asked for it
	Missing  HoldingState = "missing"  // there is none that the client may see
	Waiting  HoldingState = "waiting"  // to be sent
	Sent     HoldingState = "sent"     // sent, and not acknowledged
	Acked    HoldingState = "acked"    // acknowledged in its present content
	Rejected HoldingState = "rejected" // withheld: the client refused this content
	Suspect  HoldingState = "suspect"  // withheld: it was in a refused response that named others, or nobody
)

// Holding is what one stream's client has of one resource.
type Holding struct {
	Connected time.Time    `json:"connected"` // of the stream
	State     HoldingState `json:"state"`
	// Since is when it was sent, acknowledged or refused. Of what the client had
	// acknowledged before Connected, or so long ago that only the latest are
	// told apart, Since is a time by which it had, and Exact is false.
	Since time.Time `json:"since,omitzero"`
	Exact bool      `json:"exact"`
	// Earlier is set where the client goes on with content that it took before.
	Earlier bool `json:"earlier"`
	// Error is the client's text, where it refused.
	Error string `json:"error,omitempty"`
}

// Holdings says what the client of a node id has of a resource, one for each of
// its streams that has asked for the type, the latest last.
func (s *Server) Holdings(client string, t xds.Type, name string) []Holding {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var hs []Holding
	for st := range s.streams {
		if h, ok := st.holding(client, t, name); ok {
			hs = append(hs, h)
		}
	}
	slices.SortFunc(hs, func(a, b Holding) int { return cmp.Compare(a.Connected.UnixNano(), b.Connected.UnixNano()) })
	return hs
}

// holding is called with the server's lock held.
func (st *stream) holding(client string, t xds.Type, name string) (Holding, bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.node.GetId() != client || !st.types[t].seen {
		return Holding{}, false
	}
	h, _ := st.holds(t, name)
	return h, true
}

// holds says what the client has of a resource of a type that it asked for, and
// what it shall have, nil if there is none. Called with both locks held.
func (st *stream) holds(t xds.Type, name string) (Holding, *entry) {
	tb, ts := &st.s.table, &st.types[t]
	h := Holding{Connected: st.connected}
	id, known := tb.names[name]
	if !ts.wildcard && !st.subscribesTo(ts, name) {
		h.State = Unasked
		return h, nil
	}
	_, h.Earlier = ts.brought[name]
	h.Earlier = h.Earlier || known && ts.taken.ids.has(id)
	var e *entry
	if known {
		e = tb.resolve(t, id, &st.sight, ts.subscribed.has(id))
	}
	if e == nil {
		h.State = Missing
		return h, nil
	}
	switch {
	case ts.withheld.has(id):
		h.State = Suspect
		if r, ok := ts.q.verdicts[id]; ok {
			h.State, h.Since, h.Error = Rejected, r.at, r.text
		} else if ts.nack != nil {
			h.Since, h.Error = ts.nack.At, ts.nack.Error
		}
	case ts.inFlight && ts.carried.has(id):
		h.State, h.Since, h.Exact = Sent, ts.sentAt, true
	case ts.dirty.has(id) || !h.Earlier || e.scope == st.sight.fallback && ts.brought[name] != "" || !st.s.open || !ts.gated.IsZero():
		h.State = Waiting
	default:
		h.State, h.Earlier = Acked, false
		if h.Since, h.Exact = ts.taken.since(id); h.Since.IsZero() {
			h.Since = st.connected
		}
	}
	return h, e
}

// maxLate is of how many resources of a type it is kept exactly when a stream's
// client acknowledged them: the latest.
const maxLate = 128

// taken is what a client acknowledged of one type, or brought from an earlier
// stream, in whatever content.
type taken struct {
	ids  bitset
	late []moment  // the latest acknowledgements, the oldest first
	rest time.Time // by when all the others had been acknowledged; zero: before the stream
}

type moment struct {
	id uint32
	at int64 // Unix time in nanoseconds
}

// accept notes an acknowledgement of what a response carried; held is what the
// client has after it.
func (k *taken) accept(carried, held bitset, now time.Time) {
	k.ids.add(carried)
	k.ids.keep(held)
	if carried.count() > maxLate {
		k.late, k.rest = nil, now
		return
	}
	carried.each(bitset{}, func(id uint32) bool {
		k.late = append(k.late, moment{id, now.UnixNano()})
		return true
	})
	if over := len(k.late) - 2*maxLate; over > 0 {
		over += maxLate
		k.rest = time.Unix(0, k.late[over-1].at)
		k.late = slices.Delete(k.late, 0, over)
	}
}

// since is when the resource was acknowledged last, and whether that is exact.
func (k *taken) since(id uint32) (time.Time, bool) {
	for _, m := range slices.Backward(k.late) {
		if m.id == id {
			return time.Unix(0, m.at), true
		}
	}
	return k.rest, false
}
