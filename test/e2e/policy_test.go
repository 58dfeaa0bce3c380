package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/test/harness"
)

const cart = "shop.v1.Cart"

// says sets annotations of a pod, and returns it.
func says(p *corev1.Pod, annotations ...string) *corev1.Pod {
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	for i := 0; i < len(annotations); i += 2 {
		p.Annotations[annotations[i]] = annotations[i+1]
	}
	return p
}

// declared is a pod of workload cart that says itself that it serves it at an
// address, whatever is there.
func (w *world) declared(id, addr string, annotations ...string) *corev1.Pod {
	w.t.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		w.t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		w.t.Fatal(err)
	}
	return w.add(says(newPod(id, host, n), append(annotations, kube.ServicesAnnotation, port+"="+cart)...))
}

// deadAddr is an address where nobody listens.
func deadAddr(t *testing.T) string {
	t.Helper()
	lis, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	return lis.Addr().String()
}

// refuser is an HTTP/2 server that refuses every stream.
type refuser struct {
	net.Listener
	refused atomic.Int64
}

func startRefuser(t *testing.T) *refuser {
	t.Helper()
	lis, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		t.Fatal(err)
	}
	r := &refuser{Listener: lis}
	var done sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); lis.Close(); done.Wait() })
	done.Go(func() {
		for {
			conn, err := lis.Accept()
			if err != nil {
				return
			}
			stop := context.AfterFunc(ctx, func() { conn.Close() })
			done.Go(func() { defer stop(); defer conn.Close(); r.serve(conn) })
		}
	})
	return r
}

func (r *refuser) serve(conn net.Conn) {
	if _, err := io.ReadFull(conn, make([]byte, len(http2.ClientPreface))); err != nil {
		return
	}
	f := http2.NewFramer(conn, conn)
	for err := f.WriteSettings(); err == nil; {
		var frame http2.Frame
		if frame, err = f.ReadFrame(); err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				err = f.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !frame.IsAck() {
				err = f.WritePing(true, frame.Data)
			}
		case *http2.HeadersFrame:
			r.refused.Add(1)
			err = f.WriteRSTStream(frame.StreamID, http2.ErrCodeRefusedStream)
		}
	}
}

// relay passes on what comes for a server, until it is stalled: then its kernel
// still takes what is sent, and nobody answers, as of a process that is stopped.
type relay struct {
	net.Listener
	stalled chan struct{}
}

func startRelay(t *testing.T, to string) *relay {
	t.Helper()
	lis, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{Listener: lis, stalled: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	t.Cleanup(func() { cancel(); lis.Close(); done.Wait() })
	copies := func(dst io.Writer, src io.Reader) {
		b := make([]byte, 64<<10)
		for {
			n, err := src.Read(b)
			select {
			case <-r.stalled:
				<-ctx.Done()
				return
			default:
			}
			if _, werr := dst.Write(b[:n]); errors.Join(err, werr) != nil {
				return
			}
		}
	}
	done.Go(func() {
		for {
			conn, err := lis.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				conn.Close()
				continue
			}
			end := sync.OnceFunc(func() { conn.Close(); out.Close() })
			stop := context.AfterFunc(ctx, end)
			for _, pair := range [][2]net.Conn{{conn, out}, {out, conn}} {
				done.Go(func() { defer stop(); defer end(); copies(pair[0], pair[1]) })
			}
		}
	})
	return r
}

// stat is a counter or gauge of the cluster of shop.v1.Cart; one that was never
// counted is 0.
func (e *sidecar) stat(name string) uint64 {
	n, _ := e.Stat("cluster.prod/shop_v1_Cart." + name)
	return n
}

// failing makes Say end with UNAVAILABLE after it was executed, and counts.
func failing(n *atomic.Int64) grpc.ServerOption {
	return grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
		n.Add(1)
		return status.Error(codes.Unavailable, "done, and then lost")
	})
}

