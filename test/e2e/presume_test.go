package e2e_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// refusing answers reflection with the code alone.
func refusing(code codes.Code) grpc.ServerOption {
	return grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		if strings.HasPrefix(info.FullMethod, "/grpc.reflection.") {
			return status.Error(code, "broken")
		}
		return handle(srv, s)
	})
}

// replica is a pod with its server.
type replica struct {
	*corev1.Pod
	*demo.Sample
}

// replicate adds a pod of revision n of cart, at the port or at any if it is 0.
// Revisions are an hour apart.
func (w *world) replicate(n, i, port int, services []string, opts ...grpc.ServerOption) replica {
	w.t.Helper()
	id := fmt.Sprintf("cart-%d-%d", n, i)
	s := sample(w.t, id, port, services, opts...)
	p := w.add(newPod(id, s.IP(), s.Port()))
	p.CreationTimestamp = metav1.NewTime(time.Date(2026, 1, 1, n, i, 0, 0, time.UTC))
	return replica{p, s}
}

// endpointsOf are those of replicas as a cluster has them.
func endpointsOf(rs ...[]replica) map[string]string {
	hosts := map[string]string{}
	for _, r := range slices.Concat(rs...) {
		hosts[r.Addr()] = "HEALTHY"
	}
	return hosts
}

// tally counts who answers calls that go on until stop.
type tally struct {
	// mu guards what follows.
	mu  sync.Mutex
	by  map[string]int
	n   int
	err error
}

