package ads_test

import (
	"context"
	"net"
	"runtime"
	"sync/atomic"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// follower is a client that keeps nothing: it acknowledges and passes on.
type follower struct {
	conn interface{ Close() error }
	got  chan *discovery.DeltaDiscoveryResponse
}

// follow subscribes to all clusters and to the CLAs by name, and returns when
// all of them have come.
func (w *world) follow(names []string, opts ...grpc.DialOption) *follower {
	w.t.Helper()
	conn, err := client.Dial(w.path, opts...)
	if err != nil {
		w.t.Fatal(err)
	}
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	f := &follower{conn: conn, got: make(chan *discovery.DeltaDiscoveryResponse, 16)}
	ended := make(chan struct{})
	w.t.Cleanup(func() { _ = conn.Close(); <-ended })
	_ = stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: "prod/a-1"}})
	_ = stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: eds.URL(), ResourceNamesSubscribe: names})
	go func() {
		defer close(ended)
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			_ = stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()})
			f.got <- r
		}
	}()
	for n := 0; n < 2*len(names); {
		select {
		case r := <-f.got:
			n += len(r.GetResources())
		case <-ended:
			w.t.Fatalf("the stream ended after %d of %d resources", n, 2*len(names))
		}
	}
	return f
}

// One pod change sends each subscriber one response with one resource, and
// costs the same however many resources there are.
func TestOneChangeIsOneResourceForEachSubscriber(t *testing.T) {
	streams := 110
	if testing.Short() {
		streams = 20
	}
	w := openWorld(t)
	names := numbered(1000)
	for _, n := range names {
		w.set(cluster(n, 1), cla(n, 1))
	}
	followers := make([]*follower, streams)
	for i := range followers {
		followers[i] = w.follow(names)
	}
	round := func(rev int) {
		changed := cla(names[42], rev)
		w.set(changed)
		for _, f := range followers {
			r := <-f.got
			if len(r.GetResources()) != 1 || r.GetResources()[0].GetVersion() != changed.Version || r.GetTypeUrl() != xds.Endpoint.URL() {
				t.Fatalf("got %d %s resources", len(r.GetResources()), r.GetTypeUrl())
			}
		}
	}
	round(2)
	const rounds = 5
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for rev := 3; rev < 3+rounds; rev++ {
		round(rev)
	}
	runtime.ReadMemStats(&after)
	// Server and clients together, so an upper bound. The race detector makes
	// pools forget what they hold.
	if per := (after.TotalAlloc - before.TotalAlloc) / rounds; per > 2<<20 && !raceEnabled {
		t.Fatalf("%d bytes allocated for one change", per)
	}
	for _, f := range followers {
		select {
		case r := <-f.got:
			t.Fatalf("one more response: %s", r.GetTypeUrl())
		default:
		}
	}
}

// What a change costs on the wire, framing by gRPC and HTTP/2 included, is the
// CLA, its name again, and at most 200 bytes.
func TestOneChangeIsOneCLAAndFewBytesOnTheWire(t *testing.T) {
	const name, changes = "prod/company.v1.Users", 500
	w := openWorld(t, cluster(name, 1), cla(name, 1))
	var read atomic.Int64
	f := w.follow([]string{name},
		// As an Envoy does, which sends no pings to find out how wide these are to be.
		grpc.WithStaticStreamWindowSize(16<<20), grpc.WithStaticConnWindowSize(16<<20),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			conn, err := d.DialContext(ctx, "unix", w.path)
			return countedConn{conn, &read}, err
		}))
	round := func(rev int) *xds.Resource {
		changed := cla(name, rev)
		w.set(changed)
		r := <-f.got
		if more := proto.Size(r) - len(changed.Body.GetValue()); more > 200 {
			t.Fatalf("a response is %d bytes longer than its CLA", more)
		}
		return changed
	}
	round(2)
	before := read.Load()
	expected := 0
	for rev := 3; rev < 3+changes; rev++ {
		expected += len(round(rev).Body.GetValue()) + len(name) + 200
	}
	if got := int(read.Load() - before); got > expected {
		t.Fatalf("%d changes are %d bytes, want at most %d", changes, got, expected)
	}
}

type countedConn struct {
	net.Conn
	read *atomic.Int64
}

func (c countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.read.Add(int64(n))
	return n, err
}

// A client that stops reading is parked: the others are served as before.
func TestClientThatNeverReadsHoldsNobodyUp(t *testing.T) {
	w := openWorld(t)
	names := numbered(2000)
	for _, n := range names {
		w.set(cluster(n, 1), cla(n, 1))
	}
	conn, err := client.Dial(w.path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	stuck, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	_ = stuck.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: "prod/stuck"}})
	_ = stuck.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: eds.URL(), ResourceNamesSubscribe: names})
	w.until("the stuck client was sent something", func() bool {
		c := w.server.Clients()
		return len(c) == 1 && c[0].Types["eds"].Sent != ""
	})
	f := w.follow(names)
	for rev := 2; rev < 200; rev++ {
		w.set(cla(names[7], rev))
		if r := <-f.got; len(r.GetResources()) != 1 {
			t.Fatalf("got %d resources", len(r.GetResources()))
		}
	}
}

func TestIdleStreamStateIsSmall(t *testing.T) {
	w := openWorld(t)
	names := numbered(10_000)
	for _, n := range names {
		w.set(cluster(n, 1), cla(n, 1))
	}
	w.follow(names)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	const n = 5
	for range n {
		w.follow(names)
	}
	after := heap()
	// Client and connection included.
	if per := (int64(after) - int64(before)) / n; per > 300<<10 {
		t.Fatalf("%d bytes for each stream", per)
	}
}
