package ads_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// model is what the tables should hold, for one client's list of scopes.
type model map[xds.ID]*xds.Resource

// resources are those that the client sees, by name.
func (m model) resources(t xds.Type, scopes []xds.Scope) map[string]*xds.Resource {
	seen := map[string]*xds.Resource{}
	for _, scope := range slices.Backward(scopes) {
		for id, r := range m {
			if id.Type == t && id.Scope == scope {
				seen[id.Name] = r
			}
		}
	}
	return seen
}

func (m model) visible(t xds.Type, scopes []xds.Scope) map[string]string {
	versions := map[string]string{}
	for name, r := range m.resources(t, scopes) {
		versions[name] = r.Version
	}
	return versions
}

// Whatever happened in between, and over reconnects with what it has, a client
// ends with what the tables hold, and with what a client of go-control-plane's
// server ends with that does the same.
func TestClientsEndWithWhatTheTablesHold(t *testing.T) {
	histories := 60
	if testing.Short() {
		histories = 10
	}
	for seed := range histories {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { history(t, rand.New(rand.NewPCG(1, uint64(seed)))) })
	}
}

func history(t *testing.T, rnd *rand.Rand) {
	scopes := []xds.Scope{xds.NamespaceScope("prod"), xds.Shared}
	w := newWorld(t, ads.Options{View: func(ads.Introduction) (ads.View, error) { return ads.View{Scopes: scopes}, nil }})
	w.server.OpenGate()
	names := []string{"a", "b", "c", "d", "e", "f"}
	m := model{}
	stock, show := newStock(t)
	change := func() {
		var u xds.Update
		for range 1 + rnd.IntN(3) {
			id := xds.ID{Type: xds.Type(rnd.IntN(xds.NumTypes)), Name: names[rnd.IntN(len(names))],
				Scope: []xds.Scope{scopes[0], scopes[1], xds.NamespaceScope("test")}[rnd.IntN(3)]}
			if slices.Contains(u.Remove, id) || slices.ContainsFunc(u.Set, func(r *xds.Resource) bool { return r.ID == id }) {
				continue
			}
			if rnd.IntN(3) == 0 {
				u.Remove = append(u.Remove, id)
				delete(m, id)
			} else {
				r := in(id.Scope, of(id.Type, id.Name, 1+rnd.IntN(4)))
				u.Set = append(u.Set, r)
				m[id] = r
			}
		}
		w.server.Publish(u)
		show(m, scopes)
	}
	type follower struct {
		of      *world
		delta   bool
		conn    *stream
		drained chan struct{}
	}
	open := func(f *follower, memory client.Memory) {
		f.conn = f.of.connect(client.Options{Delta: f.delta, Memory: memory})
		f.drained = make(chan struct{})
		go func(s *stream, done chan struct{}) {
			defer close(done)
			for range s.Responses() {
			}
		}(f.conn, f.drained)
		f.conn.sub(cds)
		f.conn.sub(lds)
		f.conn.sub(eds, names...)
		f.conn.sub(rds, names...)
	}
	// One of each kind of client at either server, in the same order.
	ours := []*follower{{of: w, delta: true}, {of: w}}
	theirs := []*follower{{of: stock, delta: true}, {of: stock}}
	followers := append(ours[:2:2], theirs...)
	for range 5 {
		change()
	}
	for _, f := range followers {
		open(f, client.Memory{})
	}
	for range 40 {
		switch rnd.IntN(8) {
		case 0:
			i := rnd.IntN(len(ours))
			var memories [2]client.Memory
			for j, f := range []*follower{ours[i], theirs[i]} {
				f.conn.Close()
				<-f.drained
				memories[j] = f.conn.Memory()
			}
			change()
			open(ours[i], memories[0])
			open(theirs[i], memories[1])
		case 1:
			// Delta only: a SotW server never sees a name go and come back in
			// requests that a response on its way has made stale. Ours only:
			// go-control-plane says nothing of a name that is gone by then,
			// which the client may have from a response on its way.
			n := names[rnd.IntN(len(names))]
			ours[0].conn.unsub(eds, n)
			change()
			ours[0].conn.sub(eds, n)
		default:
			change()
		}
	}
	for _, f := range followers {
		for typ := range xds.Type(xds.NumTypes) {
			want := m.visible(typ, scopes)
			var got map[string]string
			equal := func() bool {
				got = map[string]string{}
				for n, r := range f.conn.Memory().Resources[typ] {
					got[n] = r.Version
					if !f.delta || f.of == stock {
						got[n] = resourceVersion(typ, n, r)
					}
				}
				if !f.delta && !typ.HasWildcard() {
					maps.DeleteFunc(got, func(n, _ string) bool { _, ok := want[n]; return !ok })
				}
				return maps.Equal(got, want)
			}
			deadline := time.After(5 * time.Second)
			for !equal() {
				select {
				case <-deadline:
					t.Fatalf("%s, delta %v, of go-control-plane %v: got %v, want %v", typ, f.delta, f.of == stock, got, want)
				case <-time.After(time.Millisecond):
				}
			}
		}
		f.conn.Close()
		<-f.drained
	}
}

