package ads_test

import (
	"slices"
	"sync"
	"testing"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

const (
	nsScope   xds.Scope = "ns/prod"
	backScope xds.Scope = "fallback/prod"
)

// asked notes what a client asks for, and makes what stands in for it.
type asked struct {
	w *world

	// mu guards what follows.
	mu       sync.Mutex
	names    []string
	itself   []string // those of them that the client asked for
	dropped  []string
	closed   bool
	exchange []xds.Scope // returned once
}

func (a *asked) Ask(names []string, itself bool) []xds.Scope {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, n := range names {
		if a.names = append(a.names, n); itself {
			a.itself = append(a.itself, n)
		}
		a.w.set(in(backScope, cluster(n, 99)))
	}
	scopes := a.exchange
	a.exchange = nil
	return scopes
}

func (a *asked) Drop(names []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dropped = append(a.dropped, names...)
}

func (a *asked) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
}

func (a *asked) read(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

// demanding is a world whose delta clients fetch their clusters on demand.
func demanding(t *testing.T, wanted ...string) (*world, *asked) {
	w, a := demandingLater(t, wanted...)
	w.server.OpenGate()
	return w, a
}

// demandingLater has a closed gate.
func demandingLater(t *testing.T, wanted ...string) (*world, *asked) {
	a := &asked{}
	w := newWorld(t, ads.Options{View: func(in ads.Introduction) (ads.View, error) {
		v := ads.View{Scopes: []xds.Scope{nsScope, xds.Shared}}
		if in.Delta {
			v.Demand, v.Fallback, v.Closed, v.Wanted = a, backScope, a.Close, func() []ads.Wanted {
				var list []ads.Wanted
				for _, name := range wanted {
					list = append(list, ads.Wanted{Cluster: name, Origin: "test"})
				}
				return list
			}
		}
		return v, nil
	}})
	a.w = w
	return w, a
}

func TestClientOnDemandHasWhatItAsksFor(t *testing.T) {
	w, a := demanding(t)
	w.set(in(nsScope, cluster("A", 1)), in(nsScope, cla("A", 1)), in(nsScope, cluster("B", 1)), cluster("tracing", 1), listener("egress", 1))
	s := w.delta()
	s.sub(cds)
	s.want(cds, "tracing")
	s.sub(lds)
	s.want(lds, "egress")
	w.set(in(nsScope, cluster("B", 2)))
	s.quiet()
	s.sub(cds, "A")
	s.want(cds, "A")
	s.sub(eds, "A")
	s.want(eds, "A")
	w.set(in(nsScope, cla("A", 2)))
	s.want(eds, "A")
	all := w.sotw()
	all.sub(cds)
	all.want(cds, "A", "B", "tracing")
	if cs := w.server.Clients(); len(cs) != 2 || cs[0].Clusters == cs[1].Clusters {
		t.Errorf("clients: %+v", cs)
	}
	s.unsub(cds, "A")
	w.until("dropped", func() (ok bool) { a.read(func() { ok = slices.Equal(a.dropped, []string{"A"}) }); return })
	s.Close()
	w.until("closed", func() (ok bool) { a.read(func() { ok = a.closed }); return })
}

func TestWhatNobodyHasIsReplacedInPlaceAndBack(t *testing.T) {
	w, _ := demanding(t)
	s := w.delta()
	s.sub(cds)
	s.want(cds)
	s.sub(cds, "A")
	fallback := s.want(cds, "A").Resources[0].Version
	for rev := range 3 {
		own := in(nsScope, cluster("A", rev))
		w.set(own)
		if got := s.want(cds, "A").Resources[0].Version; got != own.Version {
			t.Fatalf("got version %s, want %s", got, own.Version)
		}
		w.remove(own)
		if got := s.want(cds, "A").Resources[0].Version; got != fallback {
			t.Fatalf("got version %s, want %s", got, fallback)
		}
	}
	s.quiet()
}

// A client that comes back has a cluster of which the agent does not know yet.
func TestNothingStandsInForWhatAClientBringsForWantOfEvidence(t *testing.T) {
	own, other := in(nsScope, cluster("A", 1)), in(nsScope, cluster("A", 2))
	for name, c := range map[string]struct {
		then func(*world)
		want string // version; empty: nothing comes
	}{
		"it is learned as it was":  {func(w *world) { w.set(own); w.evidence(nsScope, xds.Complete) }, ""},
		"it is learned otherwise":  {func(w *world) { w.set(other); w.evidence(nsScope, xds.Complete) }, other.Version},
		"nobody has it after all":  {func(w *world) { w.evidence(nsScope, xds.Complete) }, cluster("A", 99).Version},
		"it was there and is gone": {func(w *world) { w.set(own); w.remove(own) }, cluster("A", 99).Version},
	} {
		for _, named := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				w, _ := demanding(t)
				w.evidence(nsScope, xds.Pending)
				var m client.Memory
				m.Resources[cds] = map[string]client.Resource{"A": {Name: "A", Version: own.Version}}
				s := w.connect(client.Options{Delta: true, Memory: m})
				if named {
					s.sub(cds, "*", "A")
				} else {
					s.sub(cds) // it has it without asking; see Server.Want
				}
				s.want(cds)
				s.quiet()
				c.then(w)
				if c.want == "" {
					s.quiet()
				} else if got := s.want(cds, "A").Resources[0].Version; got != c.want {
					t.Errorf("got version %s, want %s", got, c.want)
				}
			})
		}
	}
}

