package e2e_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// Each row changes the second of two pods in a way that leaves the endpoints
// named, of "first", "second" and "third", an address of no server.
func TestEndpointsFollowWhatTheAPIServerSaysOfAPod(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(c *cluster, p *corev1.Pod)
		want   []string
	}{
		{"has succeeded and is called Ready", func(c *cluster, p *corev1.Pod) {
			c.SetStatus(c.t, p.Namespace, p.Name, func(s *corev1.PodStatus) { s.Phase = corev1.PodSucceeded })
		}, []string{"first"}},
		// https://github.com/istio/istio/pull/55171
		{"is evicted and loses its address in the same update", func(c *cluster, p *corev1.Pod) {
			c.SetStatus(c.t, p.Namespace, p.Name, func(s *corev1.PodStatus) {
				s.Phase, s.PodIP, s.PodIPs = corev1.PodFailed, "", nil
			})
		}, []string{"first"}},
		// https://github.com/istio/istio/issues/20676
		{"gets another address", func(c *cluster, p *corev1.Pod) { c.SetReady(c.t, p, true, "192.0.2.3") }, []string{"first", "third"}},
		{"leaves its address to another pod before it is deleted", func(c *cluster, p *corev1.Pod) {
			q := newPod("cart-1-c", "", int(p.Spec.Containers[0].Ports[0].ContainerPort))
			c.create(q, p.Status.PodIP)
			c.Terminate(c.t, p)
			c.Remove(c.t, p)
		}, []string{"first", "second"}},
		{"cannot be reported on by its node", func(c *cluster, p *corev1.Pod) {
			c.SetStatus(c.t, p.Namespace, p.Name, func(s *corev1.PodStatus) { s.Phase = corev1.PodUnknown })
		}, []string{"first", "second"}},
		{"is deleted with the force of no grace", func(c *cluster, p *corev1.Pod) { c.Remove(c.t, p) }, []string{"first"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			c := newCluster(t)
			first, server := c.serve("cart-1-a", []string{"shop.v1.Cart"})
			s := newSite(t)
			s.start(t, c.args()...).ready()
			e := s.sidecar(t, "delta", c.ns+"/web")
			at := map[string]string{"first": first.Status.PodIP, "second": "192.0.2.2", "third": "192.0.2.3"}
			hosts := func(names ...string) map[string]string {
				all := map[string]string{}
				for _, n := range names {
					all[fmt.Sprintf("%s:%d", at[n], server.Port())] = "HEALTHY"
				}
				return all
			}
			e.has(c.ns+"/shop.v1.Cart", hosts("first"))
			p := c.create(newPod("cart-1-b", "", server.Port()), at["second"])
			e.has(c.ns+"/shop.v1.Cart", hosts("first", "second"))
			row.change(c, p)
			e.has(c.ns+"/shop.v1.Cart", hosts(row.want...))
		})
	}
}
