package ads_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// rawDelta is a stream of its own connection that answers nothing by itself.
func (w *world) rawDelta() discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesClient {
	w.t.Helper()
	conn, err := client.Dial(w.path)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = conn.Close() })
	s, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// refusedWith returns the status that ends the stream.
func refusedWith(t *testing.T, s discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesClient, code codes.Code, text string) {
	t.Helper()
	for {
		_, err := s.Recv()
		if err == nil {
			continue
		}
		if status.Code(err) != code || !strings.Contains(err.Error(), text) {
			t.Fatalf("got %v, want %v %q", err, code, text)
		}
		return
	}
}

func many(n, length int) []string {
	names := make([]string, n)
	pad := strings.Repeat("x", length)
	for i := range names {
		names[i] = fmt.Sprintf("%s%07d", pad, i)
	}
	return names
}

// served checks that a client gets every one of a hundred changes, and each as
// it is made, whatever else goes on.
func (w *world) served(f *follower, name string, from int) {
	w.t.Helper()
	for rev := from; rev < from+100; rev++ {
		w.set(cla(name, rev))
		if r := <-f.got; len(r.GetResources()) != 1 {
			w.t.Fatalf("got %d resources", len(r.GetResources()))
		}
	}
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestClientWithTooManyNamesIsEndedWithAReason(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1))
	f := w.follow([]string{"A"})
	node := &corev3.Node{Id: "prod/greedy"}
	for name, row := range map[string]struct {
		requests []*discovery.DeltaDiscoveryRequest
		text     string
	}{
		"in one request":    {[]*discovery.DeltaDiscoveryRequest{{ResourceNamesSubscribe: many(150_000, 0)}}, "names 150000 resources, at most 131072"},
		"of great length":   {[]*discovery.DeltaDiscoveryRequest{{ResourceNamesSubscribe: many(7, 1<<20)}, {ResourceNamesSubscribe: many(7, 1<<20-1)}, {ResourceNamesSubscribe: many(7, 1<<20-2)}}, "more names that do not exist"},
		"one after another": {[]*discovery.DeltaDiscoveryRequest{{ResourceNamesSubscribe: many(100_000, 0)}, {ResourceNamesSubscribe: many(100_000, 1)}, {ResourceNamesSubscribe: many(100_000, 2)}}, "more names that do not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			s := w.rawDelta()
			for i, r := range row.requests {
				r.TypeUrl = eds.URL()
				if i == 0 {
					r.Node = node
				}
				if s.Send(r) != nil {
					break // the reason comes with what is received
				}
			}
			refusedWith(t, s, codes.ResourceExhausted, row.text)
		})
	}
	sotw := w.sotw()
	_ = sotw.SendSotW(eds, &discovery.DiscoveryRequest{ResourceNames: many(100_000, 0)})
	if err := sotw.ended(); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("got %v", err)
	}
	w.served(f, "A", 2)
}

// A name that nobody has costs memory, one that exists some bits. A hundred
// thousand names are answered, and given back with their client.
func TestHundredThousandNamesCostBoundedMemory(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1))
	f := w.follow([]string{"A"})
	before := heap()
	s := w.rawDelta()
	names := many(100_000, 20)
	if err := s.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: eds.URL(), Node: &corev3.Node{Id: "prod/greedy"}, ResourceNamesSubscribe: names}); err != nil {
		t.Fatal(err)
	}
	for left := len(names); left > 0; {
		r, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		left -= len(r.GetRemovedResources())
		if err := s.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: eds.URL(), ResponseNonce: r.GetNonce()}); err != nil {
			t.Fatal(err)
		}
		w.served(f, "A", 2+left%1000)
	}
	// The client's own copy of the names included.
	if grown := int64(heap()) - int64(before); grown > 48<<20 {
		t.Fatalf("%d MiB for one client", grown>>20)
	}
	runtime.KeepAlive(names)
}

