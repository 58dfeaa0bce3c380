package nodecache_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// two returns a directory with the pod a of key behind the Service web and one
// of another owner behind the Service api.
func two() (*nodecache.Directory, nodecache.OwnerKey) {
	d, other := routed(), ownerKey("other")
	serve(d, "api", "b")
	d.UpsertPod(pod("b", "192.0.2.2", owned(other)))
	return d, other
}

func TestRemovalOfRouteRemovesOnlyItsOwn(t *testing.T) {
	d, other := two()
	must(t, d.UpsertRoute(route("r", 1, "web", "api")))
	must(t, d.UpsertRoute(route("s", 1, "web")))
	d.RemoveRoute("r")
	wantPaths(t, d, key, "/s/1")
	wantPaths(t, d, other)
	d.RemoveRoute("unheard of")
	wantPaths(t, d, key, "/s/1")
}

func TestRouteThatMovesLeavesItsOldOwner(t *testing.T) {
	d, other := two()
	must(t, d.UpsertRoute(route("r", 1, "web")))
	s := subscribe(t, d)
	next(t, s)
	must(t, d.UpsertRoute(route("r", 2, "api")))
	if keys := next(t, s); len(keys) != 2 {
		t.Errorf("notified of %v, want both owners", keys)
	}
	wantPaths(t, d, key)
	wantPaths(t, d, other, "/r/2")
}

func TestOldGenerationOfRouteIsRefused(t *testing.T) {
	d := routed()
	must(t, d.UpsertRoute(route("r", 2, "web")))
	if err := d.UpsertRoute(route("r", 1, "web")); !errors.Is(err, nodecache.ErrOldRoute) {
		t.Errorf("got %v, want ErrOldRoute", err)
	}
	wantPaths(t, d, key, "/r/2")
}

// A grant changes what a route may refer to, and not its generation.
func TestSameGenerationOfRouteWithOtherContentIsTaken(t *testing.T) {
	d := routed()
	must(t, d.UpsertRoute(route("r", 1, "web")))
	refused := route("r", 1, "web")
	refused.Rules[0].Backends[0].Refused = "RefNotPermitted"
	must(t, d.UpsertRoute(refused))
	wantPaths(t, d, key)
	must(t, d.UpsertRoute(route("r", 1, "web")))
	wantPaths(t, d, key, "/r/1")
}

func TestSameRouteAgainIsSilent(t *testing.T) {
	d := routed()
	r := route("r", 1, "web")
	r.Created = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	must(t, d.UpsertRoute(r))
	s := subscribeFronts(t, d)
	next(t, s)
	s.PollFronts()
	again := route("r", 1, "web")
	again.Created = r.Created.In(time.FixedZone("elsewhere", 3600))
	must(t, d.UpsertRoute(again))
	quiet(t, s)
	if told := s.PollFronts(); told != nil {
		t.Errorf("told of %v", told)
	}
}

func TestRouteServiceSliceAndPodMeetInEveryOrder(t *testing.T) {
	steps := []func(*nodecache.Directory){
		func(d *nodecache.Directory) { d.UpsertFront(front("web", 1)) },
		func(d *nodecache.Directory) { d.UpsertSlice(slice("web-1", "web", "a")) },
		func(d *nodecache.Directory) { d.UpsertPod(pod("a", "10.0.0.1")) },
		func(d *nodecache.Directory) { _ = d.UpsertRoute(route("r", 1, "web")) },
	}
	for _, order := range permutations(len(steps)) {
		d := nodecache.New(nodecache.Options{})
		s := d.SubscribeFronts()
		var seen []string
		for _, i := range order {
			steps[i](d)
			if slices.Contains(s.Poll(), key) {
				seen = paths(d, key)
			}
			if told := s.PollFronts(); i != 2 && !slices.Contains(told, named("web")) {
				t.Errorf("order %v, step %d: told of the Services %v", order, i, told)
			}
		}
		s.Close()
		if !slices.Equal(seen, []string{"/r/1"}) {
			t.Errorf("order %v: who follows sees %v", order, seen)
		}
	}
}

func TestEntriesAreTheMatchesThatLeadToTheOwner(t *testing.T) {
	d := routed()
	r := route("r", 1, "elsewhere", "web", "web", "web")
	r.Kind = nodecache.GRPCRoute
	r.Rules[1].Matches = []nodecache.RouteMatch{{Service: "pkg.A"}, {Service: "pkg.A", Method: "Get", Verb: "POST"}}
	r.Rules[1].Backends = append(r.Rules[1].Backends, r.Rules[1].Backends[0])
	r.Rules[2].Backends[0].Weight = 0
	r.Rules[3].Refused = "UnsupportedValue"
	must(t, d.UpsertRoute(r))
	want := []nodecache.RouteEntry{
		{Route: "r", Rule: 1, Match: 0, Service: "pkg.A"},
		{Route: "r", Rule: 1, Match: 1, Service: "pkg.A", Method: "Get", Verb: "POST"},
	}
	if got := d.Owner(key).Routes; !slices.Equal(got, want) {
		t.Errorf("entries %+v, want %+v", got, want)
	}
}

