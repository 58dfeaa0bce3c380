package gateway_test

import (
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
)

type fixture struct {
	t     *testing.T
	dir   *nodecache.Directory
	table *gateway.Table
	log   *strings.Builder
}

func newFixture(t *testing.T) *fixture {
	x := &fixture{t: t, dir: nodecache.New(nodecache.Options{}), log: &strings.Builder{}}
	x.table = gateway.NewTable(x.dir, slog.New(slog.NewTextHandler(x.log, nil)))
	return x
}

const (
	byGateway = `[{name: gw}]`
	byService = `[{group: "", kind: Service, name: web}]`
)

// route puts a route of prod that refers to the Service api of the namespace.
func (x *fixture) route(kind, uid, parents, namespace string) {
	o := decode(x.t, kind, fmt.Sprintf(`{parentRefs: %s, rules: [{backendRefs: [{name: api, namespace: %q, port: 80}]}]}`, parents, namespace))
	x.put(o, uid, uid)
}

func (x *fixture) put(o *gateway.Object, name, uid string) {
	o.Name.Name, o.UID = name, uid
	if o.Route != nil {
		o.Route.Name, o.Route.UID = name, uid
	}
	x.table.Upsert(o)
}

// grant puts a grant of the namespace other.
func (x *fixture) grant(name, from, to string) {
	o := decode(x.t, "ReferenceGrant", fmt.Sprintf("{from: %s, to: %s}", from, to), "other")
	x.put(o, name, "grant-"+name)
}

func (x *fixture) want(uid, refused string, granted bool) {
	x.t.Helper()
	r := x.dir.Route(uid)
	if r == nil {
		x.t.Fatalf("no route %s", uid)
	}
	if b := r.Rules[0].Backends[0]; b.Refused != refused || b.Granted != granted {
		x.t.Errorf("route %s: backend %+v, want refused %q, granted %t", uid, b, refused, granted)
	}
}

const (
	fromHTTP = `[{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: prod}]`
	fromGRPC = `[{group: gateway.networking.k8s.io, kind: GRPCRoute, namespace: prod}]`
	toAll    = `[{group: "", kind: Service}]`
	toAPI    = `[{group: "", kind: Service, name: api}]`
)

func TestReferencesToOtherNamespacesNeedAGrant(t *testing.T) {
	for _, c := range []struct {
		name     string
		from, to string
		want     bool
	}{
		{"all Services", fromHTTP, toAll, true},
		{"by name", fromHTTP, toAPI, true},
		{"another name", fromHTTP, `[{group: "", kind: Service, name: web}]`, false},
		{"another kind of route", fromGRPC, toAll, false},
		{"another group of routes", `[{group: example.com, kind: HTTPRoute, namespace: prod}]`, toAll, false},
		{"another namespace", `[{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: dev}]`, toAll, false},
		{"Secrets", fromHTTP, `[{group: "", kind: Secret}]`, false},
		{"another group", fromHTTP, `[{group: example.com, kind: Service}]`, false},
		{"any of several", `[{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: dev}, {group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: prod}]`,
			`[{group: "", kind: Secret}, {group: "", kind: Service, name: web}, {group: "", kind: Service, name: api}]`, true},
		{"nothing", `[]`, `[]`, false},
	} {
		for _, first := range []string{"the route first", "the grant first"} {
			t.Run(c.name+", "+first, func(t *testing.T) {
				x := newFixture(t)
				steps := []func(){
					func() {
						x.route("HTTPRoute", "u", byGateway, "other")
						x.route("HTTPRoute", "mesh", byService, "other")
					},
					func() { x.grant("g", c.from, c.to) },
				}
				if first == "the grant first" {
					slices.Reverse(steps)
				}
				for _, step := range steps {
					step()
				}
				refused := "RefNotPermitted"
				if c.want {
					refused = ""
				}
				x.want("u", refused, c.want)
				x.want("mesh", "", c.want) // GEP-1294
				x.table.Remove("ReferenceGrant", nodecache.Name{Namespace: "other", Name: "g"}, "another")
				x.want("u", refused, c.want)
				x.table.Remove("ReferenceGrant", nodecache.Name{Namespace: "other", Name: "g"}, "grant-g")
				x.want("u", "RefNotPermitted", false)
				x.want("mesh", "", false)
			})
		}
	}
}

func TestOneOfTwoGrantsIsEnough(t *testing.T) {
	x := newFixture(t)
	x.grant("a", fromHTTP, toAll)
	x.grant("b", fromHTTP, toAPI)
	x.route("HTTPRoute", "u", byGateway, "other")
	x.table.Remove("ReferenceGrant", nodecache.Name{Namespace: "other", Name: "a"})
	x.want("u", "", true)
	x.grant("b", fromGRPC, toAPI)
	x.want("u", "RefNotPermitted", false)
}

func TestReferencesWithinTheNamespaceNeedNoGrant(t *testing.T) {
	x := newFixture(t)
	x.route("GRPCRoute", "u", byGateway, "prod")
	x.want("u", "", true)
}

