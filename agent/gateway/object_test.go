package gateway_test

import (
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
)

// decode reads an object of prod, or of another namespace, with a spec in YAML.
func decode(t *testing.T, kind, spec string, namespace ...string) *gateway.Object {
	t.Helper()
	text := fmt.Sprintf(`{apiVersion: x/v1, kind: %s, metadata: {namespace: %s, name: r, uid: u, resourceVersion: "7", generation: 3, creationTimestamp: "2026-05-01T12:00:00Z"}}`,
		kind, append(namespace, "prod")[0])
	data, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	body, err := yaml.YAMLToJSON([]byte(spec))
	if err != nil {
		t.Fatal(err)
	}
	o, err := gateway.Decode(kind, []byte(strings.TrimSuffix(string(data), "}")+`,"spec":`+string(body)+"}"))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestDefaultsOfARouteAreFilledIn(t *testing.T) {
	o := decode(t, "HTTPRoute", `
parentRefs: [{name: web}, {group: "", kind: Service, name: web, namespace: other, port: 80, sectionName: api}]
hostnames: [Shop.Example.com]
rules:
- name: all
  backendRefs: [{name: web, port: 80}, {name: api, namespace: other, port: 81, weight: 0}]
- matches: [{path: {value: /v2/}}, {path: {type: Exact, value: /v2/}, method: GET}]
  timeouts: {request: 0s, backendRequest: 1h2m}
  retry: {codes: [500, 503], attempts: 2, backoff: 100ms}
`)
	want := &nodecache.Route{
		UID: "u", Generation: 3, Namespace: "prod", Name: "r", Created: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC),
		Parents: []nodecache.RouteParent{
			{Group: "gateway.networking.k8s.io", Kind: "Gateway", Name: nodecache.Name{Namespace: "prod", Name: "web"}},
			{Kind: "Service", Name: nodecache.Name{Namespace: "other", Name: "web"}, Section: "api", Port: 80},
		},
		Hostnames: []string{"shop.example.com"},
		Rules: []nodecache.RouteRule{{
			Name: "all", Matches: []nodecache.RouteMatch{{Path: "/", PathType: nodecache.MatchPrefix}},
			Backends: []nodecache.RouteBackend{
				{Service: nodecache.Name{Namespace: "prod", Name: "web"}, Port: 80, Weight: 1},
				{Service: nodecache.Name{Namespace: "other", Name: "api"}, Port: 81},
			},
			Timeout: -1, BackendTimeout: -1,
		}, {
			Matches: []nodecache.RouteMatch{
				{Path: "/v2", PathType: nodecache.MatchPrefix}, {Path: "/v2/", PathType: nodecache.MatchExact, Verb: "GET"},
			},
			BackendTimeout: 62 * time.Minute,
			Retry:          &nodecache.RouteRetry{Codes: []int{500, 503}, Attempts: 2, Backoff: 100 * time.Millisecond},
		}},
	}
	if o.Err != nil || o.Version != "7" || !reflect.DeepEqual(o.Route, want) {
		t.Errorf("%v, version %s, got\n%+v, want\n%+v", o.Err, o.Version, o.Route, want)
	}
}

func TestDefaultsOfAGRPCRouteAreFilledIn(t *testing.T) {
	o := decode(t, "GRPCRoute", `
parentRefs: [{group: "", kind: Service, name: web}]
rules:
- backendRefs: [{name: web, port: 80}]
- matches:
  - {method: {service: pkg.A}}
  - {method: {type: RegularExpression, method: "Get.*"}, headers: [{name: X-A, value: b}, {name: x-a, value: c}, {name: z, type: RegularExpression, value: "d+"}]}
`)
	if o.Route.Kind != nodecache.GRPCRoute || !o.Route.Parents[0].Service() {
		t.Errorf("route %+v", o.Route)
	}
	want := [][]nodecache.RouteMatch{{{}}, {
		{Service: "pkg.A"},
		{Method: "Get.*", MethodType: nodecache.MatchRegex, Headers: []nodecache.ValueMatch{
			{Name: "x-a", Value: "b"}, {Name: "z", Value: "d+", Type: nodecache.MatchRegex},
		}},
	}}
	for i, rule := range o.Route.Rules {
		if !reflect.DeepEqual(rule.Matches, want[i]) || rule.Refused != "" {
			t.Errorf("rule %d: %+v, want %+v", i, rule, want[i])
		}
	}
}

