package resources_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"unique"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	transcoderv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/grpc_json_transcoder/v3"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
	"github.com/fingerpost/fingerpost/xds/resources/transcode"
)

// annotated is what a port serves whose descriptors have HTTP rules: as far as
// the compiler looks at them.
func annotated(hash string, services ...string) nodecache.PortInfo {
	rule := protowire.AppendTag(nil, 72295728, protowire.BytesType)
	p := nodecache.PortInfo{Port: 1000, State: nodecache.PortServes, Hash: hash, Files: []unique.Handle[string]{unique.Make(hash + string(rule))}}
	for _, s := range services {
		p.Services = append(p.Services, nodecache.Service{Name: s})
	}
	return p
}

// linked links everything that waits for it, and returns by which hashes.
func (m *mesh) linked(link func(p *nodecache.PortInfo) (*transcode.Set, error)) []string {
	var hashes []string
	for _, p := range m.c.Unlinked() {
		set, err := link(p)
		m.take(m.c.Linked(m.dir, p, set, err))
		hashes = append(hashes, p.Hash)
	}
	slices.Sort(hashes)
	return hashes
}

func good(p *nodecache.PortInfo) (*transcode.Set, error) {
	return &transcode.Set{Descriptors: []byte(p.Hash), Services: []string{p.Services[0].Name}}, nil
}

// transcodes are the descriptors on each of the namespace's routes, in order;
// a route of transcoded calls is in brackets.
func (m *mesh) transcodes(ns string) string {
	m.t.Helper()
	var out []string
	for _, h := range m.hosts(ns) {
		for _, r := range h.GetRoutes() {
			switch any := r.GetTypedPerFilterConfig()["envoy.filters.http.grpc_json_transcoder"]; {
			case any != nil:
				var c transcoderv3.GrpcJsonTranscoder
				if err := any.UnmarshalTo(&c); err != nil {
					m.t.Fatal(err)
				}
				out = append(out, string(c.GetProtoDescriptorBin()))
			case slices.ContainsFunc(r.GetMatch().GetHeaders(), func(h *routev3.HeaderMatcher) bool { return h.GetName() == "x-envoy-original-path" }):
				out = append(out, "["+r.GetMatch().GetPrefix()+" "+r.GetRoute().GetCluster()+"]")
			default:
				out = append(out, "-")
			}
		}
	}
	return strings.Join(out, " ")
}

func TestHTTPRouteToAnnotatedProgramTranscodes(t *testing.T) {
	m := newMesh(t, "prod", "shop")
	m.service("prod", "web", api, "a")
	m.service("prod", "canary", api, "b")
	redirect := to(canary, 80)
	redirect.Filters = []nodecache.RouteFilter{{Type: nodecache.FilterRedirect, Hostname: "x"}}
	r := httpRoute("prod", "r", web, to(web, 80), to(canary, 80), redirect)
	r.Rules[1].Matches[0].Path = "/c"
	m.route(r)
	key := m.pod("a", "10.0.0.1", nodecache.Serving)
	m.flush()
	m.want("before anything is known", m.transcodes("shop"), "- - -")
	m.learn(key, annotated("A", "lib.Books"))
	u := m.flush()
	if len(u.Set) != 0 {
		t.Errorf("knowledge that is not linked yet changes %v", u.Set)
	}
	m.want("waiting", strings.Join(m.linked(good), " "), "A")
	if c, _ := m.c.Choose("shop", "web.prod", routetable.Call{Path: "/v1"}); !slices.Equal(c.Transcodes, []string{"lib.Books"}) {
		t.Errorf("choice %+v", c)
	}
	m.want("routes", m.transcodes("shop"), "[/lib.Books/ backend/prod/web/80/lib.Books] - A -")
	m.want("backends", m.backends("shop"), "prod/canary/80 [] prod/web/80 [10.0.0.1:1000 HEALTHY] prod/web/80/lib.Books [10.0.0.1:1000 HEALTHY]")

	// Another program, with descriptors that would conflict.
	m.learn(m.pod("b", "10.0.0.2", nodecache.Serving), annotated("B", "lib.Films"))
	m.flush()
	m.want("waiting", strings.Join(m.linked(good), " "), "B")
	m.want("routes", m.transcodes("prod"),
		"[/lib.Films/ backend/prod/canary/80/lib.Films] [/lib.Films/ backend/prod/canary/80/lib.Films] [/lib.Films/ backend/prod/canary/80/lib.Films] "+
			"[/lib.Books/ backend/prod/web/80/lib.Books] B A -")

	// What others know changes nothing here.
	m.service("prod", "third", api, "c")
	m.learn(m.pod("c", "10.0.0.3", nodecache.Serving), annotated("C", "lib.Songs"))
	if u := m.flush(); !u.Empty() || len(m.c.Unlinked()) != 0 {
		t.Errorf("a program behind no route changes %v", u)
	}

	m.dir.RemoveRoute("prod/r")
	m.flush()
	m.want("backends", m.backends("shop"), "")
	m.route(httpRoute("prod", "r", web, to(web, 80)))
	m.flush()
	m.want("linked again, since nobody needed it", strings.Join(m.linked(good), " "), "A")
}

func TestDescriptorsThatDoNotLinkChangeNothing(t *testing.T) {
	m := newMesh(t, "prod")
	m.service("prod", "web", api, "a")
	m.route(httpRoute("prod", "r", web, to(web, 80)))
	key := m.pod("a", "10.0.0.1", nodecache.Serving)
	m.learn(key, annotated("A", "lib.Books"))
	m.flush()
	before := m.published[xds.ID{Type: xds.Route, Name: "egress", Scope: "ns/prod"}]
	m.linked(func(*nodecache.PortInfo) (*transcode.Set, error) { return nil, errors.New("a missing import") })
	m.pod("a", "10.0.0.9", nodecache.Serving)
	m.flush()
	m.want("backends", m.backends("prod"), "prod/web/80 [10.0.0.9:1000 HEALTHY]")
	if m.published[before.ID] != before || len(m.c.Unlinked()) != 0 {
		t.Error("a program that does not link has changed the routes, or is tried again")
	}
	c, _ := m.c.Choose("prod", "web", routetable.Call{Path: "/v1"})
	m.want("why", c.NotTranscoded, "prod/web: a missing import")
}

// As long as a pod of the older owner is there its descriptors count.
func TestOlderOwnersDescriptorsCountOverARollout(t *testing.T) {
	m := newMesh(t, "prod")
	m.service("prod", "web", api, "a")
	m.slices("prod", "web", api, "b")
	m.route(httpRoute("prod", "r", web, to(web, 80)))
	m.learn(m.pod("a", "10.0.0.1", nodecache.Serving), annotated("A", "lib.Books"))
	m.flush()
	m.linked(good)
	m.learn(m.pod("b", "10.0.0.2", nodecache.Serving), annotated("B", "lib.Books"))
	m.flush()
	m.linked(good)
	m.want("with both", m.transcodes("prod"), "[/lib.Books/ backend/prod/web/80/lib.Books] A")
	m.dir.RemovePod("a")
	m.flush()
	m.linked(good)
	m.want("with the new one", m.transcodes("prod"), "[/lib.Books/ backend/prod/web/80/lib.Books] B")
}