// executing is a pod whose server executes every call and then fails it.
func (w *world) executing(id string, n *atomic.Int64, annotations ...string) {
	w.t.Helper()
	server := sample(w.t, id, 0, nil, failing(n))
	w.declared(id, server.Addr(), annotations...)
}

func TestRetriesAreOfCallsThatNoServerHasBegun(t *testing.T) {
	w := newWorld(t)
	bad := startRefuser(t)
	good := sample(t, "cart-1-good", 0, []string{cart})
	w.declared("cart-1-dead", deadAddr(t))
	w.declared("cart-2-refuses", bad.Addr().String())
	w.declared("cart-3-good", good.Addr())
	w.write()
	s := newSite(t)
	s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	for i := range 30 {
		if who, err := say(t, e.conn, cart); err != nil || who != "cart-1-good" {
			t.Fatalf("call %d: %s, %v", i, who, err)
		}
	}
	if retried, refused := e.stat("upstream_rq_retry"), bad.refused.Load(); refused == 0 || retried <= uint64(refused) {
		t.Errorf("%d retries, %d streams refused: connections and streams that fail are to be retried", retried, refused)
	}

	x := newWorld(t)
	var executed atomic.Int64
	x.executing("cart-1-a", &executed)
	x.executing("cart-1-b", &executed)
	x.write()
	s = newSite(t)
	s.start(t, "--source", x.source()).ready()
	e = s.sidecar(t, "delta", "prod/web")
	for range 10 {
		if _, err := say(t, e.conn, cart); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "done, and then lost") {
			t.Errorf("a call that was executed: %v", err)
		}
	}
	if n := executed.Load(); n != 10 {
		t.Errorf("10 calls were executed %d times", n)
	}
}

func TestRetriesByAnnotation(t *testing.T) {
	w := newWorld(t)
	var executed atomic.Int64
	w.executing("cart-1-a", &executed, kube.RetryOnAnnotation, "unavailable", kube.NumRetriesAnnotation, "3", kube.RetryBudgetAnnotation, "50%")
	w.write()
	s := newSite(t)
	a := s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	if _, err := say(t, e.conn, cart); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
	if n := executed.Load(); n != 4 {
		t.Errorf("a call was executed %d times, want 4", n)
	}
	e.content()

	// A value that makes no sense is named; the others hold.
	says(w.pods[0], kube.NumRetriesAnnotation, "many", kube.MaxRequestsAnnotation, "7")
	w.write()
	harness.Eventually(t, soon, func() error {
		out := a.must("explain", "workload", "prod/cart")
		for _, want := range []string{`fingerpost.dev/num-retries: "many" is ignored: it is not a number from 0 to 10`, "retry-on=unavailable, retry-budget=50%, max-requests=7"} {
			if !strings.Contains(out, want) {
				return fmt.Errorf("explain workload does not say %s:\n%s", want, out)
			}
		}
		return nil
	})
	executed.Store(0)
	harness.Eventually(t, soon, func() error {
		executed.Store(0)
		if _, err := say(t, e.conn, cart); status.Code(err) != codes.Unavailable {
			return err
		}
		if n := executed.Load(); n != 3 { // the default of two retries
			return fmt.Errorf("a call was executed %d times, want 3", n)
		}
		return nil
	})
	if out := a.must("explain", "service", cart); !strings.Contains(out, "policy of its cluster: retry-on=unavailable, retry-budget=50%, max-requests=7") {
		t.Errorf("explain service: %s", out)
	}
	if out := a.must("explain", "pod", "prod/cart-1-a"); !strings.Contains(out, "is ignored") || !strings.Contains(out, "of calls to its workload: retry-on=unavailable") {
		t.Errorf("explain pod: %s", out)
	}
	e.content()
}

