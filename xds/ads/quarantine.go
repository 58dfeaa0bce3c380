package ads

import (
	"slices"
	"strings"
	"time"

	"github.com/fingerpost/fingerpost/xds"
)

// DefaultTrial is how long resources that a client may have refused wait to be
// sent again while nothing changes.
const DefaultTrial = 10 * time.Second

// maxTrial bounds the doubling of the wait between refused trials.
const maxTrial = 5 * time.Minute

// maxRefusal bounds the bytes that are kept of a client's error text.
const maxRefusal = 4 << 10

// quarantine is what a stream knows of the resources of one type that its
// client refused. They are withheld from this client only, in the content that
// it refused: other content goes out at once.
//
// A refused response may have been taken in part (gRFC A46). What its error
// names is withheld until it changes, and so is what was alone in it. The
// others are suspects. They wait for the next response that is accepted, or
// for a while, and then are tried in sets; a set that is refused is halved.
type quarantine struct {
	verdicts map[uint32]refusal // withheld, and known as bad
	groups   []group            // suspects, in the sets in which they are tried
	trying   bool               // the response in flight is a trial
	next     time.Time          // no trial before
	refused  int                // trials in a row that were refused
}

// group is a set of suspects that are tried together.
type group struct {
	ids    []uint32
	before time.Time // not tried before, whatever changes
}

// refusal is why a resource is withheld.
type refusal struct {
	version string // of the content that was refused
	text    string
	at      time.Time
}

// sentEntry is a resource as it went out.
type sentEntry struct {
	id uint32
	e  *entry
}

// withhold keeps a resource from the client until it changes or is tried.
func (ts *typeState) withhold(id uint32) {
	ts.withheld.set(id)
	ts.refused.set(id)
	ts.dirty.clear(id)
}

// absolve ends the withholding of a resource that changed, or that the client
// asks for again.
func (ts *typeState) absolve(id uint32) {
	ts.withheld.clear(id)
	if ts.q != nil {
		delete(ts.q.verdicts, id)
	}
}

// pardon forgets that a resource was ever refused.
func (ts *typeState) pardon(id uint32) {
	ts.absolve(id)
	ts.refused.clear(id)
	if ts.refused.empty() {
		ts.nack = nil
	}
}

// accept takes an ACK. Called with both locks held.
func (st *stream) accept(t xds.Type) {
	ts := &st.types[t]
	ts.ackedVersion = ts.sentVersion
	ts.taken.accept(ts.carried, ts.held, time.Now())
	st.keepAccepted(ts)
	if q := ts.q; q != nil {
		if !ts.carried.empty() {
			q.next, q.refused = time.Time{}, 0
		}
		q.trying = false
	}
	// A whole set that is accepted is so in all that is not withheld from it.
	whole := !st.delta && fullSet(t)
	ts.refused.each(bitset{}, func(id uint32) bool {
		if ts.carried.has(id) || whole && !ts.withheld.has(id) && !ts.dirty.has(id) {
			st.s.memory.forget(st.key, t, st.s.table.slots[id].name)
			ts.refused.clear(id)
		}
		return true
	})
	if ts.refused.empty() {
		ts.nack = nil
	}
}

// refuse takes a NACK, and returns the names that are withheld because of it,
// but for mere suspects. Called with both locks held.
func (st *stream) refuse(t xds.Type, text string) (withheld []string) {
	ts, tb, now := &st.types[t], &st.s.table, time.Now()
	ts.nack = &Nack{Version: ts.sentVersion, Error: text, At: now}
	flying := ts.flying
	ts.flying = nil
	if ts.q == nil {
		ts.q = &quarantine{verdicts: map[uint32]refusal{}}
	}
	q, trial := ts.q, ts.q.trying
	q.trying = false
	wait := st.s.opts.Trial
	if trial {
		wait = min(st.s.opts.Trial/10<<min(q.refused, 20), maxTrial)
		q.refused++
	}
	q.next = now.Add(wait)

	var culprits, suspects []uint32
	ts.carried.each(bitset{}, func(id uint32) bool {
		e := tb.resolve(t, id, &st.sight, ts.subscribed.has(id))
		switch {
		case e == nil || ts.dirty.has(id) || !ts.held.has(id):
			// Removed, or changed while the response was on its way.
		case mentions(text, tb.slots[id].name):
			culprits = append(culprits, id)
		default:
			suspects = append(suspects, id)
		}
		return true
	})
	if !st.delta && fullSet(t) && len(culprits) == 0 {
		// What stays in the set because nothing is known that could stand
		// there instead is refused in every set anew.
		known := false
		ts.withheld.each(bitset{}, func(id uint32) bool {
			known = ts.held.has(id) && mentions(text, tb.slots[id].name)
			return !known
		})
		if known {
			ts.flying = flying
			st.keepAccepted(ts)
			return nil
		}
		if ts.resumed {
			return nil // nothing can be left out without removing it
		}
	}
	if len(culprits) == 0 && len(suspects) == 1 {
		culprits, suspects = suspects, nil
	}
	for _, id := range culprits {
		e := tb.resolve(t, id, &st.sight, ts.subscribed.has(id))
		r := refusal{version: e.res.Version, text: text, at: now}
		q.verdicts[id] = r
		ts.withhold(id)
		st.s.memory.note(st.key, t, tb.slots[id].name, r, ts.previous[id])
		withheld = append(withheld, tb.slots[id].name)
	}
	for _, id := range suspects {
		ts.withhold(id)
	}
	// What is sorted now leaves the sets of earlier refusals.
	for i := range q.groups {
		q.groups[i].ids = slices.DeleteFunc(q.groups[i].ids, ts.carried.has)
	}
	q.groups = slices.DeleteFunc(q.groups, func(g group) bool { return len(g.ids) == 0 })
	switch n := len(suspects); {
	case n == 0:
	case len(culprits) > 0 || n == 1:
		q.groups = append(q.groups, group{ids: suspects})
	default:
		q.groups = append(q.groups, group{ids: suspects[:n/2]}, group{ids: suspects[n/2:]})
	}
	return withheld
}

