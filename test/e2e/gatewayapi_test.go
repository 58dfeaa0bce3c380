package e2e_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fingerpost/fingerpost/test/harness"
)

// grpcRoute is a GRPCRoute of the namespace from the Service web to itself.
func grpcRoute(ns, name string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "gateway.networking.k8s.io/v1", "kind": "GRPCRoute",
		"metadata": map[string]any{"namespace": ns, "name": name},
		"spec": map[string]any{
			"parentRefs": []any{map[string]any{"group": "", "kind": "Service", "name": "web"}},
			"rules":      []any{map[string]any{"backendRefs": []any{map[string]any{"name": "web", "port": int64(80)}}}},
		},
	}}
}

func (a *agentProcess) routes(want, objects string) {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		got, n := a.part("routes"), a.metric(`fingerpost_gateway_objects{kind="GRPCRoute"}`)
		if got != want || n != objects {
			return fmt.Errorf("routes are %q, %s GRPCRoutes; want %q, %s", got, n, want, objects)
		}
		return nil
	})
}

// A port that says nothing of itself is asked about because a GRPCRoute leads
// there.
func TestPodBehindAGRPCRouteIsAsked(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	p, _ := w.serve("web-1-a", []string{"shop.v1.Web"})
	p.Spec.Containers[0].Ports[0].Name = "api"
	w.more = service("web", 1, "api", p)
	w.write()
	a := s.start(t, "--source", w.source()).ready()
	a.routes("on", "0")
	a.provided("shop.v1.Web", "nobody")
	w.more = append(w.more, grpcRoute("prod", "r"))
	w.write()
	a.provided("shop.v1.Web", "web-1-a, 0 claimants")
	a.routes("on", "1")
}

// The same from the API server, with the rights that the DaemonSet has.
func TestRoutesOfTheAPIServerAreRead(t *testing.T) {
	c := newCluster(t)
	crds := harness.GatewayCRDs(t)
	c.InstallCRDs(t, crds...)
	t.Cleanup(func() { c.RemoveCRDs(t, crds...) })
	web := sample(t, "web-1-a", 0, []string{"shop.v1.Web"})
	p := newPod("web-1-a", "", web.Port())
	p.Spec.Containers[0].Ports[0].Name = "api"
	p = c.create(p, web.IP())
	_, err := c.Client.CoreV1().Services(c.ns).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Name: "api", Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	name, port := "api", int32(web.Port())
	_, err = c.Client.DiscoveryV1().EndpointSlices(c.ns).Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
		// The API server takes no loopback addresses here.
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: c.ns, Name: p.Name, UID: p.UID}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	a := newSite(t).start(t, c.args()...).ready()
	a.routes("on", "0")
	a.providedIn(c.ns, "shop.v1.Web", "nobody")
	routes := c.Dynamic(t).Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "grpcroutes"}).Namespace(c.ns)
	if _, err := routes.Create(t.Context(), grpcRoute(c.ns, "r"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	a.providedIn(c.ns, "shop.v1.Web", "web-1-a, 0 claimants")
	a.routes("on", "1")
	if st := a.status(); st.Source.Error != "" {
		t.Errorf("status %+v", st)
	}
}
