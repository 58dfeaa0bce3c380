package ads_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// model is what the tables should hold, for one client's list of scopes.
type model map[xds.ID]*xds.Resource

func (m model) visible(t xds.Type, scopes []xds.Scope) map[string]string {
	seen := map[string]string{}
	for _, scope := range slices.Backward(scopes) {
		for id, r := range m {
			if id.Type == t && id.Scope == scope {
				seen[id.Name] = r.Version
			}
		}
	}
	return seen
}

// Whatever happened in between, and over reconnects with what it has, a client
// ends with what the tables hold.
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
	w := newWorld(t, ads.Options{Scopes: func(*corev3.Node) ([]xds.Scope, error) { return scopes, nil }})
	w.server.OpenGate()
	names := []string{"a", "b", "c", "d", "e", "f"}
	m := model{}
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
	}
	type follower struct {
		conn    *stream
		delta   bool
		drained chan struct{}
	}
	open := func(f *follower, memory client.Memory) {
		f.conn = w.connect(client.Options{Delta: f.delta, Memory: memory})
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
	followers := []*follower{{delta: true}, {delta: false}}
	for range 5 {
		change()
	}
	for _, f := range followers {
		open(f, client.Memory{})
	}
	for range 40 {
		switch rnd.IntN(8) {
		case 0:
			f := followers[rnd.IntN(len(followers))]
			f.conn.Close()
			<-f.drained
			memory := f.conn.Memory()
			change()
			open(f, memory)
		case 1:
			// Delta only: a SotW server never sees a name go and come back in
			// requests that a response on its way has made stale.
			f, n := followers[0], names[rnd.IntN(len(names))]
			f.conn.unsub(eds, n)
			change()
			f.conn.sub(eds, n)
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
					if !f.delta {
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
					t.Fatalf("%s, delta %v: got %v, want %v", typ, f.delta, got, want)
				case <-time.After(time.Millisecond):
				}
			}
		}
		f.conn.Close()
		<-f.drained
	}
}

// resourceVersion finds the version of a SotW resource, which has none of its
// own, by its bytes.
func resourceVersion(typ xds.Type, name string, r client.Resource) string {
	for rev := 1; rev <= 4; rev++ {
		if c := of(typ, name, rev); string(c.Body.GetValue()) == string(r.Body.GetValue()) {
			return c.Version
		}
	}
	return "unknown content"
}

// Random subscriptions, refusals, departures and publishes on 110 streams at
// once leave nothing behind.
func TestManyStreamsAtOnceLeaveNothingBehind(t *testing.T) {
	length := 5 * time.Second
	if testing.Short() {
		length = time.Second
	}
	w := newWorld(t, ads.Options{HoldLimit: time.Minute})
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
		w.server.Clients()
	}
	for range 110 {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	w.until("all streams are gone", func() bool { return len(w.server.Clients()) == 0 })
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
