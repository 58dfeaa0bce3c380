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
	// Wanted returns what a client with a Demand gets beside what it asks for,
	// with its wildcard. It is called once, when the client is first answered; nil
	// for none.
	Wanted func() []Wanted
	// Warnings say, one line each, what of the client's wishes is not met, or what
	// it cannot do.
	Warnings []string
	// Closed is called when the stream has ended; nil: nobody hears of it.
	Closed func()
}

// Wanted is a cluster that a client gets before it asks for it. One that is not
// there, by Demand's word either, is passed over.
type Wanted struct {
	Cluster string `json:"cluster"`
	// Origin says why it is wanted.
	Origin string `json:"origin"`
}

// Demand hears which clusters one stream's client asks for. Its methods must be
// safe for concurrent use; none is called with the server's locks held.
type Demand interface {
	// Ask makes what is to be there under the names. What it publishes counts
	// for the request that held them. With itself set the client asks for them,
	// else it is given them. It returns the scopes that the client sees from now
	// on, nil if they stay: they may differ in route tables alone.
	Ask(names []string, itself bool) []xds.Scope
	// Drop says that the client does not ask for the names any more.
	Drop(names []string)
}

// Want lets the client of a node id have the clusters as if it had asked for
// them by name, on each of its streams that fetch clusters on demand. It tells
// whether there was one. Names that are not there are passed over.
func (s *Server) Want(client string, names ...string) bool {
	found := false
	for _, st := range s.of(client) {
		if st.demands() {
			st.want(names)
			found = true
		}
	}
	return found
}

// of returns the streams of a client, by its node id, in any order.
func (s *Server) of(client string) []*stream {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var of []*stream
	for st := range s.streams {
		st.mu.Lock()
		if st.node != nil && st.node.GetId() == client {
			of = append(of, st)
		}
		st.mu.Unlock()
	}
	return of
}

// want subscribes to clusters in the client's place.
func (st *stream) want(names []string) {
	st.ask(names, false)
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

// wantFirst lets the client have, once, what it gets beside what it asks for: as
// soon as it can be answered, and with the first answer (see collect).
func (st *stream) wantFirst() {
	if !st.s.isOpen() {
		return
	}
	st.mu.Lock()
	wanted, due := st.wanted, st.wants()
	st.mu.Unlock()
	if !due {
		return
	}
	list := wanted()
	names := make([]string, len(list))
	for i, w := range list {
		names[i] = w.Cluster
	}
	if len(names) > 0 {
		st.want(names)
	}
	st.mu.Lock()
	st.wanted, st.given = nil, list
	st.mu.Unlock()
}

// wants tells that the client is still to be given what it gets with its
// wildcard. Called with mu held.
func (st *stream) wants() bool { return st.wanted != nil && st.types[xds.Cluster].wildcard }

// Sees tells whether a stream of the client sees a scope.
func (s *Server) Sees(client string, scope xds.Scope) bool {
	of := s.of(client)
	s.mu.RLock()
	defer s.mu.RUnlock()
	id, ok := s.table.scopeIDs[scope]
	return ok && slices.ContainsFunc(of, func(st *stream) bool {
		st.mu.Lock()
		defer st.mu.Unlock()
		return slices.Contains(st.sight.scopes, id)
	})
}

// demands tells whether the client fetches clusters on demand.
func (st *stream) demands() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.demand != nil
}

// ask tells the demand of names, with no lock held, and lets the client see
// what it then shall.
func (st *stream) ask(names []string, itself bool) {
	if names = named(names); len(names) == 0 {
		return
	}
	scopes := st.demand.Ask(names, itself)
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