// A route that has a Service and a Gateway as parents may refer as one of the
// mesh; what it may as one of the Gateway says Granted.
func TestRouteOfBothKindsOfParentsIsOneOfTheMesh(t *testing.T) {
	x := newFixture(t)
	x.route("HTTPRoute", "u", `[{name: gw}, {group: "", kind: Service, name: web}]`, "other")
	x.want("u", "", false)
}

func TestTheSourcesLastWordHolds(t *testing.T) {
	x := newFixture(t)
	prod := func(name string) nodecache.Name { return nodecache.Name{Namespace: "prod", Name: name} }
	put := func(name, uid string, generation int64) {
		o := decode(t, "HTTPRoute", `{rules: [{}]}`)
		o.Route.Generation = generation
		x.put(o, name, uid)
	}
	uids := func() (us []string) {
		for _, r := range x.dir.Routes() {
			us = append(us, fmt.Sprint(r.UID, r.Generation))
		}
		return us
	}
	check := func(want ...string) {
		t.Helper()
		if got := uids(); !slices.Equal(got, want) {
			t.Errorf("routes %v, want %v", got, want)
		}
	}
	put("a", "1", 5)
	put("b", "2", 1)
	put("a", "1", 3) // put back to an earlier state
	check("13", "21")
	put("a", "3", 1) // created again
	check("31", "21")
	x.table.Remove("HTTPRoute", prod("a"), "1")
	check("31", "21")
	x.table.Remove("GRPCRoute", prod("a"))
	check("31", "21")
	x.table.Remove("HTTPRoute", prod("a"))
	check("21")
	x.table.Remove("HTTPRoute", prod("b"), "1", "2")
	check()
}

func TestObjectsThatCannotBeReadAreCountedAndNamedOnce(t *testing.T) {
	x := newFixture(t)
	bad := func() *gateway.Object { return decode(t, "HTTPRoute", `rules: 1`) }
	x.route("HTTPRoute", "u", byService, "prod")
	x.put(bad(), "u", "u")
	x.put(bad(), "u", "u")
	if x.dir.Route("u") == nil {
		t.Error("the last state that could be read is gone")
	}
	x.put(bad(), "v", "v")
	if n := strings.Count(x.log.String(), "object is left out"); n != 2 || !strings.Contains(x.log.String(), "prod/v") {
		t.Errorf("logged %s", x.log)
	}
	held, unread := x.table.Counts()
	if held["HTTPRoute"] != 2 || unread["HTTPRoute"] != 2 || unread["GRPCRoute"] != 0 {
		t.Errorf("held %v, unreadable %v", held, unread)
	}
	names := x.table.Names("HTTPRoute")
	if len(names) != 2 {
		t.Errorf("names %v", names)
	}
	x.put(bad(), "u", "again") // what cannot be read is another one
	if x.dir.Route("u") != nil {
		t.Error("a predecessor is served")
	}
	for _, n := range x.table.Names("HTTPRoute") {
		x.table.Remove("HTTPRoute", n)
	}
	held, unread = x.table.Counts()
	if held["HTTPRoute"] != 0 || unread["HTTPRoute"] != 0 {
		t.Errorf("held %v, unreadable %v", held, unread)
	}

	x.grant("g", fromHTTP, toAll)
	x.route("HTTPRoute", "w", byGateway, "other")
	x.want("w", "", true)
	g := decode(t, "ReferenceGrant", `from: 1`, "other")
	x.put(g, "g", "grant-g")
	x.want("w", "RefNotPermitted", false)
	if names := x.table.Names("ReferenceGrant"); len(names) != 1 {
		t.Errorf("names %v", names)
	}
}

// What came about in any order is what came about alone.
func TestRoutesAndGrantsMeetInEveryOrder(t *testing.T) {
	var steps []func(*fixture)
	for _, kind := range []string{"HTTPRoute", "GRPCRoute"} {
		steps = append(steps, func(x *fixture) { x.route(kind, kind, byGateway, "other") })
	}
	steps = append(steps,
		func(x *fixture) { x.grant("a", fromHTTP, toAPI) },
		func(x *fixture) { x.grant("b", fromGRPC, toAPI) },
	)
	var want []*nodecache.Route
	for _, order := range permutations(len(steps)) {
		x := newFixture(t)
		for _, i := range order {
			steps[i](x)
		}
		got := x.dir.Routes()
		if want == nil {
			want = got
			x.want("HTTPRoute", "", true)
			x.want("GRPCRoute", "", true)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("order %v: %+v", order, got)
		}
	}
}

func permutations(n int) [][]int {
	if n == 0 {
		return [][]int{nil}
	}
	var all [][]int
	for _, short := range permutations(n - 1) {
		for i := 0; i <= len(short); i++ {
			all = append(all, slices.Insert(slices.Clone(short), i, n-1))
		}
	}
	return all
}
