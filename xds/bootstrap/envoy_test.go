package bootstrap_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

func validate(t *testing.T, config []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "envoy.yaml")
	if err := os.WriteFile(path, config, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(harness.Tool(t, "envoy"), "-c", path, "--mode", "validate").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestEnvoyAcceptsBootstrap(t *testing.T) {
	for _, o := range []bootstrap.Options{
		{NodeID: "prod/a-1"},
		{NodeID: "prod/a-1", API: "sotw", Clusters: "all", ADSSocket: "/tmp/fp/ads.sock", AdminSocket: "/tmp/fp/admin.sock"},
		{NodeID: "prod/100%-1"},
		{NodeID: "prod/a-1", AdminSocket: "@fingerpost-bootstrap-test", ReadyAddress: "::1", ReadyPort: 15002},
	} {
		b, err := bootstrap.Envoy(o)
		if err != nil {
			t.Fatal(err)
		}
		validate(t, b)
	}
}

func TestCallsThroughEnvoyGoWhereTheirNameSays(t *testing.T) {
	w := newWorld(t, resources.Options{})
	w.pod("a", w.backend("127.0.0.2", answering("a")), nodecache.Serving, "A", "pkg.v1.A")
	w.pod("b", w.backend("127.0.0.3", answering("b")), nodecache.Serving, "pkg.v1.B")
	w.service("cart", "10.96.0.1", "a")
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
		{authority: "users.prod:50051", path: "/pkg.v1.A/Do", code: codes.Unavailable, text: `authority "users.prod:50051": no Service`},
		{authority: "127.0.0.10", path: "/pkg.v1.A/Do", code: codes.Unavailable, text: "the address is no Service's and no pod's"},
		{authority: "cart", path: "/pkg.v1.A/Do", want: "a"},
		{authority: "Cart.", path: "/pkg.v1.A/Do", want: "a"},
		{authority: "cart:80", path: "/pkg.v1.A/Do", want: "a"},
		{authority: "cart.prod", path: "/pkg.v1.A/Do", want: "a"},
		{authority: "cart.prod.svc:80", path: "/pkg.v1.A/Do", want: "a"},
		{authority: "CART.prod.svc.cluster.local.:80", path: "/pkg.v1.A/Do", want: "a"},
		{authority: "cart", path: "/pkg.v1.B/Do", code: codes.Unimplemented, text: "nobody at port 80 of Service prod/cart serves it"},
		{authority: "10.96.0.1", path: "/pkg.v1.A/Do", code: codes.Unavailable, text: "call it as cart.prod:80"},
		{authority: "127.0.0.2:1", path: "/pkg.v1.A/Do", code: codes.Unavailable, text: "needs clusters on demand"},
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

func TestReflectionThroughEnvoyListsTheNamespace(t *testing.T) {
	w := newWorld(t, resources.Options{})
	w.pod("a", w.backend("127.0.0.2", answering("a")), nodecache.Serving, "pkg.v1.A", "pkg.v1.B")
	w.serveUnknown(unknown.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	// What the application says of itself does not count.
	ctx = metadata.AppendToOutgoingContext(ctx, unknown.NodeHeader, "other/pod")
	stream, err := reflectionv1.NewServerReflectionClient(w.start("127.0.0.1:15001")).ServerReflectionInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	resp, err := stream.Recv()
	if err != nil || len(resp.GetListServicesResponse().GetService()) != 2 {
		t.Errorf("%v, %v; want two services", resp, err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Error(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("%v, want the end", err)
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
