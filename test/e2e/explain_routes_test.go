package e2e_test

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// routedCall is a call to a Service that has routes, and what explain call says
// of it. With an HTTP method it is not one of gRPC.
type routedCall struct {
	name      string
	authority string
	path      string
	verb      string
	headers   map[string]string
	code      string   // as 404 or UNAVAILABLE; OK reaches a pod
	says      string   // stands in the first line
	facts     []string // stand below it
	// unmade calls reach a pod that does not understand them.
	unmade bool
}

// makes makes the call through the sidecar, and returns code and message.
func (m *mesh) makes(c routedCall) (code, message string, err error) {
	if c.verb == "" {
		ctx := deadline(m.t)
		for name, value := range c.headers {
			ctx = metadata.AppendToOutgoingContext(ctx, name, value)
		}
		st := status.Convert(m.at(c.authority).Invoke(ctx, c.path, &wrapperspb.StringValue{}, &emptypb.Empty{}))
		return codeName(st.Code()), st.Message(), nil
	}
	got, body, err := m.http(request{host: c.authority, path: c.path, verb: c.verb, headers: c.headers})
	switch {
	case got == 200:
		return "OK", "", err
	case got/100 == 3:
		body = "" // the location
	}
	return strconv.Itoa(got), body, err
}

// explains wants the explanation of the call to be so, and a real call to get
// just that.
func (m *mesh) explains(t *testing.T, from string, c routedCall) {
	t.Helper()
	args := []string{"explain", "call", "--from", from, "--authority", c.authority, c.path}
	if c.verb != "" {
		args = append(args, "--method", c.verb)
	}
	for name, value := range c.headers {
		args = append(args, "--header", name+"="+value)
	}
	harness.Eventually(t, soon, func() error {
		out := m.agent.must(args...)
		line, rest, _ := strings.Cut(out, "\n")
		if prefix := fmt.Sprintf("%s calling %s: %s: ", from, c.path, c.code); !strings.HasPrefix(line, prefix) || !strings.Contains(line, c.says) {
			return fmt.Errorf("explain call says\n%s\nwant %s… with %q", out, prefix, c.says)
		}
		for _, fact := range c.facts {
			if !strings.Contains(rest, fact) {
				return fmt.Errorf("explain call does not say %q:\n%s", fact, out)
			}
		}
		var e agent.CallExplanation
		if err := json.Unmarshal([]byte(m.agent.must(append(args, "-o", "json")...)), &e); err != nil {
			return err
		}
		if e.Code != c.code || e.Do == "" {
			return fmt.Errorf("in JSON: %+v", e)
		}
		if c.unmade {
			return nil
		}
		if code, message, err := m.makes(c); err != nil || code != e.Code || message != e.Message {
			return fmt.Errorf("the call gets %s %q, %v; explained was %s %q", code, message, err, e.Code, e.Message)
		}
		return nil
	})
}

