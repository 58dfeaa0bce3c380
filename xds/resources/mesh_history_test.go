package resources_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// Whatever happened in whatever order, what is published is what a compiler
// publishes that comes later and sees only the end.
func TestRoutesAfterAnyHistoryAreThoseOfTheirEnd(t *testing.T) {
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			m := newMesh(t, "prod", "shop")
			pick := func(names ...string) string { return names[rnd.IntN(len(names))] }
			service := func() nodecache.Name {
				return nodecache.Name{Namespace: "prod", Name: pick("web", "canary", "third")}
			}
			for range 150 {
				switch rnd.IntN(12) {
				case 0, 1:
					port := nodecache.FrontPort{Name: pick("api", "grpc"), Port: uint16(80 + rnd.IntN(2))}
					m.service("prod", service().Name, port, pick("a", "b", "c"))
				case 2:
					m.dir.RemoveFront(service())
				case 3:
					m.dir.RemoveSlice(nodecache.Name{Namespace: "prod", Name: service().Name + "-" + pick("a", "b", "c")})
				case 4, 5:
					uid := pick("a", "b", "c")
					m.pod(uid, "10.0.0."+fmt.Sprint(1+rnd.IntN(4)), nodecache.PodState(1+rnd.IntN(2)))
				case 6:
					m.dir.RemovePod(pick("a", "b", "c"))
				case 7:
					key := nodecache.OwnerKey{UID: "rs-" + pick("a", "b", "c")}
					if r, err := m.dir.Begin(key); err == nil {
						service := pick("lib.Books", "lib.Films")
						p := annotated("hash of "+service, service)
						if err := m.dir.Commit(r, &nodecache.Info{Ports: []nodecache.PortInfo{p}}); err != nil {
							t.Fatal(err)
						}
					}
				case 8, 9, 10:
					var rules []nodecache.RouteRule
					for range 1 + rnd.IntN(2) {
						rule := to(service(), uint16(80+rnd.IntN(2)))
						rule.Backends = append(rule.Backends, nodecache.RouteBackend{Service: service(), Port: 80, Weight: uint32(rnd.IntN(3))})
						rule.Matches = []nodecache.RouteMatch{{Path: pick("/", "/a", "/b"), PathType: nodecache.MatchPrefix}}
						rules = append(rules, rule)
					}
					r := httpRoute(pick("prod", "shop", "other"), pick("x", "y"), service(), rules...)
					if rnd.IntN(3) == 0 {
						r.Kind = nodecache.GRPCRoute
						for i := range r.Rules {
							r.Rules[i].Matches = []nodecache.RouteMatch{{Service: pick("", "lib.Books", "lib.Films")}}
						}
					}
					m.route(r)
				case 11:
					m.dir.RemoveRoute(pick("prod", "shop", "other") + "/" + pick("x", "y"))
				}
				if rnd.IntN(3) == 0 {
					m.flush()
				}
				if rnd.IntN(3) == 0 {
					m.linked(good)
				}
			}
			m.flush()
			m.linked(good)
			c, err := resources.New(resources.Options{})
			if err != nil {
				t.Fatal(err)
			}
			late := &mesh{world: &world{t: t, c: c, published: map[xds.ID]*xds.Resource{}, evidence: map[xds.Scope]xds.Evidence{}}, dir: m.dir, sub: m.dir.SubscribeFronts()}
			late.flush()
			late.client("shop")
			late.client("prod")
			late.linked(good)
			for id, r := range late.published {
				if got := m.published[id]; got == nil || got.Version != r.Version {
					t.Errorf("%v is not published as it is", id)
				}
			}
			for id := range m.published {
				if late.published[id] == nil {
					t.Errorf("%v is published still", id)
				}
			}
			if t.Failed() {
				t.Logf("routes of prod: %v\nand late: %v", m.hosts("prod"), late.hosts("prod"))
			}
		})
	}
}
