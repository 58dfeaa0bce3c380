package resources

import (
	_ "embed"
	"fmt"
	"net/netip"
	"strings"

	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	earlyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/xds"
)

// DefaultCapturePort is the port of the sidecar to which connections of its
// application are redirected.
const DefaultCapturePort = 15002

// captureName is the name of the listener for them.
const captureName = "capture"

// CaptureID is what [Compiler.Capture] publishes.
var CaptureID = xds.ID{Type: xds.Listener, Name: captureName, Scope: ScopeCapture}

// toHeader is the request header in which the listener notes to which of its
// addresses a call came. It goes to nobody else.
const toHeader = "fingerpost-to"

// toPrefix begins the names of clusters for redirected calls.
const toPrefix = "to/"

//go:embed capture.lua
var captureCode string

// capture is the socket to which connections of an application are redirected,
// each by the loopback address that is the number of its destination. What comes
// from elsewhere finds no filter chain and is closed. As with [egress] nothing in
// it varies but the series of the numbers; its route table is its own, since
// authorities mean nothing here.
func capture(port uint16, tracing *hcmv3.HttpConnectionManager_Tracing, series uint32) *listenerv3.Listener {
	l := egress(captureName, "0.0.0.0", port, tracing, true)
	// The bootstrap of an injected sidecar has another socket of this port, at
	// the pod's own address, on which a kubelet asks: both need it.
	l.EnableReusePort = nil
	chain := l.FilterChains[0]
	chain.FilterChainMatch = &listenerv3.FilterChainMatch{
		PrefixRanges: []*corev3.CidrRange{{AddressPrefix: "127.0.0.0", PrefixLen: number(8)}},
	}
	m := egressManager(tracing, true)
	m.StatPrefix = captureName
	// The name and the value are the kernel's word: what an application says
	// under the name does not count.
	m.EarlyHeaderMutationExtensions = []*corev3.TypedExtensionConfig{{
		Name: "envoy.http.early_header_mutation.header_mutation",
		TypedConfig: pack(&earlyv3.HeaderMutation{Mutations: []*mutationv3.HeaderMutation{{
			Action: &mutationv3.HeaderMutation_Append{Append: &corev3.HeaderValueOption{
				Header:       &corev3.HeaderValue{Key: toHeader, Value: "%DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT%"},
				AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
			}},
		}}}),
	}}
	m.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: &routev3.RouteConfiguration{
		Name:                   captureName,
		RequestHeadersToRemove: []string{toHeader},
		VirtualHosts: []*routev3.VirtualHost{{
			Name:    captureName,
			Domains: []string{"*"},
			Routes:  []*routev3.Route{computed("by-address", captureCode)},
		}},
	}}
	chain.Filters[0].ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: pack(m)}
	l.Metadata = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
		"fingerpost.dev/redirect": {Fields: map[string]*structpb.Value{"series": structpb.NewStringValue(fmt.Sprintf("%08x", series))}},
	}}
	return l
}

// RedirectedCluster is the name of the cluster for calls of the service on a
// connection that was redirected by the number.
func RedirectedCluster(number netip.Addr, service string) string {
	return toPrefix + number.String() + "/" + service
}

// parseTo reads the name of a cluster for redirected calls: service is empty
// where the calls are of no gRPC service.
func parseTo(name string) (number netip.Addr, service string, ok bool) {
	rest, ok := strings.CutPrefix(name, toPrefix)
	if !ok {
		return netip.Addr{}, "", false
	}
	text, service, named := strings.Cut(rest, "/")
	number, err := netip.ParseAddr(text)
	if err != nil || !number.Is4() || !number.IsLoopback() || number.String() != text {
		return netip.Addr{}, "", false
	}
	return number, service, !named || len(service) <= longestService && callPath.MatchString("/"+service+"/M")
}

// Capture is the listener for redirected connections, of clients that have
// [ScopeCapture]: publish it once connections are redirected and it is known what
// their numbers mean. Where nobody listens they go where they were dialled. With
// numbers of another series it is another listener: Envoy then tells those who came
// by the old one to connect again (GOAWAY), since their numbers mean nothing any more.
func (c *Compiler) Capture(series uint32) (*xds.Resource, error) {
	return xds.NewResource(CaptureID, c.capture(series))
}

// Renumbered writes what changes for those who asked for clusters of redirected
// calls, once the numbers of destinations mean something else than before: each
// is asked for again.
func (c *Compiler) Renumbered(dir Services) (u xds.Update) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for w := range c.wants.redirected {
		c.wants.stale[w] = struct{}{}
	}
	c.refresh(dir).wanted(nil, &u)
	sortSet(&u)
	return u
}
