package e2e_test

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/test/harness"
)

// mesh is a world of Services and routes, with an agent and a sidecar.
type mesh struct {
	*world
	*site
	agent    *agentProcess
	services map[string][]any
	routes   map[string]any
}

func newMesh(t *testing.T) *mesh {
	return &mesh{world: newWorld(t), site: newSite(t), services: map[string][]any{}, routes: map[string]any{}}
}

// front puts a Service with port 80 in front of pods of prod.
func (m *mesh) front(name string, pods ...*corev1.Pod) {
	minute := len(m.services) + 1
	objects := service(name, minute, "api", pods...)
	objects[0].(*corev1.Service).Spec.ClusterIP = fmt.Sprintf("10.96.0.%d", minute)
	m.services[name] = objects
}

// route puts a route into the world: the parent is the Service of prod, rules
// are YAML.
func (m *mesh) route(kind, ns, name, parent, rules string) {
	m.t.Helper()
	text := fmt.Sprintf(`
apiVersion: gateway.networking.k8s.io/v1
kind: %s
metadata: {namespace: %s, name: %s, uid: %s-%s-%s, generation: 1, creationTimestamp: "2026-05-01T12:00:00Z"}
spec:
  parentRefs: [{group: "", kind: Service, namespace: prod, name: %s}]
  rules:
%s`, kind, ns, name, kind, ns, name, parent, rules)
	var o any
	if err := yaml.Unmarshal([]byte(text), &o); err != nil {
		m.t.Fatalf("%v:\n%s", err, text)
	}
	m.routes[kind+ns+name] = o
}

func (m *mesh) put() {
	m.t.Helper()
	m.more = nil
	for _, name := range slices.Sorted(maps.Keys(m.services)) {
		m.more = append(m.more, m.services[name]...)
	}
	for _, name := range slices.Sorted(maps.Keys(m.routes)) {
		m.more = append(m.more, m.routes[name])
	}
	m.write()
	if m.agent == nil {
		m.agent = m.start(m.t, "--source", m.source()).ready()
	}
}

// rest starts a plain HTTP/1.1 server, and puts its pod into the world.
func (m *mesh) rest(id string, handle http.HandlerFunc) *corev1.Pod {
	m.t.Helper()
	lis, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		m.t.Fatal(err)
	}
	s := &http.Server{Handler: handle}
	go func() { _ = s.Serve(lis) }()
	m.t.Cleanup(func() { s.Close() })
	at := lis.Addr().(*net.TCPAddr)
	p := newPod(id, at.IP.String(), at.Port)
	p.Spec.Containers[0].Ports[0].Name = "http"
	return m.add(p)
}

// echo answers with its name, the request's line, and the named headers.
func echo(name string, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %s", name, r.Method, r.RequestURI)
		for _, h := range headers {
			fmt.Fprintf(w, " %s=%s", h, cmp.Or(strings.Join(r.Header.Values(h), ","), "-"))
		}
	}
}

// request is one of an application to its sidecar.
type request struct {
	host, path, verb string
	headers          map[string]string
}

