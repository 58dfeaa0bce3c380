package e2e_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// shop is a world of two workloads, the first with two pods.
func shop(t *testing.T) *world {
	w := newWorld(t)
	w.serve("cart-1-a", []string{"shop.v1.Cart"})
	w.serve("cart-1-b", []string{"shop.v1.Cart"})
	w.serve("stock-1-a", []string{"shop.v1.Stock"})
	return w.write()
}

func TestCallsThroughEnvoyReachThePodsOfTheirService(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		w := shop(t)
		s := newSite(t)
		a := s.start(t, "--source", w.source()).ready()
		e := s.sidecar(t, api, "prod/web")

		reaches(t, e.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
		reaches(t, e.conn, "shop.v1.Stock", "stock-1-a")
		stream, err := demo.Chat(t.Context(), e.conn, "shop.v1.Stock")
		if err != nil {
			t.Fatal(err)
		}
		for i := range 100 {
			said := fmt.Sprint(i)
			if answer, err := stream.Ask(said); err != nil || answer != "stock-1-a: "+said {
				t.Fatalf("answer %d of a stream: %q, %v", i, answer, err)
			}
		}
		if err := stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
		if err := stream.RecvMsg(&wrapperspb.StringValue{}); !errors.Is(err, io.EOF) {
			t.Errorf("end of a stream: %v", err)
		}

		for _, c := range []struct {
			name, authority, method string
			code                    codes.Code
			says                    string
		}{
			{"a service that nobody has", "", "/shop.v1.Nobody/Say", codes.Unimplemented, "unknown service shop.v1.Nobody in namespace prod"},
			{"a path of three parts", "", "/a/b/c", codes.Unimplemented, "malformed"},
			{"health", "", "/grpc.health.v1.Health/Check", codes.Unimplemented, "grpc.health.v1.Health"},
			{"the agent's own protocol", "", "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources", codes.Unimplemented, "unknown service"},
			{"a method that the server lacks", "", "/shop.v1.Cart/Nothing", codes.Unimplemented, "unknown method Nothing"},
			{"an authority that names nothing", "cart.prod:50051", "/shop.v1.Cart/Say", codes.Unavailable, `authority "cart.prod:50051": no Service and no pod of a headless Service has the name`},
			{"localhost", "localhost:80", "/shop.v1.Cart/Say", codes.OK, ""},
		} {
			conn := e.conn
			if c.authority != "" {
				conn = dial(t, e.conn.Target(), grpc.WithAuthority(c.authority))
			}
			err := conn.Invoke(t.Context(), c.method, &wrapperspb.StringValue{}, &emptypb.Empty{})
			if st := status.Convert(err); st.Code() != c.code || !strings.Contains(st.Message(), c.says) {
				t.Errorf("%s: %v, want %v with %q", c.name, err, c.code, c.says)
			}
		}

		e.content()
		a.connected("prod/web", "cds", "eds", "lds", "rds")
		if st := a.status(); st.Proxies != 1 || st.Nacks != 0 {
			t.Errorf("status: %+v", st)
		}
		if out := a.must("status", "--check"); out == "" {
			t.Error("status --check says nothing")
		}
		checkListeners(t, e, s.egress)
		checkTimeouts(t, e)
		for name := range e.stats(`cluster\.prod/shop`) {
			if strings.HasPrefix(name, "cluster.prod/shop_v1_Cart.grpc.") {
				return
			}
		}
		t.Errorf("no gRPC statistics of the cluster: %v", e.stats("grpc"))
	})
}

// checkListeners wants one listener on the egress port of 127.0.0.1, and no
// more.
func checkListeners(t *testing.T, e *sidecar, port int) {
	t.Helper()
	got := strings.TrimSpace(e.Admin(t, "/listeners"))
	if want := fmt.Sprintf("egress::127.0.0.1:%d", port); got != want {
		t.Errorf("Envoy listens at %q, want %q", got, want)
	}
}

// checkTimeouts wants nothing in the configuration that would end a long
// stream.
func checkTimeouts(t *testing.T, e *sidecar) {
	t.Helper()
	d := e.dump()
	for _, key := range []string{"dynamic_route_configs egress", "dynamic_listeners egress"} {
		text := strings.Join(strings.Fields(d[key]), "")
		wants := []string{`"timeout":"0s"`, `"idle_timeout":"0s"`, `"grpc_timeout_header_max":"0s"`}
		if strings.Contains(key, "listeners") {
			wants = []string{`"stream_idle_timeout":"0s"`}
		}
		for _, want := range wants {
			if !strings.Contains(text, want) {
				t.Errorf("%s does not have %s:\n%s", key, want, text)
			}
		}
	}
}

