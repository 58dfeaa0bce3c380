package routetable_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

var (
	web  = nodecache.Name{Namespace: "prod", Name: "web"}
	port = nodecache.FrontPort{Name: "api", Port: 80}
)

func parent(name nodecache.Name) nodecache.RouteParent {
	return nodecache.RouteParent{Kind: "Service", Name: name}
}

// route is attached to prod/web and has one rule for each list of matches.
func route(ns, name string, minute int, rules ...[]nodecache.RouteMatch) *nodecache.Route {
	r := &nodecache.Route{UID: ns + name, Namespace: ns, Name: name, Parents: []nodecache.RouteParent{parent(web)}}
	if minute >= 0 {
		r.Created = time.Date(2026, 5, 1, 12, minute, 0, 0, time.UTC)
	}
	for _, m := range rules {
		r.Rules = append(r.Rules, nodecache.RouteRule{Matches: m})
	}
	return r
}

func prefix(p string) nodecache.RouteMatch {
	return nodecache.RouteMatch{Path: p, PathType: nodecache.MatchPrefix}
}

func exact(p string) nodecache.RouteMatch { return nodecache.RouteMatch{Path: p} }

func one(m ...nodecache.RouteMatch) []nodecache.RouteMatch { return m }

// order is what a table tries, as namespace/name:rule.match.
func order(t routetable.Table) string {
	var out []string
	for _, e := range t.Entries {
		out = append(out, fmt.Sprintf("%s/%s:%d.%d", e.Route.Namespace, e.Route.Name, e.Rule, e.Match))
	}
	return strings.Join(out, " ")
}

// anyOrder wants one table whatever the order of the routes.
func anyOrder(t *testing.T, ns string, want string, routes ...*nodecache.Route) {
	t.Helper()
	for range 20 {
		rand.Shuffle(len(routes), func(i, j int) { routes[i], routes[j] = routes[j], routes[i] })
		if got := order(routetable.New(ns, web, port, routes)); got != want {
			t.Fatalf("order %s\nwant  %s", got, want)
		}
	}
}

func TestMatchesAreTriedByTheirPrecedence(t *testing.T) {
	with := func(m nodecache.RouteMatch, verb string, headers, query int) nodecache.RouteMatch {
		m.Verb = verb
		for i := range headers {
			m.Headers = append(m.Headers, nodecache.ValueMatch{Name: fmt.Sprint("h", i)})
		}
		for i := range query {
			m.Query = append(m.Query, nodecache.ValueMatch{Name: fmt.Sprint("q", i)})
		}
		return m
	}
	anyOrder(t, "prod", "prod/r:0.0 prod/r:1.0 prod/r:2.0 prod/r:3.0 prod/r:4.0 prod/r:5.0 prod/r:6.0 prod/r:7.0 prod/r:8.0",
		route("prod", "r", 1,
			one(exact("/a")),
			one(nodecache.RouteMatch{Path: "/.*", PathType: nodecache.MatchRegex}),
			one(prefix("/a/b")),
			one(with(prefix("/a/"), "GET", 1, 0)),
			one(with(prefix("/a"), "GET", 0, 9)),
			one(with(prefix("/a"), "", 2, 0)),
			one(with(prefix("/a"), "", 1, 1)),
			one(with(prefix("/a"), "", 1, 0)),
			one(prefix("/")),
		))
}

func TestTiesGoToTheOlderRouteThenToItsName(t *testing.T) {
	anyOrder(t, "prod", "prod/old:0.0 prod/old:0.1 prod/old:1.0 prod/a:0.0 prod/b:0.0 prod/timeless:0.0",
		route("prod", "old", 1, one(prefix("/"), prefix("/")), one(prefix("/"))),
		route("prod", "b", 2, one(prefix("/"))),
		route("prod", "a", 2, one(prefix("/"))),
		route("prod", "timeless", -1, one(prefix("/"))),
	)
}

func TestGRPCMatchesAreTriedByTheirPrecedence(t *testing.T) {
	m := func(service, method string, headers int) nodecache.RouteMatch {
		return nodecache.RouteMatch{Service: service, Method: method, Headers: make([]nodecache.ValueMatch, headers)}
	}
	re := m("shop[.].*[.]Cart[0-9]*", "", 0)
	re.MethodType = nodecache.MatchRegex
	r := route("prod", "r", 1, one(m("shop.v1.Cart", "Get", 0)), one(m("shop.v1.Cart", "", 1)), one(m("shop.v1.Cart", "", 0)),
		one(m("Cart", "GetEverything", 3)), one(re), one(m("", "Get", 0)), one(m("", "", 1)), one(m("", "", 0)))
	r.Kind = nodecache.GRPCRoute
	anyOrder(t, "prod", "prod/r:0.0 prod/r:1.0 prod/r:2.0 prod/r:3.0 prod/r:4.0 prod/r:5.0 prod/r:6.0 prod/r:7.0", r)
}

