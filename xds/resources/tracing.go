package resources

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	tracev3 "github.com/envoyproxy/go-control-plane/envoy/config/trace/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/anypb"
)

// tracingCluster is the name of the cluster of the trace collector. No call
// can name it: those clusters have a slash in their names.
const tracingCluster = "fingerpost-tracing"

// collector is where traces go; nil for nowhere.
type collector struct {
	host string
	port uint16
}

// parseTracing reads otlp:HOST:PORT, or nothing.
func parseTracing(s string) (*collector, error) {
	if s == "" {
		return nil, nil
	}
	hostport, ok := strings.CutPrefix(s, "otlp:")
	host, portText, err := net.SplitHostPort(hostport)
	port, perr := strconv.ParseUint(portText, 10, 16)
	if !ok || err != nil || perr != nil || host == "" || port == 0 {
		return nil, fmt.Errorf("tracing %q is not otlp:HOST:PORT", s)
	}
	return &collector{host: host, port: uint16(port)}, nil
}

func (c *collector) provider() *hcmv3.HttpConnectionManager_Tracing {
	if c == nil {
		return nil
	}
	return &hcmv3.HttpConnectionManager_Tracing{Provider: &tracev3.Tracing_Http{
		Name: "envoy.tracers.opentelemetry",
		ConfigType: &tracev3.Tracing_Http_TypedConfig{TypedConfig: pack(&tracev3.OpenTelemetryConfig{
			ServiceName: "fingerpost-egress",
			GrpcService: &corev3.GrpcService{
				Timeout: duration(time.Second),
				TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{
					ClusterName: tracingCluster,
				}},
			},
		})},
	}}
}

func (c *collector) cluster() *clusterv3.Cluster {
	discovery := clusterv3.Cluster_STRICT_DNS
	if _, err := netip.ParseAddr(c.host); err == nil {
		discovery = clusterv3.Cluster_STATIC
	}
	return &clusterv3.Cluster{
		Name:                 tracingCluster,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: discovery},
		// A collector whose name does not resolve must hold up no call.
		WaitForWarmOnInit: no(),
		DnsLookupFamily:   clusterv3.Cluster_ALL,
		ConnectTimeout:    duration(time.Second),
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: tracingCluster,
			Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{{
				HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
					Address: tcpAddress(c.host, c.port),
				}},
			}}}},
		},
		TypedExtensionProtocolOptions: map[string]*anypb.Any{
			httpProtocolOptions: pack(http2Upstream()),
		},
	}
}