func TestNoRetriesByAnnotation(t *testing.T) {
	w := newWorld(t)
	good := sample(t, "good", 0, []string{cart})
	w.declared("cart-1-dead", deadAddr(t), kube.NumRetriesAnnotation, "0", kube.OutlierAnnotation, "off")
	w.declared("cart-1-good", good.Addr(), kube.NumRetriesAnnotation, "0", kube.OutlierAnnotation, "off")
	w.write()
	s := newSite(t)
	s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	failed := 0
	for range 40 {
		if _, err := say(t, e.conn, cart); err != nil {
			failed++
		}
	}
	if failed != 20 || e.stat("upstream_rq_retry") != 0 || e.stat("outlier_detection.ejections_enforced_total") != 0 {
		t.Errorf("%d of 40 calls failed, %d retries, %d ejections", failed, e.stat("upstream_rq_retry"), e.stat("outlier_detection.ejections_enforced_total"))
	}
}

func TestBreakerByAnnotation(t *testing.T) {
	for _, front := range []string{"envoy", "grpc"} {
		t.Run(front, func(t *testing.T) {
			w := newWorld(t)
			p, _ := w.serve("cart-1-a", []string{cart})
			says(p, kube.MaxRequestsAnnotation, "1")
			w.write()
			s := newSite(t)
			a := s.start(t, "--source", w.source()).ready()
			var conn *grpc.ClientConn
			if front == "grpc" {
				conn = s.proxyless(t, "prod/web", cart)
			} else {
				e := s.sidecar(t, "delta", "prod/web")
				defer e.content()
				conn = e.conn
			}
			stream := onPod(t, conn, cart, "cart-1-a")
			says := map[string]string{"envoy": "overflow", "grpc": "max requests 1 exceeded"}[front]
			if _, err := say(t, conn, cart); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), says) {
				t.Errorf("a second call beside one that runs: %v", err)
			}
			stays(t, stream, "cart-1-a")
			if err := errors.Join(stream.CloseSend(), stream.RecvMsg(&wrapperspb.StringValue{})); !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			reaches(t, conn, cart, "cart-1-a")
			a.connected("prod/web", "cds", "eds")
		})
	}
}

func TestServerThatStopsAnsweringIsFoundByPings(t *testing.T) {
	w := newWorld(t)
	live := sample(t, "live", 0, []string{cart})
	stops := sample(t, "stops", 0, []string{cart})
	r := startRelay(t, stops.Addr())
	annotations := []string{kube.KeepaliveAnnotation, "1s"}
	w.declared("cart-1-live", live.Addr(), annotations...)
	w.declared("cart-1-stops", r.Addr().String(), annotations...)
	w.write()
	s := newSite(t)
	s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	reaches(t, e.conn, cart, "live", "stops")
	stream := onPod(t, e.conn, cart, "stops")
	close(r.stalled)
	// The caller of a stream hears of it, without a deadline of its own.
	if who, err := stream.Ask("x"); err == nil {
		t.Errorf("a stream to a server that stopped answering is answered: %s", who)
	}
	reaches(t, e.conn, cart, "live")
	var pings uint64
	for name, value := range e.stats("keepalive_timeout") {
		if strings.HasPrefix(name, "cluster.prod/shop_v1_Cart.") {
			n, _ := strconv.ParseUint(value, 10, 64)
			pings += n
		}
	}
	if ejected := e.stat("outlier_detection.ejections_enforced_total"); pings == 0 || ejected == 0 {
		t.Errorf("%d connections were closed for pings without an answer, %d endpoints ejected", pings, ejected)
	}
}