// newStock serves the snapshots that show makes of the model by
// go-control-plane's cache and server. The world that it returns has no server
// of ours.
func newStock(t *testing.T) (stock *world, show func(model, []xds.Scope)) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	snapshots := cachev3.NewSnapshotCache(false, cachev3.IDHash{}, nil)
	stock = &world{t: t, path: filepath.Join(t.TempDir(), "stock.sock"), ctx: ctx}
	l, err := net.Listen("unix", stock.path)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	discovery.RegisterAggregatedDiscoveryServiceServer(g, serverv3.NewServer(ctx, snapshots, nil))
	served := make(chan struct{})
	go func() { defer close(served); _ = g.Serve(l) }()
	if stock.conn, err = client.Dial(stock.path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); _ = stock.conn.Close(); g.Stop(); <-served })
	version := 0
	return stock, func(m model, scopes []xds.Scope) {
		version++
		all := map[string][]types.Resource{}
		for typ := range xds.Type(xds.NumTypes) {
			all[typ.URL()] = []types.Resource{}
			for _, r := range m.resources(typ, scopes) {
				body, err := r.Body.UnmarshalNew()
				if err != nil {
					t.Fatal(err)
				}
				all[typ.URL()] = append(all[typ.URL()], body)
			}
		}
		snapshot, err := cachev3.NewSnapshot(fmt.Sprint(version), all)
		if err == nil {
			err = snapshots.SetSnapshot(ctx, "prod/a-1", snapshot)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// resourceVersion finds the version of a resource that came without one, or
// with that of another server, by its bytes.
func resourceVersion(typ xds.Type, name string, r client.Resource) string {
	for rev := 1; rev <= 4; rev++ {
		if c := of(typ, name, rev); string(c.Body.GetValue()) == string(r.Body.GetValue()) {
			return c.Version
		}
	}
	return "unknown content"
}

var streamsFor = flag.Duration("streams", 5*time.Second, "how long TestManyStreamsAtOnceLeaveNothingBehind goes on")

// Random subscriptions, refusals, departures and publishes on 110 streams at
// once leave nothing behind.
//
// With "go test -race ./xds/ads -run ManyStreams -args -streams 60s" it goes on
// for a minute.
func TestManyStreamsAtOnceLeaveNothingBehind(t *testing.T) {
	length := *streamsFor
	if testing.Short() {
		length = time.Second
	}
	goroutines := runtime.NumGoroutine()
	w := newWorld(t, ads.Options{HoldLimit: time.Hour})
	ctx, cancel := context.WithTimeout(context.Background(), length+patience)
	defer cancel()
	w.ctx = ctx
	w.server.OpenGate()
	names := numbered(200)
	stop := time.After(length)
	over := make(chan struct{})
	go func() { <-stop; close(over) }()
	running := func() bool {
		select {
		case <-over:
			return false
		default:
			return true
		}
	}
	conns := make([]*grpc.ClientConn, 10)
	for i := range conns {
		c, err := client.Dial(w.path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		conns[i] = c
	}
	ended := make(chan error, 110)
	for i := range 110 {
		go func() {
			rnd := rand.New(rand.NewPCG(2, uint64(i)))
			for running() {
				if err := visit(w, fmt.Sprintf("prod/x-%d", i), conns[i%len(conns)], rnd, i%2 == 0, names, running); err != nil {
					ended <- err
					return
				}
			}
			ended <- nil
		}()
	}
	rnd := rand.New(rand.NewPCG(3, 0))
	for running() {
		typ, n := xds.Type(rnd.IntN(xds.NumTypes)), names[rnd.IntN(len(names))]
		if rnd.IntN(4) == 0 {
			w.remove(of(typ, n, 1))
		} else {
			w.set(of(typ, n, 1+rnd.IntN(1000)))
		}
		// Who asks is answered in the midst of it (istio#10126).
		w.server.Clients()
		if _, ok := w.server.Inventories(func(n *corev3.Node) bool { return n.GetId() == "prod/x-7" }, 1<<20); !ok {
			t.Fatal("one client has a million resources")
		}
	}
	for range 110 {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	w.until("all streams are gone", func() bool { return w.server.Streams() == 0 })
	for _, c := range conns {
		_ = c.Close()
	}
	// The listener's, and those of the world's own connection.
	w.until("their goroutines are gone", func() bool { return runtime.NumGoroutine() <= goroutines+8 })
}

// visit is one stream's life: some requests in random order, some refusals,
// and an end without warning.
func visit(w *world, id string, conn *grpc.ClientConn, rnd *rand.Rand, delta bool, names []string, running func() bool) error {
	refuse := rnd.IntN(5)
	n := 0
	s, err := client.Open(w.ctx, conn, client.Options{Delta: delta, Node: &corev3.Node{Id: id},
		Reply: func(client.Response) client.Reply {
			if n++; n%5 == refuse {
				return client.Reply{Nack: "at random"}
			}
			return client.Reply{}
		}})
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.Subscribe(cds); err != nil {
		return err
	}
	for range 20 {
		if !running() {
			return nil
		}
		typ := xds.Type(rnd.IntN(xds.NumTypes))
		some := names[rnd.IntN(100):][:rnd.IntN(100)]
		if rnd.IntN(3) == 0 {
			err = s.Unsubscribe(typ, some...)
		} else {
			err = s.Subscribe(typ, some...)
		}
		if err != nil {
			return err
		}
		for range rnd.IntN(10) {
			select {
			case r, ok := <-s.Responses():
				if !ok {
					return s.Err()
				}
				seen := map[string]bool{}
				for _, name := range append(r.Names(), r.Removed...) {
					if seen[name] {
						return fmt.Errorf("%q twice in one response", name)
					}
					seen[name] = true
				}
			case <-time.After(time.Millisecond):
			}
		}
	}
	return nil
}
