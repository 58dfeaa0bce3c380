package peer

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/agent/collect"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// Directory is what an [Exchange] needs of [nodecache.Directory]; [Over] makes
// one of it.
type Directory interface {
	// Changes returns a feed that first yields every owner of the moment.
	Changes() Feed
	// Hosts returns the nodes on which an eligible pod of the owner stands, each
	// once, sorted; and whether the owner has pods at all.
	Hosts(key nodecache.OwnerKey) (nodes []string, there bool)
	// Learned is what is known of the owner.
	Learned(key nodecache.OwnerKey) nodecache.Learned
	// Learn and LearnFailure are those of nodecache.Directory.
	Learn(key nodecache.OwnerKey, node string, info *nodecache.Info) error
	LearnFailure(key nodecache.OwnerKey, node string, f nodecache.Failure) error
}

// Feed yields owners that changed. See [nodecache.Subscription].
type Feed interface {
	Next(context.Context) ([]nodecache.OwnerKey, error)
	Close()
}

// Collector is the part of [collect.Collector] that an [Exchange] uses.
type Collector interface {
	// Consider looks at the owners again: another agent is in charge now, or
	// this one.
	Consider(keys ...nodecache.OwnerKey)
}

// Trust says for which node a key speaks, by the certificate that came with it
// (DER, may be nil). It is called often, and by many goroutines.
type Trust func(key Fingerprint, certificate []byte) (node string, ok bool)

// Options configures an [Exchange].
type Options struct {
	Node      string              // required
	Directory Directory           // required
	Identity  *Identity           // required
	Network   Network             // required
	Scheduler *schedule.Scheduler // required: fetches run in its group peer-fetch
	// Trust is nil where the members' Keys decide.
	Trust Trust
	// Remote lets this agent ask pods of other nodes, where no agent stands on
	// any node that has one and a caller of this node waits. [collect.ScopeCluster]
	// is needed for it as well.
	Remote bool
	Logger *slog.Logger // nil: none
	// Metrics registers the metrics; nil registers none.
	Metrics prometheus.Registerer
}

// Exchange shares what the agents of a cluster collected. Its methods are safe
// for concurrent use, and only Run, Wait and the Serve methods block.
type Exchange struct{}

// New returns an exchange that knows no member, so that all owners with a pod
// on this node are this agent's to collect.
func New(o Options) *Exchange { return &Exchange{} }

// Attach names the collector; called once, before Run. (A collector needs its
// exchange when it is made.)
func (x *Exchange) Attach(c Collector) {}

// Run exchanges until ctx ends, and returns when every stream has ended. The
// directory should hold the first list by then. It is called once; the
// scheduler has to run beside it.
func (x *Exchange) Run(ctx context.Context) {}

// SetMembers replaces the members: all agents of the cluster that can be
// reached, the one of this node among them or not.
func (x *Exchange) SetMembers(ms []Member) {}

// Place tells who is to collect the owner. It is collect.Options.Placement.
func (x *Exchange) Place(o *nodecache.Owner) collect.Place { return collect.OwnNode }

// Want lets the owner be known soon: a caller waits for it. It asks the agent
// in charge, where that is not this one.
func (x *Exchange) Want(key nodecache.OwnerKey) {}

// Wait returns when something is known of the owner, or an attempt to learn it
// from the agents in charge has failed; at once if this agent is in charge. Its
// error is that of ctx.
func (x *Exchange) Wait(ctx context.Context, key nodecache.OwnerKey) error { return nil }

// ServeFetch answers a peer, which speaks for the node from. The error is a
// gRPC status.
func (x *Exchange) ServeFetch(ctx context.Context, from string, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	return nil, nil
}

// ServeSync serves a peer's stream until it ends.
func (x *Exchange) ServeSync(from string, stream ServerStream) error { return nil }

// Status is how it stands with every member, sorted by node.
func (x *Exchange) Status() []PeerStatus { return nil }

// PeerStatus is how it stands with one member.
type PeerStatus struct {
	Member
	// State is self, connected (a sync stream is open), idle or backoff.
	State State
	// Serving tells whether the peer has a sync stream open to this agent.
	Serving bool
	// Reason is the last error in one line, Until when the backoff ends.
	Reason string
	Until  int64 // Unix milliseconds; 0 is none
	// Records is how many of the records held are this peer's word.
	Records int
}

// State is that of a [PeerStatus].
type State string

// The states.
const (
	StateSelf      State = "self"
	StateConnected State = "connected"
	StateIdle      State = "idle"
	StateBackoff   State = "backoff"
)