// http makes a request and returns status and body; a redirect is not followed
// and gives its location.
func (m *mesh) http(r request) (int, string, error) {
	req, err := http.NewRequestWithContext(deadline(m.t), cmp.Or(r.verb, "GET"), fmt.Sprintf("http://127.0.0.1:%d%s", m.egress, r.path), nil)
	if err != nil {
		return 0, "", err
	}
	req.Host = r.host
	for k, v := range r.headers {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if at := resp.Header.Get("Location"); at != "" {
		return resp.StatusCode, at, err
	}
	return resp.StatusCode, string(body), err
}

// answers waits until the request is answered so.
func (m *mesh) answers(r request, want string) {
	m.t.Helper()
	harness.Eventually(m.t, soon, func() error {
		code, body, err := m.http(r)
		if got := strings.TrimSpace(fmt.Sprintf("%d %s", code, body)); err != nil || got != want {
			return fmt.Errorf("%+v: %q, %v; want %q", r, got, err, want)
		}
		return nil
	})
}

// at is a connection for calls that name a Service.
func (m *mesh) at(authority string) *grpc.ClientConn {
	return dial(m.t, fmt.Sprintf("passthrough:127.0.0.1:%d", m.egress), grpc.WithAuthority(authority))
}

// fails waits until calls of the service end with the code.
func (m *mesh) fails(authority, service string, code codes.Code, says string) {
	m.t.Helper()
	conn := m.at(authority)
	harness.Eventually(m.t, soon, func() error {
		_, err := say(m.t, conn, service)
		if st := status.Convert(err); st.Code() != code || !strings.Contains(st.Message(), says) {
			return fmt.Errorf("%s at %s: %w, want %v with %q", service, authority, err, code, says)
		}
		return nil
	})
}

// quiet wants an Envoy that refused nothing and drained nothing.
func (e *sidecar) quiet(listeners string) {
	e.t.Helper()
	e.content()
	for name, value := range e.stats("total_filter_chains_draining|listener_manager.listener_modified|total_listeners_draining") {
		if value != "0" {
			e.t.Errorf("%s is %s", name, value)
		}
	}
	if now := e.dump()["dynamic_listeners egress"]; now != listeners {
		e.t.Errorf("the listener was\n%s\nand is\n%s", listeners, now)
	}
}

func TestGRPCRouteDecidesWhereCallsOfItsServiceGo(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		m := newMesh(t)
		stable, _ := m.serve("web-1-a", []string{"shop.Web"})
		canary, _ := m.serve("canary-1-a", []string{"shop.Web", "shop.New"})
		m.front("web", stable)
		m.front("canary", canary)
		m.put()
		e := m.sidecar(t, api, "prod/me")
		reaches(t, e.conn, "shop.Web", "web-1-a")
		listeners := e.dump()["dynamic_listeners egress"]
		reaches(t, m.at("web.prod"), "shop.Web", "web-1-a")
		m.fails("web.prod", "shop.New", codes.Unimplemented, "nobody at port 80 of Service prod/web serves it")

		m.route("GRPCRoute", "prod", "split", "web", `
  - matches: [{method: {service: shop.New}}]
    backendRefs: [{name: canary, port: 80}]
  - matches: [{method: {service: shop.Web}, headers: [{name: x-canary, value: "yes"}]}]
    backendRefs: [{name: canary, port: 80}]
  - matches: [{method: {service: shop.Web, method: Say}}]
    backendRefs: [{name: web, port: 80}]
  - matches: [{method: {service: shop.Gone}}]
    backendRefs: [{name: nobody, port: 80}]
`)
		m.put()
		for _, authority := range []string{
			"web", "web:80", "web.", "web.prod", "web.prod.:80", "WEB.prod.svc", "web.prod.svc.cluster.local",
			"web.prod.svc.cluster.local.:80", "10.96.0.1", "10.96.0.1:80",
		} {
			conn := m.at(authority)
			reaches(t, conn, "shop.New", "canary-1-a")
			reaches(t, conn, "shop.Web", "web-1-a")
		}
		m.fails("web.prod", "shop.Gone", codes.Unavailable, "no backend that can be called")
		// No match, and a port for which no route speaks.
		m.fails("web.prod", "shop.Other", codes.Unimplemented, "")
		m.fails("web.prod:81", "shop.Web", codes.Unavailable, "Service prod/web has no TCP port 81, it has 80")
		// What names no Service goes where it went.
		reaches(t, e.conn, "shop.Web", "web-1-a")

		e.quiet(listeners)
		m.agent.connected("prod/me", "cds", "eds", "lds", "rds")
		m.routes = nil
		m.put()
		m.fails("web.prod", "shop.New", codes.Unimplemented, "nobody at port 80 of Service prod/web serves it")
		harness.Eventually(t, soon, func() error {
			for key := range e.dump() {
				if strings.Contains(key, "backend/") {
					return errors.New(key + " is still there")
				}
			}
			return nil
		})
		e.quiet(listeners)
		m.agent.connected("prod/me", "cds", "eds", "lds", "rds")
	})
}

func TestConsumerRouteIsOfItsNamespaceAlone(t *testing.T) {
	m := newMesh(t)
	web := m.rest("web-1-a", echo("web"))
	mine := m.rest("mine-1-a", echo("mine"))
	m.front("web", web)
	m.front("mine", mine)
	m.route("HTTPRoute", "prod", "producer", "web", "  - backendRefs: [{name: web, port: 80}]\n")
	m.put()
	e := m.sidecar(t, "delta", "shop/me")
	m.answers(request{host: "web.prod", path: "/a"}, "200 web GET /a")
	m.answers(request{host: "web", path: "/a"}, "415") // of shop there is none: no route, and no call of gRPC
	listeners := e.dump()["dynamic_listeners egress"]
	m.route("HTTPRoute", "shop", "consumer", "web", `
  - matches: [{path: {type: Exact, value: /a}}]
    backendRefs: [{name: mine, namespace: prod, port: 80}]
`)
	// Another namespace's routes say nothing here.
	m.route("HTTPRoute", "other", "consumer", "web", "  - backendRefs: [{name: nobody, port: 80}]\n")
	m.put()
	m.answers(request{host: "web.prod", path: "/a"}, "200 mine GET /a")
	m.answers(request{host: "web.prod", path: "/b"}, "404") // not merged with the producer's
	delete(m.routes, "HTTPRouteshopconsumer")
	m.put()
	m.answers(request{host: "web.prod", path: "/b"}, "200 web GET /b")
	e.quiet(listeners)
}