func TestFiltersAreRead(t *testing.T) {
	o := decode(t, "HTTPRoute", `
rules:
- filters:
  - type: RequestHeaderModifier
    requestHeaderModifier: {set: [{name: A, value: "1"}, {name: a, value: "2"}], add: [{name: b, value: c}], remove: [D]}
  - {type: URLRewrite, urlRewrite: {hostname: h.example.com, path: {type: ReplacePrefixMatch, replacePrefixMatch: /x}}}
  backendRefs:
  - name: web
    port: 80
    filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {remove: [e]}}]
- filters: [{type: RequestRedirect, requestRedirect: {scheme: HTTPS, hostname: h, port: 8443, statusCode: 301, path: {type: ReplaceFullPath, replaceFullPath: /y}}}]
- filters: [{type: RequestRedirect, requestRedirect: {}}]
`)
	rules := o.Route.Rules
	want := [][]nodecache.RouteFilter{{
		{Type: nodecache.FilterRequestHeaders, Set: []nodecache.Header{{Name: "a", Value: "1"}}, Add: []nodecache.Header{{Name: "b", Value: "c"}}, Remove: []string{"d"}},
		{Type: nodecache.FilterRewrite, Hostname: "h.example.com", PathOp: nodecache.PathPrefix, ReplacePath: "/x"},
	}, {
		{Type: nodecache.FilterRedirect, Scheme: "https", Hostname: "h", Port: 8443, Status: 301, PathOp: nodecache.PathFull, ReplacePath: "/y"},
	}, {{Type: nodecache.FilterRedirect}}}
	for i := range want {
		if !reflect.DeepEqual(rules[i].Filters, want[i]) || rules[i].Refused != "" {
			t.Errorf("rule %d: %+v, want %+v", i, rules[i], want[i])
		}
	}
	if got := rules[0].Backends[0].Filters; !reflect.DeepEqual(got, []nodecache.RouteFilter{{Type: nodecache.FilterResponseHeaders, Remove: []string{"e"}}}) {
		t.Errorf("filters of the backend: %+v", got)
	}
}

