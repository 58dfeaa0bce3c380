package ads

import (
	"cmp"
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
	// Types holds the types that the client has asked for, by short name.
	Types map[string]TypeStatus `json:"types"`
}

// Identity is what proves which pod a client runs in.
type Identity struct {
	Pod    string `json:"pod"`
	Method string `json:"method"` // netns, pidfd or none
	Reason string `json:"reason"` // why there is no proof
}

// TypeStatus is how far one type has come at a client. On delta the versions
// are system versions.
type TypeStatus struct {
	Sent  string `json:"sent"`  // of the last response; empty: none
	Acked string `json:"acked"` // last accepted; empty: none
	// Nack is the refusal that still stands: no response that carries one of
	// the refused resources has been accepted since.
	Nack *Nack `json:"nack"`
}

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
		ID:        st.node.GetId(),
		Connected: st.connected,
		Delta:     st.delta,
		Clusters:  "all",
		Identity:  Identity{Method: "none", Reason: "callers are not identified"},
		Types:     map[string]TypeStatus{},
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
		c.Types[t.String()] = status
	}
	return c, st.node, true
}
