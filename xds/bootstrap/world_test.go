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
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

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
		UID: workload + at.String(), Name: workload + "-1", Node: "n1", State: state, Addr: at.Addr(),
		Common: &nodecache.Common{
			Namespace: "prod", Owner: nodecache.OwnerKey{UID: workload}, OwnerName: "ReplicaSet/" + workload,
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: workload},
			Declared: []nodecache.Declared{{Port: at.Port(), Services: services}},
		},
	})
}

// service puts a Service with port 80 in front of the pods of a workload.
func (w *world) service(name, ip, workload string) {
	w.cache.UpsertFront(&nodecache.Front{
		UID: name, Namespace: "prod", Name: name, Type: "ClusterIP", Selects: true,
		ClusterIPs: []netip.Addr{netip.MustParseAddr(ip)}, Ports: []nodecache.FrontPort{{Name: "grpc", Port: 80}},
	})
	s := &nodecache.Slice{UID: name, Namespace: "prod", Name: name, Service: name}
	for _, o := range w.cache.Owners() {
		for _, p := range o.Pods {
			if o.Key.UID == workload {
				s.Ports = []nodecache.SlicePort{{Name: "grpc", Port: p.Declared[0].Port}}
				s.Endpoints = append(s.Endpoints, nodecache.Endpoint{Pod: p.UID, Ready: true, Serving: true})
			}
		}
	}
	w.cache.UpsertSlice(s)
}

// updates compiles everything the directory holds.
func (w *world) updates() []*xds.Resource {
	w.t.Helper()
	var keys []nodecache.OwnerKey
	for _, o := range w.cache.Owners() {
		keys = append(keys, o.Key)
	}
	all := append(w.compiler.Initial().Set, w.compiler.Apply(w.cache, keys).Set...)
	ns, err := w.compiler.Namespace("prod", resources.AllClusters)
	if err != nil {
		w.t.Fatal(err)
	}
	all = append(all, ns.Set...)
	return append(all, w.compiler.Aliases(w.cache, "prod").Set...)
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
	clusters, assigned := map[string]*clusterv3.Cluster{}, map[string]*endpointv3.ClusterLoadAssignment{}
	listener, routes := &listenerv3.Listener{}, &routev3.RouteConfiguration{}
	for _, r := range w.updates() {
		switch {
		case r.Type == xds.Cluster:
			clusters[r.Name] = decode(t, r.Body, &clusterv3.Cluster{})
		case r.Type == xds.Endpoint:
			assigned[r.Name] = decode(t, r.Body, &endpointv3.ClusterLoadAssignment{})
		case r.Type == xds.Route:
			decode(t, r.Body, routes)
		case r.Name == "egress":
			decode(t, r.Body, listener)
		}
	}
	for name, c := range clusters {
		if cla := assigned[name]; cla != nil {
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
	cmd := exec.Command(harness.Tool(t, "envoy"), "-c", path, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")
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
	harness.Eventually(w.t, 20*time.Second, func() error {
		if ok() {
			return nil
		}
		return fmt.Errorf("not %s\n%s", what, w.out.String())
	})
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

type knowledge struct {
	*resources.Compiler
	dir *nodecache.Directory
}

func (k knowledge) Resolve(namespace, authority, service string) resources.Named {
	return k.Compiler.Resolve(k.dir, namespace, authority, service)
}

// serveUnknown runs the server for unknown names where the sidecar looks for it.
func (w *world) serveUnknown(o unknown.Options) {
	w.t.Helper()
	l, err := net.Listen("unix", filepath.Join(w.dir, bootstrap.UnknownSocket))
	if err != nil {
		w.t.Fatal(err)
	}
	s := unknown.New(knowledge{w.compiler, w.cache}, o)
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