func TestConsumerRoutesReplaceProducerRoutesForTheirNamespaceAlone(t *testing.T) {
	producer, consumer := route("prod", "p", 2, one(prefix("/"))), route("shop", "c", 1, one(prefix("/x")))
	routes := []*nodecache.Route{producer, consumer, route("other", "o", 1, one(prefix("/")))}
	for ns, want := range map[string]string{"prod": "prod/p:0.0", "shop": "shop/c:0.0", "third": "prod/p:0.0", "other": "other/o:0.0"} {
		anyOrder(t, ns, want, routes...)
	}
	// A consumer route that cannot be served is none.
	consumer.Rules[0].Refused = "unknown type of match"
	anyOrder(t, "shop", "prod/p:0.0", routes...)
}

func TestGRPCRouteTakesThePortFromHTTPRoutes(t *testing.T) {
	grpc := route("prod", "g", 9, one(nodecache.RouteMatch{}))
	grpc.Kind = nodecache.GRPCRoute
	http := route("prod", "h", 1, one(exact("/")))
	anyOrder(t, "prod", "prod/g:0.0", grpc, http)
	table := routetable.New("prod", web, port, []*nodecache.Route{http, grpc})
	if table.Kind != nodecache.GRPCRoute || !slices.Equal(table.Conflicted, []*nodecache.Route{http}) {
		t.Errorf("kind %v, conflicted %v", table.Kind, table.Conflicted)
	}
	// On another port there is no conflict.
	grpc.Parents[0].Port = 90
	anyOrder(t, "prod", "prod/h:0.0", grpc, http)
}

func TestGroupKindPortAndSectionOfTheParentAreCompared(t *testing.T) {
	for _, c := range []struct {
		p    nodecache.RouteParent
		want bool
	}{
		{nodecache.RouteParent{Kind: "Service", Name: web}, true},
		{nodecache.RouteParent{Kind: "Service", Name: web, Port: 80, Section: "api"}, true},
		{nodecache.RouteParent{Kind: "Service", Name: web, Port: 81}, false},
		{nodecache.RouteParent{Kind: "Service", Name: web, Section: "grpc"}, false},
		{nodecache.RouteParent{Kind: "Gateway", Group: "gateway.networking.k8s.io", Name: web}, false},
		{nodecache.RouteParent{Kind: "Service", Group: "net.example.com", Name: web}, false},
		{nodecache.RouteParent{Kind: "Service", Name: nodecache.Name{Namespace: "dev", Name: "web"}}, false},
	} {
		r := &nodecache.Route{Parents: []nodecache.RouteParent{c.p}}
		if got := routetable.Attached(r, web, port); got != c.want {
			t.Errorf("%+v: %v", c.p, got)
		}
	}
}

func TestMatchLooksAtAllThatItNames(t *testing.T) {
	m := prefix("/v1/")
	m.Verb = "GET"
	m.Headers = []nodecache.ValueMatch{{Name: "x-user", Value: "a.*", Type: nodecache.MatchRegex}}
	m.Query = []nodecache.ValueMatch{{Name: "q", Value: "1"}}
	table := routetable.New("prod", web, port, []*nodecache.Route{route("prod", "r", 1, one(m))})
	good := routetable.Call{Path: "/v1?p=2&q=1", Verb: "GET", Headers: map[string]string{"X-User": "anna"}}
	if _, ok := table.Match(good); !ok {
		t.Error("the call is not taken")
	}
	for what, change := range map[string]func(*routetable.Call){
		"path":        func(c *routetable.Call) { c.Path = "/v11?q=1" },
		"query":       func(c *routetable.Call) { c.Path = "/v1/x?q=2&q=1" },
		"verb":        func(c *routetable.Call) { c.Verb = "POST" },
		"header":      func(c *routetable.Call) { c.Headers = map[string]string{"x-user": "bea anna"} },
		"no headers":  func(c *routetable.Call) { c.Headers = nil },
		"other names": func(c *routetable.Call) { c.Headers = map[string]string{"x-users": "anna"} },
	} {
		c := good
		change(&c)
		if _, ok := table.Match(c); ok {
			t.Errorf("a call of another %s is taken", what)
		}
	}
}
