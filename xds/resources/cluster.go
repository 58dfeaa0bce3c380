package resources

import (
	"math"
	"strings"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fingerpost/fingerpost/nodecache"
)

const httpProtocolOptions = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

// clusterName is the name of the cluster, and of its CLA, to which calls go
// that name nothing but the gRPC service.
func clusterName(namespace, service string) string { return namespace + "/" + service }

// cluster holds nothing that follows the pods: Envoy builds a changed cluster
// anew, with new connections. It keeps to what grpc-go, C-core and grpc-js
// accept as well (gRFC A27 and later): no load_balancing_policy, no transport
// socket. What the workload behind it wants is p, nil for nothing.
func cluster(name string, p *nodecache.Policy) *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name: name,
		// A dot would begin a new part of the statistic's name.
		AltStatName:          strings.ReplaceAll(name, ".", "_"),
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS},
		EdsClusterConfig:     &clusterv3.Cluster_EdsClusterConfig{EdsConfig: overADS(15 * time.Second)},
		ConnectTimeout:       duration(connectTimeout(p)),
		LbPolicy:             clusterv3.Cluster_ROUND_ROBIN,
		CommonLbConfig: &clusterv3.Cluster_CommonLbConfig{
			HealthyPanicThreshold: &typev3.Percent{Value: 50},
			LocalityConfigSpecifier: &clusterv3.Cluster_CommonLbConfig_LocalityWeightedLbConfig_{
				LocalityWeightedLbConfig: &clusterv3.Cluster_CommonLbConfig_LocalityWeightedLbConfig{},
			},
		},
		CircuitBreakers:  breakers(p),
		OutlierDetection: outliers(p),
		TypedExtensionProtocolOptions: map[string]*anypb.Any{
			httpProtocolOptions: pack(upstream(p)),
		},
	}
}

// hostCluster follows one DNS name, which each client resolves for itself: one
// connection to one of its addresses at a time, of either family (gRFC A37 for
// gRPC, which knows no other kind of DNS cluster).
func hostCluster(name string, e endpoint, p *nodecache.Policy) *clusterv3.Cluster {
	c := cluster(name, p)
	c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_LOGICAL_DNS}
	c.EdsClusterConfig = nil
	c.DnsLookupFamily = clusterv3.Cluster_ALL
	c.LoadAssignment = (&locality{}).assignment(name, []endpoint{e})
	return c
}

// http2Upstream pings a connection every 6 minutes, and closes it after 5
// idle ones: Envoy pings idle connections too, and a gRPC server answers pings
// faster than 5 minutes with GOAWAY by default (gRFC A8). The jitter that
// Envoy adds only makes pings rarer.
func http2Upstream() *upstreamv3.HttpProtocolOptions {
	return &upstreamv3.HttpProtocolOptions{
		CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{IdleTimeout: duration(5 * time.Minute)},
		UpstreamProtocolOptions: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
					Http2ProtocolOptions: &corev3.Http2ProtocolOptions{
						ConnectionKeepalive: &corev3.KeepaliveSettings{
							Interval: duration(6 * time.Minute),
							Timeout:  duration(20 * time.Second),
						},
					},
				},
			},
		},
	}
}

// breakers never break: the default of 1,024 requests counts long streams, in
// Envoy and in gRPC. Retries are a share of what runs.
func breakers(p *nodecache.Policy) *clusterv3.CircuitBreakers {
	b := &clusterv3.CircuitBreakers{Thresholds: []*clusterv3.CircuitBreakers_Thresholds{{
		Priority:           corev3.RoutingPriority_DEFAULT,
		MaxConnections:     number(math.MaxUint32),
		MaxPendingRequests: number(math.MaxUint32),
		MaxRequests:        number(math.MaxUint32),
		MaxRetries:         number(math.MaxUint32),
		RetryBudget: &clusterv3.CircuitBreakers_Thresholds_RetryBudget{
			BudgetPercent:       &typev3.Percent{Value: 20},
			MinRetryConcurrency: number(10),
		},
	}}}
	breakersOf(b.Thresholds[0], p)
	return b
}

// outliers ejects a host to which several connections in a row failed, never
// one that answers, and never more than half of them. gRPC knows only the two
// enforcing percentages that are zero here, and so ejects nobody.
func outliers(p *nodecache.Policy) *clusterv3.OutlierDetection {
	o := &clusterv3.OutlierDetection{
		SplitExternalLocalOriginErrors:         true,
		ConsecutiveLocalOriginFailure:          number(5),
		EnforcingConsecutiveLocalOriginFailure: number(100),
		EnforcingLocalOriginSuccessRate:        number(0),
		EnforcingConsecutive_5Xx:               number(0),
		EnforcingConsecutiveGatewayFailure:     number(0),
		EnforcingSuccessRate:                   number(0),
		EnforcingFailurePercentage:             number(0),
		EnforcingFailurePercentageLocalOrigin:  number(0),
		Interval:                               duration(5 * time.Second),
		BaseEjectionTime:                       duration(10 * time.Second),
		MaxEjectionTime:                        duration(time.Minute),
		MaxEjectionPercent:                     number(50),
		AlwaysEjectOneHost:                     no(),
	}
	outliersOf(o, p)
	return o
}