func TestExplainCallFollowsRoutes(t *testing.T) {
	m := newMesh(t)
	stable, _ := m.serve("web-1-a", []string{"shop.Web"})
	other, _ := m.serve("web-1-b", []string{"shop.Other"})
	other.OwnerReferences[0].UID, other.OwnerReferences[0].Name = "uid-other", "other-1"
	canary, _ := m.serve("canary-1-a", []string{"shop.Web", "shop.New"})
	late, _ := m.serve("late-1-a", []string{"shop.Web"})
	m.front("web", stable, other)
	m.front("canary", canary)
	m.front("late", late)
	m.front("empty")
	m.front("plain", canary)
	m.front("rest", m.rest("rest-1-a", echo("rest")))
	m.front("books", m.library("books-1-a", "Books", "title"))
	m.front("mixed", stable)
	m.route("GRPCRoute", "prod", "split", "web", `
  - matches: [{method: {service: shop.New}}]
    backendRefs: [{name: canary, port: 80}]
  - matches: [{method: {service: shop.Web, method: Say}, headers: [{name: x-canary, value: "yes"}]}]
    backendRefs: [{name: canary, port: 80}]
  - matches: [{method: {service: shop.Web, method: Say}}]
    backendRefs: [{name: web, port: 80}]
  - matches: [{method: {service: shop.Gone}}]
    backendRefs: [{name: nobody, port: 80}]
  - matches: [{method: {service: shop.Port}}]
    backendRefs: [{name: web, port: 99}]
  - matches: [{method: {service: shop.Kind}}]
    backendRefs: [{name: web, port: 80, kind: Bucket, group: example.com}]
  - matches: [{method: {service: shop.Late}}]
    backendRefs: [{name: late, port: 80}]
  - matches: [{method: {service: shop.Empty}}]
    backendRefs: [{name: empty, port: 80}]
  - matches: [{method: {service: shop.Lacking}}]
    backendRefs: [{name: web, port: 80}]
  - matches: [{method: {service: shop.Zero}}]
    backendRefs: [{name: web, port: 80, weight: 0}]
  - matches: [{method: {service: shop.None}}]
  - matches: [{method: {method: Watch}}]
    backendRefs: [{name: web, port: 80}]
  - matches: [{method: {service: "shop.Fut.*", type: Glob}}]
    backendRefs: [{name: web, port: 80}]
`)
	m.route("HTTPRoute", "prod", "loser", "web", "  - backendRefs: [{name: rest, port: 80}]\n")
	m.route("GRPCRoute", "shop", "mine", "mixed", "  - backendRefs: [{name: canary, namespace: prod, port: 80}]\n")
	m.route("GRPCRoute", "prod", "theirs", "mixed", "  - backendRefs: [{name: web, port: 80}]\n")
	m.route("HTTPRoute", "prod", "rest", "rest", `
  - matches: [{path: {value: /v1/Books}}]
    backendRefs: [{name: books, port: 80}]
  - matches: [{path: {value: /v1/Books/7}, headers: [{name: x-mixed, value: "yes"}]}]
    backendRefs: [{name: books, port: 80}, {name: late, port: 80, weight: 1000000}]
  - matches: [{path: {value: /get}, method: GET}]
    backendRefs: [{name: rest, port: 80}]
  - matches: [{path: {value: /half}}]
    backendRefs: [{name: rest, port: 80, weight: 4000000}, {name: empty, port: 80, weight: 1}]
  - matches: [{path: {value: /gone}}]
    backendRefs: [{name: gone, port: 80}]
  - matches: [{path: {value: /empty}}]
    backendRefs: [{name: empty, port: 80}]
  - matches: [{path: {value: /moved}}]
    filters: [{type: RequestRedirect, requestRedirect: {hostname: example.org, statusCode: 301}}]
  - matches: [{path: {type: Exact, value: /flaw}}]
    backendRefs: [{name: rest, port: 80}]
    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /new}}}]
  - matches: [{path: {type: RegularExpression, value: "/re[0-9a-z]{300}"}}]
    backendRefs: [{name: rest, port: 80}]
  - matches: [{path: {value: /shop.Web}}]
    backendRefs: [{name: canary, port: 80}]
  - matches: [{path: {value: /shop.Gone}}]
    backendRefs: [{name: gone, port: 80}]
  - matches: [{path: {value: /both}}]
    backendRefs: [{name: rest, port: 80}]
    filters: [{type: RequestRedirect, requestRedirect: {hostname: example.org}}]
`)
	m.put()
	e := m.sidecar(t, "delta", "shop/me")
	reaches(t, m.at("web.prod"), "shop.Web", "web-1-a")
	notReady(late)
	m.put()
	by := func(rule int) string { return fmt.Sprintf("by rule %d of GRPCRoute prod/split", rule) }
	rest := func(rule int) string { return fmt.Sprintf("by rule %d of HTTPRoute prod/rest", rule) }
	for _, c := range []routedCall{
		{name: "match", authority: "web.prod", path: "/shop.New/Say", code: "OK",
			says: "it goes to 1 endpoint behind port 80 of Service prod/canary, " + by(0), facts: []string{
				"authority web.prod is port 80 of Service prod/web, for which routes speak",
				`rule 0 of GRPCRoute prod/split, match 0 (service is shop.New), of virtual host "prod/web/80"`,
				"a producer route, of the Service's namespace; shop has no consumer route of its own for it",
				"weight 1, port 80 of Service prod/canary: cluster backend/prod/canary/80/shop.New",
				"pod prod/canary-1-a on node \"n1\", serving",
				"routes of egress: acknowledged", "cluster of backend/prod/canary/80/shop.New: acknowledged", "endpoints of backend/prod/canary/80/shop.New: acknowledged",
				"HTTPRoute prod/loser has no say: a GRPCRoute has the port",
				"rule 12 of GRPCRoute prod/split takes no call: UnsupportedValue: ",
				"rule 5 of GRPCRoute prod/split may not send to a backend that is no Service: InvalidKind",
			}},
		{name: "match by header", authority: "WEB.prod.svc:80", path: "/shop.Web/Say", headers: map[string]string{"X-Canary": "yes"}, code: "OK", says: by(1)},
		{name: "pod that lacks it", authority: "web.prod", path: "/shop.Web/Say", code: "OK",
			says:  "to 1 endpoint behind port 80 of Service prod/web, not to pod prod/web-1-b (it is known not to implement shop.Web: its owner was collected without shop.Web), " + by(2),
			facts: []string{"pod prod/web-1-b of prod/web: it is known not to implement shop.Web"}},
		{name: "no Service", authority: "web.prod", path: "/shop.Gone/Say", code: "UNAVAILABLE", says: by(3) + ": there is no Service prod/nobody"},
		{name: "no port", authority: "web.prod", path: "/shop.Port/Say", code: "UNAVAILABLE", says: by(4) + ": Service prod/web has no port 99"},
		{name: "refused", authority: "web.prod", path: "/shop.Kind/Say", code: "UNAVAILABLE", says: by(5) + ": a backend that is no Service is refused: InvalidKind"},
		{name: "not ready", authority: "web.prod", path: "/shop.Late/Say", code: "UNAVAILABLE",
			says: by(6) + ": no pod behind port 80 of Service prod/late gets the call: pod prod/late-1-a (is not ready)"},
		{name: "nothing behind", authority: "web.prod", path: "/shop.Empty/Say", code: "UNAVAILABLE", says: "nothing stands behind port 80 of Service prod/empty"},
		{name: "all lack it", authority: "web.prod", path: "/shop.Lacking/Say", code: "UNAVAILABLE", says: "pod prod/web-1-a (it is known not to implement shop.Lacking"},
		{name: "weight 0", authority: "web.prod", path: "/shop.Zero/Say", code: "UNAVAILABLE", says: "rule 9 of GRPCRoute prod/split names no backend with a weight"},
		{name: "no backend", authority: "web.prod", path: "/shop.None/Say", code: "UNAVAILABLE", says: "names no backend"},
		{name: "no match", authority: "web.prod", path: "/shop.Nothing/Say", code: "UNIMPLEMENTED", says: "routes speak for port 80 of Service prod/web, and none of their rules takes the call"},
		{name: "refused rule takes nothing", authority: "web.prod", path: "/shop.Future/Say", code: "UNIMPLEMENTED", says: "none of their rules takes the call"},
		{name: "no routes for it", authority: "plain.prod", path: "/shop.Web/Say", code: "OK", says: "it goes to 1 endpoint of port 80 of Service prod/plain"},
		{name: "port without routes", authority: "web.prod:81", path: "/shop.Web/Say", code: "UNAVAILABLE", says: "Service prod/web has no TCP port 81, it has 80"},
		{name: "consumer", authority: "mixed.prod", path: "/shop.New/Say", code: "OK", says: "by rule 0 of GRPCRoute shop/mine", facts: []string{
			"a consumer route, of the caller's namespace shop: it goes before all producer routes of prod",
			"match 0 (all calls)"}},
		{name: "gRPC by HTTPRoute", authority: "rest.prod", path: "/shop.Web/Say", code: "OK", says: rest(9)},
		{name: "gRPC by HTTPRoute without a backend", authority: "rest.prod", path: "/shop.Gone/Say", code: "UNKNOWN", says: rest(10) + ": there is no Service prod/gone"},
		{name: "gRPC and no HTTPRoute", authority: "rest.prod", path: "/shop.Other/Say", code: "UNIMPLEMENTED", says: "none of their rules"},

		{name: "REST", authority: "rest.prod", path: "/get?a=b", verb: "GET", code: "OK", says: "behind port 80 of Service prod/rest, " + rest(2), facts: []string{"cluster backend/prod/rest/80\n"}},
		{name: "other verb", authority: "rest.prod", path: "/get", verb: "POST", code: "404", says: "none of their rules"},
		{name: "HTTP no backend", authority: "rest.prod", path: "/gone", verb: "GET", code: "500", says: "there is no Service prod/gone"},
		{name: "HTTP nothing behind", authority: "rest.prod", path: "/empty", verb: "GET", code: "503", says: "nothing stands behind port 80 of Service prod/empty"},
		{name: "a share fails", authority: "rest.prod", path: "/half", verb: "GET", code: "OK", says: "0.0001 % of the calls fail: nothing stands behind port 80 of Service prod/empty"},
		{name: "redirect", authority: "rest.prod", path: "/moved", verb: "GET", code: "301", says: "rule 6 of HTTPRoute prod/rest redirects it"},
		{name: "flaw", authority: "rest.prod", path: "/flaw", verb: "GET", code: "500", says: "cannot be served, and all its calls fail: "},
		{name: "match that cannot be written", authority: "rest.prod", path: "/re" + strings.Repeat("a", 300), verb: "GET", code: "404", says: "none of their rules", facts: []string{"rule 8 of HTTPRoute prod/rest cannot be served: match 0: regular expression"}},
		{name: "redirect with a backend", authority: "rest.prod", path: "/both", verb: "GET", code: "302", says: "redirects it"},
		{name: "transcoded", authority: "rest.prod", path: "/v1/Books/7", verb: "GET", code: "OK", says: "behind port 80 of Service prod/books, " + rest(0),
			facts: []string{"transcoded", "to lib.v1.Books/Get, by the descriptors of the backend", "cluster backend/prod/books/80/lib.v1.Books\n"}},
		{name: "beside what is transcoded", authority: "rest.prod", path: "/v1/Books", verb: "DELETE", code: "OK", says: rest(0), facts: []string{"for lib.v1.Books, but this is none"}, unmade: true},
		{name: "HTTP without routes", authority: "plain.prod", path: "/a", verb: "GET", code: "415", says: "beyond routes only calls of gRPC are answered"},
	} {
		t.Run(c.name, func(t *testing.T) { m.explains(t, "shop/me", c) })
	}
	e.content()
	t.Run("what the client has", func(t *testing.T) {
		call := routedCall{authority: "web.prod", path: "/shop.New/Say", code: "UNAVAILABLE", unmade: true,
			says: "no client of that id is connected"}
		m.explains(t, "shop/raw", call)
		c := connectRaw(t, m.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "shop/raw"}, Reply: func(r client.Response) client.Reply {
			if r.Type == xds.Cluster {
				return client.Reply{Nack: "no such clusters"}
			}
			return client.Reply{}
		}})
		c.subscribe(xds.Listener)
		call.says = "the client does not have the routes of egress yet: not asked for"
		m.explains(t, "shop/raw", call)
		c.subscribe(xds.Route, "egress")
		call.says = "the client does not have the cluster of backend/prod/canary/80/shop.New yet: not asked for"
		m.explains(t, "shop/raw", call)
		c.subscribe(xds.Cluster)
		call.says = "the client rejected the cluster of backend/prod/canary/80/shop.New: no such clusters"
		m.explains(t, "shop/raw", call)
	})
	t.Run("path alone", func(t *testing.T) {
		if out := m.agent.must("explain", "call", "--from", "shop/me", "--authority", "rest.prod", "/get"); !strings.HasPrefix(out, "shop/me calling /get: OK: ") {
			t.Errorf("a path that is not of gRPC is a GET:\n%s", out)
		}
	})
	t.Run("share of what is transcoded", func(t *testing.T) {
		code, body, err := m.http(request{host: "rest.prod", path: "/v1/Books/7", headers: map[string]string{"x-mixed": "yes"}})
		if err != nil || code != 503 || !strings.Contains(body, "no healthy upstream") {
			t.Errorf("%d %s, %v", code, body, err)
		}
		e := decoded(t, m.agent, "explain", "call", "--from", "shop/me", "--authority", "rest.prod", "--method", "GET", "--header", "x-mixed=yes", "/v1/Books/7").(map[string]any)
		s := list(t, "shares", e["shares"], 2)[1].(map[string]any)
		if s["cluster"] != "backend/prod/late/80/lib.v1.Books" || s["code"] != "503" {
			t.Errorf("share %v", s)
		}
	})
	t.Run("JSON", func(t *testing.T) {
		e := wantKeys(t, "call", decoded(t, m.agent, "explain", "call", "--from", "shop/me", "--authority", "rest.prod", "--method", "GET", "/half"),
			"verdict", "facts", "from", "authority", "path", "code", "message", "cause", "do", "route", "shares", "cluster", "endpoints", "absent", "decisions")
		if e["route"] != "HTTPRoute prod/rest" || e["cluster"] != "backend/prod/rest/80" {
			t.Errorf("route %v, cluster %v", e["route"], e["cluster"])
		}
		shares := list(t, "shares", e["shares"], 2)
		s := wantKeys(t, "share", shares[1], "service", "port", "weight", "cluster", "code", "why")
		if s["service"] != "prod/empty" || s["code"] != "503" || s["weight"] != 1.0 || s["why"] == "" {
			t.Errorf("share %v", s)
		}
	})
	t.Run("workload", func(t *testing.T) {
		out := m.agent.must("explain", "workload", "prod/canary")
		for _, want := range []string{
			"rule 0 of GRPCRoute prod/split leads to ReplicaSet/canary-1: service is shop.New",
			`rule 1 of GRPCRoute prod/split leads to ReplicaSet/canary-1: service is shop.Web, method is Say, header x-canary is "yes"`,
			"rule 0 of GRPCRoute shop/mine leads to ReplicaSet/canary-1: all calls",
			"rule 12 of GRPCRoute prod/split takes no call: UnsupportedValue: ",
		} {
			if strings.Count(out, want) != 1 {
				t.Errorf("explain workload does not say %q once:\n%s", want, out)
			}
		}
	})
	t.Run("no name of its own", func(t *testing.T) {
		for _, args := range [][]string{{"workload", "prod/rest"}, {"pod", "prod/rest-1-a"}} {
			line, _, _ := strings.Cut(m.agent.must("explain", args[0], args[1]), "\n")
			if !strings.Contains(line, "; calls may come by ") || !strings.Contains(line, "HTTPRoute prod/rest") {
				t.Errorf("explain %s says %q, not by which route calls come", args[0], line)
			}
		}
	})
	t.Run("usage", func(t *testing.T) {
		refused(t, 2, "--method", nil, "explain", "call", "--from", "shop/me", "--method", "G T", "/a", "--admin-socket", m.admin)
		refused(t, 2, "NAME=VALUE", nil, "explain", "call", "--from", "shop/me", "--header", "x", "/a", "--admin-socket", m.admin)
	})
}