// A gRPC server answers pings that come too often with GOAWAY, unless it is told
// to permit them.
func TestPingsByAnnotationNeedServersThatPermitThem(t *testing.T) {
	w := newWorld(t)
	permits := keepalive.EnforcementPolicy{MinTime: 500 * time.Millisecond, PermitWithoutStream: true}
	p, _ := w.serve("cart-1-a", []string{cart}, grpc.KeepaliveEnforcementPolicy(permits))
	q, _ := w.serve("stock-1-a", []string{"shop.v1.Stock"})
	d, _ := w.serve("plain-1-a", []string{"shop.v1.Plain"})
	says(p, kube.KeepaliveAnnotation, "1s")
	says(q, kube.KeepaliveAnnotation, "1s")
	w.write()
	s := newSite(t)
	s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	reaches(t, e.conn, cart, "cart-1-a")
	reaches(t, e.conn, "shop.v1.Stock", "stock-1-a")
	reaches(t, e.conn, "shop.v1.Plain", "plain-1-a")
	goaways := func(cluster string) uint64 {
		n, _ := e.Stat("cluster.prod/" + cluster + ".upstream_cx_close_notify")
		return n
	}
	e.WaitFor(t, soon, func() error {
		if goaways("shop_v1_Stock") == 0 {
			return errors.New("a server that permits no pings has not complained")
		}
		return nil
	})
	// It has had as many pings, and the last none.
	for _, cluster := range []string{"shop_v1_Cart", "shop_v1_Plain"} {
		if n := goaways(cluster); n != 0 {
			t.Errorf("%d GOAWAYs for %s", n, cluster)
		}
	}
	_ = d
}

func TestEndpointThatFailsIsEjectedButNeverTheLast(t *testing.T) {
	w := newWorld(t)
	good := sample(t, "good", 0, []string{cart})
	w.declared("cart-1-dead", deadAddr(t))
	live := w.declared("cart-1-good", good.Addr())
	w.write()
	s := newSite(t)
	s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	e.WaitFor(t, soon, func() error {
		if _, err := say(t, e.conn, cart); err != nil {
			t.Errorf("beside an endpoint that is dead: %v", err)
		}
		if e.stat("outlier_detection.ejections_active") == 0 {
			return errors.New("no endpoint is ejected")
		}
		return nil
	})
	tried := e.stat("upstream_cx_connect_fail")
	for range 20 {
		if _, err := say(t, e.conn, cart); err != nil {
			t.Error(err)
		}
	}
	if n := e.stat("upstream_cx_connect_fail"); n > tried+1 { // it may come back meanwhile
		t.Errorf("an ejected endpoint was tried %d times", n-tried)
	}

	// The one that is left is tried, whatever becomes of it.
	w.remove(live)
	w.write()
	e.WaitFor(t, soon, func() error {
		if n := e.stat("membership_total"); n != 1 {
			return fmt.Errorf("%d endpoints", n)
		}
		return nil
	})
	before := e.stat("upstream_cx_connect_fail")
	for range 20 {
		if _, err := say(t, e.conn, cart); status.Code(err) != codes.Unavailable {
			t.Errorf("the last endpoint, which is dead: %v", err)
		}
	}
	if n := e.stat("upstream_cx_connect_fail"); n < before+20 {
		t.Errorf("the last endpoint was tried %d times for 20 calls", n-before)
	}
}

// An annotation makes Envoy build the cluster anew: calls go on, and the endpoints
// come with it.
func TestPolicyThatChangesUnderLoadLosesNoCall(t *testing.T) {
	eachMode(t, func(t *testing.T, api string) {
		w := newWorld(t)
		a, _ := w.serve("cart-1-a", []string{cart})
		b, _ := w.serve("cart-1-b", []string{cart})
		w.write()
		s := newSite(t)
		s.start(t, "--source", w.source()).ready()
		e := s.sidecar(t, api, "prod/web")
		reaches(t, e.conn, cart, "cart-1-a", "cart-1-b")
		stream := onPod(t, e.conn, cart, "cart-1-a")
		answered, stop := load(t, e.conn, cart)
		modified := func() uint64 { n, _ := e.Stat("cluster_manager.cluster_modified"); return n }
		for i := range 3 {
			before := modified()
			for _, p := range []*corev1.Pod{a, b} { // one after the other, as in a rollout
				says(p, kube.MaxRequestsAnnotation, fmt.Sprint(1000+i))
				w.write()
			}
			e.WaitFor(t, soon, func() error {
				if n := modified(); n != before+1 {
					return fmt.Errorf("the cluster was changed %d times", n-before)
				}
				return nil
			})
			proceeds(t, answered)
			reaches(t, e.conn, cart, "cart-1-a", "cart-1-b")
			if n := modified(); n != before+1 {
				t.Errorf("the cluster was changed %d times by one annotation", n-before)
			}
		}
		stays(t, stream, "cart-1-a")
		stop()
		e.content()
	})
}