func TestWeightsShareTheCallsAndABrokenBackendFailsItsShare(t *testing.T) {
	m := newMesh(t)
	for _, name := range []string{"a", "b"} {
		m.front(name, m.rest(name+"-1-a", echo(name)))
	}
	m.front("empty")
	m.route("HTTPRoute", "prod", "split", "a", `
  - matches: [{path: {value: /split}}]
    backendRefs: [{name: a, port: 80, weight: 7}, {name: b, port: 80, weight: 2}, {name: gone, port: 80, weight: 1}, {name: b, port: 99, weight: 0}]
  - matches: [{path: {value: /gone}}]
    backendRefs: [{name: gone, port: 80}]
  - matches: [{path: {value: /port}}]
    backendRefs: [{name: b, port: 99}]
  - matches: [{path: {value: /kind}}]
    backendRefs: [{name: b, port: 80, kind: Bucket, group: example.com}]
  - matches: [{path: {value: /zero}}]
    backendRefs: [{name: b, port: 80, weight: 0}]
  - matches: [{path: {value: /none}}]
  - matches: [{path: {value: /empty}}]
    backendRefs: [{name: empty, port: 80}]
`)
	m.put()
	e := m.sidecar(t, "delta", "prod/me")
	for path, code := range map[string]int{"/gone": 500, "/port": 500, "/kind": 500, "/zero": 500, "/none": 500, "/empty": 503, "/other": 404} {
		if got, body, err := m.http(request{host: "a.prod", path: path}); got != code {
			t.Errorf("%s: %d %s, %v; want %d", path, got, body, err, code)
		}
	}
	got := map[string]float64{}
	const n = 3000
	for range n {
		code, body, err := m.http(request{host: "a.prod", path: "/split"})
		if err != nil {
			t.Fatal(err)
		}
		who, _, _ := strings.Cut(body, " ")
		if code != 200 {
			who = fmt.Sprint(code)
		}
		got[who]++
	}
	// Four standard deviations.
	for who, p := range map[string]float64{"a": 0.7, "b": 0.2, "500": 0.1} {
		if d := got[who]/n - p; d*d > 16*p*(1-p)/n {
			t.Errorf("%s got %v of %d, want %v of them", who, got[who], n, p)
		}
	}
	e.content()
}