// cilium/cilium#39193: a Gateway with the Service's name takes no route of it.
func TestRoutesAreFoundByParentAndBackend(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	gateway, mesh := route("a", 1, "web"), route("b", 1, "web", "api", "web")
	gateway.Parents = []nodecache.RouteParent{{Group: "gateway.networking.k8s.io", Kind: "Gateway", Name: named("front")}}
	mesh.Parents = append(mesh.Parents, mesh.Parents[0])
	must(t, d.UpsertRoute(mesh))
	must(t, d.UpsertRoute(gateway))
	for _, c := range []struct {
		what string
		got  []*nodecache.Route
		want []*nodecache.Route
	}{
		{"of front", d.RoutesOf(named("front")), []*nodecache.Route{mesh}},
		{"of web", d.RoutesOf(named("web")), nil},
		{"to web", d.RoutesTo(named("web")), []*nodecache.Route{gateway, mesh}},
		{"to api", d.RoutesTo(named("api")), []*nodecache.Route{mesh}},
		{"all", d.Routes(), []*nodecache.Route{gateway, mesh}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %v, want %v", c.what, c.got, c.want)
		}
	}
	if d.Route("b") != mesh || d.Route("c") != nil {
		t.Error("by UID")
	}
}

func TestServicesHearOfWhatConcernsThem(t *testing.T) {
	d := nodecache.New(nodecache.Options{Keep: time.Minute})
	s := subscribeFronts(t, d)
	told := func(what string, want ...string) {
		t.Helper()
		var got []string
		for _, n := range s.PollFronts() {
			got = append(got, n.Name)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: told of %v, want %v", what, got, want)
		}
	}
	d.UpsertFront(front("web", 1))
	told("a Service", "web")
	d.UpsertFront(front("web", 1))
	told("nothing new")
	d.UpsertSlice(slice("web-1", "web", "a"))
	told("a slice", "web")
	r := d.UpsertPod(pod("a", "192.0.2.1", created(1)))
	told("a pod behind it", "web")
	d.UpsertPod(pod("c", "192.0.2.3"))
	told("a pod behind nothing")
	must(t, d.Commit(r, serves("pkg.A")))
	told("knowledge of its owner", "web")
	d.UpsertPod(pod("b", "192.0.2.1", created(2), owned(ownerKey("other"))))
	told("its pod has lost its address", "web")
	d.RemovePod("b")
	told("and has it again", "web")
	must(t, d.UpsertRoute(route("r", 1, "web")))
	told("a route to it", "front", "web")
	must(t, d.UpsertRoute(route("r", 2, "api")))
	told("a route that moved", "front", "web", "api")
	d.RemoveRoute("r")
	told("a route that went", "front", "api")
	d.UpsertSlice(slice("web-1", "api", "a"))
	told("a slice of another Service", "web", "api")
	d.RemoveSlice(named("web-1"))
	told("no slice", "api")
	d.UpsertSlice(slice("web-1", "web", "a"))
	d.RemovePod("c")
	s.PollFronts()
	d.RemovePod("a")
	told("no pod", "web")
	d.Expire(time.Now().Add(time.Hour))
	told("nothing known of its owner", "web")
	d.RemoveFront(named("web"))
	told("no Service", "web")
}

func TestPortBehindGRPCRouteIsAPortToAsk(t *testing.T) {
	bare := func(p *nodecache.Pod) { p.Hints = nil }
	of := func(edit func(*nodecache.Route)) *nodecache.Route {
		r := route("r", 1, "web")
		r.Kind = nodecache.GRPCRoute
		edit(r)
		return r
	}
	backend := func(r *nodecache.Route) *nodecache.RouteBackend { return &r.Rules[0].Backends[0] }
	for _, c := range []struct {
		name string
		r    *nodecache.Route
		want bool
	}{
		{"its port", of(func(*nodecache.Route) {}), true},
		{"without calls", of(func(r *nodecache.Route) { backend(r).Weight = 0 }), true},
		{"another port", of(func(r *nodecache.Route) { backend(r).Port = 81 }), false},
		{"another Service", of(func(r *nodecache.Route) { backend(r).Service.Name = "api" }), false},
		{"an HTTPRoute", of(func(r *nodecache.Route) { r.Kind = nodecache.HTTPRoute }), false},
		{"refused", of(func(r *nodecache.Route) { backend(r).Refused = "RefNotPermitted" }), false},
		{"from a namespace that was granted nothing", of(func(r *nodecache.Route) { backend(r).Granted = false }), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := nodecache.New(nodecache.Options{})
			serve(d, "web", "a")
			d.UpsertPod(pod("a", "10.0.0.1", bare))
			must(t, d.UpsertRoute(c.r))
			m, _ := d.Member("a")
			if got := slices.Contains(m.DialPorts(), 50051); got != c.want {
				t.Errorf("ports %v", m.DialPorts())
			}
			if c.want {
				wantKnowledge(t, d, nodecache.Unknown)
				if h := m.AllHints(); len(h) != 1 || h[0].Why != "GRPCRoute to Service web" {
					t.Errorf("hints %v", h)
				}
			}
			d.RemoveRoute("r")
			wantKnowledge(t, d, nodecache.None)
		})
	}
	t.Run("also where the Service comes last", func(t *testing.T) {
		d := nodecache.New(nodecache.Options{})
		must(t, d.UpsertRoute(of(func(*nodecache.Route) {})))
		must(t, d.Commit(d.UpsertPod(pod("a", "10.0.0.1", func(p *nodecache.Pod) { p.Hints[0].Port = 9 })), nil))
		wantKnowledge(t, d, nodecache.None)
		serve(d, "web", "a")
		wantKnowledge(t, d, nodecache.Unknown)
	})
}
