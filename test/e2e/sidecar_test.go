package e2e_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// eachAPI runs a test with an Envoy of either protocol.
func eachAPI(t *testing.T, f func(t *testing.T, api string)) {
	for _, api := range []string{"delta", "sotw"} {
		t.Run(api, func(t *testing.T) { f(t, api) })
	}
}

// eachMode runs a test with an Envoy that fetches its clusters on demand, and with
// Envoys of either protocol that have all.
func eachMode(t *testing.T, f func(t *testing.T, api string)) {
	for _, api := range []string{"delta", "all", "sotw"} {
		t.Run(api, func(t *testing.T) { f(t, api) })
	}
}

// sidecar is an Envoy on the bootstrap that the program prints, and a
// connection of its application.
type sidecar struct {
	*harness.Envoy
	t    *testing.T
	conn *grpc.ClientConn
}

// sidecar starts the Envoy of the pod that the id names, and waits until it is
// ready.
func (s *site) sidecar(t *testing.T, api, id string) *sidecar {
	t.Helper()
	e := s.earlySidecar(t, api, id)
	e.WaitReady(t, soon)
	return e
}

// earlySidecar is a sidecar that need not be ready: the agent may not be there.
func (s *site) earlySidecar(t *testing.T, api, id string) *sidecar {
	t.Helper()
	return s.sidecarIn(t, nil, api, id)
}

// sidecarIn is an earlySidecar in a network, from which its application calls;
// nil is this process's own.
func (s *site) sidecarIn(t *testing.T, in *harness.Network, api, id string) *sidecar {
	t.Helper()
	args := []string{"bootstrap", "--format", "envoy", "--ads-socket", s.ads, "--node-id", id, "--api", api}
	if api == "all" {
		args = append(args[:len(args)-1], "delta", "--clusters", "all")
	}
	conf, errs, code := run(t, args...)
	if code != 0 || errs != "" {
		t.Fatalf("fingerpost bootstrap: exit %d, %s", code, errs)
	}
	e := &sidecar{Envoy: harness.StartEnvoy(t, conf, harness.EnvoyOptions{Network: in}), t: t}
	e.conn = s.app(t, in, "")
	return e
}

// app is a connection of an application in a network to its sidecar, for calls
// to an authority; empty for those that name the gRPC service alone.
func (s *site) app(t *testing.T, in *harness.Network, authority string) *grpc.ClientConn {
	t.Helper()
	opts := []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return in.Dial(ctx, "tcp", addr) })}
	if authority != "" {
		opts = append(opts, grpc.WithAuthority(authority))
	}
	return dial(t, fmt.Sprintf("passthrough:127.0.0.1:%d", s.egress), opts...)
}

func dial(t *testing.T, target string, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(target, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// deadline is a context that ends with the test or soon.
func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	t.Cleanup(cancel)
	return ctx
}

// say makes one call and returns who answered.
func say(t testing.TB, conn *grpc.ClientConn, service string, opts ...grpc.CallOption) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	return demo.Say(ctx, conn, service, opts...)
}

// reaches waits until exactly these pods answer calls of the service.
func reaches(t testing.TB, conn *grpc.ClientConn, service string, pods ...string) {
	t.Helper()
	slices.Sort(pods)
	harness.Eventually(t, soon, func() error {
		by := map[string]bool{}
		for range 10 * len(pods) {
			who, err := say(t, conn, service)
			if err != nil {
				return err
			}
			by[who] = true
		}
		if got := slices.Sorted(maps.Keys(by)); !slices.Equal(got, pods) {
			return fmt.Errorf("calls of %s are answered by %v, want %v", service, got, pods)
		}
		return nil
	})
}

// load calls a service all the time, until stop, which returns how many calls
// were answered and fails the test if one was not.
func load(t *testing.T, conn *grpc.ClientConn, service string) (answered func() int64, stop func()) {
	t.Helper()
	return loading(t, func(n int64) error {
		if _, err := say(t, conn, service); err != nil {
			return fmt.Errorf("call %d of %s failed: %w", n, service, err)
		}
		return nil
	})
}