func TestClientGetsAnotherRouteTableWithItsScopes(t *testing.T) {
	w, a := demanding(t)
	w.set(in(nsScope, route("egress", 1)), in("table/asking", route("egress", 2)))
	s := w.delta()
	s.sub(cds)
	s.want(cds)
	s.sub(rds, "egress")
	s.want(rds, "egress")
	s.sub(cds, "A")
	s.want(cds, "A")
	a.read(func() { a.exchange = []xds.Scope{"table/asking", nsScope, xds.Shared} })
	s.sub(cds, "B")
	got := map[xds.Type]client.Response{}
	for range 2 {
		r := s.next()
		got[r.Type] = r
	}
	if r := got[rds]; len(r.Resources) != 1 || r.Resources[0].Version != route("egress", 2).Version {
		t.Errorf("the route table is %+v", r)
	}
	if r := got[cds]; !slices.Equal(r.Names(), []string{"B"}) {
		t.Errorf("the clusters are %+v", r)
	}
	w.set(in(nsScope, route("egress", 3))) // hidden now
	own := in(nsScope, cluster("A", 1))
	w.set(own)
	s.want(cds, "A")
	w.remove(own)
	s.want(cds, "A")
	s.quiet()
}

func TestWantedClustersComeWithoutBeingAskedFor(t *testing.T) {
	w, a := demanding(t, "A")
	w.set(in(nsScope, cluster("A", 1)), in(nsScope, cluster("B", 1)))
	s := w.delta()
	s.sub(cds)
	s.want(cds, "A")
	if !w.server.Want("prod/a-1", "B") || w.server.Want("prod/stranger", "B") {
		t.Error("Want finds the wrong streams")
	}
	s.want(cds, "B")
	w.server.Want("prod/a-1", "B")
	w.set(in(nsScope, cluster("B", 2)))
	s.want(cds, "B")
	s.quiet()
	a.read(func() {
		if !slices.Contains(a.names, "A") || !slices.Contains(a.names, "B") || len(a.itself) > 0 {
			t.Errorf("the demand heard of %v, and that the client asked for %v", a.names, a.itself)
		}
	})
	if cs := w.server.Clients(); len(cs) != 1 || !slices.Equal(cs[0].Upstreams, []ads.Wanted{{Cluster: "A", Origin: "test"}}) {
		t.Errorf("clients: %+v", cs)
	}
}

// What is wanted is found out when the agent knows the cluster, not when the
// client comes.
func TestWantedClustersComeWithTheFirstAnswerAlsoOfAnAgentThatStarts(t *testing.T) {
	w, _ := demandingLater(t, "A", "B")
	s := w.delta()
	s.sub(cds)
	w.until("connected", func() bool { return len(w.server.Clients()) == 1 })
	w.set(in(nsScope, cluster("A", 1)), in(nsScope, cluster("C", 1)), cluster("tracing", 1))
	w.server.OpenGate()
	got := s.want(cds, "A", "B", "tracing")
	for _, r := range got.Resources {
		if r.Name == "B" && r.Version != cluster("B", 99).Version {
			t.Errorf("B, which nobody has, is of version %s", r.Version)
		}
	}
	// It is there before it is called.
	w.set(in(nsScope, cluster("B", 1)))
	s.want(cds, "B")
	s.quiet()
}

// A client without a wildcard has what it names.
func TestClientWithoutAWildcardIsGivenNothing(t *testing.T) {
	w, _ := demanding(t, "A")
	w.set(in(nsScope, cluster("A", 1)), in(nsScope, cluster("B", 1)))
	s := w.delta()
	s.sub(cds, "B")
	s.want(cds, "B")
	s.quiet()
}

// One that comes back with what it has gets what else is wanted.
func TestWantedClustersOfAClientThatComesBack(t *testing.T) {
	w, a := demanding(t, "A", "B")
	w.set(in(nsScope, cluster("A", 1)), in(nsScope, cluster("B", 1)), in(nsScope, cluster("C", 1)))
	var m client.Memory
	m.Resources[cds] = map[string]client.Resource{
		"A": {Name: "A", Version: cluster("A", 1).Version}, "C": {Name: "C", Version: cluster("C", 1).Version},
	}
	s := w.connect(client.Options{Delta: true, Memory: m})
	s.sub(cds, "*", "C")
	s.want(cds, "B")
	s.quiet()
	w.set(in(nsScope, cluster("A", 2)))
	s.want(cds, "A")
	a.read(func() {
		if !slices.Equal(a.itself, []string{"C"}) {
			t.Errorf("the client asked for %v", a.itself)
		}
	})
}

// A client may leave before the server knows what it may see.
func TestClientThatLeavesWhileItIsIntroducedLeavesNothing(t *testing.T) {
	a := &asked{}
	entered, leave := make(chan struct{}), make(chan struct{})
	w := newWorld(t, ads.Options{View: func(ads.Introduction) (ads.View, error) {
		close(entered)
		<-leave
		return ads.View{Scopes: []xds.Scope{nsScope}, Demand: a, Closed: a.Close}, nil
	}})
	a.w = w
	s := w.delta()
	s.sub(cds, "A")
	<-entered
	s.Close()
	if err := w.server.Shutdown(w.ctx, 0); err != nil {
		t.Fatal(err)
	}
	a.read(func() {
		if a.closed {
			t.Error("closed before it began")
		}
	})
	close(leave)
	w.until("closed", func() (ok bool) { a.read(func() { ok = a.closed }); return })
}
