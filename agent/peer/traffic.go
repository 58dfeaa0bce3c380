package peer

import (
	"context"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/stats"
)

// traffic counts the bytes of messages, as they are within TLS.
type traffic struct{ sent, received atomic.Int64 }

var _ stats.Handler = (*traffic)(nil)

// TagRPC implements [stats.Handler].
func (*traffic) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn implements [stats.Handler].
func (*traffic) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements [stats.Handler].
func (*traffic) HandleConn(context.Context, stats.ConnStats) {}

// HandleRPC implements [stats.Handler].
func (t *traffic) HandleRPC(_ context.Context, s stats.RPCStats) {
	switch s := s.(type) {
	case *stats.InPayload:
		t.received.Add(int64(s.WireLength))
	case *stats.OutPayload:
		t.sent.Add(int64(s.WireLength))
	}
}

// Register registers the metrics of the transport.
func (t *Transport) Register(reg prometheus.Registerer) {
	for direction, n := range map[string]*atomic.Int64{"sent": &t.traffic.sent, "received": &t.traffic.received} {
		reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "fingerpost_peer_bytes_total", Help: "Bytes of messages to and from other agents, by direction.",
			ConstLabels: prometheus.Labels{"direction": direction},
		}, func() float64 { return float64(n.Load()) }))
	}
}
