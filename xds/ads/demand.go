package ads

import (
	"slices"

	"github.com/fingerpost/fingerpost/xds"
)

// View is what one client may see.
type View struct {
	// Scopes is an ordered list: of several resources with one type and name the
	// client sees that of the first scope.
	Scopes []xds.Scope
	// Demand hears which clusters the client asks for; nil for a client that has
	// all of them by its wildcard.
	Demand Demand
	// Dialer hears of what the client asks for by name; nil: nobody does.
	Dialer Dialer
	// Fallback comes after Scopes and holds, under the names of clusters that
	// nobody has, what stands in for them. Such a one never takes the place of
	// what a client brought for want of evidence. [xds.Shared] for none.
	Fallback xds.Scope
	// Wanted are the clusters that a client with a Demand has beside those that
	// it asks for, as if it asked for them at once.
	Wanted []string
	// Warnings say, one line each, what of the client's wishes is not met, or what
	// it cannot do.
	Warnings []string
}

// Demand hears which clusters one stream's client asks for. Its methods must be
// safe for concurrent use; none is called with the server's locks held.
type Demand interface {
	// Ask makes what is to be there under the names. What it publishes counts
	// for the request that held them. It returns the scopes that the client sees
	// from now on, nil if they stay: they may differ in route tables alone.
	Ask(names []string) []xds.Scope
	// Drop says that the client does not ask for the names any more.
	Drop(names []string)
	// Close drops all. What comes after it changes nothing.
	Close()
}

// Want lets the client of a node id have the clusters as if it had asked for
// them by name, on each of its streams that fetch clusters on demand. It tells
// whether there was one. Names that are not there are passed over.
func (s *Server) Want(client string, names ...string) bool {
	s.mu.RLock()
	var of []*stream
	for st := range s.streams {
		st.mu.Lock()
		if st.node != nil && st.node.GetId() == client && st.demand != nil {
			of = append(of, st)
		}
		st.mu.Unlock()
	}
	s.mu.RUnlock()
	for _, st := range of {
		st.want(names)
	}
	return len(of) > 0
}

// want subscribes to clusters in the client's place.
func (st *stream) want(names []string) {
	st.ask(names)
	st.s.mu.RLock()
	defer st.s.mu.RUnlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	ts := &st.types[xds.Cluster]
	for _, name := range names {
		id, ok := st.s.table.names[name]
		if !ok || ts.subscribed.has(id) || st.s.table.resolve(xds.Cluster, id, &st.sight, true) == nil {
			continue
		}
		ts.subscribed.set(id)
		if !ts.held.has(id) {
			ts.dirty.set(id)
		}
	}
	st.wake()
}

// wantFirst lets the client have, once, what it wants beside what it asks for.
func (st *stream) wantFirst() {
	st.mu.Lock()
	names := st.wanted
	st.wanted = nil
	st.mu.Unlock()
	if len(names) > 0 {
		st.want(names)
	}
}

// Sees tells whether a stream of the client sees a scope.
func (s *Server) Sees(client string, scope xds.Scope) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	id, ok := s.table.scopeIDs[scope]
	for st := range s.streams {
		st.mu.Lock()
		sees := ok && st.node != nil && st.node.GetId() == client && slices.Contains(st.sight.scopes, id)
		st.mu.Unlock()
		if sees {
			return true
		}
	}
	return false
}

// demands tells whether the client fetches clusters on demand.
func (st *stream) demands() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.demand != nil
}

// ask tells the demand of names, with no lock held, and lets the client see
// what it then shall.
func (st *stream) ask(names []string) {
	if names = named(names); len(names) == 0 {
		return
	}
	scopes := st.demand.Ask(names)
	if scopes == nil {
		return
	}
	v := View{Scopes: scopes, Demand: st.demand}
	sees := st.s.see(&v)
	st.s.mu.RLock()
	defer st.s.mu.RUnlock()
	st.mu.Lock()
	defer st.mu.Unlock()
	if sees.fallback = st.sight.fallback; sees.fallback != noScope {
		sees.scopes = append(sees.scopes, sees.fallback)
	}
	was := st.sight
	st.sight = sees
	ts := &st.types[xds.Route]
	ts.subscribed.each(bitset{}, func(id uint32) bool {
		if e := st.s.table.resolve(xds.Route, id, &st.sight, true); e != nil && e != st.s.table.resolve(xds.Route, id, &was, true) {
			if ts.refused.has(id) {
				ts.absolve(id)
			}
			ts.dirty.set(id)
		}
		return true
	})
	st.wake()
}
