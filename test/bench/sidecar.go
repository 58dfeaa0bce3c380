package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/tools"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
)

// sidecars are real Envoys with clusters on demand: a later call is compared with
// one through an Envoy that has the same in its static configuration, a first
// call with the first one of an Envoy that has all clusters already, and memory at
// 10,000 services, divided by that at 100, with that of such a one.
var sidecars = benchmark{names: []string{"sidecar/later-call", "sidecar/first-call", "sidecar/rss-10k-services"}, run: runSidecars}

// called is how many of the services are called.
const called = 50

func runSidecars(ctx context.Context, r *run) ([]result, error) {
	small, large, rounds := 100, 10_000, 2000
	if r.short {
		small, large, rounds = 100, 2_000, 300
	}
	envoy, err := tools.Path("envoy")
	if err != nil {
		return nil, err
	}
	bin, err := r.agent(ctx)
	if err != nil {
		return nil, err
	}
	server, err := demo.StartSample("bench", "127.0.0.1:0", numberedServices(called))
	if err != nil {
		return nil, err
	}
	defer server.Stop()
	var memory [2][2]float64 // by size, then on demand and all
	var first, later [2][]time.Duration
	for size, services := range []int{small, large} {
		s := &sidecarSite{r: r, envoy: envoy, dir: filepath.Join(r.dir, fmt.Sprintf("sidecar-%d", services)), server: server}
		if err := s.start(ctx, bin, services); err != nil {
			return nil, err
		}
		for way, clusters := range []string{"on-demand", "all"} {
			m, calls, err := s.measure(ctx, clusters, rounds)
			if err != nil {
				s.agent.stop()
				return nil, fmt.Errorf("%d services, clusters %s: %w", services, clusters, err)
			}
			memory[size][way] = m
			if size == 1 {
				first[way], later[way] = calls.first, calls.later
			}
			r.progress("sidecar: %d services, clusters %s: %.1f MB; first call %v, later %v", services, clusters, m, median(calls.first), median(calls.later))
		}
		if size == 1 {
			if later[1], err = s.static(ctx, rounds); err != nil {
				s.agent.stop()
				return nil, fmt.Errorf("static configuration: %w", err)
			}
			r.progress("sidecar: static configuration: later call %v", median(later[1]))
		}
		s.agent.stop()
	}
	return []result{
		better("sidecar/later-call", "ms", milliseconds(median(later[0])), milliseconds(median(later[1]))),
		better("sidecar/first-call", "ms", milliseconds(median(first[0])), milliseconds(median(first[1]))),
		better("sidecar/rss-10k-services", "x", memory[1][0]/memory[0][0], memory[1][1]/memory[0][1]),
	}, nil
}

func numberedServices(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("company.team%d.v1.Service%05d", i%100, i)
	}
	return names
}

// sidecarSite is an agent with many services, and Envoys beside it.
type sidecarSite struct {
	r      *run
	envoy  string
	dir    string
	server *demo.Sample
	port   int // of egress
	agent  *program
}

// start runs an agent whose services are declared, five endpoints each; those
// that are called are of the one server.
func (s *sidecarSite) start(ctx context.Context, bin string, services int) error {
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.port = l.Addr().(*net.TCPAddr).Port
	_ = l.Close()
	var pods strings.Builder
	pod := func(workload, name, addr string, port int, declared string) {
		fmt.Fprintf(&pods, `---
{"apiVersion":"v1","kind":"Pod","metadata":{"namespace":"prod","name":%q,"uid":%q,"annotations":{"fingerpost.dev/services":%q},"ownerReferences":[{"apiVersion":"apps/v1","kind":"ReplicaSet","name":%q,"uid":%q,"controller":true}]},
"spec":{"nodeName":"n1","containers":[{"name":"app","image":"app"}]},"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}],"conditions":[{"type":"Ready","status":"True"}]}}
`, name, "uid-"+name, fmt.Sprintf("%d=%s", port, declared), workload, "uid-"+workload, addr, addr)
	}
	names := numberedServices(services)
	pod("called", "called-0", s.server.IP(), s.server.Port(), strings.Join(names[:called], ","))
	for i, name := range names[called:] {
		for e := range 5 {
			pod(fmt.Sprintf("w%d", i), fmt.Sprintf("w%d-%d", i, e), fmt.Sprintf("10.%d.%d.%d", 1+e, i>>8, i&255), 50051, name)
		}
	}
	file := filepath.Join(s.dir, "pods.yaml")
	if err := os.WriteFile(file, []byte(pods.String()), 0o644); err != nil {
		return err
	}
	s.agent, err = startProgram(ctx, s.dir, bin, "agent", "--node-name", "n1", "--source", "file:"+file, "--ads-socket", s.ads(),
		"--admin-socket", filepath.Join(s.dir, "admin", "admin.sock"), "--http-address", "", "--peer-address", "", "--state-dir", "",
		"--egress-port", fmt.Sprint(s.port))
	if err != nil {
		return err
	}
	if _, err := s.agent.ready(ctx); err != nil {
		s.agent.stop()
		return err
	}
	return nil
}

