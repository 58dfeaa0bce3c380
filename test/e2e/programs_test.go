package e2e_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fingerpost/fingerpost/test/harness"
)

// forms are the ways to dial what the Service cart of prod serves.
var forms = []string{
	"shop.v1.Cart",
	"cart.prod:80",
	"cart.prod",
	"cart",
	"cart.prod.svc:80",
	"cart.prod.svc.cluster.local:80",
}

// eachProgram runs a test with each client, in a world of its own.
func eachProgram(t *testing.T, test func(t *testing.T, s *site, start func() *grpcProgram)) {
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			command := p.command(t)
			test(t, s, func() *grpcProgram { return s.startProgram(t, p.name, command, "prod/web") })
		})
	}
}

// unary makes one call of Say.
func (p *grpcProgram) unary(target, service string) (string, error) {
	return p.do("unary xds:///%s /%s/Say", target, service)
}

// reaches waits until exactly these pods answer calls by each of the names.
func (p *grpcProgram) reaches(t *testing.T, targets []string, service string, pods ...string) {
	t.Helper()
	for _, target := range targets {
		harness.Eventually(t, soon, func() error {
			by := map[string]bool{}
			for range 5 * len(pods) {
				who, err := p.unary(target, service)
				if err != nil {
					return err
				}
				by[who] = true
			}
			if got := slices.Sorted(maps.Keys(by)); !slices.Equal(got, pods) {
				return fmt.Errorf("calls to %s are answered by %v, want %v", target, got, pods)
			}
			return nil
		})
	}
}

// load calls by each of the names in turn until stop, and fails the test if a
// call fails.
func (p *grpcProgram) load(t *testing.T, targets []string, service string) (answered func() int64, stop func()) {
	t.Helper()
	return loading(t, func(n int64) error {
		if _, err := p.unary(targets[int(n)%len(targets)], service); err != nil {
			return fmt.Errorf("call %d failed: %w", n, err)
		}
		return nil
	})
}

// accepted fails the test if a client refused anything.
func (a *agentProcess) accepted() {
	a.t.Helper()
	for _, t := range []string{"cds", "eds", "lds", "rds"} {
		if n := a.metric(`fingerpost_ads_nacks_total{type="` + t + `"}`); n != "0" {
			a.t.Errorf("%s refusals of %s", n, t)
		}
	}
	for _, c := range a.proxies() {
		for name, state := range c.Types {
			if state.Nack != nil || len(state.Withheld) > 0 || state.Sent != state.Acked {
				a.t.Errorf("%s of %s: %+v", name, c.ID, state)
			}
		}
	}
}

// cart makes the pods of the Service cart all there is.
func (w *world) cart(pods ...*corev1.Pod) {
	w.pods, w.more = pods, service("cart", 1, "grpc", pods...)
	w.write()
}

// Every client calls by every name, unary and streams, over all that happens to
// pods and to the agent, and refuses nothing.
func TestProxylessClientsFollowWhatTheyName(t *testing.T) {
	eachProgram(t, func(t *testing.T, s *site, start func() *grpcProgram) {
		w := newWorld(t)
		both := []string{"shop.v1.Cart", "shop.v1.Extra"}
		a, first := w.serve("cart-1-a", both)
		b, second := w.serve("cart-1-b", both)
		w.cart(a, b)
		agent := s.start(t, "--source", w.source()).ready()
		p := start()
		p.reaches(t, forms, "shop.v1.Cart", "cart-1-a", "cart-1-b")
		p.reaches(t, forms[1:], "shop.v1.Extra", "cart-1-a", "cart-1-b")
		for _, target := range forms {
			if who, err := p.do("watch xds:///%s /shop.v1.Cart/Watch", target); err != nil || !strings.HasPrefix(who, "cart-1-") {
				t.Errorf("a stream from %s: %q, %v", target, who, err)
			}
		}
		if _, err := p.do("open xds:///cart.prod:80 /shop.v1.Cart/Chat"); err != nil {
			t.Fatal(err)
		}
		said, err := p.do("ask hello")
		if err != nil {
			t.Fatal(err)
		}
		onA := strings.HasPrefix(said, "cart-1-a")
		answered, stop := p.load(t, forms, "shop.v1.Cart")

		// A pod comes; the one with the stream drains, and goes once that is over.
		c, _ := w.serve("cart-1-c", both)
		w.cart(a, b, c)
		p.reaches(t, forms, "shop.v1.Cart", "cart-1-a", "cart-1-b", "cart-1-c")
		leaves, stays, server := a, b, first
		if !onA {
			leaves, stays, server = b, a, second
		}
		terminate(leaves)
		w.cart(a, b, c)
		spared(t, server, "shop.v1.Cart", answered)
		if again, err := p.do("ask hello"); err != nil || again != said {
			t.Errorf("the stream to a draining pod: %q, %v", again, err)
		}
		w.cart(stays, c)
		spared(t, server, "shop.v1.Cart", answered)
		server.Stop()

		// The agent dies, and another comes.
		agent.kill()
		proceeds(t, answered)
		agent = s.start(t, "--source", w.source()).ready()
		agent.connected("prod/web")
		proceeds(t, answered)
		d, _ := w.serve("cart-1-d", both)
		w.cart(c, d)
		p.reaches(t, forms, "shop.v1.Cart", "cart-1-c", "cart-1-d")
		proceeds(t, answered)
		stop()
		agent.accepted()
	})
}

