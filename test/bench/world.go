package main

import (
	"fmt"
	"net/netip"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Every server of a comparison holds the same clusters and CLAs.

func serviceName(i int) string { return fmt.Sprintf("prod/company.team%d.v1.Service%05d", i%100, i) }

func clusterOf(i int) *clusterv3.Cluster { return clusterNamed(serviceName(i)) }

func clusterNamed(name string) *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                 name,
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
	var addrs []netip.AddrPort
	for e := range 5 {
		port := uint16(50051)
		if e == 0 {
			port += uint16(rev)
		}
		addrs = append(addrs, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(e), byte(i >> 8), byte(i)}), port))
	}
	return claOfAddrs(serviceName(i), addrs)
}

func claOfAddrs(name string, addrs []netip.AddrPort) *endpointv3.ClusterLoadAssignment {
	l := &endpointv3.LocalityLbEndpoints{
		Locality:            &corev3.Locality{Region: "r", Zone: "z"},
		LoadBalancingWeight: wrapperspb.UInt32(uint32(max(1, len(addrs)))),
	}
	for _, a := range addrs {
		l.LbEndpoints = append(l.LbEndpoints, &endpointv3.LbEndpoint{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{
			Endpoint: &endpointv3.Endpoint{Address: &corev3.Address{Address: &corev3.Address_SocketAddress{
				SocketAddress: &corev3.SocketAddress{
					Address:       a.Addr().String(),
					PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(a.Port())},
				},
			}}},
		}})
	}
	return &endpointv3.ClusterLoadAssignment{ClusterName: name, Endpoints: []*endpointv3.LocalityLbEndpoints{l}}
}