// loading makes one call after the other, until stop or until one fails, which
// fails the test at stop.
func loading(t *testing.T, call func(n int64) error) (answered func() int64, stop func()) {
	t.Helper()
	var n atomic.Int64
	var failed error // read once the calls have ended
	end := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
			}
			if failed = call(n.Load()); failed != nil {
				return
			}
			n.Add(1)
		}
	})
	stop = sync.OnceFunc(func() {
		close(end)
		done.Wait()
		if failed != nil {
			t.Error(failed)
		}
	})
	t.Cleanup(stop)
	return n.Load, stop
}

// proceeds waits until some more calls were answered.
func proceeds(t *testing.T, answered func() int64) {
	t.Helper()
	more := answered() + 20
	harness.Eventually(t, soon, func() error {
		if answered() < more {
			return fmt.Errorf("no more than %d calls were answered", answered())
		}
		return nil
	})
}

// hosts are the endpoints of a cluster with their health as the agent gave it.
func (e *sidecar) hosts(cluster string) (map[string]string, error) {
	var all struct {
		Clusters []struct {
			Name  string `json:"name"`
			Hosts []struct {
				Address struct {
					Socket struct {
						Address string `json:"address"`
						Port    int    `json:"port_value"`
					} `json:"socket_address"`
				} `json:"address"`
				Health struct {
					EDS string `json:"eds_health_status"`
				} `json:"health_status"`
			} `json:"host_statuses"`
		} `json:"cluster_statuses"`
	}
	text, err := e.Get("/clusters?format=json")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, err
	}
	for _, c := range all.Clusters {
		if c.Name != cluster {
			continue
		}
		hosts := map[string]string{}
		for _, h := range c.Hosts {
			hosts[fmt.Sprintf("%s:%d", h.Address.Socket.Address, h.Address.Socket.Port)] = h.Health.EDS
		}
		return hosts, nil
	}
	return nil, fmt.Errorf("there is no cluster %s", cluster)
}

// has waits until the cluster, which a call fetches, has exactly these endpoints.
func (e *sidecar) has(cluster string, want map[string]string) {
	e.t.Helper()
	if _, err := e.hosts(cluster); err != nil {
		_, service, _ := strings.Cut(cluster, "/")
		_, _ = say(e.t, e.conn, service)
	}
	e.WaitFor(e.t, soon, func() error {
		got, err := e.hosts(cluster)
		if err == nil && !maps.Equal(got, want) {
			err = fmt.Errorf("cluster %s has %v, want %v", cluster, got, want)
		}
		return err
	})
}

// stats are all counters and gauges whose name matches.
func (e *sidecar) stats(filter string) map[string]string {
	e.t.Helper()
	all := map[string]string{}
	for line := range strings.Lines(e.Admin(e.t, "/stats?filter="+filter)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			all[name] = value
		}
	}
	return all
}

// content reports whether Envoy took all that it was sent and waits for
// nothing.
func (e *sidecar) content() {
	e.t.Helper()
	e.WaitFor(e.t, soon, func() error {
		for name, want := range map[string]uint64{
			"control_plane.connected_state":                 1,
			"cluster_manager.warming_clusters":              0,
			"listener_manager.total_listeners_warming":      0,
			"cluster_manager.cds.init_fetch_timeout":        0,
			"listener_manager.lds.init_fetch_timeout":       0,
			"listener_manager.total_filter_chains_draining": 0,
		} {
			if got, ok := e.Stat(name); !ok || got != want {
				return fmt.Errorf("%s is %d (%t), want %d", name, got, ok, want)
			}
		}
		return nil
	})
	for _, filter := range []string{"update_rejected", "update_failure", "lua.errors"} {
		for name, value := range e.stats(filter) {
			// Each lost connection to the agent counts as a failed update.
			if filter != "update_failure" && value != "0" {
				e.t.Errorf("%s is %s", name, value)
			}
		}
	}
}

// changes counts what Envoy added, changed and removed so far.
func (e *sidecar) changes() map[string]string {
	e.t.Helper()
	all := e.stats("(cluster_manager.cluster_|listener_manager.listener_)(added|modified|removed)$")
	maps.Copy(all, e.stats("membership_(total|change)$"))
	return all
}