// A server of another implementation, in another namespace.
func TestProxylessClientsCallTonic(t *testing.T) {
	at, other := harness.StartServer(t, harness.Tonic, nextAddr(), true), harness.StartServer(t, harness.Tonic, nextAddr(), true)
	eachProgram(t, func(t *testing.T, s *site, start func() *grpcProgram) {
		w := newWorld(t)
		tonic := w.add(newPod("tonic-1-a", at.Addr().String(), int(at.Port())))
		far := w.add(newPod("far-1-a", other.Addr().String(), int(other.Port())))
		far.Namespace = "shop"
		w.more = slices.Concat(service("golden", 1, "grpc", tonic), service("far", 1, "grpc", far))
		w.more[2].(*corev1.Service).Namespace = "shop"
		w.more[3].(*discoveryv1.EndpointSlice).Namespace = "shop"
		w.write()
		agent := s.start(t, "--source", w.source()).ready()
		p := start()
		for _, target := range []string{"golden.v1.Cart", "golden.prod:80", "far.shop:80", "far.shop.svc.cluster.local"} {
			for _, call := range []string{"unary xds:///%s /golden.v1.Cart/Get", "watch xds:///%s /golden.v1.Cart/Watch"} {
				harness.Eventually(t, soon, func() error {
					who, err := p.do(call, target)
					if err == nil && who != "tonic" {
						err = fmt.Errorf("%s is answered by %q", fmt.Sprintf(call, target), who)
					}
					return err
				})
			}
		}
		// What nobody is known to serve goes to the pods all the same.
		if _, err := p.do("unary xds:///golden.prod:80 /nosuch.v1.Service/Get"); err == nil || !strings.HasPrefix(err.Error(), "UNIMPLEMENTED ") {
			t.Errorf("a service that the pods lack: %v", err)
		}
		agent.accepted()
	})
}

// Names that nobody has fail at once, and work as soon as somebody has them; so
// does a Service that goes and comes back.
func TestProxylessClientsAreToldWhatNobodyHas(t *testing.T) {
	eachProgram(t, func(t *testing.T, s *site, start func() *grpcProgram) {
		w := newWorld(t)
		a, _ := w.serve("cart-1-a", []string{"shop.v1.Cart"})
		w.cart(a)
		agent := s.start(t, "--source", w.source()).ready()
		p := start()
		// gRPC itself would wait for 15 s, longer than the client has.
		fails := func(target, service string) {
			t.Helper()
			harness.Eventually(t, soon, func() error {
				who, err := p.unary(target, service)
				if err == nil {
					return fmt.Errorf("%s answers calls to %s", who, target)
				}
				if !strings.HasPrefix(err.Error(), "UNAVAILABLE ") {
					t.Fatal(err)
				}
				return nil
			})
		}
		for target, cluster := range map[string]string{
			"late.prod:80": "backend/prod/late/80", "late": "backend/prod/late/80", "late.v1.Service": "prod/late.v1.Service",
			"late.shop.svc.cluster.local:80": "backend/shop/late/80", "cart.prod:81": "backend/prod/cart/81", "10.96.7.7:80": "nobody:10.96.7.7:80",
		} {
			fails(target, "late.v1.Service")
			if p.name == "grpcio" { // which says which cluster is empty
				if _, err := p.unary(target, "late.v1.Service"); err == nil || !strings.Contains(err.Error(), cluster) {
					t.Errorf("it is not said what %s is: %v", target, err)
				}
			}
		}
		// A call that waits for a server gets the one that comes.
		waits := func(target, service string) {
			t.Helper()
			said := make(chan error, 1)
			go func() {
				_, err := p.do("probe xds:///%s /%s/Say", target, service)
				said <- err
			}()
			w.write()
			if err := <-said; err != nil {
				t.Errorf("a call that waits: %v", err)
			}
		}
		late, _ := w.serve("late-1-a", []string{"late.v1.Service"})
		w.more = append(w.more, service("late", 2, "grpc", late)...)
		waits("late.prod:80", "late.v1.Service")
		fails("later.v1.Service", "later.v1.Service")
		w.serve("later-1-a", []string{"later.v1.Service"})
		waits("later.v1.Service", "later.v1.Service")
		p.reaches(t, []string{"late.prod:80", "late", "late.v1.Service"}, "late.v1.Service", "late-1-a")

		// One more gRPC service behind a Service that is dialled already.
		p.reaches(t, forms, "shop.v1.Cart", "cart-1-a")
		b, _ := w.serve("cart-2-a", []string{"shop.v1.Cart", "shop.v2.Cart"})
		w.cart(a, b)
		p.reaches(t, forms[1:], "shop.v2.Cart", "cart-2-a")
		p.reaches(t, forms, "shop.v1.Cart", "cart-1-a", "cart-2-a")
		fails("late.prod:80", "late.v1.Service")

		// The Service without pods, then gone, then back.
		for _, rest := range [][]any{service("cart", 1, "grpc"), nil} {
			w.pods, w.more = nil, rest
			w.write()
			fails("cart.prod:80", "shop.v1.Cart")
		}
		w.cart(a, b)
		p.reaches(t, forms, "shop.v1.Cart", "cart-1-a", "cart-2-a")
		agent.accepted()
	})
}
