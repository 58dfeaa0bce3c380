package resources_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// A release that changes these bytes drains the listeners and rebuilds the
// clusters of every running sidecar: it needs a new shape beside this one.
func TestShapeKeepsItsBytes(t *testing.T) {
	w := newWorld(t)
	all := w.c.Initial().Set
	c, err := resources.New(resources.Options{Tracing: "otlp:collector.obs:4317", EgressPort: 15002})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range c.Initial().Set {
		if r.Name != "egress6" {
			traced := *r
			traced.Name += "-traced"
			all = append(all, &traced)
		}
	}
	ns, err := w.c.Namespace("prod", resources.ShapeOne)
	if err != nil {
		t.Fatal(err)
	}
	all = append(all, ns.Set...)
	all = append(all, w.set(known("a", "a", []string{"company.v1.Users"}, pod("10.0.0.1", nodecache.Serving), pod("fd00::1", nodecache.Draining))).Set...)
	old := resources.Client{Namespace: "prod", Shape: 1, IPv6: true}.Scopes()
	golden(t, "shape-1", slices.DeleteFunc(all, func(r *xds.Resource) bool { return !slices.Contains(old, r.Scope) })...)
}

// What shape 2 has of its own; all else is as in shape 1.
func TestShapeTwoKeepsItsBytes(t *testing.T) {
	m := newMesh(t)
	m.learn(m.pod("a", "10.0.0.1", nodecache.Serving), serves(1000, "pkg.v1.A"))
	m.service("prod", "users", nodecache.FrontPort{Name: "grpc", Port: 80}, "a")
	m.flush()
	u, err := m.c.Namespace("prod", resources.AllClusters)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "shape-2", append(u.Set, m.c.Aliases(m.dir, "prod").Set...)...)
	if u, err = m.c.Namespace("prod", resources.Asking); err != nil {
		t.Fatal(err)
	}
	golden(t, "shape-2/asking", u.Set...)
	if u, err = m.c.Namespace("prod", resources.OnDemand); err != nil {
		t.Fatal(err)
	}
	wanted, _ := m.c.Want(m.dir, "prod", "/run/fingerpost/unknown.sock", []string{"at/users/pkg.v1.A"}, 1)
	golden(t, "shape-2/demand", slices.DeleteFunc(slices.Clone(wanted.Set), func(r *xds.Resource) bool { return r.Scope != xds.DemandScope("prod") })...)
	capture, err := m.c.Capture(0x5d9)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "shape-2/capture", capture)
	wanted, _ = m.c.Want(m.dir, "prod", "/run/fingerpost/unknown.sock", []string{"prod/pkg.v1.Nobody"}, 1)
	all := append(u.Set, wanted.Set...)
	mine := resources.Client{Namespace: "prod", Shape: 2, OnDemand: true, IPv6: true}.Scopes()
	mine = append(mine, xds.FallbackScope("prod", "/run/fingerpost/unknown.sock"))
	for _, r := range m.c.Initial().Set {
		if slices.Contains(mine, r.Scope) && r.Scope != xds.Shared {
			all = append(all, r)
		}
	}
	golden(t, "shape-2/on-demand", all...)
}

func golden(t *testing.T, dir string, all ...*xds.Resource) {
	t.Helper()
	dir = filepath.Join("testdata", dir)
	if os.Getenv("UPDATE") != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range all {
		text, err := protojson.Marshal(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		var tree any
		if err := json.Unmarshal(text, &tree); err != nil {
			t.Fatal(err)
		}
		got, err := json.MarshalIndent(map[string]any{
			"name": r.Name, "version": r.Version, "sha256": fmt.Sprintf("%x", sha256.Sum256(r.Body.GetValue())), "resource": tree,
		}, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(dir, fmt.Sprintf("%s-%s.json", r.Type, filepath.Base(r.Name)))
		if os.Getenv("UPDATE") != "" {
			if err := os.WriteFile(name, append(got, '\n'), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(bytes.TrimSpace(want), got) {
			t.Errorf("%s is another than in %s:\n%s", r.Name, name, got)
		}
	}
}

func TestClientSaysItsNamespace(t *testing.T) {
	meta := func(kv ...string) *structpb.Struct {
		s := &structpb.Struct{Fields: map[string]*structpb.Value{}}
		for i := 0; i < len(kv); i += 2 {
			s.Fields[kv[i]] = structpb.NewStringValue(kv[i+1])
		}
		return s
	}
	for _, id := range []string{"", "a", "/a", "prod/", "prod/a/b", "Prod/a", "pr\"od/a", "prod/a b", "sidecar~10.0.0.1~a.prod~x"} {
		if _, err := resources.Scopes(&corev3.Node{Id: id}); err == nil {
			t.Errorf("node id %q is taken", id)
		}
	}
	for _, c := range []struct {
		meta     *structpb.Struct
		scopes   int
		warnings int
	}{
		{nil, 7, 0},
		{meta(resources.MetaShape, "1"), 5, 0},
		{meta(resources.MetaShape, "2"), 7, 0},
		{meta(resources.MetaShape, "3"), 7, 1},
		{meta(resources.MetaShape, "x"), 7, 1},
		{meta(resources.MetaIPv6, "true"), 8, 0},
		{meta(resources.MetaClusters, "all", resources.MetaUnknown, "not looked at"), 7, 0},
		{meta(resources.MetaIPv6, "true", resources.MetaShape, "1"), 6, 0},
	} {
		got, err := resources.ParseClient(&corev3.Node{Id: "prod/a-1", Metadata: c.meta})
		if err != nil || got.Namespace != "prod" || got.Pod != "a-1" || got.Shape != map[bool]int{true: 1, false: 2}[c.scopes < 7] {
			t.Errorf("%v: %+v, %v", c.meta, got, err)
		}
		scopes := got.Scopes()
		if got.Shape == 2 {
			if scopes[0] != xds.TableScope("prod", "all") || scopes[1] != xds.AliasScope("prod") {
				t.Errorf("%v: %v", c.meta, scopes)
			}
			scopes, c.scopes = scopes[2:], c.scopes-2
		}
		if len(scopes) != c.scopes || len(got.Warnings) != c.warnings || scopes[0] != xds.NamespaceScope("prod") || scopes[1] != xds.BackendScope("prod") || scopes[2] != xds.DialScope("prod") || scopes[3] != xds.APIScope("prod") || scopes[4] != xds.Shared {
			t.Errorf("%v: %v, %v", c.meta, scopes, got.Warnings)
		}
	}
}

func TestNamespaceHasItsTableWithoutOwners(t *testing.T) {
	w := newWorld(t)
	a, err := w.c.Namespace("empty", resources.ShapeOne)
	if err != nil || len(a.Set) != 1 || a.Set[0].Scope != xds.NamespaceScope("empty") || a.Set[0].Name != resources.RouteName {
		t.Fatalf("%+v, %v", a, err)
	}
	b, _ := w.c.Namespace("empty", resources.ShapeOne)
	other, _ := w.c.Namespace("other", resources.ShapeOne)
	if a.Set[0] != b.Set[0] || a.Set[0].Version == other.Set[0].Version {
		t.Error("a namespace's table is not its own")
	}
	if _, err := w.c.Namespace(`x" .. os.exit() .. "`, resources.ShapeOne); err == nil {
		t.Error("a namespace that is code is taken")
	}
}
