package e2e_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/demo"
)

// A pod whose only address is of IPv6 is asked, served and called as others
// are, beside one with both.
func TestIPv6PodsAreCalledThroughEnvoy(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		w, s := newWorld(t), newSite(t)
		six, err := demo.StartSample("six-1-a", "[::1]:0", []string{"shop.v1.Six"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(six.Stop)
		w.add(newPod("six-1-a", "::1", six.Port()))
		both, server := w.serve("both-1-a", []string{"shop.v1.Both"})
		both.Status.PodIPs = append(both.Status.PodIPs, corev1.PodIP{IP: "fd00::1"})
		a := s.start(t, "--source", w.write().source()).ready()
		e := s.sidecar(t, api, "prod/web")
		reaches(t, e.conn, "shop.v1.Six", "six-1-a")
		reaches(t, e.conn, "shop.v1.Both", "both-1-a")
		want := map[string]string{"shop.v1.Six": fmt.Sprintf("[::1]:%d", six.Port()), "shop.v1.Both": server.Addr()}
		for _, v := range a.services() {
			if len(v.Endpoints) != 1 || v.Endpoints[0].Address != want[v.Name] {
				t.Errorf("%s has %+v, want %s", v.Name, v.Endpoints, want[v.Name])
			}
		}
		if st := a.status(); st.Nacks != 0 {
			t.Errorf("status %+v", st)
		}
		e.content()
	})
}
