package e2e_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/test/harness"
)

// speaksAsProd calls with the header in which a sidecar says whose it is, forged
// to be of namespace test, and fails unless the answers are for prod: test has
// test.Only, prod has shop.Web.
func speaksAsProd(t *testing.T, what string, conn *grpc.ClientConn) {
	t.Helper()
	for _, forged := range [][]string{{"test/only-1-a"}, {"test/~"}, {"test/only-1-a", "test/only-1-a"}, {""}} {
		ctx := deadline(t)
		for _, v := range forged {
			ctx = metadata.AppendToOutgoingContext(ctx, "fingerpost-node", v)
		}
		err := conn.Invoke(ctx, "/test.Only/Say", &wrapperspb.StringValue{}, &emptypb.Empty{})
		if st := status.Convert(err); st.Code() != codes.Unimplemented || st.Message() != "unknown service test.Only in namespace prod" {
			t.Errorf("%s, header %q: %v", what, forged, err)
		}
		stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
		if err == nil {
			err = stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}})
		}
		if err != nil {
			t.Fatal(err)
		}
		if resp, err := stream.Recv(); err != nil || !strings.Contains(resp.String(), "shop.Web") || strings.Contains(resp.String(), "test.Only") {
			t.Errorf("%s, header %q: services are %v, %v", what, forged, resp, err)
		}
	}
}

// An application cannot speak as another pod by the header of its sidecar, whose
// own word it is: neither through the sidecar, proved or not, nor past it where the
// kernel proves who it is.
func TestForgedHeaderOfASidecarSpeaksForNobodyElse(t *testing.T) {
	s, w := newSite(t), newWorld(t)
	s.network = harness.NewNetwork(t)
	_, web := s.wiredPod(w, "prod", "web-1-a", "10.81.0.2", "shop.Web")
	s.wiredPod(w, "test", "only-1-a", "10.81.0.3", "test.Only")
	a := s.start(t, "--source", w.write().source()).ready()

	unknown := dialFrom(t, web, filepath.Join(filepath.Dir(s.ads), "unknown.sock"), "127.0.0.1:15001")
	t.Cleanup(func() { unknown.Close() })
	speaksAsProd(t, "past the sidecar of a proved pod", unknown)

	for _, api := range []string{"delta", "all", "sotw"} {
		loose := harness.NewNetwork(t)
		e := s.sidecarIn(t, loose, api, "prod/loose-1-a")
		e.WaitReady(t, soon)
		if p, err := a.identityOf("prod/loose-1-a"); err != nil || p.Identity.Pod != "" {
			t.Errorf("%+v, %v", p, err)
		}
		speaksAsProd(t, api+", unproved", e.conn)
		if api == "delta" {
			// With the route table that asks for no unknown name the header is of another
			// cluster.
			for i := range 70 {
				if _, err := say(t, e.conn, fmt.Sprintf("invented.S%d", i)); status.Code(err) != codes.Unimplemented {
					t.Fatal(err)
				}
			}
			if got := a.metric("fingerpost_on_demand_exchanged_total"); got != "1" {
				t.Fatalf("tables were exchanged %s times", got)
			}
			speaksAsProd(t, "asking, unproved", e.conn)
		}
		e.Stop()
	}

	e := s.sidecarIn(t, web, "delta", "test/only-1-a") // even its node.id is another's
	e.WaitReady(t, soon)
	if p, err := a.identityOf("test/only-1-a"); err != nil || p.Identity.Pod != "prod/web-1-a" {
		t.Errorf("%+v, %v", p, err)
	}
	speaksAsProd(t, "a proved pod's sidecar with another's node.id", e.conn)
}

// A Service that is but a DNS name is followed by its gRPC service's name alone.
// By its own name it is refused with the reason, until it is a Service with pods.
func TestExternalNameByItsOwnNameSaysWhyItIsNotFollowed(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, api string) {
		m := newMesh(t)
		outside, _ := m.serve("outside-1-a", []string{"bank.Accounts"})
		declared := external(1, "localhost", int(outside.Spec.Containers[0].Ports[0].ContainerPort))
		mute := external(2, "localhost", 1)
		mute.Name, mute.UID, mute.Annotations = "mute", "uid-mute", nil
		m.services["outside"], m.services["mute"] = []any{declared}, []any{mute}
		m.put()
		e := m.sidecar(t, api, "prod/me")
		for _, name := range []string{"outside", "mute"} {
			for _, authority := range []string{name, name + ".prod.svc.cluster.local.", name + ":80"} {
				m.fails(authority, "bank.Accounts", codes.Unavailable, "Service prod/"+name+" is but another name for localhost (ExternalName), which a sidecar does not follow")
			}
		}
		m.front("mute", outside)
		m.put()
		for _, authority := range []string{"mute", "mute:80"} {
			reaches(t, m.at(authority), "bank.Accounts", "outside-1-a")
		}
		m.services["mute"] = []any{mute}
		m.put()
		m.fails("mute", "bank.Accounts", codes.Unavailable, "is but another name for localhost (ExternalName)")
		e.content()
	})
}
