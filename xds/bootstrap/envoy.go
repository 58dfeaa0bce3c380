package bootstrap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/xds/resources"
)

// adsCluster is the name of the cluster that is the agent.
const adsCluster = "fingerpost"

const envoyComment = `# Bootstrap of an Envoy sidecar that takes its configuration from Fingerpost.
# Applications call 127.0.0.1:15001 (or the agent's --egress-port) in plaintext HTTP/2.
# The access log is off; turn it on at the admin socket:
#   POST /runtime_modify?` + resources.RuntimeAccessLog + `=100
`

// Envoy returns the bootstrap of an Envoy sidecar as YAML. It returns an error
// that names the option if one makes no sense.
func Envoy(o Options) ([]byte, error) {
	text, err := EnvoyJSON(o)
	if err != nil {
		return nil, err
	}
	if text, err = yaml.JSONToYAML(text); err != nil {
		return nil, fmt.Errorf("write bootstrap: %w", err)
	}
	return append([]byte(envoyComment), text...), nil
}

// EnvoyJSON is [Envoy] on one line, for Envoy's argument --config-yaml.
func EnvoyJSON(o Options) ([]byte, error) {
	b, err := o.envoy()
	if err != nil {
		return nil, err
	}
	if err := b.ValidateAll(); err != nil {
		return nil, fmt.Errorf("bootstrap is not valid: %w", err)
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(b)
	if err != nil {
		return nil, fmt.Errorf("write bootstrap: %w", err)
	}
	// protojson puts spaces where it likes.
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		return nil, fmt.Errorf("write bootstrap: %w", err)
	}
	return compact.Bytes(), nil
}

func (o *Options) envoy() (*bootstrapv3.Bootstrap, error) {
	namespace, err := o.check()
	if err != nil {
		return nil, err
	}
	b := &bootstrapv3.Bootstrap{
		Node: o.node(namespace),
		DynamicResources: &bootstrapv3.Bootstrap_DynamicResources{
			AdsConfig: o.ads(),
			CdsConfig: fromADS(),
			LdsConfig: fromADS(),
		},
		StaticResources: &bootstrapv3.Bootstrap_StaticResources{
			Clusters: []*clusterv3.Cluster{o.agent(), o.unknown()},
		},
		// Without a layer of its own /runtime_modify is refused. What it sets
		// goes before the static layer.
		LayeredRuntime: &bootstrapv3.LayeredRuntime{Layers: []*bootstrapv3.RuntimeLayer{
			{
				Name: "static",
				LayerSpecifier: &bootstrapv3.RuntimeLayer_StaticLayer{StaticLayer: &structpb.Struct{
					Fields: map[string]*structpb.Value{resources.RuntimeAccessLog: structpb.NewNumberValue(0)},
				}},
			},
			{
				Name:           "admin",
				LayerSpecifier: &bootstrapv3.RuntimeLayer_AdminLayer_{AdminLayer: &bootstrapv3.RuntimeLayer_AdminLayer{}},
			},
		}},
		// Both keep what a cluster costs until it is called.
		DeferredStatOptions: &bootstrapv3.Bootstrap_DeferredStatOptions{EnableDeferredCreationStats: true},
		ClusterManager:      &bootstrapv3.ClusterManager{EnableDeferredClusterCreation: true},
	}
	if o.ReadyAddress != "" {
		b.StaticResources.Listeners = []*listenerv3.Listener{o.ready()}
	}
	if o.AdminSocket != "" {
		b.Admin = &bootstrapv3.Admin{Address: pipe(o.AdminSocket)}
	}
	return b, nil
}

func (o *Options) ads() *corev3.ApiConfigSource {
	api := corev3.ApiConfigSource_DELTA_GRPC
	if o.API == "sotw" {
		api = corev3.ApiConfigSource_GRPC
	}
	return &corev3.ApiConfigSource{
		ApiType:                   api,
		TransportApiVersion:       corev3.ApiVersion_V3,
		SetNodeOnFirstMessageOnly: true,
		GrpcServices: []*corev3.GrpcService{{
			TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{
				ClusterName: adsCluster,
				// The default grows to 30 s, for which a restarted agent would
				// not be heard.
				RetryPolicy: &corev3.RetryPolicy{RetryBackOff: &corev3.BackoffStrategy{
					BaseInterval: durationpb.New(50 * time.Millisecond),
					MaxInterval:  durationpb.New(500 * time.Millisecond),
				}},
			}},
		}},
	}
}

// fromADS waits for ever: a sidecar without an agent is not ready, rather than
// ready with nothing.
func fromADS() *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ResourceApiVersion:    corev3.ApiVersion_V3,
		InitialFetchTimeout:   durationpb.New(0),
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
	}
}

// ready is where a probe asks. Nothing but its own answer is behind it.
func (o *Options) ready() *listenerv3.Listener {
	hcm := &hcmv3.HttpConnectionManager{
		StatPrefix: "ready",
		HttpFilters: []*hcmv3.HttpFilter{{
			Name:       "envoy.filters.http.router",
			ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: pack(&routerv3.Router{})},
		}},
		RouteSpecifier: &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: &routev3.RouteConfiguration{
			VirtualHosts: []*routev3.VirtualHost{{
				Name:    "ready",
				Domains: []string{"*"},
				Routes: []*routev3.Route{{
					Match:  &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}},
					Action: &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{Status: 200}},
				}},
			}},
		}},
	}
	return &listenerv3.Listener{
		Name: "ready",
		Address: &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
			Address:       o.ReadyAddress,
			PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(o.ReadyPort)},
		}}},
		FilterChains: []*listenerv3.FilterChain{{Filters: []*listenerv3.Filter{{
			Name:       "envoy.filters.network.http_connection_manager",
			ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: pack(hcm)},
		}}}},
	}
}

// agent is the agent's ADS socket. The pings find an agent that hangs.
func (o *Options) agent() *clusterv3.Cluster {
	return static(adsCluster, o.ADSSocket, http2(&corev3.KeepaliveSettings{
		Interval: durationpb.New(30 * time.Second),
		Timeout:  durationpb.New(10 * time.Second),
	}))
}

// unknown is where calls end for which there is no cluster. The header tells
// the agent who calls; the application's own, if it sends one, does not count.
func (o *Options) unknown() *clusterv3.Cluster {
	options := http2(nil)
	options.HttpFilters = resources.SaysNode(o.NodeID)
	return static(resources.UnknownCluster, o.unknownSocket(), options)
}

func static(name, socket string, options *upstreamv3.HttpProtocolOptions) *clusterv3.Cluster {
	return &clusterv3.Cluster{
		Name:                 name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:       durationpb.New(time.Second),
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: name,
			Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{{
				HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{Address: pipe(socket)}},
			}}}},
		},
		TypedExtensionProtocolOptions: map[string]*anypb.Any{
			"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": pack(options),
		},
	}
}

func http2(keepalive *corev3.KeepaliveSettings) *upstreamv3.HttpProtocolOptions {
	return &upstreamv3.HttpProtocolOptions{
		UpstreamProtocolOptions: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
					Http2ProtocolOptions: &corev3.Http2ProtocolOptions{ConnectionKeepalive: keepalive},
				},
			},
		},
	}
}

func pipe(path string) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: path}}}
}

// pack is anypb.New for messages that can always be encoded.
func pack(m proto.Message) *anypb.Any {
	a, err := anypb.New(m)
	if err != nil {
		panic(fmt.Sprintf("encode %T: %v", m, err))
	}
	return a
}