// call calls on some streams of the connection at once. The test fails if a call
// does.
func (y *tally) call(t *testing.T, conn *grpc.ClientConn, service string) (stop func()) {
	end := make(chan struct{})
	var done sync.WaitGroup
	y.by = map[string]int{}
	for range 4 {
		done.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				who, err := say(t, conn, service)
				y.mu.Lock()
				y.n++
				y.by[who]++
				if err != nil && y.err == nil {
					y.err = fmt.Errorf("call %d of %s: %w", y.n, service, err)
				}
				failed := y.err != nil
				y.mu.Unlock()
				if failed {
					return
				}
			}
		})
	}
	stop = sync.OnceFunc(func() {
		close(end)
		done.Wait()
		if y.err != nil {
			t.Error(y.err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// count returns who answered the next calls.
func (y *tally) count(t *testing.T, calls int) map[string]int {
	t.Helper()
	y.mu.Lock()
	y.by, y.n = map[string]int{}, 0
	y.mu.Unlock()
	var by map[string]int
	harness.Eventually(t, soon, func() error {
		y.mu.Lock()
		defer y.mu.Unlock()
		if y.err != nil {
			t.Fatal(y.err)
		}
		if y.n < calls {
			return fmt.Errorf("%d calls", y.n)
		}
		by = maps.Clone(y.by)
		return nil
	})
	return by
}

// fair wants no pod of these to get more than its share of the calls. Six
// standard deviations of a choice by lot are noise; Envoy goes round.
func fair(t *testing.T, by map[string]int, serving int, pods []replica) (most float64) {
	t.Helper()
	calls := 0
	for _, n := range by {
		calls += n
	}
	share := 1 / float64(serving)
	noise := 6 * math.Sqrt(share*(1-share)/float64(calls))
	for _, p := range pods {
		got := float64(by[p.Name]) / float64(calls)
		most = max(most, got)
		if got > share+noise {
			t.Errorf("%s got %.3f of %d calls beside %d other pods, want at most %.3f and %.3f of noise", p.Name, got, calls, serving-1, share, noise)
		}
	}
	return most
}

const replicas = 10

// The new revision's reflection is broken. Its pods take their share of the calls
// from the moment in which they are Ready, so that no old pod ever gets more than
// its own, and the service is there without any old pod, also for an agent that
// never saw one.
func TestRolloutWithBrokenReflectionKeepsServiceAndShares(t *testing.T) {
	for _, c := range []struct {
		name, api string
		option    func(*testing.T) grpc.ServerOption
		moved     bool
		knowledge string
		unknown   codes.Code // of a service that nobody is known to have
	}{
		{"denied", "delta", func(*testing.T) grpc.ServerOption { return refusing(codes.PermissionDenied) }, false, "none", codes.Unimplemented},
		{"failing", "sotw", func(*testing.T) grpc.ServerOption { return refusing(codes.Internal) }, false, "failed", codes.Unavailable},
		{"silent", "delta", func(t *testing.T) grpc.ServerOption {
			h := newReflectionHold()
			h.hold()
			t.Cleanup(h.release)
			return h.option()
		}, false, "", codes.Unavailable},
		{"moved to another port", "delta", func(*testing.T) grpc.ServerOption { return refusing(codes.PermissionDenied) }, true, "none", codes.Unimplemented},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w, s, k := newWorld(t), newSite(t), newCheckpoint(t)
			service := "shop.v1.Cart"
			var old, young []replica
			port := 0
			for i := range replicas {
				r := w.replicate(1, i, port, []string{service})
				old, port = append(old, r), r.Port()
			}
			w.write()
			args := []string{"--source", w.source(), "--state-dir", k.Dir}
			a := s.start(t, args...).ready()
			e := s.sidecar(t, c.api, "prod/web")
			reaches(t, e.conn, service, names(old)...)
			e.has("prod/"+service, endpointsOf(old))
			_, _ = say(t, e.conn, "shop.v1.Nobody") // on demand it costs a cluster
			before := e.dump()
			var y tally
			stop := y.call(t, e.conn, service)

			option, most := c.option(t), 0.0
			if c.moved {
				port = 0
			}
			var ending sync.WaitGroup
			for i := range replicas {
				r := w.replicate(2, i, port, []string{service}, option)
				young, port = append(young, r), r.Port()
				w.write()
				e.has("prod/"+service, endpointsOf(old, young))
				most = max(most, fair(t, y.count(t, 600), replicas+1, old)*(replicas+1))

				terminate(old[0].Pod)
				w.write()
				ending.Go(old[0].GracefulStop)
				w.remove(old[0].Pod)
				w.write()
				old = old[1:]
				e.has("prod/"+service, endpointsOf(old, young))
				most = max(most, fair(t, y.count(t, 600), replicas, old)*replicas)
			}
			t.Logf("no old pod got more than %.2f times its share", most)
			fair(t, y.count(t, 600), replicas, young)
			ending.Wait()

			presumed(t, a, service, young, c.knowledge)
			err := e.conn.Invoke(t.Context(), "/shop.v1.Nobody/Say", &wrapperspb.StringValue{}, &emptypb.Empty{})
			if status.Code(err) != c.unknown {
				t.Errorf("a service that nobody has: %v, want %v", err, c.unknown)
			}
			described(t, e.conn, service)
			after := e.dump()
			delete(before, "dynamic_endpoint_configs prod/"+service)
			delete(after, "dynamic_endpoint_configs prod/"+service)
			same(t, "after the rollout", before, after)

			// An agent that begins anew knows the old revision from the checkpoint.
			a.stop()
			a = s.start(t, args...).ready()
			a.connected("prod/web")
			presumed(t, a, service, young, c.knowledge)
			e.has("prod/"+service, endpointsOf(young))
			y.count(t, 100)
			stop()
			e.content()
		})
	}
}

func names(rs []replica) []string {
	var out []string
	for _, r := range rs {
		out = append(out, r.Name)
	}
	return out
}

// presumed wants every pod of revision 2 to be presumed to serve by revision 1,
// and the program to say so.
func presumed(t *testing.T, a *agentProcess, service string, pods []replica, knowledge string) {
	t.Helper()
	harness.Eventually(t, soon, func() error {
		i := slices.IndexFunc(a.services(), func(v resources.ServiceView) bool { return v.Name == service })
		if i < 0 {
			return errors.New("the service is not listed")
		}
		v := a.services()[i]
		if len(v.Endpoints) != len(pods) || slices.ContainsFunc(v.Endpoints, func(e resources.EndpointView) bool { return e.State != "presumed" }) {
			return fmt.Errorf("endpoints %+v", v.Endpoints)
		}
		for _, o := range a.owners() {
			if o.Key != "uid-cart-2/2" {
				continue
			}
			if knowledge != "" && o.Knowledge != knowledge || o.Origin != "" && o.Knowledge == "failed" || len(o.Services) > 0 ||
				len(o.Presumed) != 1 || o.Presumed[0].From != "uid-cart-1/1" || !slices.Equal(o.Presumed[0].Services, []string{service}) {
				return fmt.Errorf("owner %+v", o)
			}
			return nil
		}
		return errors.New("the owner is not listed")
	})
	why := "presumed from ReplicaSet/cart-1 (uid-cart-1/1), since its own collect does not disprove it: " + knowledge
	if out := a.must("explain", "service", service); strings.Count(out, why) != len(pods) {
		t.Errorf("explain service says\n%s\nwithout %q for each pod", out, why)
	}
	out := a.must("explain", "pod", "prod/"+pods[0].Name)
	if want := fmt.Sprintf("%s on port %d, %s", service, pods[0].Port(), why); !strings.Contains(out, want) || !strings.Contains(out, "is served: "+service) {
		t.Errorf("explain pod says\n%s\nwithout %q", out, want)
	}
	if out := a.must("owners"); !strings.Contains(out, service+" (presumed)") {
		t.Errorf("owners says\n%s", out)
	}
}

// described wants reflection through the sidecar to describe the service.
func described(t *testing.T, conn *grpc.ClientConn, service string) {
	t.Helper()
	stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	err = stream.Send(&reflectionv1.ServerReflectionRequest{
		MessageRequest: &reflectionv1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: service},
	})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := stream.Recv()
	if err != nil || len(resp.GetFileDescriptorResponse().GetFileDescriptorProto()) == 0 {
		t.Errorf("reflection of %s: %v, %v", service, resp, err)
	}
}

// The new revision answers, and has the service no more: its pods leave it, each
// as soon as that is known, and the old ones stay.
func TestRolloutThatDropsAServiceTakesItsPodsAway(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		w, s := newWorld(t), newSite(t)
		h := newReflectionHold()
		var old, young []replica
		port := 0
		for i := range 3 {
			r := w.replicate(1, i, port, []string{"shop.v1.Cart", "shop.v1.Stock"})
			old, port = append(old, r), r.Port()
		}
		a := s.start(t, "--source", w.write().source()).ready()
		e := s.sidecar(t, api, "prod/web")
		e.has("prod/shop.v1.Cart", endpointsOf(old))

		h.hold()
		defer func() {
			if t.Failed() {
				h.release()
			}
		}()
		young = append(young, w.replicate(2, 0, port, []string{"shop.v2.Cart", "shop.v1.Stock"}, h.option()))
		w.write()
		h.waitAsked(t)
		e.has("prod/shop.v1.Cart", endpointsOf(old, young))
		h.release()
		e.has("prod/shop.v1.Cart", endpointsOf(old))
		e.has("prod/shop.v2.Cart", endpointsOf(young))
		e.has("prod/shop.v1.Stock", endpointsOf(old, young))

		var y tally
		stop := y.call(t, e.conn, "shop.v1.Stock")
		for i := range 2 {
			young = append(young, w.replicate(2, i+1, port, []string{"shop.v2.Cart", "shop.v1.Stock"}, h.option()))
			w.write()
			e.has("prod/shop.v2.Cart", endpointsOf(young))
			e.has("prod/shop.v1.Cart", endpointsOf(old))
			y.count(t, 50)
			w.remove(old[0].Pod)
			w.write()
			old = old[1:]
			e.has("prod/shop.v1.Cart", endpointsOf(old))
		}
		reaches(t, e.conn, "shop.v1.Cart", names(old)...)
		reaches(t, e.conn, "shop.v2.Cart", names(young)...)
		w.remove(old[0].Pod)
		w.write()
		e.has("prod/shop.v1.Cart", map[string]string{})
		if _, err := say(t, e.conn, "shop.v1.Cart"); status.Code(err) != codes.Unavailable {
			t.Errorf("a service without pods: %v", err)
		}
		stop()
		for _, v := range a.services() {
			for _, ep := range v.Endpoints {
				if ep.State != "serving" {
					t.Errorf("%s: %+v", v.Name, ep)
				}
			}
		}
		if out := a.must("explain", "pod", "prod/cart-2-0"); strings.Contains(out, "presumed") {
			t.Errorf("explain pod says\n%s", out)
		}
		e.content()
	})
}