// Envoy takes a cluster's retry policy in place of the route's.
func TestRulesWithRetriesKeepThemBesideAnnotations(t *testing.T) {
	m := newMesh(t)
	slow := m.rest("slow-1-a", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	var tries atomic.Int64
	flaky := m.rest("flaky-1-a", func(w http.ResponseWriter, r *http.Request) {
		tries.Add(1)
		w.WriteHeader(http.StatusConflict)
	})
	for _, p := range []*corev1.Pod{slow, flaky} {
		says(p, kube.NumRetriesAnnotation, "1", kube.RetryOnAnnotation, "reset")
	}
	m.front("slow", slow)
	m.front("flaky", flaky)
	m.route("HTTPRoute", "prod", "slow", "slow", `  - backendRefs: [{name: slow, port: 80}]
    timeouts: {backendRequest: 50ms}
`)
	m.route("HTTPRoute", "prod", "flaky", "flaky", `  - backendRefs: [{name: flaky, port: 80}]
    retry: {codes: [409], attempts: 3, backoff: 1ms}
`)
	m.put()
	e := m.sidecar(t, "delta", "prod/me")
	m.answers(request{host: "flaky.prod", path: "/"}, "409")
	if n := tries.Load(); n != 4 {
		t.Errorf("%d tries, want the 4 of the rule", n)
	}
	m.answers(request{host: "slow.prod", path: "/"}, "504 upstream request timeout")
	if text := e.dump()["dynamic_active_clusters backend/prod/slow/80"]; !strings.Contains(text, `"retry_on": "reset"`) {
		t.Errorf("the cluster does not have the annotation's retries beside the rule's timeout:\n%s", text)
	}
	e.content()
}

// Most endpoints may drain at once: less than the panic threshold is healthy
// then, and calls still go to that alone.
func TestPanicSparesDrainingPods(t *testing.T) {
	w := newWorld(t)
	for _, x := range []string{"a", "b", "c", "d"} {
		w.serve("cart-1-"+x, []string{cart})
	}
	w.write()
	s := newSite(t)
	s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	reaches(t, e.conn, cart, "cart-1-a", "cart-1-b", "cart-1-c", "cart-1-d")
	for _, p := range w.pods[:3] {
		terminate(p)
	}
	w.write()
	reaches(t, e.conn, cart, "cart-1-d")
	for range 40 {
		if who, err := say(t, e.conn, cart); err != nil || who != "cart-1-d" {
			t.Errorf("%s, %v", who, err)
		}
	}
}

func TestSpansGoToTheCollector(t *testing.T) {
	var exports atomic.Int64
	collector := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		if method, _ := grpc.MethodFromServerStream(s); method == "/opentelemetry.proto.collector.trace.v1.TraceService/Export" {
			exports.Add(1)
		}
		return nil
	}))
	lis, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = collector.Serve(lis) }() // ends with Stop
	t.Cleanup(collector.Stop)
	w := shop(t)
	s := newSite(t)
	s.start(t, "--source", w.source(), "--tracing", "otlp:"+lis.Addr().String()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	e.WaitFor(t, soon, func() error {
		if _, err := say(t, e.conn, cart); err != nil {
			t.Error(err)
		}
		if exports.Load() == 0 {
			return errors.New("the collector has heard of no call")
		}
		return nil
	})
	e.content()
}
