package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// addressOf is the address at which a pod serves.
func addressOf(p *corev1.Pod) string {
	return fmt.Sprintf("%s:%d", p.Status.PodIP, p.Spec.Containers[0].Ports[0].ContainerPort)
}

func TestBrokenEditKeepsTheLastGoodState(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	web, _ := w.serve("web-1-a", []string{"shop.Web"})
	a := s.start(t, "--source", w.write().source()).ready()
	c := connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	c.subscribe(xds.Endpoint, "prod/shop.Web")
	c.endpoints("prod/shop.Web", addressOf(web))

	for _, broken := range []string{"", "kind: [", "{", "- a\n", podWithoutUID} {
		w.writeRaw(broken)
		harness.Eventually(t, soon, func() error {
			st := a.status()
			if !strings.Contains(st.Source.Error, w.file) || !st.Source.Synced {
				return fmt.Errorf("after %q status says %+v", broken, st.Source)
			}
			return nil
		})
	}
	if strings.Count(a.status().Source.Error, "\n") != 0 {
		t.Errorf("the error spans lines: %q", a.status().Source.Error)
	}
	// It has been broken since the first of these edits, and goes on to be.
	first := a.status().Source.StaleSeconds
	harness.Eventually(t, soon, func() error {
		if now := a.status().Source.StaleSeconds; now <= first {
			return fmt.Errorf("stale for %d s, was %d s", now, first)
		}
		return nil
	})
	if err := os.Remove(w.file); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, soon, func() error {
		if e := a.status().Source.Error; !strings.Contains(e, "no such file") {
			return fmt.Errorf("without the file status says %q", e)
		}
		return nil
	})
	if st := a.status(); st.Pods != 1 || st.Gate != "open" || st.Source.StaleSeconds <= first {
		t.Errorf("status: %+v", st)
	}
	a.ready()
	if got := c.removals(); len(got) != 0 {
		t.Errorf("removed: %v", got)
	}

	cart, _ := w.serve("cart-1-a", []string{"shop.Cart"})
	w.write()
	c.has(xds.Cluster, "prod/shop.Cart", "prod/shop.Web")
	c.subscribe(xds.Endpoint, "prod/shop.Cart")
	c.endpoints("prod/shop.Cart", addressOf(cart))
	if src := a.status().Source; src.Error != "" || src.StaleSeconds != 0 {
		t.Errorf("after a good edit status says %+v", src)
	}
}

func TestWorldWithoutItemsIsEmpty(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	a := s.start(t, "--source", w.write().source()).ready()
	c := connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	c.subscribe(xds.Endpoint, "prod/shop.Web")
	c.has(xds.Endpoint, "prod/shop.Web")
	w.writeRaw("apiVersion: v1\nkind: List\nitems: []\n")
	c.endpoints("prod/shop.Web")
	// What was learned outlives the pods, and with it the cluster.
	c.has(xds.Cluster, "prod/shop.Web")
	if st := a.status(); st.Pods != 0 || st.Source.Error != "" {
		t.Errorf("status: %+v", st)
	}
	if owners := a.owners(); len(owners) != 0 {
		t.Errorf("owners: %+v", owners)
	}
}

func TestDirectoryIsOneWorld(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	dir := filepath.Dir(w.file)
	web, _ := w.serve("web-1-a", []string{"shop.Web"})
	w.write()
	other := &world{t: t, file: filepath.Join(dir, "more.yaml")}
	cart, _ := other.serve("cart-1-a", []string{"shop.Cart"})
	other.write()
	if err := os.WriteFile(filepath.Join(dir, "notes.txt"), []byte("kind: ["), 0o644); err != nil {
		t.Fatal(err)
	}
	a := s.start(t, "--source", "file:"+dir).ready()
	c := connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	c.subscribe(xds.Endpoint, "prod/shop.Web", "prod/shop.Cart", "prod/shop.Third")
	c.endpoints("prod/shop.Web", addressOf(web))
	c.endpoints("prod/shop.Cart", addressOf(cart))

	third := &world{t: t, file: filepath.Join(dir, "third.yml")}
	p, _ := third.serve("third-1-a", []string{"shop.Third"})
	third.write()
	c.endpoints("prod/shop.Third", addressOf(p))
	if err := os.Remove(third.file); err != nil {
		t.Fatal(err)
	}
	c.endpoints("prod/shop.Third")

	other.writeRaw("{")
	harness.Eventually(t, soon, func() error {
		if e := a.status().Source.Error; !strings.Contains(e, other.file) {
			return fmt.Errorf("status says %q, want it to name %s", e, other.file)
		}
		return nil
	})
	c.endpoints("prod/shop.Cart", addressOf(cart))
}

