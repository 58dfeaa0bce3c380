package resources

import (
	_ "embed"
	"slices"
	"strconv"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	previousv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/retry/host/previous_hosts/v3"
	luav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/router/cluster_specifiers/lua/v3"
	"google.golang.org/protobuf/types/known/anypb"
)

// RouteName is the name of the route table that Envoy's listeners ask for.
const RouteName = "egress"

// byNameRoute is the name of its one route.
const byNameRoute = "by-name"

// UnknownCluster is the name of the cluster, static in the bootstrap, to which
// the route table sends a call that no other cluster is there for.
const UnknownCluster = "unknown"

// The code that computes a call's cluster. It reads the global NAMESPACE, that of
// shape 2 MODE as well.
var (
	//go:embed shape1.lua
	shape1Code string
	//go:embed shape2.lua
	shape2Code string
)

// routeTable has the virtual hosts of the Services that have routes, and for
// all other calls one route whose cluster is computed from what the call names.
// That one depends on the namespace and the form alone.
func routeTable(namespace string, form Form, hosts []*routev3.VirtualHost) *routev3.RouteConfiguration {
	// Quoting is the same in Lua and Go for a namespace, see label.
	code := "NAMESPACE = " + strconv.Quote(namespace) + "\n"
	if form == ShapeOne {
		code += shape1Code
	} else {
		code += "MODE = " + strconv.Quote(form.String()) + "\n" + shape2Code
	}
	if form.OnDemand() {
		hosts = atHand(hosts)
	}
	return &routev3.RouteConfiguration{
		Name: RouteName,
		VirtualHosts: append(slices.Clip(hosts), &routev3.VirtualHost{
			Name:    egressName,
			Domains: []string{"*"},
			Routes:  []*routev3.Route{computed(byNameRoute, code)},
		}),
	}
}

// computed is a route for all calls, whose cluster the code computes.
func computed(name, code string) *routev3.Route {
	action := defaultAction()
	action.ClusterSpecifier = &routev3.RouteAction_InlineClusterSpecifierPlugin{
		InlineClusterSpecifierPlugin: &routev3.ClusterSpecifierPlugin{
			Extension: &corev3.TypedExtensionConfig{
				Name: "envoy.router.cluster_specifier_plugin.lua",
				TypedConfig: pack(&luav3.LuaConfig{
					SourceCode: &corev3.DataSource{
						Specifier: &corev3.DataSource_InlineString{InlineString: code},
					},
					DefaultCluster: UnknownCluster,
				}),
			},
		},
	}
	return &routev3.Route{
		Name:   name,
		Match:  &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}},
		Action: &routev3.Route_Route{Route: action},
	}
}

// atHand are virtual hosts whose clusters a client has from the start: it does
// not ask for one that is not there, so that the call fails by the route's word.
func atHand(hosts []*routev3.VirtualHost) []*routev3.VirtualHost {
	out := make([]*routev3.VirtualHost, len(hosts))
	for i, h := range hosts {
		out[i] = &routev3.VirtualHost{
			Name: h.Name, Domains: h.Domains, Routes: h.Routes,
			TypedPerFilterConfig: map[string]*anypb.Any{onDemandName: pack(&routev3.FilterConfig{Disabled: true})},
		}
	}
	return out
}

// defaultAction has the policies of a route of which nobody says anything, and
// no cluster.
func defaultAction() *routev3.RouteAction {
	return &routev3.RouteAction{
		// The zero value, written down: a missing cluster means that the agent
		// could not be asked, which passes. NOT_FOUND would reach the caller as
		// UNIMPLEMENTED, which does not.
		ClusterNotFoundResponseCode: routev3.RouteAction_SERVICE_UNAVAILABLE,
		Timeout:                     duration(0), // the default of 15 s would cut streams
		IdleTimeout:                 duration(0),
		MaxStreamDuration:           callersDeadline(),
		RetryPolicy:                 retries(),
	}
}

// callersDeadline ends a call at the deadline in its own grpc-timeout header,
// and at no other time.
func callersDeadline() *routev3.RouteAction_MaxStreamDuration {
	return &routev3.RouteAction_MaxStreamDuration{
		MaxStreamDuration:    duration(0),
		GrpcTimeoutHeaderMax: duration(0),
	}
}

// retries repeats only calls that no server can have begun: never on a status,
// since UNAVAILABLE may come after the work was done.
func retries() *routev3.RetryPolicy {
	return &routev3.RetryPolicy{
		RetryOn:    "connect-failure,refused-stream,reset-before-request",
		NumRetries: number(2),
		RetryHostPredicate: []*routev3.RetryPolicy_RetryHostPredicate{{
			Name: "envoy.retry_host_predicates.previous_hosts",
			ConfigType: &routev3.RetryPolicy_RetryHostPredicate_TypedConfig{
				TypedConfig: pack(&previousv3.PreviousHostsPredicate{}),
			},
		}},
		HostSelectionRetryMaxAttempts: 3,
		RetryBackOff: &routev3.RetryPolicy_RetryBackOff{
			BaseInterval: duration(25 * time.Millisecond),
			MaxInterval:  duration(250 * time.Millisecond),
		},
	}
}