func TestReflectionThroughEnvoyListsWhatCanBeCalled(t *testing.T) {
	w := shop(t)
	s := newSite(t)
	s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	stream, err := reflectionv1.NewServerReflectionClient(e.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(req *reflectionv1.ServerReflectionRequest) *reflectionv1.ServerReflectionResponse {
		t.Helper()
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		resp, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	var names []string
	for _, service := range ask(&reflectionv1.ServerReflectionRequest{
		MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{},
	}).GetListServicesResponse().GetService() {
		names = append(names, service.GetName())
	}
	if want := []string{"shop.v1.Cart", "shop.v1.Stock"}; !slices.Equal(names, want) {
		t.Errorf("services %v, want %v", names, want)
	}
	resp := ask(&reflectionv1.ServerReflectionRequest{
		MessageRequest: &reflectionv1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "shop.v1.Cart"},
	})
	var file descriptorpb.FileDescriptorProto
	files := resp.GetFileDescriptorResponse().GetFileDescriptorProto()
	if len(files) == 0 {
		t.Fatalf("no file with shop.v1.Cart: %v", resp)
	}
	if err := proto.Unmarshal(files[0], &file); err != nil || len(file.GetService()) != 1 || file.GetService()[0].GetName() != "Cart" {
		t.Errorf("file %v, %v", &file, err)
	}
}

func TestCallWaitsForOwnerThatIsBeingAsked(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		w := newWorld(t).write()
		s := newSite(t)
		a := s.start(t, "--source", w.source()).ready()
		e := s.sidecar(t, api, "prod/web")
		if _, err := say(t, e.conn, "shop.v1.Late"); status.Code(err) != codes.Unimplemented {
			t.Fatalf("%v, want UNIMPLEMENTED", err)
		}
		h := newReflectionHold()
		h.hold()
		w.serve("late-1-a", []string{"shop.v1.Late"}, h.option())
		w.write()
		h.waitAsked(t)
		_, err := say(t, e.conn, "shop.v1.Late")
		if st := status.Convert(err); st.Code() != codes.Unavailable || !strings.Contains(st.Message(), "ReplicaSet/late-1 is being asked") {
			t.Errorf("%v, want UNAVAILABLE naming ReplicaSet/late-1", err)
		}
		h.release()
		reaches(t, e.conn, "shop.v1.Late", "late-1-a")
		e.content()
		a.connected("prod/web", "cds", "eds")
	})
}

// A pod that cannot be asked may serve anything: a name that nobody else has
// is not impossible.
func TestCallIsToldWhyAnOwnerCouldNotBeAsked(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		w := shop(t)
		w.add(newPod("broken-1-a", nextAddr(), harness.FreePort(t))) // nobody listens there
		w.write()
		s := newSite(t)
		s.start(t, "--source", w.source()).ready()
		e := s.sidecar(t, api, "prod/web")
		harness.Eventually(t, soon, func() error {
			_, err := say(t, e.conn, "shop.v1.Nobody")
			st := status.Convert(err)
			if st.Code() != codes.Unavailable || !strings.Contains(st.Message(), "ReplicaSet/broken-1 could not be asked what it serves: port") ||
				!strings.Contains(st.Message(), "refused") {
				return fmt.Errorf("%w, want UNAVAILABLE with the reason of ReplicaSet/broken-1", err)
			}
			return nil
		})
		reaches(t, e.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
	})
}

func TestAccessLogIsTurnedOnAtRuntime(t *testing.T) {
	w := shop(t)
	s := newSite(t)
	s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	reaches(t, e.conn, "shop.v1.Stock", "stock-1-a")
	if _, err := e.Post("/runtime_modify?" + resources.RuntimeAccessLog + "=100"); err != nil {
		t.Fatal(err)
	}
	e.WaitFor(t, soon, func() error {
		if _, err := say(t, e.conn, "shop.v1.Cart"); err != nil {
			return err
		}
		for line := range strings.Lines(e.Log()) {
			var l map[string]any
			if json.Unmarshal([]byte(line), &l) != nil {
				continue
			}
			if l["path"] == "/shop.v1.Stock/Say" {
				t.Fatal("the log was on before")
			}
			if l["path"] == "/shop.v1.Cart/Say" && l["cluster"] == "prod/shop.v1.Cart" && l["grpc_status"] == "OK" {
				return nil
			}
		}
		return errors.New("no line of the call in Envoy's log")
	})
}