// Values come up that this program does not know; they refuse their rule, and
// no other.
func TestUnknownValuesRefuseTheirRule(t *testing.T) {
	const unsupported = "UnsupportedValue"
	for _, c := range []struct{ kind, rule, refused, detail string }{
		{"HTTPRoute", `matches: [{path: {type: Glob, value: /a}}]`, unsupported, `path type "Glob"`},
		{"HTTPRoute", `matches: [{path: {type: RegularExpression, value: "/("}}]`, unsupported, "missing closing )"},
		{"HTTPRoute", `matches: [{path: {type: RegularExpression, value: "/a.*"}}]`, "", ""},
		{"HTTPRoute", `matches: [{path: {type: Exact, value: a}}]`, unsupported, `path "a"`},
		{"HTTPRoute", `matches: [{path: {value: "/a?b"}}]`, unsupported, `path "/a?b"`},
		{"HTTPRoute", `matches: [{path: {value: "///"}}]`, "", ""},
		{"HTTPRoute", `matches: [{method: BREW}]`, unsupported, `method "BREW"`},
		{"HTTPRoute", `matches: [{headers: [{type: Prefix, name: a, value: b}]}]`, unsupported, `match type "Prefix"`},
		{"HTTPRoute", `matches: [{headers: [{name: "a b", value: b}]}]`, unsupported, `header "a b"`},
		{"HTTPRoute", `matches: [{headers: [{name: a, value: "b\n"}]}]`, unsupported, `header a`},
		{"HTTPRoute", `matches: [{queryParams: [{type: Prefix, name: a, value: b}]}]`, unsupported, `match type "Prefix"`},
		{"HTTPRoute", `matches: [{queryParams: [{name: A, value: b}]}]`, "", ""},
		{"HTTPRoute", `filters: [{type: Telepathy}]`, unsupported, `filter "Telepathy"`},
		{"HTTPRoute", `filters: [{type: RequestMirror, requestMirror: {backendRef: {name: a, port: 1}}}]`, unsupported, `filter "RequestMirror"`},
		{"HTTPRoute", `filters: [{type: ExtensionRef, extensionRef: {group: x, kind: Thing, name: z}}]`, unsupported, `filter "ExtensionRef"`},
		{"HTTPRoute", `filters: [{type: CORS, cors: {}}]`, unsupported, `filter "CORS"`},
		{"HTTPRoute", `filters: [{type: URLRewrite}]`, unsupported, `without its part`},
		{"HTTPRoute", `filters: [{type: RequestRedirect}]`, unsupported, `without its part`},
		{"HTTPRoute", `filters: [{type: RequestHeaderModifier}]`, unsupported, `without its part`},
		{"HTTPRoute", `filters: [{type: RequestHeaderModifier, requestHeaderModifier: {remove: [""]}}]`, unsupported, `header ""`},
		{"HTTPRoute", `filters: [{type: RequestHeaderModifier, requestHeaderModifier: {add: [{name: a, value: "\r"}]}}]`, unsupported, `header "a"`},
		{"HTTPRoute", `filters: [{type: RequestRedirect, requestRedirect: {scheme: gopher}}]`, unsupported, `scheme "gopher"`},
		{"HTTPRoute", `filters: [{type: RequestRedirect, requestRedirect: {statusCode: 299}}]`, unsupported, `status 299`},
		{"HTTPRoute", `filters: [{type: URLRewrite, urlRewrite: {path: {type: Rotate}}}]`, unsupported, `path modifier "Rotate"`},
		{"HTTPRoute", `filters: [{type: URLRewrite, urlRewrite: {}}, {type: RequestRedirect, requestRedirect: {}}]`, "IncompatibleFilters", "redirect and a rewrite"},
		{"HTTPRoute", `backendRefs: [{name: a, port: 1, filters: [{type: Telepathy}]}]`, unsupported, `filter "Telepathy"`},
		{"HTTPRoute", `timeouts: {request: soon}`, unsupported, `duration "soon"`},
		{"HTTPRoute", `timeouts: {request: -1s}`, unsupported, `duration "-1s"`},
		{"HTTPRoute", `retry: {backoff: later}`, unsupported, `duration "later"`},
		{"GRPCRoute", `matches: [{method: {type: Glob, service: a}}]`, unsupported, `match type "Glob"`},
		{"GRPCRoute", `matches: [{method: {type: RegularExpression, service: "("}}]`, unsupported, "missing closing )"},
		{"GRPCRoute", `matches: [{method: {service: "a/b"}}]`, unsupported, `service "a/b"`},
		{"GRPCRoute", `matches: [{method: {method: "a.b"}}]`, unsupported, `gRPC method "a.b"`},
		{"GRPCRoute", `matches: [{headers: [{type: Prefix, name: a, value: b}]}]`, unsupported, `match type "Prefix"`},
		{"GRPCRoute", `filters: [{type: RequestMirror}]`, unsupported, `filter "RequestMirror"`},
		{"GRPCRoute", `filters: [{type: URLRewrite}]`, unsupported, `filter "URLRewrite"`},
	} {
		o := decode(t, c.kind, "rules: [{backendRefs: [{name: web, port: 80}]}, {"+c.rule+"}]")
		if o.Err != nil || len(o.Route.Rules) != 2 {
			t.Errorf("%s: %v, %+v", c.rule, o.Err, o.Route)
			continue
		}
		good, bad := o.Route.Rules[0], o.Route.Rules[1]
		if good.Refused != "" || bad.Refused != c.refused || !strings.Contains(bad.Detail, c.detail) || (bad.Detail == "") != (c.refused == "") {
			t.Errorf("%s: refused %q for %q (and the good rule: %q), want %q for %q", c.rule, bad.Refused, bad.Detail, good.Refused, c.refused, c.detail)
		}
	}
}

