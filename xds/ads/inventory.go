package ads

import (
	"cmp"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/xds"
)

// Inventory is what the client of one stream has of all that it asked for.
type Inventory struct {
	Node      *corev3.Node // as far as it is kept; not to be changed
	Connected time.Time
	Items     []Item // by type, then name
}

// Item is one resource of an [Inventory].
type Item struct {
	Type xds.Type
	Name string
	Holding
	// Version is that of what the client is to have; empty: there is none.
	Version string
	// Accepted is that of what the client took last; empty where it took
	// nothing, or where that is not known any more.
	Accepted string
}

// Inventories lists what clients have, one inventory for each stream whose node
// is wanted, ordered by node id and time of connection. It returns false if that
// is more than most items. The tables may change while it runs: it holds the
// locks for a part of one stream's items at a time.
func (s *Server) Inventories(want func(*corev3.Node) bool, most int) ([]Inventory, bool) {
	s.mu.RLock()
	running := s.running()
	s.mu.RUnlock()
	var all []Inventory
	for _, st := range running {
		st.mu.Lock()
		inv := Inventory{Node: st.node, Connected: st.connected}
		st.mu.Unlock()
		if inv.Node == nil || !want(inv.Node) {
			continue
		}
		for t := range xds.Type(xds.NumTypes) {
			names := st.asked(t)
			if most -= len(names); most < 0 {
				return nil, false
			}
			for some := range slices.Chunk(names, portion) {
				inv.Items = st.describe(inv.Items, t, some)
			}
		}
		all = append(all, inv)
	}
	slices.SortFunc(all, func(a, b Inventory) int {
		return cmp.Or(cmp.Compare(a.Node.GetId(), b.Node.GetId()), a.Connected.Compare(b.Connected))
	})
	return all, true
}

// asked are the names that the client asked for or has, in order.
func (st *stream) asked(t xds.Type) []string {
	st.s.mu.RLock()
	defer st.s.mu.RUnlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	ts := &st.types[t]
	if !ts.seen {
		return nil
	}
	var ids bitset
	ids.add(ts.subscribed)
	ids.add(ts.held)
	st.members(t, func(id uint32, _ *entry) { ids.set(id) })
	var names []string
	ids.each(bitset{}, func(id uint32) bool {
		names = append(names, st.s.table.slots[id].name)
		return true
	})
	for name := range ts.missing {
		names = append(names, name)
	}
	for name := range ts.brought {
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (st *stream) describe(items []Item, t xds.Type, names []string) []Item {
	st.s.mu.RLock()
	defer st.s.mu.RUnlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	ts := &st.types[t]
	for _, name := range names {
		h, e := st.holds(t, name)
		if h.State == Unasked {
			continue // given back meanwhile
		}
		i := Item{Type: t, Name: name, Holding: h}
		if e != nil {
			i.Version = e.res.Version
			if h.State == Acked {
				i.Accepted = i.Version
			} else if p := ts.previous[st.s.table.names[name]]; p != nil {
				i.Accepted = p.res.Version
			}
		}
		items = append(items, i)
	}
	return items
}
