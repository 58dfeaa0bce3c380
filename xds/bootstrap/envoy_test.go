package bootstrap_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

// envoyBinary returns the Envoy that the environment names.
func envoyBinary(t *testing.T) string {
	t.Helper()
	path := os.Getenv("ENVOY")
	if path == "" {
		t.Skip("ENVOY does not name an Envoy binary")
	}
	return path
}

func validate(t *testing.T, config []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "envoy.yaml")
	if err := os.WriteFile(path, config, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(envoyBinary(t), "-c", path, "--mode", "validate").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestEnvoyAcceptsBootstrap(t *testing.T) {
	for _, o := range []bootstrap.Options{
		{NodeID: "prod/a-1"},
		{NodeID: "prod/a-1", API: "sotw", Clusters: "all", ADSSocket: "/tmp/fp/ads.sock", AdminSocket: "/tmp/fp/admin.sock"},
		{NodeID: "prod/100%-1"},
	} {
		b, err := bootstrap.Envoy(o)
		if err != nil {
			t.Fatal(err)
		}
		validate(t, b)
	}
}

// world is a sidecar on a static rendering of what the agent would serve, the
// agent's server for unknown names, and backends.
type world struct {
	t        *testing.T
	dir      string
	cache    *nodecache.Directory
	compiler *resources.Compiler
	port     uint16
	out      lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func newWorld(t *testing.T, o resources.Options) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), cache: nodecache.New(nodecache.Options{}), port: freePort(t)}
	o.EgressPort = w.port
	var err error
	if w.compiler, err = resources.New(o); err != nil {
		t.Fatal(err)
	}
	return w
}

func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

// backend serves every method with an empty message until the test ends.
func (w *world) backend(addr string, handle grpc.StreamHandler) netip.AddrPort {
	w.t.Helper()
	l, err := net.Listen("tcp", addr+":0")
	if err != nil {
		w.t.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnknownServiceHandler(handle))
	done := make(chan struct{})
	go func() { _ = s.Serve(l); close(done) }()
	w.t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func answering(name string) grpc.StreamHandler {
	return func(_ any, s grpc.ServerStream) error {
		var in emptypb.Empty
		if err := s.RecvMsg(&in); err != nil {
			return err
		}
		return s.SendMsg(wrapperspb.String(name))
	}
}

// pod puts a pod into the directory that declares the services.
func (w *world) pod(workload string, at netip.AddrPort, state nodecache.PodState, services ...string) {
	w.cache.UpsertPod(&nodecache.Pod{
		UID: workload + at.String(), Namespace: "prod", Name: workload + "-1", Node: "n1",
		Owner: nodecache.OwnerKey{UID: workload}, OwnerName: "ReplicaSet/" + workload,
		Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: workload},
		State:    state, Addr: at.Addr(), Declared: []nodecache.Declared{{Port: at.Port(), Services: services}},
	})
}

// updates compiles everything the directory holds.
func (w *world) updates() []*xds.Resource {
	w.t.Helper()
	var keys []nodecache.OwnerKey
	for _, o := range w.cache.Owners() {
		keys = append(keys, o.Key)
	}
	all := append(w.compiler.Initial().Set, w.compiler.Apply(w.cache, keys).Set...)
	ns, err := w.compiler.Namespace("prod")
	if err != nil {
		w.t.Fatal(err)
	}
	return append(all, ns.Set...)
}

func decode[M proto.Message](t *testing.T, a *anypb.Any, m M) M {
	t.Helper()
	if err := a.UnmarshalTo(m); err != nil {
		t.Fatal(err)
	}
	return m
}

// render writes the bootstrap with all resources as static ones.
func (w *world) render() []byte {
	t := w.t
	t.Helper()
	text, err := bootstrap.Envoy(bootstrap.Options{
		NodeID: "prod/caller%1", ADSSocket: filepath.Join(w.dir, "ads.sock"), AdminSocket: filepath.Join(w.dir, "admin.sock"),
	})
	if err != nil {
		t.Fatal(err)
	}
	if text, err = yaml.YAMLToJSON(text); err != nil {
		t.Fatal(err)
	}
	var b bootstrapv3.Bootstrap
	if err := protojson.Unmarshal(text, &b); err != nil {
		t.Fatal(err)
	}
	b.DynamicResources = nil
	clusters, clas := map[string]*clusterv3.Cluster{}, map[string]*endpointv3.ClusterLoadAssignment{}
	listener, routes := &listenerv3.Listener{}, &routev3.RouteConfiguration{}
	for _, r := range w.updates() {
		switch {
		case r.Type == xds.Cluster:
			clusters[r.Name] = decode(t, r.Body, &clusterv3.Cluster{})
		case r.Type == xds.Endpoint:
			clas[r.Name] = decode(t, r.Body, &endpointv3.ClusterLoadAssignment{})
		case r.Type == xds.Route:
			decode(t, r.Body, routes)
		case r.Name == "egress":
			decode(t, r.Body, listener)
		}
	}
	for name, c := range clusters {
		if cla := clas[name]; cla != nil {
			c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC}
			c.EdsClusterConfig, c.LoadAssignment = nil, cla
		}
		b.StaticResources.Clusters = append(b.StaticResources.Clusters, c)
	}
	filter := listener.GetFilterChains()[0].GetFilters()[0]
	hcm := decode(t, filter.GetTypedConfig(), &hcmv3.HttpConnectionManager{})
	hcm.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: routes}
	packed, err := anypb.New(hcm)
	if err != nil {
		t.Fatal(err)
	}
	filter.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: packed}
	b.StaticResources.Listeners = []*listenerv3.Listener{listener}
	if text, err = protojson.Marshal(&b); err != nil {
		t.Fatal(err)
	}
	return text
}

