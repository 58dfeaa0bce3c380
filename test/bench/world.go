package main

import (
	"fmt"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Every server of a comparison holds the same clusters and CLAs.

func serviceName(i int) string { return fmt.Sprintf("prod/company.team%d.v1.Service%05d", i%100, i) }

func clusterOf(i int) *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                 serviceName(i),
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS},
		ConnectTimeout:       durationpb.New(time.Second),
		EdsClusterConfig: &clusterv3.Cluster_EdsClusterConfig{EdsConfig: &corev3.ConfigSource{
			ResourceApiVersion:    corev3.ApiVersion_V3,
			ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
		}},
	}
}

// claOf has five endpoints; rev changes the port of the first.
func claOf(i, rev int) *endpointv3.ClusterLoadAssignment {
	l := &endpointv3.LocalityLbEndpoints{
		Locality:            &corev3.Locality{Region: "r", Zone: "z"},
		LoadBalancingWeight: wrapperspb.UInt32(5),
	}
	for e := range 5 {
		port := uint32(50051)
		if e == 0 {
			port += uint32(rev)
		}
		l.LbEndpoints = append(l.LbEndpoints, &endpointv3.LbEndpoint{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{
			Endpoint: &endpointv3.Endpoint{Address: &corev3.Address{Address: &corev3.Address_SocketAddress{
				SocketAddress: &corev3.SocketAddress{
					Address:       fmt.Sprintf("10.%d.%d.%d", e, i>>8&0xff, i&0xff),
					PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: port},
				},
			}}},
		}})
	}
	return &endpointv3.ClusterLoadAssignment{ClusterName: serviceName(i), Endpoints: []*endpointv3.LocalityLbEndpoints{l}}
}
