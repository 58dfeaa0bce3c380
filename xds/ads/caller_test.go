package ads_test

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// kernel says of every connection what the test says.
type kernel struct {
	who   atomic.Pointer[ads.Caller]
	asked atomic.Int64
}

func (k *kernel) Prove(net.Conn) ads.Caller { k.asked.Add(1); return *k.who.Load() }

func (k *kernel) says(c ads.Caller) { k.who.Store(&c) }

func pod(name string) ads.Caller {
	return ads.Caller{Identity: ads.Identity{Pod: name, Method: "netns"}}
}

func nobody(reason string, pending bool) ads.Caller {
	return ads.Caller{Identity: ads.Identity{Method: "none", Reason: reason}, Pending: pending}
}

// identified is an open world whose clients see what is in the scope of their
// node's namespace.
func identified(t *testing.T, o ads.Options, r ...*xds.Resource) (*world, *kernel, *prometheus.Registry) {
	k, reg := &kernel{}, prometheus.NewRegistry()
	o.View = func(in ads.Introduction) (ads.View, error) {
		n := in.Node
		namespace, _, _ := strings.Cut(n.GetId(), "/")
		return ads.View{Scopes: []xds.Scope{xds.NamespaceScope(namespace), xds.Shared}}, nil
	}
	o.Registerer = reg
	w := newWorld(t, o, grpc.Creds(ads.Credentials(k)))
	w.server.OpenGate()
	w.set(r...)
	return w, k, reg
}

// as is a client on a connection of its own, which says that it is id.
func (w *world) as(id string, nack ...string) *stream {
	w.t.Helper()
	reply := func(client.Response) client.Reply { return client.Reply{Nack: strings.Join(nack, "")} }
	conn, err := client.Dial(w.path)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close() })
	s, err := client.Open(w.ctx, conn, client.Options{Delta: true, Node: &corev3.Node{Id: id}, Reply: reply})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(s.Close)
	return &stream{Stream: s, w: w}
}

// counted is the value of a counter, of the label's value where one is given.
func counted(t *testing.T, reg *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && (label == "" || m.GetLabel()[0].GetValue() == label) {
				return m.GetCounter().GetValue()
			}
		}
	}
	t.Fatalf("there is no %s %s", name, label)
	return 0
}

// Whatever a client says of itself, it sees what its proved pod shall.
func TestProvedPodIsTheTruth(t *testing.T) {
	var refused []string
	w, k, reg := identified(t, ads.Options{
		Pod:     func(n *corev3.Node) string { return n.GetId() },
		Refused: func(r ads.Refusal) { refused = append(refused, r.Node.GetId()) },
	}, in(xds.NamespaceScope("prod"), cluster("prod-only", 1)), in(xds.NamespaceScope("test"), cluster("test-only", 1)))
	k.says(pod("prod/a"))
	honest := w.as("prod/a")
	honest.sub(cds)
	honest.want(cds, "prod-only")
	liar := w.as("test/b", "no")
	liar.sub(cds)
	liar.want(cds, "prod-only")
	w.until("refused", func() bool {
		return len(w.server.Holdings("prod/a", cds, "prod-only")) == 2 && counted(t, reg, "fingerpost_ads_nacks_total", "cds") == 1
	})
	for _, c := range w.server.Clients() {
		want := ads.Identity{Pod: "prod/a", Method: "netns"}
		if c.ID == "test/b" {
			want.Reason = `node.id "test/b" is not the pod's`
		}
		if c.Pod != "prod/a" || c.Identity != want {
			t.Errorf("%s: pod %s, %+v", c.ID, c.Pod, c.Identity)
		}
	}
	if n := counted(t, reg, "fingerpost_ads_identity_mismatches_total", ""); n != 1 {
		t.Errorf("%v mismatches", n)
	}
	if n := counted(t, reg, "fingerpost_ads_callers_total", "netns"); n != 2 {
		t.Errorf("%v proved", n)
	}
	liar.Close()
	honest.Close()
	w.until("gone", func() bool { return len(w.server.Clients()) == 0 })
	if len(refused) != 1 || refused[0] != "prod/a" {
		t.Errorf("refusals of %q", refused)
	}
	k.says(nobody("no link", false))
	claims := w.as("test/b")
	claims.sub(cds)
	claims.want(cds, "test-only")
	if c := w.server.Clients()[0]; c.Identity != (ads.Identity{Method: "none", Reason: "no link"}) || c.ID != "test/b" {
		t.Errorf("%+v", c)
	}
}

func TestUnprovedCallersAreRefusedWhereIdentityIsRequired(t *testing.T) {
	w, k, reg := identified(t, ads.Options{RequireIdentity: true, IdentityWait: 20 * time.Millisecond}, cluster("c", 1))
	for _, test := range []struct {
		who  ads.Caller
		code codes.Code
	}{
		{nobody("no such link", false), codes.Unauthenticated},
		{nobody("no such pod yet", true), codes.Unavailable},
	} {
		k.says(test.who)
		s := w.as("prod/a")
		s.sub(cds)
		if err := s.ended(); status.Code(err) != test.code || !strings.Contains(err.Error(), test.who.Reason) || !strings.Contains(err.Error(), "--require-identity") {
			t.Errorf("%v, want %v", err, test.code)
		}
	}
	if n := counted(t, reg, "fingerpost_ads_identity_refused_total", ""); n != 2 {
		t.Errorf("%v refused", n)
	}
	k.says(pod("prod/a"))
	s := w.as("prod/a")
	s.sub(cds)
	s.want(cds, "c")
}

