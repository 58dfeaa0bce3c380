package e2e_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

// goldenServices is what a collect of the golden proto set brings, whatever
// server has it.
var goldenServices = []string{
	"golden.admin.v1.Admin: Drop Purge",
	"golden.v1.Cart: Add Get Watch",
	"golden.v1.Stock: Count",
}

// unhurried bears with a JVM that has to load its classes first, on a machine
// that does many things.
var unhurried = collect.Budget{Connect: soon, Wall: soon}

// serveGoldenGo serves the golden proto set with grpc-go.
func serveGoldenGo(t *testing.T, ip string) netip.AddrPort {
	files, err := protodesc.NewFiles(harness.Golden(t))
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	files.RangeFiles(func(fd protoreflect.FileDescriptor) bool {
		for i := range fd.Services().Len() {
			desc := &grpc.ServiceDesc{ServiceName: string(fd.Services().Get(i).FullName()), HandlerType: (*any)(nil), Metadata: fd.Path()}
			s.RegisterService(desc, struct{}{})
		}
		return true
	})
	reflectionpb.RegisterServerReflectionServer(s, reflection.NewServerV1(reflection.ServerOptions{Services: s, DescriptorResolver: files}))
	lis, err := net.Listen("tcp", ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(lis) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return lis.Addr().(*net.TCPAddr).AddrPort()
}

// The same proto set gives the same result, whichever implementation of gRPC
// reflects it.
func TestServersOfEveryLanguageAreCollectedAlike(t *testing.T) {
	t.Parallel()
	type server struct {
		name string
		at   netip.AddrPort
		want []string
	}
	servers := []server{
		{"grpc-go", serveGoldenGo(t, nextAddr()), goldenServices},
		{"echo-basic", harness.StartServer(t, harness.EchoBasic, "", true), []string{
			"gateway_api_conformance.echo_basic.grpcecho.GrpcEcho: Echo EchoThree EchoTwo",
		}},
	}
	for _, kind := range []harness.Server{harness.Grpcio, harness.GrpcJS, harness.GrpcJava, harness.Tonic, harness.TonicV1Alpha} {
		servers = append(servers, server{string(kind), harness.StartServer(t, kind, nextAddr(), true), goldenServices})
	}
	w, s := newWorld(t), newSite(t)
	for _, srv := range servers {
		t.Run(srv.name, func(t *testing.T) {
			r, err := collect.Reflect(deadline(t), srv.at, unhurried, nil)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range r.Services {
				got = append(got, s.Name+": "+strings.Join(s.Methods, " "))
			}
			if r.State != nodecache.PortServes || !slices.Equal(got, srv.want) || r.Junk > 0 {
				t.Errorf("%s, services %q, junk %d; want %q", r.State, got, r.Junk, srv.want)
			}
			// @grpc/reflection leaves imports out (grpc-node#2595).
			if want := srv.name != string(harness.GrpcJS); r.Linkable != want {
				t.Errorf("that its files link is %v, want %v", r.Linkable, want)
			}
			again, err := collect.Reflect(deadline(t), srv.at, unhurried, nil)
			if err != nil || !reflect.DeepEqual(r, again) {
				t.Errorf("asked again it gives another result: %v", err)
			}
		})
		w.add(newPod(srv.name+"-1-a", srv.at.Addr().String(), int(srv.at.Port())))
	}

	a := s.start(t, "--source", w.write().source()).ready()
	harness.Eventually(t, soon, func() error {
		for _, o := range a.owners() {
			if o.Knowledge == "failed" {
				return fmt.Errorf("%s failed: %s", o.Name, o.Reason)
			}
		}
		return nil
	})
	for _, o := range a.owners() {
		name := strings.TrimSuffix(strings.TrimPrefix(o.Name, "ReplicaSet/"), "-1")
		i := slices.IndexFunc(servers, func(s server) bool { return s.name == name })
		var want []string
		for _, line := range servers[i].want {
			service, _, _ := strings.Cut(line, ":")
			want = append(want, service)
		}
		if o.Knowledge != "known" || !slices.Equal(o.Services, want) {
			t.Errorf("%s is %s: %v %s, want %v", name, o.Knowledge, o.Services, o.Reason, want)
		}
	}
}

// Servers without reflection are asked and not understood; what they declare is
// called all the same.
func TestServersWithoutReflectionAreServedByDeclaration(t *testing.T) {
	t.Parallel()
	for _, kind := range []harness.Server{harness.Grpcio, harness.GrpcJS, harness.GrpcJava} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			at := harness.StartServer(t, kind, nextAddr(), false)
			if r, err := collect.Reflect(deadline(t), at, unhurried, nil); err != nil || r.State != nodecache.PortNoReflection {
				t.Errorf("its port is %s, %v", r.State, err)
			}
			w, s := newWorld(t), newSite(t)
			p := w.add(newPod("app-1-a", at.Addr().String(), int(at.Port())))
			p.Annotations = map[string]string{"fingerpost.dev/services": "golden.v1.Cart,golden.v1.Stock"}
			a := s.start(t, "--source", w.write().source()).ready()
			if o := a.owners()[0]; o.Knowledge != "known" || o.Origin != "declared" || !slices.Equal(o.Services, []string{"golden.v1.Cart", "golden.v1.Stock"}) {
				t.Errorf("owner %+v", o)
			}
			for _, service := range []string{"golden.v1.Cart", "golden.v1.Stock"} {
				method := map[string]string{"golden.v1.Cart": "Get", "golden.v1.Stock": "Count"}[service]
				conn := s.proxyless(t, "prod/web", service)
				harness.Eventually(t, soon, func() error { return called(deadline(t), conn, "/"+service+"/"+method, string(kind)) })
			}
		})
	}
}

// called makes a unary call that must be answered by who.
func called(ctx context.Context, conn *grpc.ClientConn, method, who string) error {
	out := &wrapperspb.StringValue{}
	if err := conn.Invoke(ctx, method, &wrapperspb.StringValue{}, out, grpc.WaitForReady(true)); err != nil {
		return err
	}
	if out.Value != who {
		return fmt.Errorf("answered by %q, want %q", out.Value, who)
	}
	return nil
}
