package ads

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/xds"
)

// Client is what is known of one stream, in the JSON form of
// "fingerpost proxies".
type Client struct {
	// ID is node.id, a claim of the client.
	ID string `json:"id"`
	// Pod is "namespace/name" where it is known, else empty.
	Pod       string    `json:"pod"`
	Connected time.Time `json:"connected"`
	Delta     bool      `json:"delta"`
	// Clusters is "all" or "on-demand".
	Clusters string   `json:"clusters"`
	Identity Identity `json:"identity"`
	// Upstreams are the clusters that a client on demand was given with its
	// wildcard, without being asked for.
	Upstreams []Wanted `json:"upstreams,omitempty"`
	// State says what is wrong with a client that does not read, or does not
	// acknowledge, for longer than the grace; empty: nothing.
	State string `json:"state,omitempty"`
	// Warnings are those of its [View].
	Warnings []string `json:"warnings,omitempty"`
	// Node is as far as it is kept; not to be changed.
	Node *corev3.Node `json:"-"`
	// Types holds the types that the client has asked for, by short name.
	Types map[string]TypeStatus `json:"types"`
}

// Identity is what proves which pod a client runs in.
type Identity struct {
	Pod    string `json:"pod"`
	Method string `json:"method"` // netns, pidfd or none
	// Reason says why there is no proof, or that node.id is another pod's.
	Reason string `json:"reason"`
}

// TypeStatus is how far one type has come at a client. On delta the versions
// are system versions.
type TypeStatus struct {
	Sent  string `json:"sent"`  // of the last response; empty: none
	Acked string `json:"acked"` // last accepted; empty: none
	// Nack is the refusal that still stands: no response that carries one of
	// the refused resources has been accepted since.
	Nack *Nack `json:"nack"`
	// Withheld are the resources that are not sent to this client in the
	// content that it refused, by name, at most 64. Suspects is the number of
	// those beside them that were in a refused response and are tried again.
	Withheld []Withheld `json:"withheld,omitempty"`
	Suspects int        `json:"suspects,omitempty"`
}

// Withheld is a resource that a client refused.
type Withheld struct {
	Name    string    `json:"name"`
	Version string    `json:"version"` // of the refused content
	Error   string    `json:"error"`
	At      time.Time `json:"at"`
}

// maxWithheld bounds what is listed of each type.
const maxWithheld = 64

// Nack is a refused response.
type Nack struct {
	Version string    `json:"version"`
	Error   string    `json:"error"`
	At      time.Time `json:"at"`
}

// Clients lists the streams whose client has introduced itself, ordered by id
// and time of connection.
func (s *Server) Clients() []Client {
	type seen struct {
		c    Client
		node *corev3.Node
	}
	var all []seen
	s.mu.RLock()
	for st := range s.streams {
		if c, node, ok := st.client(); ok {
			all = append(all, seen{c, node})
		}
	}
	s.mu.RUnlock()
	clients := make([]Client, len(all))
	for i, a := range all {
		clients[i] = a.c
		clients[i].Node = a.node
		if s.opts.Pod != nil {
			clients[i].Pod = s.opts.Pod(a.node)
		}
	}
	slices.SortFunc(clients, func(a, b Client) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), a.Connected.Compare(b.Connected))
	})
	return clients
}

func (st *stream) client() (Client, *corev3.Node, bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.node == nil {
		return Client{}, nil, false
	}
	c := Client{
		ID:        st.id,
		Connected: st.connected,
		Delta:     st.delta,
		Clusters:  "all",
		Identity:  st.who.shown(st.id),
		Warnings:  st.warns,
		Upstreams: st.given,
		Types:     map[string]TypeStatus{},
	}
	if st.demand != nil {
		c.Clusters = "on-demand"
	}
	for t := range xds.Type(xds.NumTypes) {
		ts := &st.types[t]
		if !ts.seen {
			continue
		}
		status := TypeStatus{Sent: ts.sentVersion, Acked: ts.ackedVersion}
		if ts.nack != nil {
			n := *ts.nack
			status.Nack = &n
		}
		status.Withheld, status.Suspects = st.withheld(t)
		c.Types[t.String()] = status
	}
	c.State = st.slowness(time.Now())
	return c, st.node, true
}

// Node returns the node of the client's latest stream; nil if it has none.
func (s *Server) Node(client string) *corev3.Node {
	of := s.of(client)
	if len(of) == 0 {
		return nil
	}
	latest := slices.MaxFunc(of, func(a, b *stream) int { return a.connected.Compare(b.connected) })
	latest.mu.Lock()
	defer latest.mu.Unlock()
	return latest.node
}

// slowness says what the client does not do. Called with mu held.
func (st *stream) slowness(now time.Time) string {
	late := func(since time.Time) bool { return !since.IsZero() && now.Sub(since) > st.s.opts.Grace }
	if late(st.sendSince) {
		return fmt.Sprintf("does not read: a response waits for %v", now.Sub(st.sendSince).Round(time.Second))
	}
	for t := range xds.Type(xds.NumTypes) {
		if ts := &st.types[t]; ts.inFlight && late(ts.sentAt) {
			return fmt.Sprintf("has not acknowledged %s for %v", t, now.Sub(ts.sentAt).Round(time.Second))
		}
	}
	return ""
}

// withheld lists what the client refused. Called with both locks held.
func (st *stream) withheld(t xds.Type) (known []Withheld, suspects int) {
	ts := &st.types[t]
	if ts.q == nil {
		return nil, 0
	}
	ts.withheld.each(bitset{}, func(id uint32) bool {
		r, ok := ts.q.verdicts[id]
		switch {
		case !ok:
			suspects++
		case len(known) < maxWithheld:
			known = append(known, Withheld{Name: st.s.table.slots[id].name, Version: r.version, Error: r.text, At: r.at})
		}
		return true
	})
	slices.SortFunc(known, func(a, b Withheld) int { return cmp.Compare(a.Name, b.Name) })
	return known, suspects
}

// withheldTotal is the number of resources of a type that are withheld from
// clients, counted once for each client.
func (s *Server) withheldTotal(t xds.Type) (n int) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for st := range s.streams {
		st.mu.Lock()
		n += st.types[t].withheld.count()
		st.mu.Unlock()
	}
	return n
}
