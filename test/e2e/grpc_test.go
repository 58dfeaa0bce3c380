package e2e_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/xds"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// proxyless dials a service with gRPC's own xDS client, on the bootstrap that
// the program prints for the pod that the id names.
func (s *site) proxyless(t *testing.T, id, service string) *grpc.ClientConn {
	t.Helper()
	conf, errs, code := run(t, "bootstrap", "--format", "grpc", "--ads-socket", s.ads, "--node-id", id)
	if code != 0 || errs != "" {
		t.Fatalf("fingerpost bootstrap: exit %d, %s", code, errs)
	}
	// The name says testing; it is how a bootstrap is given without the
	// environment, which gRPC reads only when the process starts.
	resolver, err := xds.NewXDSResolverWithConfigForTesting([]byte(conf))
	if err != nil {
		t.Fatal(err)
	}
	return dial(t, "xds:///"+service, grpc.WithResolvers(resolver))
}

func TestProxylessCallsFollowThePods(t *testing.T) {
	w := newWorld(t)
	w.serve("cart-1-a", []string{"shop.v1.Cart"})
	b, server := w.serve("cart-1-b", []string{"shop.v1.Cart", "shop.v1.Extra"})
	w.write()
	s := newSite(t)
	a := s.start(t, "--source", w.source()).ready()
	conn := s.proxyless(t, "prod/web", "shop.v1.Cart")
	reaches(t, conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")

	answered, stop := load(t, conn, "shop.v1.Cart")
	w.remove(b)
	w.write()
	spared(t, server, "shop.v1.Cart", answered)
	reaches(t, conn, "shop.v1.Cart", "cart-1-a")
	server.GracefulStop()
	proceeds(t, answered)
	w.serve("cart-1-c", []string{"shop.v1.Cart"})
	w.write()
	reaches(t, conn, "shop.v1.Cart", "cart-1-a", "cart-1-c")
	proceeds(t, answered)
	stop()
	a.connected("prod/web", "lds", "cds", "eds")
	if st := a.status(); st.Nacks != 0 {
		t.Errorf("%d refusals", st.Nacks)
	}
}

// A channel made before its service exists works as soon as it does.
func TestProxylessChannelOfServiceThatAppearsLater(t *testing.T) {
	w := shop(t)
	s := newSite(t)
	a := s.start(t, "--source", w.source()).ready()
	conn := s.proxyless(t, "prod/web", "shop.v1.Late")
	// gRPC takes a name as absent when it has waited 15 s for it; a caller that
	// does not wait so long gets its deadline.
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if who, err := demo.Say(ctx, conn, "shop.v1.Late"); err == nil {
		t.Errorf("a service that nobody has is answered by %s", who)
	}
	a.connected("prod/web")
	w.serve("late-1-a", []string{"shop.v1.Late"})
	w.write()
	harness.Eventually(t, soon, func() error {
		who, err := say(t, conn, "shop.v1.Late", grpc.WaitForReady(true))
		if err == nil && who != "late-1-a" {
			err = fmt.Errorf("answered by %s", who)
		}
		return err
	})
	a.connected("prod/web", "lds", "cds", "eds")
	if st := a.status(); st.Nacks != 0 {
		t.Errorf("%d refusals", st.Nacks)
	}
}

// The agent away, calls go on; back, it is heard.
func TestProxylessClientOutlivesTheAgent(t *testing.T) {
	for _, end := range []struct {
		name string
		how  func(*agentProcess)
	}{{"stop", (*agentProcess).stop}, {"kill", (*agentProcess).kill}} {
		t.Run(end.name, func(t *testing.T) {
			w := shop(t)
			s := newSite(t)
			a := s.start(t, "--source", w.source()).ready()
			conn := s.proxyless(t, "prod/web", "shop.v1.Cart")
			reaches(t, conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
			answered, stop := load(t, conn, "shop.v1.Cart")
			end.how(a)
			proceeds(t, answered)
			a = s.start(t, "--source", w.source()).ready()
			a.connected("prod/web")
			proceeds(t, answered)
			w.serve("cart-1-c", []string{"shop.v1.Cart"})
			w.write()
			reaches(t, conn, "shop.v1.Cart", "cart-1-a", "cart-1-b", "cart-1-c")
			stop()
			if st := a.status(); st.Nacks != 0 {
				t.Errorf("%d refusals", st.Nacks)
			}
		})
	}
}
