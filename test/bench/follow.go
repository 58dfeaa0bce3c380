package main

import (
	"context"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// follow is the life of one client. It keeps nothing, so that many of them
// weigh little beside the server they measure.
func follow(ctx context.Context, path, id string, names []string, synced chan<- struct{}) error {
	conn, err := client.Dial(path)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		return err
	}
	for _, req := range []*discovery.DeltaDiscoveryRequest{
		{Node: &corev3.Node{Id: id}, TypeUrl: xds.Cluster.URL()},
		{TypeUrl: xds.Endpoint.URL(), ResourceNamesSubscribe: names},
	} {
		if err := stream.Send(req); err != nil {
			return err
		}
	}
	missing := 2 * len(names)
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()}); err != nil {
			return err
		}
		if missing > 0 {
			if missing -= len(r.GetResources()); missing <= 0 {
				synced <- struct{}{}
			}
		}
	}
}
