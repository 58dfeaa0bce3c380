package resources_test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// Envoy refuses a whole route table for one value that it cannot take. Whatever
// routes say, what is published must be good, and the routes beside them too.
func TestEnvoyTakesWhatRoutesSay(t *testing.T) {
	var rules []nodecache.RouteRule
	rule := func(m nodecache.RouteMatch, filters ...nodecache.RouteFilter) *nodecache.RouteRule {
		r := to(web, 80)
		r.Matches, r.Filters = []nodecache.RouteMatch{m}, filters
		rules = append(rules, r)
		return &rules[len(rules)-1]
	}
	odd := []string{"", "%", "%REQ(x)%", "%%", "é", "a b", `\1`, "{}", "*", ":x", "host", "x\x7f", "x\n", strings.Repeat("x", 5000)}
	for _, re := range []string{"(", ".*", "/[^/]+/x", strings.Repeat("/a", 40), strings.Repeat("/a", 60), "/" + strings.Repeat("é", 60), "(a|b){40}",
		`\pL{5}`, `(\pL\pN){20}`, "(?i)abc", `\x{10FFFF}`, "a{1000}", "(((((((((((a*)*)*)*)*)*)*)*)*)*)*)*", "^/x$", "[[:alpha:]]+", `(?P<n>x)`, `\C`, `(?=x)`, ""} {
		rule(nodecache.RouteMatch{Path: re, PathType: nodecache.MatchRegex})
		rule(nodecache.RouteMatch{Path: "/", Headers: []nodecache.ValueMatch{{Name: "x", Value: re, Type: nodecache.MatchRegex}}})
		rule(nodecache.RouteMatch{Path: "/", Query: []nodecache.ValueMatch{{Name: "x", Value: re, Type: nodecache.MatchRegex}}})
	}
	for _, v := range odd {
		rule(nodecache.RouteMatch{Path: "/" + v})
		rule(nodecache.RouteMatch{Path: v})
		rule(nodecache.RouteMatch{Path: "/" + v, PathType: nodecache.MatchPrefix})
		rule(nodecache.RouteMatch{Path: "/", Verb: v})
		for _, n := range []string{"x", v} {
			rule(nodecache.RouteMatch{Path: "/", Headers: []nodecache.ValueMatch{{Name: n, Value: v}}})
			rule(nodecache.RouteMatch{Path: "/", Query: []nodecache.ValueMatch{{Name: n, Value: v}}})
			for _, typ := range []nodecache.FilterType{nodecache.FilterRequestHeaders, nodecache.FilterResponseHeaders} {
				f := nodecache.RouteFilter{Type: typ, Set: []nodecache.Header{{Name: n, Value: v}}, Add: []nodecache.Header{{Name: n, Value: v}}, Remove: []string{n}}
				rule(nodecache.RouteMatch{Path: "/"}, f)
				rule(nodecache.RouteMatch{Path: "/"}).Backends[0].Filters = []nodecache.RouteFilter{f}
			}
		}
		for _, typ := range []nodecache.FilterType{nodecache.FilterRedirect, nodecache.FilterRewrite} {
			for _, p := range []string{"/", "/a"} {
				m := nodecache.RouteMatch{Path: p, PathType: nodecache.MatchPrefix}
				for op := nodecache.PathKeep; op <= nodecache.PathPrefix; op++ {
					rule(m, nodecache.RouteFilter{Type: typ, Hostname: v, Scheme: v, PathOp: op, ReplacePath: "/" + v})
					rule(m, nodecache.RouteFilter{Type: typ, PathOp: op, ReplacePath: v, Status: http.StatusTeapot})
				}
			}
		}
	}
	rule(nodecache.RouteMatch{Path: "/"}).Retry = &nodecache.RouteRetry{Codes: []int{-1, 0, 99999}, Attempts: 1 << 31, Backoff: time.Nanosecond}
	rule(nodecache.RouteMatch{Path: "/"}).Backends[0].Weight = 1<<32 - 1
	many := rule(nodecache.RouteMatch{Path: "/"})
	for range 5000 {
		many.Backends = append(many.Backends, nodecache.RouteBackend{Service: web, Port: 80, Weight: 1<<32 - 1})
	}

	m := newMesh(t, "prod")
	left := map[string]bool{} // rules of which something is left out
	m.c, _ = resources.New(resources.Options{Report: func(id xds.ID, err error) { left[path.Dir(id.Name)] = true }})
	m.published = map[xds.ID]*xds.Resource{}
	m.client("prod")
	m.service("prod", "web", api)
	timed := httpRoute("prod", "odd", web, rules...)
	timed.Rules[0].Timeout, timed.Rules[0].BackendTimeout = time.Nanosecond, 1<<62
	m.route(timed)
	grpc := httpRoute("prod", "grpc", canary, to(web, 80))
	m.service("prod", "canary", rpc)
	grpc.Kind, grpc.Rules[0].Matches = nodecache.GRPCRoute, nil
	for _, v := range odd {
		grpc.Rules[0].Matches = append(grpc.Rules[0].Matches,
			nodecache.RouteMatch{Service: v, Method: v}, nodecache.RouteMatch{Service: v}, nodecache.RouteMatch{Method: v},
			nodecache.RouteMatch{Service: v, Method: v, MethodType: nodecache.MatchRegex})
	}
	m.route(grpc)
	m.flush()
	if hosts := m.hosts("prod"); len(hosts) != 2 || len(hosts[1].GetRoutes())+len(hosts[0].GetRoutes()) < 300 {
		t.Fatalf("%d hosts", len(hosts))
	}
	if len(left) < 100 {
		t.Errorf("only %d are left out", len(left))
	}
	for _, r := range []*nodecache.Route{timed, grpc} { // what is said of the route is what is served
		said := resources.Unservable(r)
		for i := range r.Rules {
			if name := fmt.Sprintf("%s/%s/%d", r.Kind, r.Key(), i); (said[i] != nil) != left[name] {
				t.Errorf("%s: said %v, left out %t", name, said[i], left[name])
			}
		}
	}

	rds := decode(t, m.published[xds.ID{Type: xds.Route, Name: resources.RouteName, Scope: "ns/prod"}], &routev3.RouteConfiguration{})
	var l *listenerv3.Listener
	for _, r := range m.c.Initial().Set {
		if r.Name == "egress" {
			l = decode(t, r, &listenerv3.Listener{})
		}
	}
	filter := l.GetFilterChains()[0].GetFilters()[0]
	var hcm hcmv3.HttpConnectionManager
	if err := filter.GetTypedConfig().UnmarshalTo(&hcm); err != nil {
		t.Fatal(err)
	}
	rds.ValidateClusters = wrapperspb.Bool(false) // as it is for one that comes by RDS
	hcm.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: rds}
	any, err := anypb.New(&hcm)
	if err != nil {
		t.Fatal(err)
	}
	filter.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: any}
	b := &bootstrapv3.Bootstrap{StaticResources: &bootstrapv3.Bootstrap_StaticResources{Listeners: []*listenerv3.Listener{l}}}
	for id, r := range m.published {
		if id.Type == xds.Cluster {
			c := decode(t, r, &clusterv3.Cluster{})
			c.EdsClusterConfig, c.ClusterDiscoveryType = nil, &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC}
			b.StaticResources.Clusters = append(b.StaticResources.Clusters, c)
		}
	}
	text, err := protojson.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "envoy.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(harness.Tool(t, "envoy"), "--mode", "validate", "-l", "error", "-c", file).CombinedOutput(); err != nil {
		if len(out) > 2000 {
			out = out[len(out)-2000:]
		}
		t.Errorf("Envoy refuses: %v: %s", err, out)
	}
}