func TestFiltersTimeoutsAndRetriesOfARule(t *testing.T) {
	m := newMesh(t)
	web := m.rest("web-1-a", echo("web", "x-set", "x-add", "x-gone"))
	slow := m.rest("slow-1-a", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	tries := make(chan string, 100)
	flaky := m.rest("flaky-1-a", func(w http.ResponseWriter, r *http.Request) {
		tries <- r.URL.Path
		w.WriteHeader(http.StatusConflict)
	})
	m.front("web", web)
	m.front("slow", slow)
	m.front("flaky", flaky)
	backend := "backendRefs: [{name: web, port: 80}]"
	path := func(kind, p string) string {
		return fmt.Sprintf("  - matches: [{path: {type: %s, value: %q}}]\n    ", kind, p)
	}
	m.route("HTTPRoute", "prod", "filters", "web", path("PathPrefix", "/headers")+backend+`
    filters:
    - {type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-set, value: "100%"}], add: [{name: x-add, value: more}], remove: [x-gone]}}
`+path("PathPrefix", "/rewrite")+backend+`
    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /new}}}]
`+path("PathPrefix", "/base/")+backend+`
    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]
`+path("PathPrefix", "/full")+backend+`
    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplaceFullPath, replaceFullPath: '/a\1b'}}}]
`+path("PathPrefix", "/redirect")+`filters: [{type: RequestRedirect, requestRedirect: {hostname: example.org, scheme: https, statusCode: 301}}]
`+path("PathPrefix", "/moved/")+`filters: [{type: RequestRedirect, requestRedirect: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}, port: 8080}}]
`+path("Exact", "/exact")+backend+`
    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /new}}}]
`+path("RegularExpression", "/re/[0-9]+")+backend+`
`+path("RegularExpression", "/re/[0-9a-z]{300}")+backend+`
`+path("Exact", "/timeout")+`backendRefs: [{name: slow, port: 80}]
    timeouts: {request: 50ms}
`+path("Exact", "/backend-timeout")+`backendRefs: [{name: slow, port: 80}]
    timeouts: {backendRequest: 50ms}
`+path("Exact", "/retry")+`backendRefs: [{name: flaky, port: 80}]
    retry: {codes: [409], attempts: 3, backoff: 1ms}
`+path("Exact", "/once")+`backendRefs: [{name: flaky, port: 80}]
`)
	m.put()
	e := m.sidecar(t, "delta", "prod/me")
	for _, c := range []struct{ path, want string }{
		{"/headers?a=b", "200 web GET /headers?a=b x-set=100% x-add=mine,more x-gone=-"},
		{"/rewrite", "200 web GET /new x-set=- x-add=mine x-gone=mine"},
		{"/rewrite/x?a=b", "200 web GET /new/x?a=b x-set=- x-add=mine x-gone=mine"},
		{"/base", "200 web GET / x-set=- x-add=mine x-gone=mine"},
		{"/base?a=b", "200 web GET /?a=b x-set=- x-add=mine x-gone=mine"},
		{"/base/x", "200 web GET /x x-set=- x-add=mine x-gone=mine"},
		{"/based", "404"},
		{"/full/x?a=b", `200 web GET /a\1b?a=b x-set=- x-add=mine x-gone=mine`},
		{"/redirect/x", "301 https://example.org/redirect/x"},
		{"/moved/x", "302 http://web.prod:8080/x"},
		{"/re/12", "200 web GET /re/12 x-set=- x-add=mine x-gone=mine"},
		{"/re/1a", "404"},
		{"/timeout", "504 upstream request timeout"},
		{"/backend-timeout", "504 upstream request timeout"},
	} {
		m.answers(request{host: "web.prod", path: c.path, headers: map[string]string{"x-gone": "mine", "x-add": "mine"}}, c.want)
	}
	if code, _, err := m.http(request{host: "web.prod", path: "/exact"}); code != 500 {
		t.Errorf("a prefix replaced without one: %d, %v; want 500", code, err)
	}
	for path, want := range map[string]int{"/retry": 4, "/once": 1} {
		m.answers(request{host: "web.prod", path: path}, "409")
		for range want {
			select {
			case got := <-tries:
				if got != path {
					t.Errorf("a try of %s, want %s", got, path)
				}
			case <-time.After(soon):
				t.Fatalf("fewer than %d tries of %s", want, path)
			}
		}
	}
	if len(tries) > 0 {
		t.Errorf("%d tries too many", len(tries))
	}
	e.content()
	m.agent.connected("prod/me", "rds")
}

// Each change takes away the cluster that the routes named before, and brings
// another: the first must outlive the routes at every client, the second be
// there before them.
func TestRoutesThatMoveUnderLoadLoseNoCall(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		m := newMesh(t)
		blue, _ := m.serve("blue-1-a", []string{"shop.Web"})
		green, _ := m.serve("green-1-a", []string{"shop.Web"})
		m.front("shop")
		m.front("blue", blue)
		m.front("green", green)
		move := func(to string) {
			m.route("GRPCRoute", "prod", "move", "shop", fmt.Sprintf("  - backendRefs: [{name: %s, port: 80}]\n", to))
			m.put()
		}
		move("blue")
		e := m.sidecar(t, api, "prod/me")
		conn := m.at("shop.prod")
		reaches(t, conn, "shop.Web", "blue-1-a")
		listeners := e.dump()["dynamic_listeners egress"]
		answered, stop := load(t, conn, "shop.Web")
		for range 10 {
			move("green")
			reaches(t, conn, "shop.Web", "green-1-a")
			move("blue")
			reaches(t, conn, "shop.Web", "blue-1-a")
		}
		stop()
		if answered() < 100 {
			t.Errorf("only %d calls were made", answered())
		}
		e.quiet(listeners)
		m.agent.connected("prod/me", "cds", "eds", "lds", "rds")
	})
}
