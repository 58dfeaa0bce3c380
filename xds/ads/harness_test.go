package ads_test

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	cds = xds.Cluster
	eds = xds.Endpoint
	lds = xds.Listener
	rds = xds.Route
)

// patience is a deadline for what must come; nothing is measured against it.
const patience = time.Minute

// world is a server on a unix socket.
type world struct {
	t      testing.TB
	server *ads.Server
	path   string
	conn   *grpc.ClientConn
	ctx    context.Context
}

func newWorld(t testing.TB, opts ads.Options) *world {
	t.Helper()
	w := &world{t: t, server: ads.New(opts), path: filepath.Join(t.TempDir(), "ads.sock")}
	l, err := net.Listen("unix", w.path)
	if err != nil {
		t.Fatal(err)
	}
	g := ads.NewGRPCServer(w.server)
	served := make(chan struct{})
	go func() { defer close(served); _ = g.Serve(l) }()
	if w.conn, err = client.Dial(w.path); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	w.ctx = ctx
	t.Cleanup(func() { cancel(); _ = w.conn.Close(); g.Stop(); <-served })
	return w
}

// openWorld has an open gate and holds the resources.
func openWorld(t testing.TB, resources ...*xds.Resource) *world {
	w := newWorld(t, ads.Options{})
	w.server.OpenGate()
	w.set(resources...)
	return w
}

func (w *world) set(r ...*xds.Resource) { w.server.Publish(xds.Update{Set: r}) }

func (w *world) remove(r ...*xds.Resource) {
	var u xds.Update
	for _, r := range r {
		u.Remove = append(u.Remove, r.ID)
	}
	w.server.Publish(u)
}

func (w *world) evidence(scope xds.Scope, e xds.Evidence) {
	w.server.Publish(xds.Update{Evidence: map[xds.Scope]xds.Evidence{scope: e}})
}

// stream is a client's stream with what a test asks of it.
type stream struct {
	*client.Stream
	w      *world
	fences int
}

func (w *world) connect(opts client.Options) *stream {
	w.t.Helper()
	if opts.Node == nil {
		opts.Node = &corev3.Node{Id: "prod/a-1"}
	}
	s, err := client.Open(w.ctx, w.conn, opts)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(s.Close)
	return &stream{Stream: s, w: w}
}

func (w *world) delta() *stream { w.t.Helper(); return w.connect(client.Options{Delta: true}) }
func (w *world) sotw() *stream  { w.t.Helper(); return w.connect(client.Options{}) }

func (s *stream) sub(t xds.Type, names ...string) {
	s.w.t.Helper()
	if err := s.Subscribe(t, names...); err != nil {
		s.w.t.Fatal(err)
	}
}

func (s *stream) unsub(t xds.Type, names ...string) {
	s.w.t.Helper()
	if err := s.Unsubscribe(t, names...); err != nil {
		s.w.t.Fatal(err)
	}
}

// next is the next response.
func (s *stream) next() client.Response {
	s.w.t.Helper()
	r, err := s.Next(s.w.ctx)
	if err != nil {
		s.w.t.Fatalf("no response: %v", err)
	}
	seen := map[string]bool{}
	for _, n := range append(r.Names(), r.Removed...) {
		if seen[n] {
			s.w.t.Fatalf("%s response %s holds %q twice", r.Type, r.Nonce, n)
		}
		seen[n] = true
	}
	return r
}

// want checks the next response against names; those that begin with "-" are
// removed ones.
func (s *stream) want(t xds.Type, names ...string) client.Response {
	s.w.t.Helper()
	r := s.next()
	got := r.Names()
	for _, n := range r.Removed {
		got = append(got, "-"+n)
	}
	slices.Sort(got)
	slices.Sort(names)
	if r.Type != t || !slices.Equal(got, names) {
		s.w.t.Fatalf("got %s %q, want %s %q", r.Type, got, t, names)
	}
	return r
}

// quiet checks that the server has nothing more to say: what it is asked next
// is what it answers next.
func (s *stream) quiet() {
	s.w.t.Helper()
	s.fences++
	name := fmt.Sprintf("fence-%d", s.fences)
	s.w.set(route(name, 1))
	s.sub(rds, name)
	s.want(rds, name)
}

// ended returns why the stream ends.
func (s *stream) ended() error {
	s.w.t.Helper()
	for {
		if _, err := s.Next(s.w.ctx); err != nil {
			return err
		}
	}
}

// until polls a condition that has no event of its own.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			w.t.Fatalf("never came true: %s", what)
		}
	}
}

func in(scope xds.Scope, r *xds.Resource) *xds.Resource {
	c := *r
	c.Scope = scope
	return &c
}

func resource(t xds.Type, name string, m proto.Message) *xds.Resource {
	r, err := xds.NewResource(xds.ID{Type: t, Name: name}, m)
	if err != nil {
		panic(err)
	}
	return r
}

func cluster(name string, rev int) *xds.Resource {
	return resource(cds, name, &clusterv3.Cluster{Name: name, AltStatName: fmt.Sprint(rev)})
}

func cla(name string, rev int) *xds.Resource {
	return resource(eds, name, &endpointv3.ClusterLoadAssignment{ClusterName: name,
		Policy: &endpointv3.ClusterLoadAssignment_Policy{OverprovisioningFactor: wrapperspb.UInt32(uint32(rev))}})
}

func listener(name string, rev int) *xds.Resource {
	return resource(lds, name, &listenerv3.Listener{Name: name, StatPrefix: fmt.Sprint(rev)})
}

func route(name string, rev int) *xds.Resource {
	return resource(rds, name, &routev3.RouteConfiguration{Name: name, MaxDirectResponseBodySizeBytes: wrapperspb.UInt32(uint32(rev))})
}

func of(t xds.Type, name string, rev int) *xds.Resource {
	return [...]func(string, int) *xds.Resource{cluster, cla, listener, route}[t](name, rev)
}
