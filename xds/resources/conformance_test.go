package resources_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

const infra = "gateway-conformance-infra"

// A call to Service same-namespace, as the conformance suite of the Gateway API
// makes it to the Gateway of that name, and what must become of it: the backend
// Service, 500, or none where no route speaks.
type conformanceCall struct {
	path    string
	version string // header
	want    string
}

// The suite's expectations stand in the .go files beside its tables. Two of
// them are other ones under a Service: hostnames are ignored there, and a route
// of another namespace is a consumer route and no mistake.
var conformanceTables = []struct {
	name  string
	from  string // namespace of the client, infra if empty
	calls []conformanceCall
}{
	{name: "httproute-path-match-order", calls: []conformanceCall{
		{path: "/match/exact/one", want: "infra-backend-v3"}, {path: "/match/exact", want: "infra-backend-v2"},
		{path: "/match", want: "infra-backend-v1"}, {path: "/match/prefix/one/any", want: "infra-backend-v2"},
		{path: "/match/prefix/any", want: "infra-backend-v1"}, {path: "/match/any", want: "infra-backend-v3"},
		{path: "/", want: "no match"},
	}},
	{name: "httproute-matching", calls: []conformanceCall{
		{path: "/", want: "infra-backend-v1"}, {path: "/example", want: "infra-backend-v1"},
		{path: "/", version: "one", want: "infra-backend-v1"}, {path: "/v2", want: "infra-backend-v2"},
		{path: "/v2/example", want: "infra-backend-v2"}, {path: "/", version: "two", want: "infra-backend-v2"},
		{path: "/v2/", want: "infra-backend-v2"}, {path: "/v2example", want: "infra-backend-v1"},
		{path: "/foo/v2/example", want: "infra-backend-v1"},
	}},
	{name: "httproute-matching-across-routes", calls: []conformanceCall{
		{path: "/", want: "infra-backend-v1"}, {path: "/example", want: "infra-backend-v1"},
		{path: "/example", version: "one", want: "infra-backend-v1"}, {path: "/v2", want: "infra-backend-v2"},
		{path: "/v2/example", want: "infra-backend-v2"}, {path: "/", version: "two", want: "infra-backend-v2"},
	}},
	{name: "httproute-reference-grant", calls: []conformanceCall{{path: "/", want: "web-backend"}}},
	{name: "httproute-invalid-reference-grant", calls: []conformanceCall{{path: "/", want: "500"}}},
	{name: "httproute-invalid-backendref-unknown-kind", calls: []conformanceCall{{path: "/v2", want: "500"}}},
	{name: "httproute-invalid-cross-namespace-backend-ref", calls: []conformanceCall{{path: "/", want: "500"}}},
	{name: "httproute-invalid-nonexistent-backendref", calls: []conformanceCall{{path: "/", want: "500"}}},
	{name: "httproute-invalid-cross-namespace-parent-ref", calls: []conformanceCall{{path: "/", want: "none"}}},
	{name: "httproute-invalid-cross-namespace-parent-ref", from: "gateway-conformance-web-backend", calls: []conformanceCall{{path: "/", want: "web-backend"}}},
	{name: "httproute-invalid-parentref-not-matching-listener-port", calls: []conformanceCall{{path: "/", want: "none"}}},
	{name: "httproute-invalid-parentref-not-matching-section-name", calls: []conformanceCall{{path: "/", want: "none"}}},
	{name: "httproute-invalid-parentref-section-name-not-matching-port", calls: []conformanceCall{{path: "/", want: "none"}}},
}

func TestConformanceTablesOfTheGatewayAPI(t *testing.T) {
	dir := conformanceModule(t)
	for _, table := range conformanceTables {
		t.Run(table.name+" "+table.from, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join(dir, "tests", table.name+".yaml"))
			if err != nil {
				t.Fatal(err)
			}
			objects := decodeObjects(t, text)
			from := table.from
			if from == "" {
				from = infra
			}
			for range 10 {
				rand.Shuffle(len(objects), func(i, j int) { objects[i], objects[j] = objects[j], objects[i] })
				m := conformanceMesh(t, objects, from)
				for _, c := range table.calls {
					if got := m.backend(from, c); got != c.want {
						t.Errorf("%+v of %s: %s", c, from, got)
					}
				}
				if t.Failed() {
					return
				}
			}
		})
	}
}

