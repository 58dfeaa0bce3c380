package e2e_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds/client"
)

// cilium#38997, istio#38034: a sidecar that came before its agent failed, or
// waited for minutes.
func TestClientsThatWereThereBeforeTheAgentConverge(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		w, s := shop(t), newSite(t)
		e := s.earlySidecar(t, api, "prod/web") // not even the directory is there
		proxyless := s.proxyless(t, "prod/early", "shop.v1.Stock")
		if who, err := say(t, proxyless, "shop.v1.Stock"); err == nil {
			t.Errorf("without an agent %s answers", who)
		}
		e.WaitFor(t, soon, func() error {
			if n, _ := e.Stat("cluster_manager.cds.update_failure"); n < 3 {
				return fmt.Errorf("Envoy tried %d times to reach the agent", n)
			}
			return nil
		})
		if _, err := e.Get("/ready"); err == nil {
			t.Error("Envoy is ready without an agent")
		}
		a := s.start(t, "--source", w.source()).ready()
		e.WaitReady(t, soon)
		reaches(t, e.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
		e.content()
		a.connected("prod/web", "cds", "eds", "lds", "rds")
		reaches(t, proxyless, "shop.v1.Stock", "stock-1-a")
	})
}

// projectcontour/contour#1280: what a control plane sent first after it was
// killed was what it happened to have by then.
func TestKillsWhilePodsComeAndGoTakeNothingFromClients(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	clusters := []string{"prod/shop.Admin", "prod/shop.Cart", "prod/shop.Web"}
	w.serve("web-1-a", []string{"shop.Web", "shop.Admin"})
	w.serve("cart-1-a", []string{"shop.Cart"})
	w.write()
	a := s.start(t, "--source", w.source()).ready()
	delta := s.faithful(t, "prod/delta", true, client.Memory{}, clusters...)
	sotw := s.faithful(t, "prod/sotw", false, client.Memory{}, clusters...)
	delta.has()
	sotw.has()
	var carts []*corev1.Pod
	change := func(i int) {
		if len(carts) > 3 || len(carts) > 0 && rand.IntN(2) == 0 {
			w.remove(carts[0])
			carts = carts[1:]
		} else {
			p, _ := w.serve(fmt.Sprintf("cart-1-%d", i), []string{"shop.Cart"})
			carts = append(carts, p)
		}
		w.write()
	}
	for round := range 8 {
		for i := range 5 {
			change(10*round + i)
		}
		a.kill()
		change(10*round + 5)
		a = s.start(t, "--source", w.source())
		for i := range 4 {
			change(10*round + 6 + i)
		}
		a.ready()
		a.connected("prod/delta")
		a.connected("prod/sotw", "cds", "eds")
	}
	want := map[string]bool{}
	for _, p := range w.pods[1:] { // all but web
		want[fmt.Sprintf("%s:%d", p.Status.PodIP, p.Spec.Containers[0].Ports[0].ContainerPort)] = true
	}
	for _, f := range []*faithful{delta, sotw} {
		harness.Eventually(t, soon, func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			got, err := endpointsIn(f.memory, "prod/shop.Cart")
			if err == nil && !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(maps.Keys(want))) {
				err = errors.New(f.id + " does not have the endpoints that there are")
			}
			return err
		})
		if lost := f.lost(); len(lost) != 0 {
			t.Errorf("%s lost %v", f.id, lost)
		}
	}
}
