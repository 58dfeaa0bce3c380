package e2e_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// An Envoy says in its node what it was built with. One that cannot fetch clusters
// has all of them; one that cannot take its routes is told so, and nothing less
// than all is shown.
func TestClientWithoutExtensionsIsShownWithTheReason(t *testing.T) {
	w := shop(t)
	s := newSite(t)
	a := s.start(t, "--source", w.source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	a.connected("prod/web", "cds", "lds", "rds")
	for _, p := range a.proxies() {
		if len(p.Warnings) > 0 || p.Clusters != "on-demand" {
			t.Errorf("an Envoy as it is released: %s, %q", p.Clusters, p.Warnings)
		}
	}
	if out := a.must("status"); strings.Contains(out, "limited") {
		t.Errorf("status: %s", out)
	}
	e.content()

	c := connectRaw(t, s.ads, client.Options{Delta: true, Node: &corev3.Node{
		Id: "prod/slim", UserAgentName: "envoy",
		Metadata:   &structpb.Struct{Fields: map[string]*structpb.Value{resources.MetaClusters: structpb.NewStringValue("on-demand")}},
		Extensions: []*corev3.Extension{{Category: "envoy.filters.http", Name: "envoy.filters.http.router"}},
	}})
	c.subscribe(xds.Cluster)
	c.until(func() error {
		if names := c.names(xds.Cluster); !slices.Contains(names, "prod/shop.v1.Cart") {
			return fmt.Errorf("it has %v", names)
		}
		return nil
	})
	out := a.must("proxies")
	for _, want := range []string{
		"its Envoy was built without envoy.router.cluster_specifier_plugin.lua (routes)", "it rejects these, and its calls fail",
		"built without envoy.filters.http.on_demand, which clusters on demand need; it has all clusters",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("proxies does not say %q:\n%s", want, out)
		}
	}
	if out := a.must("status"); !strings.Contains(out, "1; see fingerpost proxies") {
		t.Errorf("status: %s", out)
	}
	if out := a.must("explain", "call", "--from", "prod/slim", "/shop.v1.Cart/Say"); !strings.Contains(out, "it has all clusters") {
		t.Errorf("explain call: %s", out)
	}
}