func TestRestartOfAgentTakesNothingFromEnvoy(t *testing.T) {
	for _, end := range []struct {
		name string
		how  func(*agentProcess)
	}{{"stop", (*agentProcess).stop}, {"kill", (*agentProcess).kill}} {
		t.Run(end.name, func(t *testing.T) {
			eachAPI(t, func(t *testing.T, api string) {
				w := shop(t)
				s := newSite(t)
				a := s.start(t, "--source", w.source()).ready()
				e := s.sidecar(t, api, "prod/web")
				reaches(t, e.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
				e.content()
				a.connected("prod/web", "cds", "eds", "lds", "rds")
				dump, changes := e.dump(), e.changes()
				answered, stop := load(t, e.conn, "shop.v1.Cart")

				proceeds(t, answered)
				end.how(a)
				e.WaitFor(t, soon, func() error {
					if n, _ := e.Stat("control_plane.connected_state"); n != 0 {
						return errors.New("Envoy is still connected")
					}
					return nil
				})
				proceeds(t, answered)
				same(t, "without the agent", dump, e.dump())
				a = s.start(t, "--source", w.source()).ready()
				a.connected("prod/web")
				e.content()
				proceeds(t, answered)

				// What comes now comes after whatever the agent had to say first.
				w.serve("cart-1-c", []string{"shop.v1.Cart"})
				before := e.dump()
				if api == "delta" {
					same(t, "after the restart", dump, before)
					same(t, "after the restart", changes, e.changes())
					for _, kind := range []string{"cds", "eds", "lds", "rds"} {
						if n := a.metric(fmt.Sprintf("fingerpost_ads_resources_total{type=%q}", kind)); n != "0" {
							t.Errorf("%s: %s resources were sent to a client that has them", kind, n)
						}
					}
				}
				w.write()
				reaches(t, e.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b", "cart-1-c")
				stop()
				for name, value := range e.stats("(cluster|listener)_(modified|removed)$") {
					if value != "0" {
						t.Errorf("%s is %s", name, value)
					}
				}
				e.content()
			})
		})
	}
}

func TestHangingReflectionAfterRestartTakesNothingFromEnvoy(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		w := newWorld(t)
		h := newReflectionHold()
		w.serve("cart-1-a", []string{"shop.v1.Cart"}, h.option())
		w.serve("stock-1-a", []string{"shop.v1.Stock"})
		w.write()
		s := newSite(t)
		a := s.start(t, "--source", w.source()).ready()
		e := s.sidecar(t, api, "prod/web")
		reaches(t, e.conn, "shop.v1.Cart", "cart-1-a")
		reaches(t, e.conn, "shop.v1.Stock", "stock-1-a")
		a.connected("prod/web", "cds", "eds", "lds", "rds")
		dump := e.dump()
		cart, stopCart := load(t, e.conn, "shop.v1.Cart")
		stock, stopStock := load(t, e.conn, "shop.v1.Stock")

		h.hold()
		defer h.release()
		a.kill()
		a = s.start(t, "--source", w.source())
		h.waitAsked(t)
		if code, body, err := a.get("/ready"); err != nil || code != http.StatusServiceUnavailable || !strings.Contains(body, "ReplicaSet/cart-1") {
			t.Errorf("/ready while an owner is asked: %d %s %v", code, body, err)
		}
		a.ready() // past the bound
		a.connected("prod/web")
		proceeds(t, cart)
		proceeds(t, stock)
		if api == "delta" {
			w.serve("stock-1-b", []string{"shop.v1.Stock"})
			w.write()
			reaches(t, e.conn, "shop.v1.Stock", "stock-1-a", "stock-1-b")
			e.content()
		}
		stopCart()
		stopStock()
		for name, value := range e.stats("(cluster|listener)_(modified|removed)$") {
			if value != "0" {
				t.Errorf("%s is %s", name, value)
			}
		}
		after := e.dump()
		delete(dump, "dynamic_endpoint_configs prod/shop.v1.Stock")
		delete(after, "dynamic_endpoint_configs prod/shop.v1.Stock")
		same(t, "after the restart", dump, after)
	})
}

// stays tells that a stream is served by one pod until it ends.
func stays(t *testing.T, stream *demo.Stream, pod string) {
	t.Helper()
	if answer, err := stream.Ask("here"); err != nil || answer != pod+": here" {
		t.Errorf("a stream of %s: %q, %v", pod, answer, err)
	}
}

// onPod opens a stream that the pod serves.
func onPod(t *testing.T, conn *grpc.ClientConn, service, pod string) *demo.Stream {
	t.Helper()
	var found *demo.Stream
	harness.Eventually(t, soon, func() error {
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := demo.Chat(ctx, conn, service)
		var answer string
		if err == nil {
			answer, err = stream.Ask("first")
		}
		if err == nil && answer != pod+": first" {
			err = fmt.Errorf("%q", answer)
		}
		if err != nil {
			cancel()
			return fmt.Errorf("no stream of %s comes to %s: %w", service, pod, err)
		}
		t.Cleanup(cancel)
		found = stream
		return nil
	})
	return found
}