// start runs Envoy and returns a connection to its egress.
func (w *world) start(authority string) *grpc.ClientConn {
	t := w.t
	t.Helper()
	path := filepath.Join(w.dir, "envoy.json")
	if err := os.WriteFile(path, w.render(), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(envoyBinary(t), "-c", path, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")
	cmd.Stdout, cmd.Stderr = &w.out, &w.out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(w.out.String())
		}
	})
	w.eventually("ready", func() bool { return strings.Contains(w.admin("GET", "/ready"), "LIVE") })
	return w.dial(authority)
}

func (w *world) dial(authority string) *grpc.ClientConn {
	w.t.Helper()
	conn, err := grpc.NewClient(fmt.Sprintf("passthrough:127.0.0.1:%d", w.port),
		grpc.WithAuthority(authority), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close() })
	return conn
}

func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			w.t.Fatalf("not %s in 20 s\n%s", what, w.out.String())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// admin returns what an admin page says, or nothing.
func (w *world) admin(method, path string) string {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(w.dir, "admin.sock"))
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(w.t.Context(), method, "http://admin"+path, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return string(text)
}

// serveUnknown runs the server for unknown names where the sidecar looks for it.
func (w *world) serveUnknown(o unknown.Options) {
	w.t.Helper()
	l, err := net.Listen("unix", filepath.Join(w.dir, bootstrap.UnknownSocket))
	if err != nil {
		w.t.Fatal(err)
	}
	s := unknown.New(w.compiler, o)
	done := make(chan struct{})
	go func() { _ = s.Serve(l); close(done) }()
	w.t.Cleanup(func() { s.Stop(); <-done })
}

func call(t *testing.T, conn *grpc.ClientConn, method string) (string, *status.Status) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var out wrapperspb.StringValue
	err := conn.Invoke(ctx, method, &emptypb.Empty{}, &out)
	return out.GetValue(), status.Convert(err)
}

func TestCallsThroughEnvoyGoWhereTheirNameSays(t *testing.T) {
	w := newWorld(t, resources.Options{})
	w.pod("a", w.backend("127.0.0.2", answering("a")), nodecache.Serving, "A", "pkg.v1.A")
	w.pod("b", w.backend("127.0.0.3", answering("b")), nodecache.Serving, "pkg.v1.B")
	w.serveUnknown(unknown.Options{})
	conn := w.start("127.0.0.1:15001")
	for _, c := range []struct {
		authority, path, want string
		code                  codes.Code
		text                  string
	}{
		{authority: "127.0.0.1:15001", path: "/pkg.v1.A/Do", want: "a"},
		{authority: "LocalHost", path: "/A/Do_2", want: "a"},
		{authority: "localhost.:80", path: "/pkg.v1.B/Do", want: "b"},
		{authority: "[::1]:15001", path: "/pkg.v1.B/Do", want: "b"},
		{authority: "[::1]", path: "/pkg.v1.B/Do", want: "b"},
		{authority: "127.0.0.1", path: "/pkg.v1.C/Do", code: codes.Unimplemented, text: "unknown service pkg.v1.C in namespace prod"},
		{authority: "127.0.0.1", path: "/pkg.v1.A/Do-it", code: codes.Unimplemented, text: "malformed path"},
		{authority: "127.0.0.1", path: "/x/pkg.v1.A/Do", code: codes.Unimplemented, text: "malformed path"},
		{authority: "users.prod:50051", path: "/pkg.v1.A/Do", code: codes.Unavailable, text: `authority "users.prod:50051" names a Service`},
		{authority: "127.0.0.10", path: "/pkg.v1.A/Do", code: codes.Unavailable, text: "names a Service"},
		{authority: "127.0.0.1", path: "/grpc.health.v1.Health/Check", code: codes.Unimplemented, text: "grpc.health.v1.Health in namespace prod"},
	} {
		got, st := call(t, w.dial(c.authority), c.path)
		if got != c.want || st.Code() != c.code || !strings.Contains(st.Message(), c.text) {
			t.Errorf("%s%s: %q, %v; want %q, %v %q", c.authority, c.path, got, st, c.want, c.code, c.text)
		}
	}
	if stats := w.admin("GET", "/stats"); strings.Contains(stats, "lua.errors: ") && !strings.Contains(stats, "lua.errors: 0") {
		t.Error("the route's code fails")
	}
	if strings.Contains(w.out.String(), "/pkg.v1.A/Do") {
		t.Error("the access log is on")
	}
	w.admin("POST", "/runtime_modify?"+resources.RuntimeAccessLog+"=100")
	w.eventually("logged", func() bool {
		call(t, conn, "/pkg.v1.A/Do")
		return strings.Contains(w.out.String(), `"cluster":"prod/pkg.v1.A"`)
	})
	if stats := w.admin("GET", "/stats?filter=cluster.prod"); !strings.Contains(stats, "cluster.prod/pkg_v1_A.upstream_rq_total") {
		t.Errorf("the cluster's statistics have another name:\n%.2000s", stats)
	}
}

