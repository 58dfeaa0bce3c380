package report_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/agent/report"
	"github.com/fingerpost/fingerpost/nodecache"
)

// object decodes a route of which the name is NAMESPACE/NAME, in generation 3.
func object(t *testing.T, kind, name, spec string, status ...gatewayv1.RouteParentStatus) *gateway.Object {
	t.Helper()
	ns, n, _ := strings.Cut(name, "/")
	var body any
	if err := yaml.Unmarshal([]byte(spec), &body); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]any{
		"apiVersion": "gateway.networking.k8s.io/v1", "kind": kind, "spec": body, "status": map[string]any{"parents": status},
		"metadata": map[string]any{"namespace": ns, "name": n, "uid": kind + " " + name, "generation": 3},
	})
	if err != nil {
		t.Fatal(err)
	}
	o, err := gateway.Decode(kind, text)
	if err != nil || o.Err != nil {
		t.Fatal(err, o.Err)
	}
	return o
}

// parents names Services as parents, each as NAME or NAME:PORT.
func parents(names ...string) string {
	text := "parentRefs: ["
	for _, name := range names {
		name, port, _ := strings.Cut(name, ":")
		if port != "" {
			port = ", port: " + port
		}
		text += fmt.Sprintf(`{group: "", kind: Service, name: %s, namespace: prod%s}, `, name, port)
	}
	return text + "]"
}

// services are those of every world.
func services(d *nodecache.Directory) {
	for _, f := range []*nodecache.Front{
		{Name: "web", Ports: []nodecache.FrontPort{{Name: "http", Port: 80}, {Name: "grpc", Port: 81}}},
		{Name: "api", Ports: []nodecache.FrontPort{{Port: 80}, {Name: "tls", Port: 443, AppProtocol: "https"}}},
		{Name: "ext", External: "example.org", Ports: []nodecache.FrontPort{{Port: 80}}},
		{Name: "portless"},
	} {
		f.Namespace, f.UID, f.Type = "prod", f.Name, "ClusterIP"
		d.UpsertFront(f)
	}
}

