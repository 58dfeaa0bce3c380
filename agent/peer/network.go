package peer

import (
	"context"

	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
)

// Network is how an [Exchange] reaches the others: [Transport], or a simulated
// one. Messages that it gave or got are not changed any more.
type Network interface {
	// Fetch asks one agent. The bound is that of ctx.
	Fetch(ctx context.Context, to Member, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error)
	// Sync opens a stream, which ends with ctx.
	Sync(ctx context.Context, to Member) (ClientStream, error)
	// Retain closes connections to all but these members, later those too that
	// are idle.
	Retain([]Member)
}

// ClientStream is the caller's end of a Sync. Send and Recv may be called by two
// goroutines at once. After the peer ended the stream without an error, Recv
// returns [io.EOF].
type ClientStream interface {
	Send(*peerv1.SyncRequest) error
	Recv() (*peerv1.SyncResponse, error)
}

// ServerStream is the other end.
type ServerStream interface {
	Context() context.Context
	Send(*peerv1.SyncResponse) error
	Recv() (*peerv1.SyncRequest, error)
}