// A caller that sends on and on gets its answer all the same.
func TestEnvoyPassesAnswerToStreamThatGoesOnSending(t *testing.T) {
	w := newWorld(t, resources.Options{})
	w.serveUnknown(unknown.Options{})
	conn := w.start("127.0.0.1")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/pkg.S/Do")
	if err != nil {
		t.Fatal(err)
	}
	big := wrapperspb.Bytes(make([]byte, 64<<10))
	for err == nil {
		err = s.SendMsg(big)
	}
	if err := s.RecvMsg(&emptypb.Empty{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("%v, want UNIMPLEMENTED", err)
	}
}

// Without the agent an unknown name passes for absent, not for impossible.
func TestEnvoySaysUnavailableWithoutAgent(t *testing.T) {
	w := newWorld(t, resources.Options{})
	if _, st := call(t, w.start("127.0.0.1"), "/pkg.S/Do"); st.Code() != codes.Unavailable {
		t.Errorf("%v, want UNAVAILABLE", st)
	}
}

func TestEnvoyRetriesWhereNobodyListens(t *testing.T) {
	w := newWorld(t, resources.Options{})
	at := w.backend("127.0.0.2", answering("a"))
	w.pod("a", at, nodecache.Serving, "pkg.S")
	// Nobody listens at these.
	for _, ip := range []string{"127.0.0.3", "127.0.0.4"} {
		w.pod("a", netip.AddrPortFrom(netip.MustParseAddr(ip), at.Port()), nodecache.Serving, "pkg.S")
	}
	conn := w.start("127.0.0.1")
	for range 50 {
		if got, st := call(t, conn, "/pkg.S/Do"); got != "a" {
			t.Fatalf("%q, %v", got, st)
		}
	}
	stats := w.admin("GET", "/stats?filter=prod/pkg_S")
	if !strings.Contains(stats, "prod/pkg_S.upstream_rq_retry_success") {
		t.Errorf("no retry:\n%s", stats)
	}
}

// The last host is not ejected, and UNAVAILABLE ejects nobody and is not
// tried again.
func TestEnvoyEjectsNeitherLastHostNorForStatus(t *testing.T) {
	w := newWorld(t, resources.Options{})
	var calls sync.Map
	at := w.backend("127.0.0.2", func(_ any, s grpc.ServerStream) error {
		calls.Store(s, true)
		return status.Error(codes.Unavailable, "busy")
	})
	w.pod("a", at, nodecache.Serving, "pkg.Busy")
	w.pod("b", netip.MustParseAddrPort("127.0.0.3:1"), nodecache.Serving, "pkg.Gone")
	conn := w.start("127.0.0.1")
	for range 30 {
		if _, st := call(t, conn, "/pkg.Busy/Do"); st.Message() != "busy" {
			t.Fatal(st)
		}
		if _, st := call(t, conn, "/pkg.Gone/Do"); st.Code() != codes.Unavailable {
			t.Fatal(st)
		}
	}
	n := 0
	calls.Range(func(_, _ any) bool { n++; return true })
	if n != 30 {
		t.Errorf("30 calls reached the server %d times", n)
	}
	for _, line := range strings.Split(w.admin("GET", "/stats?filter=ejections_active"), "\n") {
		if line != "" && !strings.HasSuffix(line, ": 0") {
			t.Error(line)
		}
	}
}

func TestEnvoyPrefersServingOverDraining(t *testing.T) {
	w := newWorld(t, resources.Options{})
	w.pod("a", w.backend("127.0.0.2", answering("serving")), nodecache.Serving, "pkg.S")
	for i := range 4 {
		w.pod("a", w.backend(fmt.Sprintf("127.0.0.%d", 3+i), answering("draining")), nodecache.Draining, "pkg.S", "pkg.T")
	}
	conn := w.start("127.0.0.1")
	for range 20 {
		if got, st := call(t, conn, "/pkg.S/Do"); got != "serving" {
			t.Fatalf("%q, %v; want serving", got, st)
		}
		if got, st := call(t, conn, "/pkg.T/Do"); got != "draining" {
			t.Fatalf("%q, %v; want draining", got, st)
		}
	}
}

func TestEnvoyTakesTracing(t *testing.T) {
	w := newWorld(t, resources.Options{Tracing: "otlp:127.0.0.1:1"})
	w.pod("a", w.backend("127.0.0.2", answering("a")), nodecache.Serving, "pkg.S")
	if got, st := call(t, w.start("127.0.0.1"), "/pkg.S/Do"); got != "a" {
		t.Errorf("%q, %v", got, st)
	}
}
