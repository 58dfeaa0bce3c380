package collect_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/nodecache"
)

// placement is a [collect.Placement] as the test says.
type placement struct {
	mu     sync.Mutex
	place  collect.Place
	wanted []nodecache.OwnerKey
	// each is called for every question, unless it is nil.
	each func()
	// waits is what Wait does; nil is nothing.
	waits func(ctx context.Context) error
}

func (p *placement) Place(*nodecache.Owner) collect.Place {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.each != nil {
		p.each()
	}
	return p.place
}

func (p *placement) put(at collect.Place) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.place = at
}

func (p *placement) Want(key nodecache.OwnerKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = append(p.wanted, key)
}

func (p *placement) Wait(ctx context.Context, _ nodecache.OwnerKey) error {
	if p.waits == nil {
		return nil
	}
	return p.waits(ctx)
}

func serving(t *testing.T, services ...string) *counter {
	t.Helper()
	return serve(t, func(s *grpc.Server) { registerReflection(s, v1, (&script{services: services}).handle) })
}

func TestOwnerElsewhereIsNotAskedUntilItIsPlacedHere(t *testing.T) {
	p := &placement{}
	a := start(t, collect.Options{Placement: p})
	l := serving(t, "pkg.A")
	a.dir.UpsertPod(podAt("a1", "a", l))
	a.Want(key("a"))
	if err := a.FirstAttempts(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := l.accepted.Load(); n > 0 {
		t.Fatalf("%d connections", n)
	}
	if len(p.wanted) != 1 {
		t.Errorf("the wish was passed on %d times", len(p.wanted))
	}
	p.put(collect.OwnNode)
	a.Consider(key("a"))
	a.await(t, "a", knows(nodecache.Known))
}

func TestOwnerOfThisNodeIsAskedOnThisNodeOnly(t *testing.T) {
	p := &placement{place: collect.OwnNode}
	a := start(t, collect.Options{Placement: p, Scope: collect.ScopeCluster})
	here, far := serving(t, "pkg.A"), serving(t, "pkg.A")
	away := podAt("a0", "a", far)
	away.Node = "n2"
	a.dir.UpsertPod(away)
	if err := a.FirstAttempts(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.dir.UpsertPod(podAt("a1", "a", here))
	if o := a.await(t, "a", knows(nodecache.Known)); o.Info.Pod != "prod/a1" {
		t.Errorf("asked %s", o.Info.Pod)
	}
	p.put(collect.AnyNode)
	away = podAt("b0", "b", far)
	away.Node = "n2"
	a.dir.UpsertPod(away)
	a.await(t, "b", knows(nodecache.Known))
}

// The gate waits for the attempt to learn what is collected elsewhere.
func TestFirstAttemptsWaitForWhatIsElsewhere(t *testing.T) {
	p := &placement{}
	a := start(t, collect.Options{Placement: p})
	away := podAt("a0", "a", serving(t, "pkg.A"))
	away.Node = "n2"
	a.dir.UpsertPod(away)
	asked := 0
	p.waits = func(context.Context) error {
		asked++
		return a.dir.Learn(key("a"), "n2", &nodecache.Info{Origin: nodecache.OriginPeer, Collected: time.Now()})
	}
	if err := a.FirstAttempts(t.Context()); err != nil || asked != 1 {
		t.Errorf("%d waits, error %v", asked, err)
	}
	b := podAt("b0", "b", serving(t, "pkg.A"))
	b.Node = "n2"
	a.dir.UpsertPod(b)
	p.waits = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.FirstAttempts(ctx); err == nil {
		t.Error("it did not wait")
	}
}

func TestRecollectAsksWhoeverIsInCharge(t *testing.T) {
	p := &placement{}
	a := start(t, collect.Options{Placement: p})
	a.dir.UpsertPod(podAt("a1", "a", serving(t, "pkg.A")))
	r, err := a.Recollect(t.Context(), key("a"))
	if err != nil || r.Result != "known" {
		t.Errorf("%+v, error %v", r, err)
	}
}

// A peer's word that comes after the flight looked and before it begins is kept,
// whatever the flight would have met.
func TestPeersWordBeforeTheFlightBeginsIsKept(t *testing.T) {
	p := &placement{}
	a := start(t, collect.Options{Placement: p})
	l := serve(t, func(s *grpc.Server) {
		registerReflection(s, v1, func(st stream) error { panic("asked") })
	})
	asked := 0
	p.each = func() {
		if asked++; asked == 2 { // by the flight, before it begins
			if err := a.dir.Learn(key("a"), "n1", &nodecache.Info{
				Origin: nodecache.OriginPeer, Collected: time.Now(),
				Ports: []nodecache.PortInfo{{Port: 1, State: nodecache.PortServes, Services: []nodecache.Service{{Name: "pkg.Peer"}}}},
			}); err != nil {
				t.Error(err)
			}
		}
	}
	p.place = collect.OwnNode
	a.dir.UpsertPod(podAt("a1", "a", l))
	a.await(t, "a", knows(nodecache.Known))
	if err := a.Wait(t.Context(), key("a")); err != nil {
		t.Fatal(err)
	}
	if o := a.dir.Owner(key("a")); o.Knowledge != nodecache.Known || o.Origin != nodecache.OriginPeer || l.accepted.Load() > 0 {
		t.Errorf("owner %+v after %d connections", o, l.accepted.Load())
	}
}
