package ads_test

import (
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	clusterservice "github.com/envoyproxy/go-control-plane/envoy/service/cluster/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	endpointservice "github.com/envoyproxy/go-control-plane/envoy/service/endpoint/v3"
	listenerservice "github.com/envoyproxy/go-control-plane/envoy/service/listener/v3"
	routeservice "github.com/envoyproxy/go-control-plane/envoy/service/route/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/xds"
)

var node = &corev3.Node{Id: "prod/a-1"}

func TestEachTypeHasADeltaServiceOfItsOwn(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1), listener("A", 1), route("A", 1))
	for typ, open := range map[xds.Type]func() (grpc.BidiStreamingClient[discovery.DeltaDiscoveryRequest, discovery.DeltaDiscoveryResponse], error){
		cds: func() (grpc.BidiStreamingClient[discovery.DeltaDiscoveryRequest, discovery.DeltaDiscoveryResponse], error) {
			return clusterservice.NewClusterDiscoveryServiceClient(w.conn).DeltaClusters(w.ctx)
		},
		eds: func() (grpc.BidiStreamingClient[discovery.DeltaDiscoveryRequest, discovery.DeltaDiscoveryResponse], error) {
			return endpointservice.NewEndpointDiscoveryServiceClient(w.conn).DeltaEndpoints(w.ctx)
		},
		lds: func() (grpc.BidiStreamingClient[discovery.DeltaDiscoveryRequest, discovery.DeltaDiscoveryResponse], error) {
			return listenerservice.NewListenerDiscoveryServiceClient(w.conn).DeltaListeners(w.ctx)
		},
		rds: func() (grpc.BidiStreamingClient[discovery.DeltaDiscoveryRequest, discovery.DeltaDiscoveryResponse], error) {
			return routeservice.NewRouteDiscoveryServiceClient(w.conn).DeltaRoutes(w.ctx)
		},
	} {
		s, err := open()
		if err != nil {
			t.Fatal(err)
		}
		next := func() *discovery.DeltaDiscoveryResponse {
			t.Helper()
			r, err := s.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if r.GetTypeUrl() != typ.URL() {
				t.Fatalf("%s on the stream of %s", r.GetTypeUrl(), typ)
			}
			return r
		}
		// The type goes without saying here. What is gone is removed at once:
		// no other type comes on this stream.
		_ = s.Send(&discovery.DeltaDiscoveryRequest{Node: node, ResourceNamesSubscribe: []string{"A", "gone"},
			InitialResourceVersions: map[string]string{"gone": "1"}})
		r := next()
		if len(r.GetResources()) != 1 || len(r.GetRemovedResources()) != 1 {
			t.Fatalf("%s: got %d and %q", typ, len(r.GetResources()), r.GetRemovedResources())
		}
		_ = s.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: typ.URL(), ResponseNonce: r.GetNonce()})
		changed := of(typ, "A", 2)
		w.set(changed)
		if r = next(); r.GetResources()[0].GetVersion() != changed.Version {
			t.Fatalf("%s: the change did not come", typ)
		}
		_ = s.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: "type.googleapis.com/other", ResponseNonce: r.GetNonce()})
		if _, err := s.Recv(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "type_url") {
			t.Fatalf("%s: got %v", typ, err)
		}
	}
}

func TestEachTypeHasASotWServiceOfItsOwn(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1), listener("A", 1), route("A", 1))
	for typ, open := range map[xds.Type]func() (grpc.BidiStreamingClient[discovery.DiscoveryRequest, discovery.DiscoveryResponse], error){
		cds: func() (grpc.BidiStreamingClient[discovery.DiscoveryRequest, discovery.DiscoveryResponse], error) {
			return clusterservice.NewClusterDiscoveryServiceClient(w.conn).StreamClusters(w.ctx)
		},
		eds: func() (grpc.BidiStreamingClient[discovery.DiscoveryRequest, discovery.DiscoveryResponse], error) {
			return endpointservice.NewEndpointDiscoveryServiceClient(w.conn).StreamEndpoints(w.ctx)
		},
		lds: func() (grpc.BidiStreamingClient[discovery.DiscoveryRequest, discovery.DiscoveryResponse], error) {
			return listenerservice.NewListenerDiscoveryServiceClient(w.conn).StreamListeners(w.ctx)
		},
		rds: func() (grpc.BidiStreamingClient[discovery.DiscoveryRequest, discovery.DiscoveryResponse], error) {
			return routeservice.NewRouteDiscoveryServiceClient(w.conn).StreamRoutes(w.ctx)
		},
	} {
		s, err := open()
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Send(&discovery.DiscoveryRequest{Node: node, ResourceNames: []string{"A"}})
		for rev := 2; rev < 4; rev++ {
			r, err := s.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if r.GetTypeUrl() != typ.URL() || len(r.GetResources()) != 1 {
				t.Fatalf("%s: got %d of %s", typ, len(r.GetResources()), r.GetTypeUrl())
			}
			_ = s.Send(&discovery.DiscoveryRequest{ResourceNames: []string{"A"}, VersionInfo: r.GetVersionInfo(), ResponseNonce: r.GetNonce()})
			w.set(of(typ, "A", rev))
		}
	}
}
