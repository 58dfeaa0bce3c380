package csds_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	statusv3 "github.com/envoyproxy/go-control-plane/envoy/service/status/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
	"github.com/fingerpost/fingerpost/xds/csds"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is an ADS server whose status is asked on the same socket.
type world struct {
	t      *testing.T
	ctx    context.Context
	server *ads.Server
	conn   *grpc.ClientConn
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, server: ads.New(ads.Options{})}
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := ads.NewGRPCServer(w.server)
	csds.Register(g, w.server)
	served := make(chan struct{})
	go func() { defer close(served); _ = g.Serve(l) }()
	if w.conn, err = client.Dial(path); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	w.ctx = ctx
	t.Cleanup(func() { cancel(); _ = w.conn.Close(); g.Stop(); <-served })
	w.server.OpenGate()
	return w
}

func cluster(name string, rev int) *xds.Resource {
	r, err := xds.NewResource(xds.ID{Type: xds.Cluster, Name: name}, &clusterv3.Cluster{Name: name, AltStatName: fmt.Sprint(rev)})
	if err != nil {
		panic(err)
	}
	return r
}

func (w *world) set(rs ...*xds.Resource) { w.server.Publish(xds.Update{Set: rs}) }

// connect opens the stream of a client whose responses nobody looks at.
func (w *world) connect(o client.Options) *client.Stream {
	w.t.Helper()
	s := w.open(o)
	w.drain(s)
	return s
}

func (w *world) open(o client.Options) *client.Stream {
	w.t.Helper()
	s, err := client.Open(w.ctx, w.conn, o)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(s.Close)
	return s
}

func (w *world) drain(s *client.Stream) {
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for range s.Responses() {
		}
	}()
	w.t.Cleanup(func() { s.Close(); <-drained })
}

func (w *world) subscribe(s *client.Stream, t xds.Type, names ...string) {
	w.t.Helper()
	if err := s.Subscribe(t, names...); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) fetch(matchers ...*matcherv3.NodeMatcher) (*statusv3.ClientStatusResponse, error) {
	return statusv3.NewClientStatusDiscoveryServiceClient(w.conn).FetchClientStatus(w.ctx, &statusv3.ClientStatusRequest{NodeMatchers: matchers})
}

// until waits until the only client has exactly these clusters in these states,
// and returns them.
func (w *world) until(want map[string]string) map[string]*statusv3.ClientConfig_GenericXdsConfig {
	w.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := w.fetch()
		if err != nil {
			w.t.Fatal(err)
		}
		got, configs := map[string]string{}, map[string]*statusv3.ClientConfig_GenericXdsConfig{}
		for _, c := range resp.GetConfig() {
			for _, x := range c.GetGenericXdsConfigs() {
				if x.GetTypeUrl() != xds.Cluster.URL() {
					w.t.Fatalf("type %s", x.GetTypeUrl())
				}
				got[x.GetName()] = x.GetClientStatus().String() + " " + x.GetConfigStatus().String()
				configs[x.GetName()] = x
			}
		}
		if len(resp.GetConfig()) == 1 && maps.Equal(got, want) {
			return configs
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			w.t.Fatalf("clients have %v, want %v", got, want)
		}
	}
}

