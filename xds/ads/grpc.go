package ads

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/keepalive"
)

// maxRequest is the largest request in bytes: a client that reconnects with
// 10,000 names and versions needs about 1.3 MB for each type. A larger one is
// refused by its length, before it is read.
const maxRequest = 8 << 20

// window is how much a client may send before it is read, on one stream and on
// all of a connection: the least that gRPC knows.
const window = 64 << 10

// readBuffer is what each connection reads into: most requests are some bytes.
const readBuffer = 4 << 10

// ServerOptions are what a gRPC server needs to serve Envoys: pings as often
// as each 10 s, also without a stream (the default answers Envoy's usual 30 s
// with GOAWAY), large requests, and bounds on what one client may do. A
// [Server] needs them: the codec among them encodes its responses, and all other
// messages as ever. Windows are fixed, since gRPC would else ask each client for
// a ping with every request, to find out how wide they should be. A connection
// has no buffer of its own to write from, since it mostly is idle.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ForceServerCodecV2(codec{encoding.GetCodecV2(proto.Name)}),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
		grpc.ReadBufferSize(readBuffer),
	}
}

// NewGRPCServer returns a gRPC server with [ServerOptions] and opts that
// serves s: the aggregated service, and one for each type, SotW and delta.
func NewGRPCServer(s *Server, opts ...grpc.ServerOption) *grpc.Server {
	g := grpc.NewServer(append(ServerOptions(), opts...)...)
	s.register(g)
	return g
}
