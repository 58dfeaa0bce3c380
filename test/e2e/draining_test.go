package e2e_test

import (
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// front is a client of the agent: what its application calls, and what it
// makes of the endpoints.
type front struct {
	conn *grpc.ClientConn
	// has waits until the client has these endpoints, with their health.
	has func(map[string]string)
	// envoy is nil where the client is none.
	envoy *sidecar
}

// eachFront runs a test with Envoy of either protocol and with grpc-go, which
// shows its endpoints to nobody.
func eachFront(t *testing.T, service string, f func(*testing.T, *site, func() front)) {
	eachAPI(t, func(t *testing.T, api string) {
		s := newSite(t)
		f(t, s, func() front {
			e := s.sidecar(t, api, "prod/web")
			return front{e.conn, func(want map[string]string) { t.Helper(); e.has("prod/"+service, want) }, e}
		})
	})
	t.Run("grpc", func(t *testing.T) {
		s := newSite(t)
		f(t, s, func() front {
			return front{s.proxyless(t, "prod/web", service), func(map[string]string) {}, nil}
		})
	})
}

func TestDrainingPodKeepsItsStreamsAndGetsNoCalls(t *testing.T) {
	eachFront(t, "shop.v1.Cart", func(t *testing.T, s *site, start func() front) {
		w := newWorld(t)
		a, first := w.serve("cart-1-a", []string{"shop.v1.Cart"})
		b, second := w.serve("cart-1-b", []string{"shop.v1.Cart"})
		w.write()
		s.start(t, "--source", w.source()).ready()
		f := start()
		stream := onPod(t, f.conn, "shop.v1.Cart", "cart-1-a")
		answered, stop := load(t, f.conn, "shop.v1.Cart")

		terminate(a)
		w.write()
		f.has(map[string]string{first.Addr(): "DRAINING", second.Addr(): "HEALTHY"})
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-b")
		spared(t, first, "shop.v1.Cart", answered)
		calls := first.Calls("shop.v1.Cart")
		for range 20 {
			if who, err := say(t, f.conn, "shop.v1.Cart"); err != nil || who != "cart-1-b" {
				t.Errorf("beside a pod that drains: %q, %v", who, err)
			}
			stays(t, stream, "cart-1-a")
		}
		if n := first.Calls("shop.v1.Cart"); n != calls {
			t.Errorf("the pod that drains got %d calls", n-calls)
		}

		// Only pods that drain are left: they are all there is.
		terminate(b)
		w.write()
		f.has(map[string]string{first.Addr(): "HEALTHY", second.Addr(): "HEALTHY"})
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")

		w.remove(b)
		w.write()
		f.has(map[string]string{first.Addr(): "HEALTHY"})
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-a")
		stays(t, stream, "cart-1-a")
		proceeds(t, answered)
		stop()
		if err := stream.CloseSend(); err != nil {
			t.Error(err)
		}
	})
}

// spared waits until no call comes to the server, while others are answered.
func spared(t *testing.T, s *demo.Sample, service string, answered func() int64) {
	t.Helper()
	harness.Eventually(t, soon, func() error {
		calls := s.Calls(service)
		proceeds(t, answered)
		if n := s.Calls(service); n != calls {
			return fmt.Errorf("%s gets calls: %d lately", s.Name, n-calls)
		}
		return nil
	})
}

// A pod that went takes its streams with it only when it ends them itself.
func TestStreamOutlivesRemovalOfItsEndpoint(t *testing.T) {
	eachFront(t, "shop.v1.Cart", func(t *testing.T, s *site, start func() front) {
		w := newWorld(t)
		a, _ := w.serve("cart-1-a", []string{"shop.v1.Cart"})
		_, second := w.serve("cart-1-b", []string{"shop.v1.Cart"})
		w.write()
		s.start(t, "--source", w.source()).ready()
		f := start()
		stream := onPod(t, f.conn, "shop.v1.Cart", "cart-1-a")
		w.remove(a)
		w.write()
		f.has(map[string]string{second.Addr(): "HEALTHY"})
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-b")
		stays(t, stream, "cart-1-a")
	})
}

func TestScaleToZeroAndBackCostsNoSecondCollect(t *testing.T) {
	eachFront(t, "shop.v1.Cart", func(t *testing.T, s *site, start func() front) {
		h := newReflectionHold()
		w := newWorld(t)
		a, first := w.serve("cart-1-a", []string{"shop.v1.Cart"}, h.option())
		w.serve("stock-1-a", []string{"shop.v1.Stock"})
		w.write()
		agent := s.start(t, "--source", w.source()).ready()
		f := start()
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-a")
		w.remove(a)
		w.write()
		f.has(map[string]string{})
		harness.Eventually(t, soon, func() error {
			_, err := say(t, f.conn, "shop.v1.Cart")
			if status.Code(err) == codes.Unavailable {
				return nil
			}
			return fmt.Errorf("a call without a pod: %v, want UNAVAILABLE", err)
		})
		collects := agent.metric(`fingerpost_collects_total{result="known"}`)

		// Whoever asks now gets no answer.
		h.hold()
		defer h.release()
		w.add(a)
		w.write()
		f.has(map[string]string{first.Addr(): "HEALTHY"})
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-a")
		if n := agent.metric(`fingerpost_collects_total{result="known"}`); n != collects {
			t.Errorf("%s collects, %s before the scale to zero", n, collects)
		}
	})
}
