package resources_test

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

func TestPodChangeAltersEndpointsAlone(t *testing.T) {
	w := newWorld(t)
	u := w.set(known("a", "a", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving)))
	if len(u.Set) != 3 {
		t.Fatalf("%d resources at first, want cluster, endpoints and listener", len(u.Set))
	}
	for i, pods := range [][]*nodecache.Pod{
		{pod("10.0.0.1", nodecache.Serving), pod("10.0.0.2", nodecache.Serving)},
		{pod("10.0.0.2", nodecache.Draining)},
		{},
		{pod("fd00::1", nodecache.Serving)},
	} {
		u := w.set(known("a", "a", []string{"pkg.S"}, pods...))
		if len(u.Set) != 1 || u.Set[0].Type != xds.Endpoint || len(u.Remove) != 0 || len(u.Evidence) != 0 {
			t.Errorf("change %d: %+v, want one set of endpoints", i, u)
		}
	}
	if u := w.apply(nodecache.OwnerKey{UID: "a", Revision: "1"}); !u.Empty() {
		t.Errorf("nothing changed, and the update is %+v", u)
	}
}

func TestDrainingEndpointsCountWhereNoneServes(t *testing.T) {
	w := newWorld(t)
	w.set(known("a", "a", []string{"pkg.S"}, pod("10.0.0.2", nodecache.Serving), pod("10.0.0.1", nodecache.Draining)))
	if got, want := w.addrs("prod", "pkg.S"), []string{"10.0.0.1:50051 DRAINING", "10.0.0.2:50051 HEALTHY"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	w.set(known("a", "a", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Draining)))
	if got, want := w.addrs("prod", "pkg.S"), []string{"10.0.0.1:50051 HEALTHY"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestServiceStaysWhileRememberedAndGoesAfter(t *testing.T) {
	w := newWorld(t)
	a := known("a", "a", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving))
	w.set(a)
	w.set(known("a", "a", []string{"pkg.S"}))
	if cla := w.cla("prod", "pkg.S"); cla == nil || len(cla.GetEndpoints()) != 0 || w.cluster("prod", "pkg.S") == nil {
		t.Errorf("endpoints %v, want an empty set beside the cluster", cla)
	}
	u := w.remove(a.Key)
	if len(u.Remove) != 3 || len(w.published) != 0 {
		t.Errorf("%+v, want the three resources removed", u)
	}
	if u := w.set(a); len(u.Set) != 3 {
		t.Errorf("%+v, want all resources again", u)
	}
}

// An owner without a service leaves nothing behind that a later one trips on.
func TestOwnersWithoutServicesComeAndGo(t *testing.T) {
	w := newWorld(t)
	none := owner("n", "n", nodecache.None, pod("10.0.0.9", nodecache.Serving))
	for range 2 {
		w.set(none)
		w.set(none)
		w.remove(none.Key)
		w.remove(none.Key)
	}
	if u := w.set(&nodecache.Owner{Key: none.Key}); !u.Empty() {
		t.Errorf("an owner that only a route names gives %+v", u)
	}
}

func TestInfrastructureAndImpossibleNamesAreNotServed(t *testing.T) {
	w := newWorld(t)
	w.set(known("a", "a", []string{"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "pkg.S", "a/b", "x\ny", "", ".S", "pkg..S"}))
	if got := w.c.Names("prod"); !slices.Equal(got, []string{"pkg.S"}) {
		t.Errorf("%q, want pkg.S", got)
	}
}

func TestServiceCannotTakeTheNameOfASidecarsListener(t *testing.T) {
	w := newWorld(t)
	a := known("a", "a", []string{"egress", "egress6"}, pod("10.0.0.1", nodecache.Serving))
	w.set(a)
	if len(w.published) != 4 {
		t.Errorf("%d resources, want two clusters with their endpoints", len(w.published))
	}
	if w.remove(a.Key); len(w.published) != 0 {
		t.Errorf("%v stay", w.published)
	}
}

func TestProviderIsOneWorkloadAndStaysOverRollout(t *testing.T) {
	w := newWorld(t)
	w.set(
		known("b1", "b", []string{"pkg.S"}, pod("10.0.1.1", nodecache.Serving)),
		known("c1", "c", []string{"pkg.S"}, pod("10.0.2.1", nodecache.Serving)),
	)
	check := func(when string, want ...string) {
		t.Helper()
		var got []string
		for _, a := range w.addrs("prod", "pkg.S") {
			got = append(got, strings.Fields(a)[0])
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	check("two workloads", "10.0.1.1:50051")
	b2 := known("b2", "b", []string{"pkg.S"}, pod("10.0.1.2", nodecache.Serving))
	w.set(b2)
	check("rollout", "10.0.1.1:50051", "10.0.1.2:50051")
	w.set(known("b1", "b", []string{"pkg.S"}))
	w.remove(nodecache.OwnerKey{UID: "b1", Revision: "1"})
	check("after the rollout", "10.0.1.2:50051")
	w.set(known("b2", "b", []string{"pkg.S"}))
	check("all old pods stopped first")
	w.set(b2)
	w.set(known("a", "a", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving)))
	check("a lower workload", "10.0.0.1:50051")
	text, err := json.Marshal(w.c.Services())
	if want := `[{"name":"pkg.S","namespace":"prod","owners":["a/1"],"claimants":["b2/1","c1/1"],` +
		`"endpoints":[{"address":"10.0.0.1:50051","pod":"prod/pod-10.0.0.1","node":"n1","state":"serving"}]}]`; err != nil || string(text) != want {
		t.Errorf("%v\n%s, want\n%s", err, text, want)
	}
	w.remove(nodecache.OwnerKey{UID: "a", Revision: "1"})
	check("the lower workload gone", "10.0.1.2:50051")
}

func TestEvidenceFollowsTheWorstOwnerWithPods(t *testing.T) {
	w := newWorld(t)
	p := pod("10.0.0.1", nodecache.Serving)
	hung := owner("b", "b", nodecache.Failed, p)
	hung.Hung = true
	drains := owner("b", "b", nodecache.Unknown, pod("10.0.0.2", nodecache.Draining))
	for i, step := range []struct {
		o    *nodecache.Owner
		want xds.Evidence
	}{
		{hung, xds.Pending},
		{drains, xds.Failed},
		{owner("b", "b", nodecache.Failed, p), xds.Failed},
		{owner("a", "a", nodecache.Unknown, p), xds.Pending},
		{owner("b", "b", nodecache.Failed, p), xds.Pending},
		{owner("a", "a", nodecache.Collecting, p), xds.Pending},
		{known("a", "a", []string{"pkg.S"}, p), xds.Failed},
		{owner("c", "c", nodecache.Collecting, p), xds.Pending},
		{owner("c", "c", nodecache.Collecting), xds.Failed},
		{owner("b", "b", nodecache.None, p), xds.Complete},
	} {
		w.set(step.o)
		if got := w.evidence[xds.NamespaceScope("prod")]; got != step.want {
			t.Errorf("step %d: evidence %d, want %d", i, got, step.want)
		}
	}
	again := known("a", "a", []string{"pkg.S"}, p)
	again.Knowledge = nodecache.Collecting
	if u := w.set(again); !u.Empty() {
		t.Errorf("asking again what is known changes %+v", u)
	}
	w.set(owner("d", "d", nodecache.Unknown, p))
	w.remove(nodecache.OwnerKey{UID: "d", Revision: "1"})
	if got := w.evidence[xds.NamespaceScope("prod")]; got != xds.Complete {
		t.Errorf("evidence %d after the owner went, want complete", got)
	}
}

func TestLookupTellsServedSuspectsAndChange(t *testing.T) {
	w := newWorld(t)
	p := pod("10.0.0.1", nodecache.Serving)
	w.set(owner("a", "a", nodecache.Unknown, p), known("b", "b", []string{"pkg.B"}, p))
	if a := w.c.Lookup("prod", "pkg.B"); !a.Served || a.Suspects != nil {
		t.Errorf("%+v, want served", a)
	}
	if a := w.c.Lookup("other", "pkg.B"); a.Served || a.Suspects != nil {
		t.Errorf("%+v, want nothing in another namespace", a)
	}
	a := w.c.Lookup("prod", "pkg.A")
	if a.Served || len(a.Suspects) != 1 || a.Suspects[0].Key.UID != "a" {
		t.Fatalf("%+v, want owner a suspected", a)
	}
	select {
	case <-a.Changed:
		t.Fatal("changed already")
	default:
	}
	w.set(known("a", "a", []string{"pkg.A"}, p))
	<-a.Changed
	if a := w.c.Lookup("prod", "pkg.A"); !a.Served {
		t.Errorf("%+v, want served", a)
	}
}

// Whatever the order and the grouping of changes, the same views end in the
// same bytes, and these keep the rules that gRPC and Envoy have for endpoints.
func TestAnyOrderEndsInTheSameBytes(t *testing.T) {
	for seed := range int64(60) {
		rng := rand.New(rand.NewSource(seed))
		final := views{}
		for i := range 12 {
			o := randomOwner(rng, i)
			final[o.Key] = o
		}
		a, b := newWorld(t), newWorld(t)
		for _, w := range []*world{a, b} {
			for step := range 40 { // history that must leave no trace
				o := randomOwner(rng, rng.Intn(12))
				if rng.Intn(4) == 0 {
					w.remove(o.Key)
				} else {
					w.set(o)
				}
				if step%8 == 0 {
					w.check()
				}
			}
			var keys []nodecache.OwnerKey
			for k := range final {
				keys = append(keys, k)
			}
			rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
			w.views = final
			for len(keys) > 0 {
				n := 1 + rng.Intn(len(keys))
				w.apply(keys[:n]...)
				keys = keys[n:]
			}
			w.check()
		}
		if len(a.published) != len(b.published) {
			t.Fatalf("seed %d: %d and %d resources", seed, len(a.published), len(b.published))
		}
		for id, r := range a.published {
			if o := b.published[id]; o == nil || o.Version != r.Version {
				t.Fatalf("seed %d: %v differs", seed, id)
			}
		}
		for s, e := range a.evidence {
			if b.evidence[s] != e {
				t.Fatalf("seed %d: evidence of %s is %d and %d", seed, s, e, b.evidence[s])
			}
		}
	}
}

func randomOwner(rng *rand.Rand, i int) *nodecache.Owner {
	services := []string{"pkg.A", "pkg.B", "pkg.C", "D", "grpc.health.v1.Health"}
	rng.Shuffle(len(services), func(i, j int) { services[i], services[j] = services[j], services[i] })
	var pods []*nodecache.Pod
	for range rng.Intn(4) {
		p := pod(fmt.Sprintf("10.0.0.%d", 1+rng.Intn(6)), nodecache.PodState(1+rng.Intn(2)))
		p.UID += fmt.Sprint(i, len(pods))
		p.HostNetwork = true
		if rng.Intn(3) == 0 {
			p.Declared = []nodecache.Declared{{Port: uint16(1 + rng.Intn(2)), Services: []string{"pkg.A"}}}
		}
		pods = append(pods, p)
	}
	o := known(fmt.Sprint(i), fmt.Sprint("w", i/3), services[:rng.Intn(len(services))], pods...)
	o.Workload.Namespace = []string{"prod", "test"}[i%2]
	if rng.Intn(3) == 0 {
		o.Info, o.Knowledge = nil, nodecache.Knowledge(rng.Intn(5))
	}
	return o
}

// check tells whether every name has its three resources, and every assignment
// keeps the rules.
func (w *world) check() {
	w.t.Helper()
	for id, r := range w.published {
		if id.Type != xds.Endpoint {
			continue
		}
		namespace, service, _ := strings.Cut(id.Name, "/")
		if w.cluster(namespace, service) == nil || w.published[xds.ID{Type: xds.Listener, Name: service, Scope: xds.APIScope(namespace)}] == nil {
			w.t.Errorf("%s has endpoints without cluster or listener", id.Name)
		}
		cla := w.cla(namespace, service)
		if err := cla.ValidateAll(); err != nil {
			w.t.Error(err)
		}
		seen, last, healthy := map[netip.AddrPort]bool{}, netip.AddrPort{}, 0
		for i, l := range cla.GetEndpoints() {
			if l.GetLocality() == nil || l.GetPriority() != uint32(i) || l.GetLoadBalancingWeight().GetValue() != uint32(len(l.GetLbEndpoints())) || len(l.GetLbEndpoints()) == 0 {
				w.t.Errorf("%s: locality %v breaks a rule", r.Name, l)
			}
			for _, e := range l.GetLbEndpoints() {
				a := e.GetEndpoint().GetAddress().GetSocketAddress()
				at := netip.AddrPortFrom(netip.MustParseAddr(a.GetAddress()), uint16(a.GetPortValue()))
				if seen[at] || last.IsValid() && at.Compare(last) < 0 {
					w.t.Errorf("%s: %s twice or out of order", r.Name, at)
				}
				if seen[at], last = true, at; e.GetHealthStatus() == 2 {
					w.t.Errorf("%s: %s is unhealthy", r.Name, at)
				}
				if e.GetHealthStatus() == 1 {
					healthy++
				}
			}
		}
		if len(seen) > 0 && healthy == 0 {
			w.t.Errorf("%s has no healthy endpoint", r.Name)
		}
	}
}

// One changed pod costs the same among 10 and among 10,000 services.
func BenchmarkOnePodAmong(b *testing.B) {
	for _, n := range []int{10, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w := newWorld(b)
			for i := range n {
				w.set(known(fmt.Sprint("o", i), fmt.Sprint("w", i), []string{fmt.Sprintf("pkg.S%d", i)}, pod("10.0.0.1", nodecache.Serving)))
			}
			var both [2]*nodecache.Owner
			for i := range both {
				both[i] = known("o1", "w1", []string{"pkg.S1"}, pod(fmt.Sprintf("10.0.0.%d", i+1), nodecache.Serving))
			}
			keys := []nodecache.OwnerKey{both[0].Key}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				w.views[both[0].Key] = both[(i+1)%2]
				if u := w.c.Apply(w.views, keys); len(u.Set) != 1 {
					b.Fatalf("%d resources", len(u.Set))
				}
			}
		})
	}
}

func TestOptionsThatMakeNoSenseAreRefused(t *testing.T) {
	for _, o := range []resources.Options{
		{Locality: "moon"}, {Tracing: "zipkin:a:1"}, {Tracing: "otlp:a"}, {Tracing: "otlp::1"}, {Tracing: "otlp:a:0"}, {Tracing: "otlp:a:99999"},
	} {
		if _, err := resources.New(o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
	for _, o := range []resources.Options{{Tracing: "otlp:[fd00::1]:4317"}, {Tracing: "otlp:collector.obs:4317"}, {Locality: "zone"}} {
		if _, err := resources.New(o); err != nil {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
