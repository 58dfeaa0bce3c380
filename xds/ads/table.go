package ads

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"math/bits"

	"google.golang.org/grpc/mem"

	"github.com/fingerpost/fingerpost/xds"
)

// sum is a commutative hash of a set of (name, version) pairs: sets with equal
// content have equal sums, in every process.
type sum [2]uint64

func sumOf(name, version string) sum {
	h := sha256.Sum256([]byte(name + "\x00" + version))
	return sum{binary.BigEndian.Uint64(h[:8]), binary.BigEndian.Uint64(h[8:16])}
}

func (a sum) plus(b sum) sum {
	lo, carry := bits.Add64(a[1], b[1], 0)
	hi, _ := bits.Add64(a[0], b[0], carry)
	return sum{hi, lo}
}

func (a sum) minus(b sum) sum {
	lo, borrow := bits.Sub64(a[1], b[1], 0)
	hi, _ := bits.Sub64(a[0], b[0], borrow)
	return sum{hi, lo}
}

func (a sum) String() string { return fmt.Sprintf("%016x%016x", a[0], a[1]) }

// short is the beginning of the sum, where it is shown and not relied on: it
// goes to every client with every change.
func (a sum) short() string {
	return base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint64(nil, a[0])[:6])
}

// entry is what a table holds under (type, name, scope). It is immutable. An
// entry without a resource is the memory of one that this process removed.
type entry struct {
	scope uint32
	res   *xds.Resource
	sum   sum
	// What responses hold of it, shared by all of them; see [xds.Resource].
	delta, sotw mem.Buffer
}

// slot holds everything that one name means. All types share the ids, so that
// a cluster and its CLA are the same bit of two bitsets.
type slot struct {
	name    string
	live    int // entries with a resource
	entries [xds.NumTypes][]*entry
}

// scopeState is a scope with its dense id.
type scopeState struct {
	namedOnly bool
	onDemand  bool
	evidence  xds.Evidence
	sums      [xds.NumTypes]sum // over the entries of the scope
}

// table maps names to dense ids and ids to entries. An id is given when a name
// is first published and stays with it until a sweep finds that the name has
// no entry and no stream a use for it; then it is given again.
type table struct {
	names    map[string]uint32
	slots    []slot
	free     []uint32
	dead     int // slots with a name and without a resource
	scopeIDs map[xds.Scope]uint32
	scopes   []scopeState
}

func newTable() table {
	return table{names: map[string]uint32{}, scopeIDs: map[xds.Scope]uint32{}}
}

func (tb *table) scopeID(s xds.Scope) uint32 {
	id, ok := tb.scopeIDs[s]
	if !ok {
		id = uint32(len(tb.scopes))
		tb.scopeIDs[s] = id
		tb.scopes = append(tb.scopes, scopeState{namedOnly: s.NamedOnly(), onDemand: s.OnDemand()})
	}
	return id
}

// change tells that the entry (t, id, scope) is not what it was.
type change struct {
	t     xds.Type
	id    uint32
	scope uint32
	old   *entry // nil if there was none
}

// put stores r; false if it was there already with that version.
func (tb *table) put(r *xds.Resource) (change, bool) {
	scope := tb.scopeID(r.Scope)
	id, ok := tb.names[r.Name]
	if !ok {
		id = tb.newID(r.Name)
	}
	sl := &tb.slots[id]
	e := &entry{
		scope: scope,
		res:   r,
		sum:   sumOf(r.Name, r.Version),
		delta: mem.SliceBuffer(r.Delta),
		sotw:  mem.SliceBuffer(r.SotW),
	}
	sums := &tb.scopes[scope].sums[r.Type]
	for i, old := range sl.entries[r.Type] {
		if old.scope != scope {
			continue
		}
		c := change{t: r.Type, id: id, scope: scope}
		if old.res != nil {
			if old.res.Version == r.Version {
				return change{}, false
			}
			*sums = sums.minus(old.sum)
			c.old = old
		} else {
			tb.count(sl, 1)
		}
		*sums = sums.plus(e.sum)
		sl.entries[r.Type][i] = e
		return c, true
	}
	*sums = sums.plus(e.sum)
	sl.entries[r.Type] = append(sl.entries[r.Type], e)
	tb.count(sl, 1)
	return change{t: r.Type, id: id, scope: scope}, true
}

