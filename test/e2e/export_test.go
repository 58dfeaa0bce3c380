package e2e_test

import (
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

func TestExportedServiceIsCalledFromOtherNamespaces(t *testing.T) {
	t.Parallel()
	eachAPI(t, func(t *testing.T, api string) {
		w, s := newWorld(t), newSite(t)
		web, _ := w.serve("web-1-a", []string{"shop.Web"})
		web.Annotations = map[string]string{"fingerpost.dev/export-to": "front"}
		w.serve("cart-1-a", []string{"shop.Cart"})
		a := s.start(t, "--source", w.write().source()).ready()
		e := s.sidecar(t, api, "front/caller")
		reaches(t, e.conn, "shop.Web", "web-1-a")
		reaches(t, s.proxyless(t, "front/caller", "shop.Web"), "shop.Web", "web-1-a")
		if _, err := say(t, e.conn, "shop.Cart"); err == nil {
			t.Error("a service that is not exported is reached")
		}
		if out := a.must("explain", "service", "shop.Web"); !strings.Contains(out, "exported to the clients of front") {
			t.Errorf("explain service:\n%s", out)
		}
		// What a namespace has itself goes first.
		own, _ := w.serve("own-1-a", []string{"shop.Web"})
		own.Namespace = "front"
		w.write()
		reaches(t, e.conn, "shop.Web", "own-1-a")
	})
}

func TestExportDefaultAll(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	kept, _ := w.serve("cart-1-a", []string{"shop.Cart"})
	kept.Annotations = map[string]string{"fingerpost.dev/export-to": ""}
	a := s.start(t, "--source", w.write().source(), "--export-default", "all").ready()
	c := connectRaw(t, s.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "front/caller"}})
	c.subscribe(xds.Cluster)
	c.has(xds.Cluster, "front/shop.Web")
	if got := a.status().Parts["export"]; got != "all" {
		t.Errorf("status says %q", got)
	}
}