// dump is the dynamic configuration of Envoy: for each resource its version,
// when it came, and what it says.
func (e *sidecar) dump() map[string]string {
	e.t.Helper()
	var d struct {
		Configs []map[string]json.RawMessage `json:"configs"`
	}
	if err := json.Unmarshal([]byte(e.Admin(e.t, "/config_dump?include_eds")), &d); err != nil {
		e.t.Fatal(err)
	}
	all := map[string]string{}
	for _, section := range d.Configs {
		for kind, raw := range section {
			var resources []json.RawMessage
			if !strings.HasPrefix(kind, "dynamic_") || json.Unmarshal(raw, &resources) != nil {
				continue
			}
			for _, r := range resources {
				var id struct {
					Name    string                `json:"name"`
					Cluster struct{ Name string } `json:"cluster"`
					Routes  struct{ Name string } `json:"route_config"`
					CLA     struct {
						Name string `json:"cluster_name"`
					} `json:"endpoint_config"`
				}
				if err := json.Unmarshal(r, &id); err != nil {
					e.t.Fatal(err)
				}
				all[kind+" "+cmp.Or(id.Name, id.Cluster.Name, id.Routes.Name, id.CLA.Name)] = string(r)
			}
		}
	}
	return all
}

// same fails the test where two dumps differ.
func same(t *testing.T, what string, before, after map[string]string) {
	t.Helper()
	for key := range before {
		if before[key] != after[key] {
			t.Errorf("%s: %s was\n%s\nand is\n%s", what, key, before[key], after[key])
		}
	}
	for key := range after {
		if _, ok := before[key]; !ok {
			t.Errorf("%s: %s is new:\n%s", what, key, after[key])
		}
	}
}

// connected waits until the agent has a client of this id that has accepted
// what it was sent, and returns it.
func (a *agentProcess) connected(id string, types ...string) {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		for _, p := range a.proxies() {
			if p.ID != id {
				continue
			}
			for name, s := range p.Types {
				if s.Nack != nil {
					a.t.Fatalf("%s refuses %s: %s", id, name, s.Nack.Error)
				}
			}
			for _, name := range types {
				if s := p.Types[name]; s.Acked == "" || s.Acked != s.Sent {
					return fmt.Errorf("%s has accepted %q of %s, sent is %q", id, s.Acked, name, s.Sent)
				}
			}
			return nil
		}
		return fmt.Errorf("%s is not connected", id)
	})
}

// metric returns the value of a metric of the agent, named with its labels as
// printed.
func (a *agentProcess) metric(name string) string {
	a.t.Helper()
	_, text, err := a.get("/metrics")
	if err != nil {
		a.t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+" "); ok {
			return value
		}
	}
	a.t.Fatalf("the agent has no metric %s:\n%s", name, text)
	return ""
}

// reflectionHold holds back the reflection of servers that have its option.
type reflectionHold struct {
	asked chan struct{} // one for each call of reflection that waits, as far as it has room

	// mu guards free: closed while nothing is held.
	mu   sync.Mutex
	free chan struct{}
}

func newReflectionHold() *reflectionHold {
	h := &reflectionHold{asked: make(chan struct{}, 1), free: make(chan struct{})}
	close(h.free)
	return h
}

func (h *reflectionHold) hold() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.free = make(chan struct{})
}

func (h *reflectionHold) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.free)
}

func (h *reflectionHold) option() grpc.ServerOption {
	return grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		if strings.HasPrefix(info.FullMethod, "/grpc.reflection.") {
			h.mu.Lock()
			free := h.free
			h.mu.Unlock()
			select {
			case <-free:
			default:
				select {
				case h.asked <- struct{}{}:
				default:
				}
				select {
				case <-free:
				case <-s.Context().Done():
					return s.Context().Err()
				}
			}
		}
		return handle(srv, s)
	})
}

// waitAsked waits until a server is asked and does not answer.
func (h *reflectionHold) waitAsked(t *testing.T) {
	t.Helper()
	select {
	case <-h.asked:
	case <-time.After(soon):
		t.Fatal("no server was asked for reflection")
	}
}
