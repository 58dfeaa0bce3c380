package e2e_test

import (
	"fmt"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// envoyproxy/envoy#32688: listeners and clusters were lost with the connection to
// the control plane. Nothing that the agent sends has a time to live, and an Envoy
// that has tried in vain to reach it several times has what it had.
func TestAgentThatIsAwayTakesNothingAway(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		t.Parallel()
		w, s := shop(t), newSite(t)
		a := s.start(t, "--source", w.source()).ready()
		e := s.sidecar(t, api, "prod/web")
		reaches(t, e.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
		reaches(t, e.conn, "shop.v1.Stock", "stock-1-a")
		e.content()
		if api == "delta" {
			timeless(t, s.ads)
		}
		dump := e.dump()
		answered, stop := load(t, e.conn, "shop.v1.Cart")
		before, _ := e.Stat("cluster.fingerpost.upstream_cx_connect_fail")
		a.kill()
		e.WaitFor(t, soon, func() error {
			if n, ok := e.Stat("cluster.fingerpost.upstream_cx_connect_fail"); !ok || n < before+4 {
				return fmt.Errorf("Envoy has tried %d times (%t)", n-before, ok)
			}
			return nil
		})
		proceeds(t, answered)
		same(t, "without the agent", dump, e.dump())
		reaches(t, e.conn, "shop.v1.Stock", "stock-1-a")
		stop()
	})
}

// timeless asks for everything and checks that no resource ends by itself.
func timeless(t *testing.T, socket string) {
	t.Helper()
	conn, err := client.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []*discoveryv3.DeltaDiscoveryRequest{
		{TypeUrl: xds.Cluster.URL(), Node: &corev3.Node{Id: "prod/raw"}},
		{TypeUrl: xds.Endpoint.URL(), ResourceNamesSubscribe: []string{"prod/shop.v1.Cart"}},
		{TypeUrl: xds.Listener.URL()},
		{TypeUrl: xds.Route.URL(), ResourceNamesSubscribe: []string{"egress"}},
	} {
		if err := stream.Send(r); err != nil {
			t.Fatal(err)
		}
	}
	for seen := map[string]bool{}; len(seen) < int(xds.NumTypes); {
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range r.GetResources() {
			seen[r.GetTypeUrl()] = true
			if one.GetTtl() != nil {
				t.Errorf("%s %s ends after %v", r.GetTypeUrl(), one.GetName(), one.GetTtl())
			}
		}
		if err := stream.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()}); err != nil {
			t.Fatal(err)
		}
	}
}