func TestPodsThatComeGoAndAreRenamedReachAClient(t *testing.T) {
	t.Parallel()
	for _, delta := range []bool{true, false} {
		t.Run(fmt.Sprintf("delta=%v", delta), func(t *testing.T) {
			t.Parallel()
			w, s := newWorld(t), newSite(t)
			one, _ := w.serve("web-1-a", []string{"shop.Web"})
			s.start(t, "--source", w.write().source()).ready()
			c := connectRaw(t, s.ads, client.Options{Delta: delta})
			c.subscribe(xds.Cluster)
			c.has(xds.Cluster, "prod/shop.Web")
			c.subscribe(xds.Endpoint, "prod/shop.Web")
			c.endpoints("prod/shop.Web", addressOf(one))

			// The pods of one owner serve on the same port.
			port := int(one.Spec.Containers[0].Ports[0].ContainerPort)
			two := w.add(newPod("web-1-b", nextAddr(), port))
			w.write()
			c.endpoints("prod/shop.Web", addressOf(one), addressOf(two))
			// Another pod by another name at the same address, in one edit.
			w.remove(two)
			same := w.add(newPod("web-1-c", two.Status.PodIP, port))
			w.remove(one)
			w.write()
			c.endpoints("prod/shop.Web", addressOf(same))
			// Another pod by the same name at another address.
			w.remove(same)
			again := newPod("web-1-c", one.Status.PodIP, port)
			again.UID = "uid-again"
			w.add(again)
			w.write()
			c.endpoints("prod/shop.Web", addressOf(again))
			// One that is not Ready any more, and one that has failed.
			again.Status.Conditions[0].Status = corev1.ConditionFalse
			w.write()
			c.endpoints("prod/shop.Web")
			again.Status.Conditions[0].Status = corev1.ConditionTrue
			w.write()
			c.endpoints("prod/shop.Web", addressOf(again))
			again.Status.Phase, again.Status.PodIP, again.Status.PodIPs = corev1.PodFailed, "", nil
			w.write()
			c.endpoints("prod/shop.Web")
			// The cluster and all else stayed as they were.
			if n := len(c.of(xds.Cluster)); n != 1 {
				t.Errorf("%d responses of clusters, want 1", n)
			}
			if got := c.removals(); len(got) != 0 {
				t.Errorf("removed: %v", got)
			}
		})
	}
}

func TestFlapOfTheOnlyPodCostsNoSecondCollect(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	r := newReflections()
	pod, _ := w.serve("web-1-a", []string{"shop.Web"}, r.option())
	a := s.start(t, "--source", w.write().source()).ready()
	c := connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	c.subscribe(xds.Endpoint, "prod/shop.Web")
	c.endpoints("prod/shop.Web", addressOf(pod))
	for range 3 {
		w.remove(pod)
		w.write()
		c.endpoints("prod/shop.Web")
		if s := a.services(); len(s) != 1 || len(s[0].Endpoints) != 0 {
			t.Errorf("services without the pod: %+v", s)
		}
		w.add(pod)
		w.write()
		c.endpoints("prod/shop.Web", addressOf(pod))
	}
	// A collect of another owner that was learned later comes after any that
	// the flaps could have caused.
	other, _ := w.serve("cart-1-a", []string{"shop.Cart"}, r.option())
	w.write()
	c.subscribe(xds.Endpoint, "prod/shop.Cart")
	c.endpoints("prod/shop.Cart", addressOf(other))
	if n := r.streams(); n != 2 {
		t.Errorf("%d reflection streams, want one for each of two owners", n)
	}
	if got := c.removals(); slices.ContainsFunc(got, func(s string) bool { return strings.HasSuffix(s, "shop.Web") }) {
		t.Errorf("removed: %v", got)
	}
}
