package ads_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/xds/client"
)

// lengths reads of each message how long it is.
type lengths struct{}

func (lengths) Name() string { return "proto" }

func (lengths) Marshal(v any) (mem.BufferSlice, error) {
	b, err := proto.Marshal(v.(proto.Message))
	return mem.BufferSlice{mem.SliceBuffer(b)}, err
}

func (lengths) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*int) = data.Len()
	return nil
}

// istio#35263: thousands of proxies that connected at once made the control plane
// run out of memory, again and again. All are answered, and what that allocates is
// bounded by what they are sent, once for the server and once for the clients.
func TestFiveHundredClientsAtOnceAreAnsweredInBoundedMemory(t *testing.T) {
	clients, each := 500, uint64(400<<10)
	if testing.Short() {
		clients = 50
	}
	w := openWorld(t)
	names := numbered(1000)
	size := 0
	for _, n := range names {
		c, e := cluster(n, 1), cla(n, 1)
		size += len(c.Delta) + len(e.Delta)
		w.set(c, e)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	answered := make(chan error, clients)
	for i := range clients {
		conn, err := client.Dial(w.path, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(lengths{})),
			grpc.WithStaticStreamWindowSize(16<<20), grpc.WithStaticConnWindowSize(16<<20))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		go func() { answered <- askAll(w.ctx, conn, fmt.Sprint("prod/crowd-", i), names, size) }()
	}
	for range clients {
		if err := <-answered; err != nil {
			t.Fatal(err)
		}
	}
	runtime.ReadMemStats(&after)
	if got := len(w.server.Clients()); got != clients {
		t.Errorf("%d clients are connected, want %d", got, clients)
	}
	// The race detector makes pools forget what they hold.
	if per := (after.TotalAlloc - before.TotalAlloc) / uint64(clients); per > uint64(size)+each && !raceEnabled {
		t.Errorf("%d bytes allocated for each client, which was sent %d", per, size)
	}
}

// askAll subscribes to everything and returns once so many bytes have come.
func askAll(ctx context.Context, conn *grpc.ClientConn, id string, names []string, size int) error {
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		discovery.AggregatedDiscoveryService_DeltaAggregatedResources_FullMethodName)
	if err != nil {
		return err
	}
	for _, r := range []*discovery.DeltaDiscoveryRequest{
		{TypeUrl: cds.URL(), Node: &corev3.Node{Id: id}},
		{TypeUrl: eds.URL(), ResourceNamesSubscribe: names},
	} {
		if err := s.SendMsg(r); err != nil {
			return err
		}
	}
	for size > 0 {
		var n int
		if err := s.RecvMsg(&n); err != nil {
			return fmt.Errorf("%s, of which %d bytes have not come: %w", id, size, err)
		}
		size -= n
	}
	return nil
}
