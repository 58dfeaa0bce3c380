package agent

import (
	"time"

	"github.com/fingerpost/fingerpost/agent/peer"
	"github.com/fingerpost/fingerpost/nodecache"
)

// PeerView is one row of the answer to /peers: the agent of another node, or of
// this one.
type PeerView struct {
	Node    string `json:"node"`
	Zone    string `json:"zone"`
	Address string `json:"address"` // IP:port
	// State is self, connected, idle (nothing is amiss, and there is no reason to
	// talk), or backoff (it failed, and is left alone until Until).
	State string     `json:"state"`
	Until *time.Time `json:"until,omitempty"`
	// Serving tells whether it lets itself be told by this agent.
	Serving bool `json:"serving"`
	// LastContact is when it answered last; null if it never did.
	LastContact *time.Time `json:"last_contact"`
	// LastError is one line, empty where the last question was answered.
	LastError string `json:"last_error"`
	// Records counts the owners of which what is known is the word of this peer,
	// by whichever way it came.
	Records int `json:"records"`
}

// viewPeers are the agents that this one knows, sorted by node.
func (a *Agent) viewPeers() []PeerView {
	views := []PeerView{}
	if a.peers == nil {
		return views
	}
	for _, s := range a.peers.exchange.Status() {
		views = append(views, viewPeer(&s))
	}
	return views
}

// told adds who told of an owner, and when it was learned.
func (v *OwnerView) told(a *Agent, o *nodecache.Owner) {
	if o.Info == nil || o.Origin != nodecache.OriginPeer || a.peers == nil {
		return
	}
	at := o.Info.Collected.UTC()
	v.Peer, v.Collected = a.peers.exchange.Author(o.Key), &at
}

func viewPeer(s *peer.PeerStatus) PeerView {
	v := PeerView{
		Node: s.Node, Zone: s.Zone, Address: s.Address.String(), State: string(s.State),
		Serving: s.Serving, LastError: s.Reason, Records: s.Records,
	}
	if !s.Last.IsZero() {
		last := s.Last.UTC()
		v.LastContact = &last
	}
	if !s.Until.IsZero() {
		until := s.Until.UTC()
		v.Until = &until
	}
	return v
}