func TestWhatIsSaidOfARoute(t *testing.T) {
	const (
		good     = "Accepted=True/Accepted: The route is served"
		resolved = "ResolvedRefs=True/ResolvedRefs: All backends are there"
		fails    = ". Their share of the calls fails"
		toAPI    = "rules: [{backendRefs: [{name: api, port: 80}]}]"
		mirror   = `{filters: [{type: RequestMirror, requestMirror: {backendRef: {name: api, port: 80}}}], backendRefs: [{name: api, port: 80}]}`
	)
	lines := func(l ...string) []string { return l }
	no := func(reason, text string) string { return "Accepted=False/" + reason + ": " + text }
	un := func(reason, text string) string { return "ResolvedRefs=False/" + reason + ": " + text + fails }
	grpc := `{parentRefs: [{group: "", kind: Service, name: web}], rules: [{backendRefs: [{name: api, port: 80}]}]}`
	const conflict = ", and a GRPCRoute goes before an HTTPRoute: attach the routes to different ports, or put all calls into GRPCRoutes"

	for _, c := range []struct {
		name, kind, route string
		spec              string
		others            map[string]string // specs of GRPCRoutes, by name
		want              []string          // "Service conditions", in order
	}{
		{name: "is served", spec: parents("web") + "\n" + toAPI, want: lines("web", good, resolved)},
		{name: "gateways are not ours", spec: "parentRefs: [{name: web}, {name: web, kind: Service, group: example.org}]\n" + toAPI},
		{name: "each parent for itself", spec: parents("web", "gone", "web:80", "portless") + "\n" + toAPI, want: lines(
			"web", good, resolved,
			"gone", no("NoMatchingParent", "there is no Service prod/gone: create it, or correct parentRefs"), resolved,
			"web:80", good, resolved,
			"portless", no("NoMatchingParent", "Service prod/portless has no TCP port (it has none): correct parentRefs, or the Service"), resolved)},
		{name: "no such port", spec: parents("web:82") + "\n" + toAPI, want: lines(
			"web:82", no("NoMatchingParent", "Service prod/web has no TCP port 82 (it has 80 http, 81 grpc): correct parentRefs, or the Service"), resolved)},
		{name: "no such section", spec: `parentRefs: [{group: "", kind: Service, name: web, sectionName: grpc, port: 80}]` + "\n" + toAPI, want: lines(
			"web:80", no("NoMatchingParent", "Service prod/web has no TCP port 80 named grpc (it has 80 http, 81 grpc): correct parentRefs, or the Service"), resolved)},
		{name: "no rule", kind: "GRPCRoute", spec: parents("web"), want: lines("web", no("UnsupportedValue", "the route has no rule: add one"), resolved)},
		{name: "no rule that is known", spec: parents("web") + "\nrules: [" + mirror + "]", want: lines(
			"web", no("UnsupportedValue", `no rule can be served: rule 0: filter "RequestMirror": correct them`), resolved)},
		{name: "filters that exclude one another", spec: parents("web") + "\nrules: [{filters: [{type: RequestRedirect, requestRedirect: {port: 81}}, {type: URLRewrite, urlRewrite: {hostname: x}}]}]", want: lines(
			"web", no("IncompatibleFilters", "no rule can be served: rule 0: a redirect and a rewrite: correct them"), resolved)},
		{name: "one rule of several", spec: parents("web") + "\nrules: [{backendRefs: [{name: api, port: 80}]}, {name: copy, " + mirror[1:] + "]", want: lines(
			"web", good, resolved, `PartiallyInvalid=True/UnsupportedValue: Dropped Rule 1 (copy): filter "RequestMirror". The other rules are served; correct or remove these`)},
		{name: "what Envoy could not take", spec: parents("web") + "\nrules: [{backendRefs: [{name: api, port: 80}]}, {matches: [{path: {type: RegularExpression, value: '/(a{1,100}){1,9}x{500}'}}]}]", want: lines(
			"web", good, resolved, "PartiallyInvalid=True/UnsupportedValue: Dropped Rule 1: match 0: *. The other rules are served; correct or remove these")},
		{name: "a faulty route is not partially invalid", spec: parents("gone") + "\nrules: [{}, " + mirror + "]", want: lines(
			"gone", no("NoMatchingParent", "there is no Service prod/gone: create it, or correct parentRefs"), resolved)},

		{name: "backends", spec: parents("web") + "\nrules: [{backendRefs: [{name: api, port: 80}, {name: gone, port: 80}]}, {name: r, backendRefs: [{name: api, port: 8}]}]", want: lines("web", good,
			un("BackendNotFound", "rule 0, backend 1: there is no Service prod/gone: create it, or correct backendRefs; rule 1 (r), backend 0: Service prod/api has no TCP port 8 (it has 80, 443 tls): correct backendRefs, or the Service"))},
		{name: "no port", spec: parents("web") + "\nrules: [{backendRefs: [{name: api}]}]", want: lines("web", good,
			un("BackendNotFound", "rule 0, backend 0: the reference to Service prod/api names no port: add it"))},
		{name: "another kind", spec: parents("web") + "\nrules: [{backendRefs: [{name: api, kind: Bucket, group: x.org}]}]", want: lines("web", good,
			un("InvalidKind", "rule 0, backend 0: only Services are called: name one"))},
		{name: "a name for a host", spec: parents("web") + "\nrules: [{backendRefs: [{name: ext, port: 80}]}]", want: lines("web", good,
			un("InvalidKind", "rule 0, backend 0: Service prod/ext is of type ExternalName, to which no call goes: name a Service with pods"))},
		{name: "TLS", spec: parents("web") + "\nrules: [{backendRefs: [{name: api, port: 443}]}]", want: lines("web", good,
			un("UnsupportedProtocol", "rule 0, backend 0: port 443 of Service prod/api has appProtocol https, and calls are sent in plaintext: name a port without TLS"))},
		{name: "another namespace without a grant, for the mesh", route: "dev/r", spec: parents("web") + "\nrules: [{backendRefs: [{name: api, namespace: prod, port: 80}]}]", want: lines("web", good, resolved)},

		{name: "lost to a GRPCRoute", spec: parents("web", "web:80") + "\n" + toAPI, others: map[string]string{"prod/g": grpc, "prod/h": grpc}, want: lines(
			"web", no("Conflicted", "GRPCRoute prod/g has port 80, 81 of Service prod/web"+conflict), resolved,
			"web:80", no("Conflicted", "GRPCRoute prod/g has port 80 of Service prod/web"+conflict), resolved)},
		{name: "lost on one port", spec: parents("web", "web:81") + "\n" + toAPI, others: map[string]string{"prod/g": "{" + parents("web:80") + ", rules: [{}]}"}, want: lines(
			"web", "Accepted=True/Accepted: The route is served, but not on port 80, which GRPCRoute prod/g has", resolved,
			"web:81", good, resolved)},
		{name: "a GRPCRoute that is not served takes nothing", spec: parents("web") + "\n" + toAPI, others: map[string]string{"prod/g": "{" + parents("web") + ", rules: [" + mirror + "]}"},
			want: lines("web", good, resolved)},
		{name: "another namespace's GRPCRoute", route: "dev/r", spec: parents("web") + "\n" + toAPI, others: map[string]string{"prod/g": grpc}, want: lines(
			"web", good, un("BackendNotFound", "rule 0, backend 0: there is no Service dev/api: create it, or correct backendRefs"))},
		{name: "a GRPCRoute of the same consumers", route: "dev/r", spec: parents("web") + "\nrules: [{}]", others: map[string]string{"dev/g": "{" + parents("web") + ", rules: [{}]}"}, want: lines(
			"web", no("Conflicted", "GRPCRoute dev/g has port 80, 81 of Service prod/web"+conflict), resolved)},
		{name: "a GRPCRoute wins", kind: "GRPCRoute", spec: parents("web") + "\n" + toAPI, others: map[string]string{"prod/g": grpc}, want: lines("web", good, resolved)},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := nodecache.New(nodecache.Options{})
			table := gateway.NewTable(dir, slog.New(slog.DiscardHandler))
			services(dir)
			kind, name := "HTTPRoute", "prod/r"
			if c.kind != "" {
				kind = c.kind
			}
			if c.route != "" {
				name = c.route
			}
			for other, spec := range c.others {
				table.Upsert(object(t, "GRPCRoute", other, spec))
			}
			table.Upsert(object(t, kind, name, c.spec))
			said := report.Judge(dir.Route(kind+" "+name), dir)
			var got []string
			for _, s := range said {
				parent := s.Parent.Name.Name
				if s.Parent.Port != 0 {
					parent += fmt.Sprintf(":%d", s.Parent.Port)
				}
				got = append(got, parent)
				for _, k := range s.Conditions {
					if k.ObservedGeneration != 3 {
						t.Errorf("condition %+v is not of generation 3", k)
					}
					got = append(got, fmt.Sprintf("%s=%s/%s: %s", k.Type, k.Status, k.Reason, k.Message))
				}
			}
			same := func(want, got string) bool {
				before, after, any := strings.Cut(want, "*")
				return want == got || any && strings.HasPrefix(got, before) && strings.HasSuffix(got, after) && len(got) > len(want)
			}
			if !slices.EqualFunc(c.want, got, same) {
				t.Errorf("said\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
			}
		})
	}
}

// What cannot be listed in full is cut where the API would refuse it.
func TestLongMessagesAreCut(t *testing.T) {
	dir := nodecache.New(nodecache.Options{})
	var rules []string
	for range 16 {
		rules = append(rules, "{backendRefs: ["+strings.Repeat("{name: gone-"+strings.Repeat("é", 30)+", port: 80}, ", 16)+"]}")
	}
	o := object(t, "HTTPRoute", "prod/r", parents("web")+"\nrules: ["+strings.Join(rules, ", ")+"]")
	refs := report.Judge(o.Route, dir)[0].Conditions[1]
	if n := len(refs.Message); n < 4000 || n > 4100 || strings.Contains(refs.Message, "�") {
		t.Errorf("%d bytes: %s", n, refs.Message)
	}
}
