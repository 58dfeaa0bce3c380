package xds_test

import (
	"slices"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/xds"
)

func TestVersionIsThatOfTheContentAlone(t *testing.T) {
	version := func(id xds.ID, m proto.Message) string {
		t.Helper()
		r, err := xds.NewResource(id, m)
		if err != nil {
			t.Fatal(err)
		}
		return r.Version
	}
	id := xds.ID{Type: xds.Endpoint, Name: "prod/pkg.S", Scope: xds.NamespaceScope("prod")}
	cla := func(policy map[string]*endpointv3.Endpoint) *endpointv3.ClusterLoadAssignment {
		return &endpointv3.ClusterLoadAssignment{ClusterName: "prod/pkg.S", NamedEndpoints: policy}
	}
	many := map[string]*endpointv3.Endpoint{}
	for _, k := range strings.Fields("a b c d e f g h i j k l m n") {
		many[k] = &endpointv3.Endpoint{Hostname: k}
	}
	first := version(id, cla(many))
	for range 50 { // the order of a map must not show
		if v := version(id, cla(many)); v != first {
			t.Fatalf("equal content has the versions %s and %s", first, v)
		}
	}
	if version(id, cla(nil)) == first {
		t.Error("other content has an equal version")
	}
	other := xds.ID{Type: xds.Endpoint, Name: "prod/pkg.S", Scope: xds.Shared}
	if version(other, cla(many)) != first {
		t.Error("the scope changes the version")
	}
}

func TestResourceThatBreaksItsOwnRulesIsRefused(t *testing.T) {
	id := xds.ID{Type: xds.Cluster, Name: "prod/pkg.S"}
	_, err := xds.NewResource(id, &clusterv3.Cluster{}) // a cluster needs a name
	if err == nil || !strings.Contains(err.Error(), `cds "prod/pkg.S"`) {
		t.Errorf("got %v, want an error that names the resource", err)
	}
}

func TestTypesAreKnownByTheirURL(t *testing.T) {
	for typ := range xds.Type(xds.NumTypes) {
		if got, ok := xds.TypeOf(typ.URL()); !ok || got != typ {
			t.Errorf("%s: TypeOf(%q) = %v, %v", typ, typ.URL(), got, ok)
		}
		if wild := typ == xds.Cluster || typ == xds.Listener; typ.HasWildcard() != wild {
			t.Errorf("%s: wildcard %v, want %v", typ, typ.HasWildcard(), wild)
		}
	}
	if _, ok := xds.TypeOf("type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"); ok {
		t.Error("secrets are served")
	}
}

func TestAPIListenersStayOutsideWildcards(t *testing.T) {
	for scope, want := range map[xds.Scope]bool{xds.Shared: false, xds.NamespaceScope("api"): false, xds.APIScope("prod"): true} {
		if scope.NamedOnly() != want {
			t.Errorf("scope %q: named only %v, want %v", scope, scope.NamedOnly(), want)
		}
	}
}

// What responses hold is written by hand; it must be what the generated code
// reads.
func TestFramesAreWhatResponsesHold(t *testing.T) {
	for name, size := range map[string]int{"a": 0, "prod/company.v1.Users": 200, strings.Repeat("x", 300): 20_000} {
		r, err := xds.NewResource(xds.ID{Type: xds.Cluster, Name: name}, &clusterv3.Cluster{Name: name, AltStatName: strings.Repeat("y", size)})
		if err != nil {
			t.Fatal(err)
		}
		var delta discovery.DeltaDiscoveryResponse
		var sotw discovery.DiscoveryResponse
		for m, frame := range map[proto.Message][]byte{&delta: r.Delta, &sotw: r.SotW} {
			if err := proto.Unmarshal(slices.Concat(frame, frame), m); err != nil {
				t.Fatal(err)
			}
		}
		wantDelta := &discovery.Resource{Name: name, Version: r.Version, Resource: r.Body}
		if len(delta.Resources) != 2 || !proto.Equal(delta.Resources[0], wantDelta) || !proto.Equal(delta.Resources[1], wantDelta) {
			t.Errorf("delta: got %v", &delta)
		}
		if len(sotw.Resources) != 2 || !proto.Equal(sotw.Resources[0], r.Body) || !proto.Equal(sotw.Resources[1], r.Body) {
			t.Errorf("sotw: got %v", &sotw)
		}
		var c clusterv3.Cluster
		if err := r.Body.UnmarshalTo(&c); err != nil || c.Name != name {
			t.Errorf("body: %v", err)
		}
	}
}