// A caller that comes before its pod is known waits for it (spiffe/spire#462,
// #3092); without --require-identity not for ever.
func TestCallerThatComesBeforeItsPodIsKnownWaits(t *testing.T) {
	w, k, _ := identified(t, ads.Options{RequireIdentity: true, IdentityWait: time.Hour}, in(xds.NamespaceScope("prod"), cluster("c", 1)))
	k.says(nobody("no such pod yet", true))
	s := w.as("whatever/x")
	s.sub(cds)
	w.until("asked for", func() bool { return k.asked.Load() > 2 })
	k.says(pod("prod/a"))
	s.want(cds, "c")
	w, k, _ = identified(t, ads.Options{IdentityWait: 20 * time.Millisecond}, cluster("c", 1))
	k.says(nobody("no such pod yet", true))
	s = w.as("prod/a")
	s.sub(cds)
	s.want(cds, "c")
	// One that leaves meanwhile leaves nothing (the leak check of the package).
	w, k, _ = identified(t, ads.Options{IdentityWait: time.Hour}, cluster("c", 1))
	k.says(nobody("no such pod yet", true))
	s = w.as("prod/a")
	s.sub(cds)
	s.Close()
}

// While the gate is closed nobody is answered, and a pod may become known.
func TestClosedGateOutlivesTheWaitForThePod(t *testing.T) {
	k := &kernel{}
	k.says(nobody("no such pod yet", true))
	w := newWorld(t, ads.Options{IdentityWait: time.Millisecond, HoldLimit: time.Hour}, grpc.Creds(ads.Credentials(k)))
	w.set(cluster("c", 1))
	s := w.as("prod/a")
	s.sub(cds)
	// More often than it would be with an open gate.
	w.until("asked for", func() bool { return k.asked.Load() > 4 })
	k.says(pod("prod/b"))
	w.until("identified", func() bool { return len(w.server.Clients()) == 1 })
	w.server.OpenGate()
	s.want(cds, "c")
	if c := w.server.Clients()[0]; c.Identity.Pod != "prod/b" {
		t.Errorf("%+v", c)
	}
	w = newWorld(t, ads.Options{HoldLimit: 30 * time.Millisecond}, grpc.Creds(ads.Credentials(k)))
	k.says(nobody("no such pod yet", true))
	s = w.as("prod/a")
	s.sub(cds)
	if err := s.ended(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "still starting") {
		t.Error(err)
	}
}

// What a pod may use is its own: who merely claims its name uses up nothing of
// it, and one that says many names has no more than with one.
func TestLimitsGoByTheProvedPod(t *testing.T) {
	w, k, _ := identified(t, ads.Options{}, cluster("c", 1))
	exhausted := func(ids func(int) string, n int) int {
		t.Helper()
		conn, err := client.Dial(w.path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		refused := 0
		for i := range n {
			g, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(w.ctx)
			if err == nil {
				err = g.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: ids(i)}})
			}
			if err == nil {
				_, err = g.Recv()
			}
			if status.Code(err) == codes.ResourceExhausted {
				refused++
			} else if err != nil {
				t.Fatal(err)
			}
		}
		return refused
	}
	k.says(nobody("no link", false))
	if n := exhausted(func(int) string { return "prod/a" }, 520); n != 8 {
		t.Errorf("%d of 520 streams of one claim refused", n)
	}
	k.says(pod("prod/a"))
	if n := exhausted(func(i int) string { return strings.Repeat("x", i+1) }, 520); n != 8 {
		t.Errorf("%d of 520 streams of one pod refused", n)
	}
	k.says(pod("prod/b"))
	if n := exhausted(func(int) string { return "prod/a" }, 1); n != 0 {
		t.Error("another pod was refused for it")
	}
}

// A client that opens streams and ends them, as fast as it can, is slowed; what
// it spent is counted after its last stream too.
func TestStreamsAreOpenedAtAPace(t *testing.T) {
	w, k, _ := identified(t, ads.Options{}, cluster("c", 1))
	k.says(pod("prod/a"))
	open := func() error {
		ctx, cancel := context.WithCancel(w.ctx)
		defer cancel()
		g, err := discovery.NewAggregatedDiscoveryServiceClient(w.conn).DeltaAggregatedResources(ctx)
		if err == nil {
			err = g.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: "prod/a"}})
		}
		if err == nil {
			_, err = g.Recv()
		}
		return err
	}
	opened := 0
	for {
		err := open()
		if status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "more than 50 streams a second") {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		opened++
	}
	if opened < 1024 {
		t.Errorf("refused after %d", opened)
	}
	w.until("one more", func() bool { return open() == nil })
}