// Deleting a grant revokes what it permitted.
func TestConformanceGrantThatGoesRevokes(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(conformanceModule(t), "tests", "httproute-reference-grant.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range decodeObjects(t, text) {
		if o.Kind == gateway.HTTPRoute {
			m := conformanceMesh(t, []*gateway.Object{o}, infra)
			m.want("without its grant", m.backend(infra, conformanceCall{path: "/"}), "500")
		}
	}
}

// conformanceModule is where the module of the suite lies. It is one of the
// tools' modules, so that users of this one do not inherit it.
func conformanceModule(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json", "sigs.k8s.io/gateway-api/conformance")
	cmd.Dir = filepath.Join("..", "..", "tools", "echo")
	out, err := cmd.Output()
	var module struct{ Dir, Error string }
	if err == nil {
		err = json.Unmarshal(out, &module)
	}
	if err != nil || module.Dir == "" {
		t.Fatalf("the module of the conformance suite: %v %s", err, module.Error)
	}
	return module.Dir
}

func decodeObjects(t *testing.T, text []byte) []*gateway.Object {
	t.Helper()
	var objects []*gateway.Object
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		data, err := yaml.YAMLToJSON(doc)
		if err != nil {
			t.Fatal(err)
		}
		var head struct {
			Kind     string
			Metadata struct{ Name string }
		}
		if err := json.Unmarshal(data, &head); err != nil {
			t.Fatal(err)
		}
		if !gateway.Reads(head.Kind, "v1") {
			continue
		}
		o, err := gateway.Decode(head.Kind, data)
		if err != nil || o.Err != nil {
			t.Fatal(err, o.Err)
		}
		if o.UID = "uid-" + head.Metadata.Name; o.Route != nil {
			o.Route.UID = o.UID
		}
		objects = append(objects, o)
	}
	if len(objects) == 0 {
		t.Fatal("no object is read")
	}
	return objects
}

// conformanceMesh has the objects, with a Service in the place of each Gateway.
// What grants decide is decided for the Gateway: under a Service none is needed.
func conformanceMesh(t *testing.T, objects []*gateway.Object, client string) *mesh {
	t.Helper()
	resolved := nodecache.New(nodecache.Options{})
	table := gateway.NewTable(resolved, slog.New(slog.DiscardHandler))
	for _, o := range objects {
		table.Upsert(o)
	}
	m := newMesh(t, client)
	http := nodecache.FrontPort{Name: "http", Port: 80}
	m.service(infra, "same-namespace", http)
	m.service(infra, "gateway-with-one-not-matching-port-and-section-name-route", http)
	for _, v := range []string{"v1", "v2", "v3"} {
		m.service(infra, "infra-backend-"+v, nodecache.FrontPort{Port: 8080})
	}
	m.service("gateway-conformance-web-backend", "web-backend", nodecache.FrontPort{Port: 8080})
	routes := resolved.Routes()
	rand.Shuffle(len(routes), func(i, j int) { routes[i], routes[j] = routes[j], routes[i] })
	for _, r := range routes {
		r := *r
		r.Parents = append([]nodecache.RouteParent(nil), r.Parents...)
		for i := range r.Parents {
			r.Parents[i].Group, r.Parents[i].Kind = "", "Service"
		}
		m.route(&r)
	}
	m.flush()
	return m
}

// backend is who gets the call.
func (m *mesh) backend(from string, c conformanceCall) string {
	call := routetable.Call{Path: c.path, Verb: "GET"}
	if c.version != "" {
		call.Headers = map[string]string{"Version": c.version}
	}
	for _, parent := range []string{"same-namespace", "gateway-with-one-not-matching-port-and-section-name-route"} {
		choice, ok := m.c.Choose(from, parent+"."+infra, call)
		switch {
		case !ok:
		case choice.Route == nil:
			return "no match"
		case len(choice.Shares) != 1:
			return fmt.Sprint(choice.Shares)
		case choice.Shares[0].Cluster == "":
			return "500"
		default:
			return strings.Split(choice.Shares[0].Cluster, "/")[2]
		}
	}
	return "none"
}