func TestStatusFollowsAResourceToItsRefusalAndBack(t *testing.T) {
	for _, delta := range []bool{true, false} {
		t.Run(fmt.Sprint("delta ", delta), func(t *testing.T) {
			w := newWorld(t)
			a1, a2, b1 := cluster("A", 1), cluster("A", 2), cluster("B", 1)
			w.set(a1)
			var silent atomic.Bool
			var refuse atomic.Pointer[string]
			s := w.open(client.Options{Delta: delta, Node: &corev3.Node{Id: "prod/a-1"}, Reply: func(client.Response) client.Reply {
				if text := refuse.Load(); text != nil {
					return client.Reply{Nack: *text}
				}
				return client.Reply{Silent: silent.Load()}
			}})
			silent.Store(true)
			w.subscribe(s, xds.Cluster, "A", "B", "Nobody")
			if _, err := s.Next(w.ctx); err != nil {
				t.Fatal(err)
			}
			want := map[string]string{"A": "REQUESTED STALE", "B": "DOES_NOT_EXIST NOT_SENT", "Nobody": "DOES_NOT_EXIST NOT_SENT"}
			w.until(want)
			// What comes while a response is not acknowledged waits.
			w.set(b1)
			want["B"] = "REQUESTED NOT_SENT"
			w.until(want)
			silent.Store(false)
			w.drain(s)
			if err := s.Ack(xds.Cluster, ""); err != nil {
				t.Fatal(err)
			}
			want = map[string]string{"A": "ACKED SYNCED", "B": "ACKED SYNCED", "Nobody": "DOES_NOT_EXIST NOT_SENT"}
			got := w.until(want)
			if v := got["A"].GetVersionInfo(); v != a1.Version || got["A"].GetLastUpdated() == nil || got["A"].GetErrorState() != nil {
				t.Errorf("accepted: %v, want version %s", got["A"], a1.Version)
			}

			text := "A: a reason of its own"
			refuse.Store(&text)
			w.set(a2)
			want["A"] = "NACKED ERROR"
			got = w.until(want)
			e := got["A"].GetErrorState()
			if e.GetDetails() != text || e.GetVersionInfo() != a2.Version || e.GetLastUpdateAttempt() == nil {
				t.Errorf("refused: %v, want version %s", e, a2.Version)
			}
			accepted := a1.Version
			if delta {
				accepted = "" // what of it the client goes on with nobody knows
			}
			if v := got["A"].GetVersionInfo(); v != accepted {
				t.Errorf("goes on with %q, want %q", v, accepted)
			}

			refuse.Store(nil)
			a3 := cluster("A", 3)
			w.set(a3)
			want["A"] = "ACKED SYNCED"
			if v := w.until(want)["A"].GetVersionInfo(); v != a3.Version {
				t.Errorf("repaired: version %q, want %q", v, a3.Version)
			}
			silent.Store(true)
			w.set(cluster("A", 4))
			want["A"] = "ACKED STALE"
			w.until(want)
			w.set(cluster("B", 2))
			want["B"] = "ACKED NOT_SENT"
			w.until(want)
		})
	}
}

func TestEachStreamIsAClientAndStreamsOfQuestionsAreAnswered(t *testing.T) {
	w := newWorld(t)
	w.set(cluster("A", 1))
	for _, id := range []string{"prod/b", "prod/a", "prod/b"} {
		s := w.connect(client.Options{Delta: true, Node: &corev3.Node{Id: id, Cluster: "x"}})
		w.subscribe(s, xds.Cluster)
	}
	g, err := statusv3.NewClientStatusDiscoveryServiceClient(w.conn).StreamClientStatus(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if err := g.Send(&statusv3.ClientStatusRequest{}); err != nil {
			t.Fatal(err)
		}
		resp, err := g.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, c := range resp.GetConfig() {
			got += fmt.Sprintf("%s %s %d, ", c.GetNode().GetId(), c.GetNode().GetCluster(), len(c.GetGenericXdsConfigs()))
		}
		if got == "prod/a x 1, prod/b x 1, prod/b x 1, " {
			break
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			t.Fatalf("clients: %s", got)
		}
	}
	if err := g.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Recv(); err == nil {
		t.Error("an answer without a question")
	}
}

func TestAnswerThatIsTooLargeIsRefusedAndOneClientIsNot(t *testing.T) {
	w := newWorld(t)
	var rs []*xds.Resource
	const each = csds.MaxResources/2 + 1
	for i := range each {
		rs = append(rs, cluster(fmt.Sprintf("c-%d", i), 1))
	}
	w.set(rs...)
	for _, id := range []string{"prod/a", "prod/b"} {
		w.subscribe(w.connect(client.Options{Delta: true, Node: &corev3.Node{Id: id}}), xds.Cluster)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := w.fetch()
		if status.Code(err) == codes.ResourceExhausted {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			t.Fatalf("%d clients are answered in one", len(resp.GetConfig()))
		}
	}
	resp, err := w.fetch(byID("prod/a"))
	if err != nil || len(resp.GetConfig()) != 1 || len(resp.GetConfig()[0].GetGenericXdsConfigs()) != each {
		t.Fatalf("%d clients, %v", len(resp.GetConfig()), err)
	}
}