func (s *sidecarSite) ads() string { return filepath.Join(s.dir, "run", "ads.sock") }

// calls is how long calls took.
type calls struct{ first, later []time.Duration }

// measure starts an Envoy, weighs it before the first call, and calls.
func (s *sidecarSite) measure(ctx context.Context, clusters string, rounds int) (float64, calls, error) {
	conf, err := bootstrap.Envoy(bootstrap.Options{ADSSocket: s.ads(), NodeID: "prod/bench", Clusters: clusters})
	if err != nil {
		return 0, calls{}, err
	}
	return s.through(ctx, "envoy-"+clusters+".yaml", conf, rounds)
}

func (s *sidecarSite) through(ctx context.Context, file string, conf []byte, rounds int) (memory float64, c calls, err error) {
	path := filepath.Join(s.dir, file)
	if err := os.WriteFile(path, conf, 0o644); err != nil {
		return 0, c, err
	}
	e, err := startProgram(ctx, s.dir, s.envoy, "-c", path, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error")
	if err != nil {
		return 0, c, err
	}
	defer e.stop()
	conn, err := grpc.NewClient(fmt.Sprintf("passthrough:127.0.0.1:%d", s.port), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return 0, c, err
	}
	defer conn.Close()
	call := func(path string) (time.Duration, error) {
		began := time.Now()
		err := conn.Invoke(ctx, path, wrapperspb.String("x"), &emptypb.Empty{})
		return time.Since(began), err
	}
	// A path that names nothing is refused once the sidecar is there.
	if err := e.await(ctx, func() bool {
		_, err := call("/a/b/c")
		return status.Code(err) != codes.Unavailable
	}); err != nil {
		return 0, c, err
	}
	f, err := e.settle(ctx, s.r)
	if err != nil {
		return 0, c, err
	}
	names := numberedServices(called)
	for _, name := range names {
		d, err := call("/" + name + "/Say")
		if err != nil {
			return 0, c, fmt.Errorf("first call of %s: %w", name, err)
		}
		c.first = append(c.first, d)
	}
	for i := range rounds {
		d, err := call("/" + names[i%called] + "/Say")
		if err != nil {
			return 0, c, fmt.Errorf("later call: %w", err)
		}
		c.later = append(c.later, d)
	}
	return f.now, c, nil
}

// static calls through an Envoy that was told by hand what is called: a route and
// a cluster for each service.
func (s *sidecarSite) static(ctx context.Context, rounds int) ([]time.Duration, error) {
	var routes, clusters strings.Builder
	for _, name := range numberedServices(called) {
		fmt.Fprintf(&routes, `
              - match: {prefix: "/%s/"}
                route: {cluster: %q, timeout: 0s}`, name, name)
		fmt.Fprintf(&clusters, `
  - name: %q
    type: STATIC
    connect_timeout: 1s
    load_assignment:
      cluster_name: %q
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: %s, port_value: %d}}}}]}]
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}`, name, name, s.server.IP(), s.server.Port())
	}
	conf := fmt.Sprintf(`
static_resources:
  listeners:
  - name: egress
    address: {socket_address: {address: 127.0.0.1, port_value: %d}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: egress
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: egress
              domains: ["*"]
              routes:
              - match: {prefix: "/a/b/c"}
                direct_response: {status: 404}
%s
          http_filters:
          - name: envoy.filters.http.grpc_stats
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.grpc_stats.v3.FilterConfig, stats_for_all_methods: false}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:%s
`, s.port, routes.String(), clusters.String())
	_, c, err := s.through(ctx, "envoy-static.yaml", []byte(conf), rounds)
	if err == nil && len(c.later) == 0 {
		err = errors.New("no call was made")
	}
	return c.later, err
}