func TestBackendsThatAreNoServicesAreRefused(t *testing.T) {
	o := decode(t, "HTTPRoute", `
rules:
- backendRefs:
  - {name: web, port: 80}
  - {kind: Bucket, name: web, port: 80}
  - {group: example.com, kind: Service, name: web, port: 80}
  - {name: web}
  - {name: web, port: 80, weight: -1}
`)
	want := []string{"", "InvalidKind", "InvalidKind", "BackendNotFound", ""}
	for i, b := range o.Route.Rules[0].Backends {
		if b.Refused != want[i] || (b.Refused == "InvalidKind") != (b.Service == nodecache.Name{}) {
			t.Errorf("backend %d: %+v, want %q", i, b, want[i])
		}
	}
	if w := o.Route.Rules[0].Backends[4].Weight; w != 0 {
		t.Errorf("weight %d", w)
	}
}

func TestObjectThatCannotBeReadIsStillNamed(t *testing.T) {
	for kind, spec := range map[string]string{
		"HTTPRoute": `rules: {not: a list}`, "GRPCRoute": `rules: [{matches: [{method: text}]}]`, "ReferenceGrant": `from: 1`, "TCPRoute": `{}`,
	} {
		o := decode(t, kind, spec)
		if o.Err == nil || strings.ContainsAny(o.Err.Error(), "\r\n") || o.Route != nil || o.Grant != nil || o.String() != "prod/r" || o.UID != "u" {
			t.Errorf("%s: %+v, error %v", kind, o, o.Err)
		}
	}
	if _, err := gateway.Decode("HTTPRoute", []byte(`{"metadata": 1}`)); err == nil {
		t.Error("an object without metadata is one")
	}
}

func TestReadVersionsAreThoseOfTheSameForm(t *testing.T) {
	for _, c := range []struct {
		kind, version string
		want          bool
	}{
		{"HTTPRoute", "v1", true}, {"HTTPRoute", "v1beta1", true}, {"GRPCRoute", "v1alpha2", true}, {"ReferenceGrant", "v1beta1", true},
		{"HTTPRoute", "v1alpha1", false}, {"HTTPRoute", "v2", false}, {"TCPRoute", "v1", false}, {"", "", false},
	} {
		if gateway.Reads(c.kind, c.version) != c.want {
			t.Errorf("%s %s: read %t", c.kind, c.version, !c.want)
		}
	}
}

// Whatever stands in an object, it is read or named, and does not crash what
// follows.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"metadata":{"name":"a"},"spec":{"rules":[{"matches":[{"path":{"type":"Exact","value":"/"}}]}]}}`,
		`{"spec":{"parentRefs":[{"port":-1}],"rules":[{"backendRefs":[{"port":70000,"weight":-5,"namespace":"x"}],"filters":[{"type":"URLRewrite","urlRewrite":{"path":{"type":"ReplaceFullPath"}}}]}]}}`,
		`{"spec":{"rules":[{"matches":[{"method":{"type":"RegularExpression","service":"("}}],"timeouts":{"request":"99999999h"},"retry":{"codes":[1e3],"attempts":-1}}]}}`,
		`{"spec":{"from":[{"group":"gateway.networking.k8s.io","kind":"HTTPRoute","namespace":"a"}],"to":[{"kind":"Service","name":""}]}}`,
		`{"metadata":{"creationTimestamp":"x"}}`, `{"spec":null,"metadata":null}`, `[`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := nodecache.New(nodecache.Options{})
		table := gateway.NewTable(dir, slog.New(slog.DiscardHandler))
		for _, kind := range []string{"ReferenceGrant", "HTTPRoute", "GRPCRoute"} {
			o, err := gateway.Decode(kind, data)
			if err != nil {
				if strings.ContainsAny(err.Error(), "\r\n") {
					t.Errorf("error of several lines: %q", err)
				}
				continue
			}
			if (o.Err == nil) != (o.Route != nil || o.Grant != nil) {
				t.Errorf("%s: %+v", kind, o)
			}
			table.Upsert(o)
			if o.Route == nil {
				continue
			}
			for _, rule := range o.Route.Rules {
				if len(rule.Matches) == 0 || (rule.Refused == "") != (rule.Detail == "") {
					t.Errorf("rule %+v", rule)
				}
			}
			held := dir.Route(o.UID)
			if held == nil || len(held.Rules) != len(o.Route.Rules) {
				t.Errorf("the directory holds %+v", held)
			}
		}
	})
}
