package main

import (
	"context"
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

// sidecars are real Envoys with clusters on demand. A later call, and one of a
// name that nobody has, take turns with the same through an Envoy that has all in
// its static configuration; a first call is compared with the first one of an
// Envoy that has all clusters already, and memory at 10,000 services, divided by
// that at 100, with that of such a one. Calls that the agent answers take turns
// with the same while another client invents names.
var sidecars = benchmark{names: []string{
	"sidecar/later-call", "sidecar/first-call", "sidecar/unknown-first-call", "sidecar/unknown-later-call",
	"sidecar/invented-names/other-client", "sidecar/rss-10k-services",
}, run: runSidecars}

const (
	// called is how many of the services are called.
	called = 50
	// invented is how many names are called that nobody has: fewer than make a
	// sidecar's route table another one.
	invented = 30
)

// times is how long calls took, in one of two ways.
type times struct{ first, later, unknownFirst, unknownLater, flooded []time.Duration }

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
	var ours, others [2]float64 // memory by size
	var demand, rival times
	for size, services := range []int{small, large} {
		s := &sidecarSite{r: r, envoy: envoy, dir: filepath.Join(r.dir, fmt.Sprintf("sidecar-%d", services)), server: server}
		if err := s.start(ctx, bin, services); err != nil {
			return nil, err
		}
		if ours[size], demand, rival, err = s.onDemand(ctx, rounds); err == nil {
			others[size], rival.first, err = s.all(ctx)
		}
		s.agent.stop()
		if err != nil {
			return nil, fmt.Errorf("%d services: %w", services, err)
		}
		r.progress("sidecar: %d services: on demand %.1f MB, first call %v, later %v, unknown %v and %v; all clusters %.1f MB, first call %v; static: later call %v, unknown %v",
			services, ours[size], median(demand.first), median(demand.later), median(demand.unknownFirst), median(demand.unknownLater),
			others[size], median(rival.first), median(rival.later), median(rival.unknownLater))
	}
	row := func(name string, ours, others []time.Duration) result {
		return better(name, "ms", milliseconds(median(ours)), milliseconds(median(others)))
	}
	return []result{
		row("sidecar/later-call", demand.later, rival.later),
		row("sidecar/first-call", demand.first, rival.first),
		row("sidecar/unknown-first-call", demand.unknownFirst, rival.unknownLater),
		row("sidecar/unknown-later-call", demand.unknownLater, rival.unknownLater),
		row("sidecar/invented-names/other-client", demand.flooded, rival.flooded),
		better("sidecar/rss-10k-services", "x", ours[1]/ours[0], others[1]/others[0]),
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
	var err error
	if s.port, err = freePort(); err != nil {
		return err
	}
	var pods strings.Builder
	pod := func(node, workload, name, addr string, port int, declared string) {
		fmt.Fprintf(&pods, `---
{"apiVersion":"v1","kind":"Pod","metadata":{"namespace":"prod","name":%q,"uid":%q,"annotations":{"fingerpost.dev/services":%q},"ownerReferences":[{"apiVersion":"apps/v1","kind":"ReplicaSet","name":%q,"uid":%q,"controller":true}]},
"spec":{"nodeName":%q,"containers":[{"name":"app","image":"app"}]},"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}],"conditions":[{"type":"Ready","status":"True"}]}}
`, name, "uid-"+name, fmt.Sprintf("%d=%s", port, declared), workload, "uid-"+workload, node, addr, addr)
	}
	names := numberedServices(services)
	// A node has a hundred pods or so: the others are of other nodes.
	pod("n1", "called", "called-0", s.server.IP(), s.server.Port(), strings.Join(names[:called], ","))
	for i, name := range names[called:] {
		for e := range 5 {
			pod(fmt.Sprintf("n%d", 2+i*5/100), fmt.Sprintf("w%d", i), fmt.Sprintf("w%d-%d", i, e), fmt.Sprintf("10.%d.%d.%d", 1+e, i>>8, i&255), 50051, name)
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

// onDemand weighs an Envoy with clusters on demand before its first call, and
// calls through it and one that was told all by hand.
func (s *sidecarSite) onDemand(ctx context.Context, rounds int) (memory float64, demand, static times, err error) {
	conf, err := bootstrap.Envoy(bootstrap.Options{ADSSocket: s.ads(), NodeID: "prod/bench", Clusters: "on-demand"})
	if err != nil {
		return 0, demand, static, err
	}
	e, err := s.open(ctx, "on-demand", conf, s.port)
	if err != nil {
		return 0, demand, static, err
	}
	defer e.close()
	f, err := e.settle(ctx, s.r)
	if err != nil {
		return 0, demand, static, err
	}
	port, err := freePort()
	if err != nil {
		return 0, demand, static, err
	}
	told, err := s.open(ctx, "static", s.static(port), port)
	if err != nil {
		return 0, demand, static, err
	}
	defer told.close()
	names := numberedServices(called)
	if demand.first, err = e.eachOnce(ctx, names); err != nil {
		return 0, demand, static, err
	}
	if _, err = told.eachOnce(ctx, names); err != nil {
		return 0, demand, static, err
	}
	for i := range rounds {
		for _, way := range []struct {
			*sidecar
			*times
		}{{e, &demand}, {told, &static}} {
			d, err := way.call(ctx, names[i%called], codes.OK)
			if err != nil {
				return 0, demand, static, err
			}
			way.later = append(way.later, d)
			nobody := fmt.Sprintf("company.invented.v1.Name%d", i%invented)
			if d, err = way.call(ctx, nobody, codes.Unimplemented); err != nil {
				return 0, demand, static, err
			}
			if i < invented {
				way.unknownFirst = append(way.unknownFirst, d)
			} else {
				way.unknownLater = append(way.unknownLater, d)
			}
		}
	}
	// The other way is the same sidecar while nobody else calls.
	static.flooded, demand.flooded, err = s.beside(ctx, e, rounds)
	return f.now, demand, static, err
}

// all weighs an Envoy that has all clusters, and calls through it.
func (s *sidecarSite) all(ctx context.Context) (memory float64, first []time.Duration, err error) {
	conf, err := bootstrap.Envoy(bootstrap.Options{ADSSocket: s.ads(), NodeID: "prod/bench", Clusters: "all"})
	if err != nil {
		return 0, nil, err
	}
	e, err := s.open(ctx, "all", conf, s.port)
	if err != nil {
		return 0, nil, err
	}
	defer e.close()
	f, err := e.settle(ctx, s.r)
	if err != nil {
		return 0, nil, err
	}
	first, err = e.eachOnce(ctx, numberedServices(called))
	return f.now, first, err
}

// sidecar is an Envoy, and a connection of an application to it.
type sidecar struct {
	*program
	name string
	conn *grpc.ClientConn
}

// open starts an Envoy and waits until it takes calls.
func (s *sidecarSite) open(ctx context.Context, name string, conf []byte, port int) (*sidecar, error) {
	path := filepath.Join(s.dir, "envoy-"+name+".yaml")
	if err := os.WriteFile(path, conf, 0o644); err != nil {
		return nil, err
	}
	p, err := startProgram(ctx, s.dir, s.envoy, "-c", path, "--disable-hot-restart", "--concurrency", "1", "--log-level", "error")
	if err != nil {
		return nil, err
	}
	e := &sidecar{program: p, name: name}
	if e.conn, err = grpc.NewClient(fmt.Sprintf("passthrough:127.0.0.1:%d", port), grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		p.stop()
		return nil, err
	}
	// A path that names nothing is refused once the sidecar is there.
	if err := p.await(ctx, func() bool {
		err := e.conn.Invoke(ctx, "/a/b/c", wrapperspb.String("x"), &emptypb.Empty{})
		return status.Code(err) != codes.Unavailable
	}); err != nil {
		e.close()
		return nil, err
	}
	return e, nil
}

func (e *sidecar) close() {
	_ = e.conn.Close()
	e.stop()
}

// call returns how long a call took, and an error unless it ended as it should.
func (e *sidecar) call(ctx context.Context, service string, want codes.Code) (time.Duration, error) {
	began := time.Now()
	err := e.conn.Invoke(ctx, "/"+service+"/Say", wrapperspb.String("x"), &emptypb.Empty{})
	took := time.Since(began)
	if status.Code(err) != want {
		return 0, fmt.Errorf("%s: %s gives %v, want %v", e.name, service, err, want)
	}
	return took, nil
}

func (e *sidecar) eachOnce(ctx context.Context, services []string) ([]time.Duration, error) {
	var all []time.Duration
	for _, name := range services {
		d, err := e.call(ctx, name, codes.OK)
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// static is the configuration of an Envoy that was told by hand what is called:
// a route and a cluster for each service. The server itself answers for names
// that it does not have.
func (s *sidecarSite) static(port int) []byte {
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
	return fmt.Appendf(nil, `
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
              - match: {prefix: "/"}
                route: {cluster: %q, timeout: 0s}
          http_filters:
          - name: envoy.filters.http.grpc_stats
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.grpc_stats.v3.FilterConfig, stats_for_all_methods: false}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:%s
`, port, routes.String(), numberedServices(called)[0], clusters.String())
}