// try takes the next set of suspects out of quarantine if it is time, and
// returns when it will be (zero: there is none, or something else comes first).
// Called with both locks held.
func (st *stream) try(t xds.Type, now time.Time) time.Time {
	ts := &st.types[t]
	q := ts.q
	if q == nil || len(q.groups) == 0 || ts.busy() || !ts.dirty.empty() || !ts.gone.empty() {
		return time.Time{}
	}
	var again time.Time
	waiting := q.groups[:0]
	for _, g := range q.groups {
		at := g.before
		if q.next.After(at) {
			at = q.next
		}
		switch {
		case q.trying:
			waiting = append(waiting, g)
		case now.Before(at):
			waiting, again = append(waiting, g), earlier(again, at)
		default:
			for _, id := range g.ids {
				if ts.withheld.has(id) { // else it changed and went out
					ts.absolve(id)
					ts.dirty.set(id)
					q.trying = true
				}
			}
		}
	}
	q.groups = waiting
	if q.trying {
		return time.Time{}
	}
	return again
}

// instead returns what stands in a whole set for a resource that is withheld:
// its last accepted content, or, for a client that came with a set of which the
// content is not known, the refused one, since absence would remove what the
// client has. Nil means that the client has none.
func (ts *typeState) instead(id uint32, e *entry) *entry {
	if p := ts.previous[id]; p != nil {
		return p
	}
	if ts.resumed {
		return e
	}
	return nil
}

// remember keeps the content that a SotW client has of a resource that is
// about to change. Called before the change is marked.
func (ts *typeState) remember(id uint32, old *entry) {
	if old == nil || old.res == nil || !ts.held.has(id) || ts.refused.has(id) || ts.previous[id] != nil ||
		ts.inFlight && ts.carried.has(id) {
		return
	}
	if ts.previous == nil {
		ts.previous = map[uint32]*entry{}
	}
	ts.previous[id] = old
}

// keepAccepted notes what the client took of the whole set that was in flight.
func (st *stream) keepAccepted(ts *typeState) {
	for _, f := range ts.flying {
		if ts.dirty.has(f.id) {
			if ts.previous == nil {
				ts.previous = map[uint32]*entry{}
			}
			ts.previous[f.id] = f.e
		} else {
			delete(ts.previous, f.id)
		}
	}
	ts.flying = nil
}

// recall withholds what an earlier stream of the client refused, as long as the
// content is the same. Each is tried once after a while: the id is a claim, and
// the program behind it may be another one.
func (st *stream) recall(t xds.Type) {
	ts, tb := &st.types[t], &st.s.table
	for name, m := range st.s.memory.of(st.key, t) {
		id, ok := tb.names[name]
		if !ok {
			continue
		}
		named := ts.subscribed.has(id)
		e := tb.resolve(t, id, &st.sight, named)
		if e == nil || e.res.Version != m.version || !named && !ts.wildcard {
			continue
		}
		if ts.q == nil {
			ts.q = &quarantine{verdicts: map[uint32]refusal{}}
		}
		ts.q.verdicts[id] = m.refusal
		ts.q.groups = append(ts.q.groups, group{ids: []uint32{id}, before: time.Now().Add(st.s.opts.Trial)})
		ts.withhold(id)
		if m.accepted != nil {
			if ts.previous == nil {
				ts.previous = map[uint32]*entry{}
			}
			ts.previous[id] = m.accepted
		}
		ts.nack = &Nack{Version: m.version, Error: m.text, At: m.at}
	}
}

// mentions tells whether a text names a resource, and not merely one whose
// name is longer.
func mentions(text, name string) bool {
	if name == "" {
		return false
	}
	for rest, before := text, byte(' '); ; {
		i := strings.Index(rest, name)
		if i < 0 {
			return false
		}
		if i > 0 {
			before = rest[i-1]
		}
		after := rest[i+len(name):]
		if !inName(before) && (after == "" || !inName(after[0]) ||
			after[0] == '.' && (len(after) == 1 || !inName(after[1]))) {
			return true
		}
		before, rest = rest[i], rest[i+1:]
	}
}

// inName tells whether a byte may be part of a resource's name.
func inName(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' ||
		c == '-' || c == '_' || c == '.' || c == '/' || c >= 0x80
}

// clip shortens an error text to what is kept of it.
func clip(text string) string {
	if len(text) <= maxRefusal {
		return text
	}
	return strings.ToValidUTF8(text[:maxRefusal], "") + " (cut)"
}