// remove forgets the resource; false if there is none.
func (tb *table) remove(rid xds.ID) (change, bool) {
	id, ok := tb.names[rid.Name]
	if !ok {
		return change{}, false
	}
	scope, sl := tb.scopeID(rid.Scope), &tb.slots[id]
	for i, old := range sl.entries[rid.Type] {
		if old.scope == scope && old.res != nil {
			sums := &tb.scopes[scope].sums[rid.Type]
			*sums = sums.minus(old.sum)
			sl.entries[rid.Type][i] = &entry{scope: scope}
			tb.count(sl, -1)
			return change{t: rid.Type, id: id, scope: scope, old: old}, true
		}
	}
	return change{}, false
}

func (tb *table) count(sl *slot, n int) {
	was := sl.live
	sl.live += n
	switch {
	case was == 0 && sl.live > 0:
		tb.dead--
	case was > 0 && sl.live == 0:
		tb.dead++
	}
}

func (tb *table) newID(name string) uint32 {
	var id uint32
	if n := len(tb.free); n > 0 {
		id, tb.free = tb.free[n-1], tb.free[:n-1]
	} else {
		id = uint32(len(tb.slots))
		tb.slots = append(tb.slots, slot{})
	}
	tb.slots[id] = slot{name: name}
	tb.names[name] = id
	tb.dead++
	return id
}

// drop gives the id of a dead slot back.
func (tb *table) drop(id uint32) {
	delete(tb.names, tb.slots[id].name)
	tb.slots[id] = slot{}
	tb.free = append(tb.free, id)
	tb.dead--
}

// sight is what one client sees.
type sight struct {
	scopes []uint32 // ordered
	// onDemand is set where wildcards leave out the clusters and CLAs that the
	// client asks for by name.
	onDemand bool
	// fallback is the last of scopes, where it holds what stands in for clusters
	// that nobody has; else no scope's id.
	fallback uint32
}

const noScope = ^uint32(0)

// hides tells whether wildcards for the type leave the scope out.
func (tb *table) hides(v *sight, t xds.Type, scope uint32) bool {
	s := &tb.scopes[scope]
	return s.namedOnly || v.onDemand && s.onDemand && (t == xds.Cluster || t == xds.Endpoint)
}

// resolve returns the entry of the first of the client's scopes that has one,
// nil if none has. A name that is not subscribed to by name is not found in
// scopes that stay outside wildcards.
func (tb *table) resolve(t xds.Type, id uint32, v *sight, named bool) *entry {
	entries := tb.slots[id].entries[t]
	if len(entries) == 0 {
		return nil
	}
	for _, scope := range v.scopes {
		if !named && tb.hides(v, t, scope) {
			continue
		}
		for _, e := range entries {
			if e.scope == scope && e.res != nil {
				return e
			}
		}
	}
	return nil
}

// removedHere tells whether this process once had the name in one of scopes
// and removed it.
func (tb *table) removedHere(t xds.Type, id uint32, scopes []uint32) bool {
	for _, e := range tb.slots[id].entries[t] {
		if e.res == nil && rank(scopes, e.scope) >= 0 {
			return true
		}
	}
	return false
}

func rank(scopes []uint32, scope uint32) int {
	for i, s := range scopes {
		if s == scope {
			return i
		}
	}
	return -1
}

// version is the delta system version: derived from the content of all that
// the scopes hold, at the cost of the number of scopes.
func (tb *table) version(t xds.Type, scopes []uint32) string {
	var v sum
	for _, s := range scopes {
		v = v.plus(tb.scopes[s].sums[t])
	}
	return v.short()
}

// evidence is the worst evidence of the scopes.
func (tb *table) evidence(scopes []uint32) xds.Evidence {
	worst := xds.Complete
	for _, s := range scopes {
		worst = max(worst, tb.scopes[s].evidence)
	}
	return worst
}
