package resources

import (
	"slices"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	streamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/stream/v3"
	grpcstatsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/grpc_stats/v3"
	ondemandv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/on_demand/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

const hcmName = "envoy.filters.network.http_connection_manager"

// RuntimeAccessLog is the runtime key that turns the access log on: its value
// is the percentage of calls that are logged, 0 by default.
const RuntimeAccessLog = "fingerpost.access_log"

// The names of the listeners of a sidecar.
const (
	egressName  = "egress"
	egress6Name = "egress6"
)

// taken tells whether a sidecar's listener has the name. A service of that
// name gets no API listener, which would stand in for the sidecar's own.
func taken(service string) bool { return service == egressName || service == egress6Name }

// egress is the socket to which an application sends its calls. Whatever is
// changed here makes Envoy drain the listener: GOAWAY at once, streams cut
// after the drain time. So it has from the start what may be wanted later, and
// nothing that varies.
//
// That of a client which fetches its clusters has one filter more.
func egress(name, host string, port uint16, tracing *hcmv3.HttpConnectionManager_Tracing, fetches bool) *listenerv3.Listener {
	return &listenerv3.Listener{
		Name:             name,
		Address:          tcpAddress(host, port),
		TrafficDirection: corev3.TrafficDirection_OUTBOUND,
		// With SO_REUSEPORT a second sidecar on the same address, as of two
		// pods of the host's network, would share the calls without a word.
		EnableReusePort: no(),
		// One socket and few long connections: balance them over the workers.
		ConnectionBalanceConfig: &listenerv3.Listener_ConnectionBalanceConfig{
			BalanceType: &listenerv3.Listener_ConnectionBalanceConfig_ExactBalance_{
				ExactBalance: &listenerv3.Listener_ConnectionBalanceConfig_ExactBalance{},
			},
		},
		FilterChains: []*listenerv3.FilterChain{{Filters: []*listenerv3.Filter{{
			Name:       hcmName,
			ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: pack(egressManager(tracing, fetches))},
		}}}},
	}
}

func egressManager(tracing *hcmv3.HttpConnectionManager_Tracing, fetches bool) *hcmv3.HttpConnectionManager {
	m := &hcmv3.HttpConnectionManager{
		CodecType:  hcmv3.HttpConnectionManager_AUTO,
		StatPrefix: "egress",
		RouteSpecifier: &hcmv3.HttpConnectionManager_Rds{Rds: &hcmv3.Rds{
			RouteConfigName: RouteName,
			ConfigSource:    overADS(15 * time.Second),
		}},
		HttpFilters: []*hcmv3.HttpFilter{
			transcoder(),
			{
				Name: "envoy.filters.http.grpc_stats",
				ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: pack(&grpcstatsv3.FilterConfig{
					// A statistic for each method would let a caller that
					// invents names fill the sidecar's memory.
					PerMethodStatSpecifier: &grpcstatsv3.FilterConfig_StatsForAllMethods{StatsForAllMethods: no()},
				})},
			},
			router(),
		},
		StreamIdleTimeout: duration(0),
		AccessLog:         []*accesslogv3.AccessLog{accessLog()},
		Tracing:           tracing,
		// The sidecar passes on what the two sides say and adds nothing.
		ServerHeaderTransformation: hcmv3.HttpConnectionManager_PASS_THROUGH,
		SkipXffAppend:              true,
	}
	if fetches {
		m.HttpFilters = slices.Insert(m.HttpFilters, len(m.HttpFilters)-1, onDemand())
	}
	return m
}

const onDemandName = "envoy.filters.http.on_demand"

// onDemand holds a call until its cluster is there. The agent answers every name
// at once; one that is away is waited for as long as Envoy does by default.
func onDemand() *hcmv3.HttpFilter {
	return &hcmv3.HttpFilter{
		Name: onDemandName,
		ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: pack(&ondemandv3.OnDemand{Odcds: &ondemandv3.OnDemandCds{
			Source:  overADS(15 * time.Second),
			Timeout: duration(5 * time.Second),
		}})},
	}
}

func router() *hcmv3.HttpFilter {
	return &hcmv3.HttpFilter{
		Name:       "envoy.filters.http.router",
		ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: pack(&routerv3.Router{})},
	}
}

func accessLog() *accesslogv3.AccessLog {
	line := map[string]*structpb.Value{}
	for key, format := range map[string]string{
		"time":        "%START_TIME%",
		"authority":   "%REQ(:AUTHORITY)%",
		"path":        "%REQ(:PATH)%",
		"grpc_status": "%GRPC_STATUS%",
		"flags":       "%RESPONSE_FLAGS%",
		"details":     "%RESPONSE_CODE_DETAILS%",
		"cluster":     "%UPSTREAM_CLUSTER_RAW%",
		"upstream":    "%UPSTREAM_HOST%",
		"attempts":    "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
		"duration_ms": "%DURATION%",
	} {
		line[key] = structpb.NewStringValue(format)
	}
	return &accesslogv3.AccessLog{
		Name: "envoy.access_loggers.stdout",
		Filter: &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_RuntimeFilter{
			RuntimeFilter: &accesslogv3.RuntimeFilter{
				RuntimeKey:     RuntimeAccessLog,
				PercentSampled: &typev3.FractionalPercent{},
			},
		}},
		ConfigType: &accesslogv3.AccessLog_TypedConfig{TypedConfig: pack(&streamv3.StdoutAccessLog{
			AccessLogFormat: &streamv3.StdoutAccessLog_LogFormat{LogFormat: &corev3.SubstitutionFormatString{
				Format: &corev3.SubstitutionFormatString_JsonFormat{JsonFormat: &structpb.Struct{Fields: line}},
			}},
		})},
	}
}

// apiListener is what a gRPC client gets for the name that it dials. Its routes
// are inline, which saves the client a round trip. They carry no retry policy:
// gRPC repeats by itself what no server has begun (gRFC A6, transparent
// retries), and its policies know statuses only.
func apiListener(name string, routes []*routev3.Route) *listenerv3.Listener {
	return &listenerv3.Listener{
		Name: name,
		ApiListener: &listenerv3.ApiListener{ApiListener: pack(&hcmv3.HttpConnectionManager{
			StatPrefix: "api",
			RouteSpecifier: &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: &routev3.RouteConfiguration{
				Name:         name,
				VirtualHosts: []*routev3.VirtualHost{{Name: name, Domains: []string{"*"}, Routes: routes}},
			}},
			HttpFilters: []*hcmv3.HttpFilter{router()},
		})},
	}
}

// apiRoute leads the calls whose path begins so to the cluster. A match of
// gRPC's is a prefix, a path or an RE2 expression, and nothing else (gRFC A28).
func apiRoute(prefix, cluster string) *routev3.Route {
	return &routev3.Route{
		Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: prefix}},
		Action: &routev3.Route_Route{Route: &routev3.RouteAction{
			ClusterSpecifier:  &routev3.RouteAction_Cluster{Cluster: cluster},
			Timeout:           duration(0),
			MaxStreamDuration: callersDeadline(),
		}},
	}
}
