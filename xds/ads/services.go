package ads

import (
	"context"

	clusterservice "github.com/envoyproxy/go-control-plane/envoy/service/cluster/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	endpointservice "github.com/envoyproxy/go-control-plane/envoy/service/endpoint/v3"
	listenerservice "github.com/envoyproxy/go-control-plane/envoy/service/listener/v3"
	routeservice "github.com/envoyproxy/go-control-plane/envoy/service/route/v3"
	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/xds"
)

// aggregated marks a stream that carries all types.
const aggregated = xds.Type(xds.NumTypes)

type sotwStream interface {
	Context() context.Context
	SendMsg(any) error // takes a *message
	Recv() (*discovery.DiscoveryRequest, error)
}

type deltaStream interface {
	Context() context.Context
	SendMsg(any) error // takes a *message
	Recv() (*discovery.DeltaDiscoveryRequest, error)
}

// The services of single types. Nothing orders one stream after another, so
// what one type has to wait for of another (see the package comment) holds on
// aggregated streams only (xDS protocol, "Eventual consistency considerations").
type (
	clusters struct {
		clusterservice.UnimplementedClusterDiscoveryServiceServer
		s *Server
	}
	endpoints struct {
		endpointservice.UnimplementedEndpointDiscoveryServiceServer
		s *Server
	}
	listeners struct {
		listenerservice.UnimplementedListenerDiscoveryServiceServer
		s *Server
	}
	routes struct {
		routeservice.UnimplementedRouteDiscoveryServiceServer
		s *Server
	}
)

func (c clusters) StreamClusters(g clusterservice.ClusterDiscoveryService_StreamClustersServer) error {
	return c.s.serveSotW(g, xds.Cluster)
}

func (c clusters) DeltaClusters(g clusterservice.ClusterDiscoveryService_DeltaClustersServer) error {
	return c.s.serveDelta(g, xds.Cluster)
}

func (e endpoints) StreamEndpoints(g endpointservice.EndpointDiscoveryService_StreamEndpointsServer) error {
	return e.s.serveSotW(g, xds.Endpoint)
}

func (e endpoints) DeltaEndpoints(g endpointservice.EndpointDiscoveryService_DeltaEndpointsServer) error {
	return e.s.serveDelta(g, xds.Endpoint)
}

func (l listeners) StreamListeners(g listenerservice.ListenerDiscoveryService_StreamListenersServer) error {
	return l.s.serveSotW(g, xds.Listener)
}

func (l listeners) DeltaListeners(g listenerservice.ListenerDiscoveryService_DeltaListenersServer) error {
	return l.s.serveDelta(g, xds.Listener)
}

func (r routes) StreamRoutes(g routeservice.RouteDiscoveryService_StreamRoutesServer) error {
	return r.s.serveSotW(g, xds.Route)
}

func (r routes) DeltaRoutes(g routeservice.RouteDiscoveryService_DeltaRoutesServer) error {
	return r.s.serveDelta(g, xds.Route)
}

// register adds the aggregated service and those of the single types.
func (s *Server) register(g grpc.ServiceRegistrar) {
	discovery.RegisterAggregatedDiscoveryServiceServer(g, s)
	clusterservice.RegisterClusterDiscoveryServiceServer(g, clusters{s: s})
	endpointservice.RegisterEndpointDiscoveryServiceServer(g, endpoints{s: s})
	listenerservice.RegisterListenerDiscoveryServiceServer(g, listeners{s: s})
	routeservice.RegisterRouteDiscoveryServiceServer(g, routes{s: s})
}
