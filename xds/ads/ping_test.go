package ads_test

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/test/bufconn"

	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// esp-v2#1030, java-control-plane#239: Envoys that ping as they are usually
// told to were sent GOAWAY (too_many_pings) again and again.
func TestClientThatPingsKeepsItsStream(t *testing.T) {
	for _, every := range []time.Duration{30 * time.Second, 10 * time.Second} {
		t.Run(every.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := ads.New(ads.Options{})
				server.OpenGate()
				l := bufconn.Listen(1 << 16)
				g := ads.NewGRPCServer(server)
				served := make(chan struct{})
				go func() { defer close(served); _ = g.Serve(l) }()
				conn, err := grpc.NewClient("passthrough:agent",
					grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
					grpc.WithTransportCredentials(insecure.NewCredentials()),
					grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: every, Timeout: time.Second, PermitWithoutStream: true}))
				if err != nil {
					t.Fatal(err)
				}
				s, err := client.Open(t.Context(), conn, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/a-1"}})
				if err == nil {
					err = s.Subscribe(cds)
				}
				if err == nil {
					_, err = s.Next(t.Context())
				}
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
				defer cancel()
				if r, err := s.Next(ctx); ctx.Err() == nil {
					t.Errorf("the stream ended or said more: %v, %v", r, err)
				}
				s.Close()
				_ = conn.Close()
				g.Stop()
				<-served
			})
		})
	}
}