func TestLargeRequestIsRefusedByItsLength(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1))
	f := w.follow([]string{"A"})
	before := heap()
	for range 5 {
		s := w.rawDelta()
		_ = s.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: eds.URL(), ResponseNonce: strings.Repeat("x", 16<<20)})
		refusedWith(t, s, codes.ResourceExhausted, "larger than max")
	}
	w.served(f, "A", 2)
	if grown := int64(heap()) - int64(before); grown > 32<<20 {
		t.Fatalf("%d MiB are kept", grown>>20)
	}
}

func TestIntroductionThatIsTooLargeIsRefused(t *testing.T) {
	w := openWorld(t)
	s := w.rawDelta()
	_ = s.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: strings.Repeat("x", 2000)}})
	refusedWith(t, s, codes.InvalidArgument, "node.id has 2000 bytes")
	s = w.rawDelta()
	_ = s.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: "prod/a", Cluster: strings.Repeat("x", 2<<20)}})
	refusedWith(t, s, codes.InvalidArgument, "node has")
}

func TestThousandStreamsOfOneClientAreTooMany(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1))
	f := w.follow([]string{"A"})
	conn, err := client.Dial(w.path)
	if err != nil {
		t.Fatal(err)
	}
	refused := 0
	for range 1000 {
		s, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(w.ctx)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: "prod/many"}})
		if _, err := s.Recv(); status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), `client "prod/many" has 512 streams`) {
			refused++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if refused != 1000-512 {
		t.Fatalf("%d of 1000 refused", refused)
	}
	w.served(f, "A", 2)
	_ = conn.Close()
	w.until("they are gone", func() bool { return len(w.server.Clients()) == 1 })
	again := w.connect(client.Options{Delta: true, Node: &corev3.Node{Id: "prod/many"}})
	again.sub(cds)
	again.want(cds, "A")
}

func TestSlowClientIsShownAsSlow(t *testing.T) {
	w := newWorld(t, ads.Options{Grace: 20 * time.Millisecond})
	w.server.OpenGate()
	names := numbered(3000)
	for _, n := range names {
		w.set(cluster(n, 1), cla(n, 1))
	}
	state := func(id string) string {
		for _, c := range w.server.Clients() {
			if c.ID == id {
				return c.State
			}
		}
		return "not connected"
	}
	f := w.follow(names)
	s := w.connect(client.Options{Delta: true, Node: &corev3.Node{Id: "prod/silent"}, Reply: silentOn(cds)})
	s.sub(cds)
	s.next()
	w.until("shown as silent", func() bool { return strings.Contains(state("prod/silent"), "has not acknowledged cds for") })
	if err := s.Ack(cds, ""); err != nil {
		t.Fatal(err)
	}
	w.until("shown as well", func() bool { return state("prod/silent") == "" })

	// One that does not read. What its transport takes for it is shown as not
	// acknowledged.
	stuck := w.rawDelta()
	_ = stuck.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: "prod/stuck"}})
	_ = stuck.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: eds.URL(), ResourceNamesSubscribe: names})
	w.until("shown as stuck", func() bool {
		return strings.Contains(state("prod/stuck"), "does not read: ") || strings.Contains(state("prod/stuck"), "has not acknowledged")
	})
	w.served(f, names[7], 2)
	if got := state("prod/a-1"); got != "" {
		t.Fatalf("another client is shown as %q", got)
	}
}

// cilium#44543: a lost acknowledgement held the updater for hours.
func TestClientThatNeverAcknowledgesHoldsNobodyUp(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := openWorld(t, cluster("A", 1), cla("A", 1))
		silent := w.connect(client.Options{Delta: delta, Node: &corev3.Node{Id: "prod/silent"}, Reply: func(client.Response) client.Reply { return client.Reply{Silent: true} }})
		silent.sub(cds)
		silent.want(cds, "A")
		silent.sub(eds, "A")
		silent.want(eds, "A")
		f := w.follow([]string{"A"})
		w.served(f, "A", 2)
		w.set(cluster("A", 2))
		if r := <-f.got; r.GetTypeUrl() != xds.Cluster.URL() {
			t.Fatalf("got %s", r.GetTypeUrl())
		}
		select {
		case r := <-silent.Responses():
			t.Fatalf("sent %s without an acknowledgement", r.Type)
		default:
		}
	}
}
