package e2e_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// service is a Service of prod that was created in the minute, and its slice
// with the pods.
func service(name string, minute int, portName string, pods ...*corev1.Pod) []any {
	created := metav1.NewTime(time.Date(2026, 5, 1, 12, minute, 0, 0, time.UTC))
	svc := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "prod", UID: types.UID("uid-" + name), CreationTimestamp: created},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.10", Selector: map[string]string{"app": name},
			Ports: []corev1.ServicePort{{Name: portName, Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
	objects := []any{svc}
	// Pods of other ports stand in a slice of their own.
	byPort := map[int32][]*corev1.Pod{}
	for _, p := range pods {
		port := p.Spec.Containers[0].Ports[0].ContainerPort
		byPort[port] = append(byPort[port], p)
	}
	for port, ps := range byPort {
		proto := corev1.ProtocolTCP
		s := &discoveryv1.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("%s-%d", name, port), Namespace: "prod",
				Labels: map[string]string{discoveryv1.LabelServiceName: name},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &proto}},
		}
		for _, p := range ps {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{p.Status.PodIP},
				TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
			})
		}
		objects = append(objects, s)
	}
	return objects
}

// provider says who provides a service, as the pods of the endpoints, and how
// many claim it.
func (a *agentProcess) provider(service string) string { return a.providerIn("prod", service) }

func (a *agentProcess) providerIn(ns, service string) string {
	for _, s := range a.services() {
		if s.Name == service && s.Namespace == ns {
			var pods []string
			for _, e := range s.Endpoints {
				pods = append(pods, strings.TrimPrefix(e.Pod, ns+"/"))
			}
			slices.Sort(pods)
			return fmt.Sprintf("%s, %d claimants", strings.Join(pods, " "), len(s.Claimants))
		}
	}
	return "nobody"
}

func (a *agentProcess) provided(service, want string) {
	a.t.Helper()
	a.providedIn("prod", service, want)
}

func (a *agentProcess) providedIn(ns, service, want string) {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		if got := a.providerIn(ns, service); got != want {
			return fmt.Errorf("%s is provided by %s, want %s", service, got, want)
		}
		return nil
	})
}

func TestOlderServiceKeepsTheNameOverRolloutsAndRestarts(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	names := []string{"model.Predict"}
	alpha, _ := w.serve("alpha-1-a", names)
	zulu, _ := w.serve("zulu-1-a", names)
	write := func(alphas, zulus []*corev1.Pod) {
		w.pods = slices.Concat(alphas, zulus)
		w.more = slices.Concat(service("alpha", 2, "api", alphas...), service("zulu", 1, "api", zulus...))
		w.write()
	}
	write([]*corev1.Pod{alpha}, []*corev1.Pod{zulu})
	a := s.start(t, "--source", w.source()).ready()
	a.provided("model.Predict", "zulu-1-a, 1 claimants")
	c := connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	c.subscribe(xds.Endpoint, "prod/model.Predict")
	c.endpoints("prod/model.Predict", addressOf(zulu))

	explained := a.must("explain", "service", "model.Predict")
	for _, want := range []string{"claimed by uid-alpha-1/1", "order 1: ReplicaSet/zulu, behind Service zulu of 2026-05-01T12:01:00Z", "order 2: ReplicaSet/alpha, behind Service alpha"} {
		if !strings.Contains(explained, want) {
			t.Errorf("explain service does not say %q:\n%s", want, explained)
		}
	}
	if got := a.must("explain", "pod", "prod/alpha-1-a"); !strings.Contains(got, "stands behind prod/alpha") || !strings.Contains(got, "model.Predict goes to uid-zulu-1/1, which provides it") {
		t.Errorf("explain pod:\n%s", got)
	}

	// A rollout of each, the new pod beside the old one and then alone.
	alpha2, _ := w.serve("alpha-2-a", names)
	write([]*corev1.Pod{alpha, alpha2}, []*corev1.Pod{zulu})
	a.provided("model.Predict", "zulu-1-a, 2 claimants")
	write([]*corev1.Pod{alpha2}, []*corev1.Pod{zulu})
	a.provided("model.Predict", "zulu-1-a, 1 claimants")
	zulu2, _ := w.serve("zulu-2-a", names)
	write([]*corev1.Pod{alpha2}, []*corev1.Pod{zulu, zulu2})
	a.provided("model.Predict", "zulu-1-a zulu-2-a, 1 claimants")
	write([]*corev1.Pod{alpha2}, []*corev1.Pod{zulu2})
	a.provided("model.Predict", "zulu-2-a, 1 claimants")
	c.endpoints("prod/model.Predict", addressOf(zulu2))

	// To zero and back: the claimant gets nothing meanwhile.
	write([]*corev1.Pod{alpha2}, nil)
	a.provided("model.Predict", ", 1 claimants")
	write([]*corev1.Pod{alpha2}, []*corev1.Pod{zulu2})
	a.provided("model.Predict", "zulu-2-a, 1 claimants")

	if got := c.removals(); len(got) != 0 {
		t.Errorf("removed: %v", got)
	}

	for range 2 {
		a.stop()
		a = s.start(t, "--source", w.source()).ready()
		a.provided("model.Predict", "zulu-2-a, 1 claimants")
	}
	c = connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	c.subscribe(xds.Endpoint, "prod/model.Predict")
	c.endpoints("prod/model.Predict", addressOf(zulu2))
	// The Service itself decides: its successor is younger.
	w.more = slices.Concat(service("alpha", 2, "api", alpha2), service("zulu", 3, "api", zulu2))
	w.write()
	a.provided("model.Predict", "alpha-2-a, 1 claimants")
	c.endpoints("prod/model.Predict", addressOf(alpha2))
}

func TestCanaryBehindOneServiceServesToo(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	stable, _ := w.serve("web-1-a", []string{"shop.Web"})
	canary, _ := w.serve("canary-1-a", []string{"shop.Web", "shop.New"})
	stranger, _ := w.serve("aaa-1-a", []string{"shop.Web"})
	w.more = slices.Concat(service("web", 1, "api", stable, canary), service("other", 2, "api", stranger))
	a := s.start(t, "--source", w.write().source()).ready()
	a.provided("shop.Web", "canary-1-a web-1-a, 1 claimants")
	a.provided("shop.New", "canary-1-a, 0 claimants")
	c := connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	c.subscribe(xds.Endpoint, "prod/shop.Web")
	c.endpoints("prod/shop.Web", addressOf(stable), addressOf(canary))
}

// What somebody wrote into a slice by hand, for a Service without a selector
// that declares what is there, is called as a pod is, and never asked.
func TestAddressesOfADeclaringServiceAreCalledThroughEnvoy(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	r := newReflections()
	server := sample(t, "bank", 0, []string{"bank.Accounts"}, r.option())
	at := newPod("bank-1-a", server.IP(), server.Port())
	bank := service("bank", 1, "api", at)
	svc, slice := bank[0].(*corev1.Service), bank[1].(*discoveryv1.EndpointSlice)
	svc.Spec.Selector, svc.Annotations = nil, map[string]string{"fingerpost.dev/services": "bank.Accounts"}
	slice.Endpoints[0].TargetRef = nil
	w.more = bank
	a := s.start(t, "--source", w.write().source()).ready()
	e := s.sidecar(t, "delta", "prod/web")
	reaches(t, e.conn, "bank.Accounts", "bank")
	a.provided("bank.Accounts", "bank@"+server.IP()+", 0 claimants")
	if n := r.streams(); n != 0 {
		t.Errorf("it was asked %d times", n)
	}
	slice.Endpoints = nil
	w.write()
	a.provided("bank.Accounts", ", 0 claimants")
}

func TestServicePortIsAHint(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	bare := func(id string, services ...string) *corev1.Pod {
		p, _ := w.serve(id, services)
		p.Spec.Containers[0].Ports[0].Name = "api"
		return p
	}
	named, proto, none := bare("named-1-a", "shop.Named"), bare("proto-1-a", "shop.Proto"), bare("none-1-a", "shop.None")
	h2c := service("proto", 1, "api", proto)
	h2c[0].(*corev1.Service).Spec.Ports[0].AppProtocol = ptr("kubernetes.io/h2c")
	w.more = slices.Concat(service("named", 1, "grpc-api", named), h2c, service("none", 1, "api", none))
	a := s.start(t, "--source", w.write().source()).ready()
	// The first list is complete before anybody is answered.
	for name, want := range map[string]string{"shop.Named": "named-1-a, 0 claimants", "shop.Proto": "proto-1-a, 0 claimants", "shop.None": "nobody"} {
		if got := a.provider(name); got != want {
			t.Errorf("%s is provided by %s, want %s", name, got, want)
		}
	}
	if got := a.must("explain", "pod", "prod/none-1-a"); !strings.Contains(got, "no port has a gRPC hint") {
		t.Errorf("explain pod:\n%s", got)
	}
	if got := a.must("explain", "pod", "prod/named-1-a"); !strings.Contains(got, "port name of Service named") {
		t.Errorf("explain pod:\n%s", got)
	}
	// A hint that comes later.
	w.more = append(w.more, service("late", 2, "grpc", none)...)
	w.write()
	a.provided("shop.None", "none-1-a, 0 claimants")
}

// A real API server takes no loopback addresses into slices: these pods declare
// what they serve.
func TestServicesOfTheAPIServerDecideWhoProvides(t *testing.T) {
	c := newCluster(t)
	declare := func(id, addr string) *corev1.Pod {
		p := newPod(id, "", 50051)
		p.Annotations = map[string]string{"fingerpost.dev/services": "50051=shop.Web"}
		return c.create(p, addr)
	}
	front := func(objects []any) {
		t.Helper()
		for _, o := range objects {
			var err error
			switch o := o.(type) {
			case *corev1.Service:
				o.Namespace, o.Spec.ClusterIP = c.ns, ""
				_, err = c.Client.CoreV1().Services(c.ns).Create(t.Context(), o, metav1.CreateOptions{})
			case *discoveryv1.EndpointSlice:
				o.Namespace = c.ns
				_, err = c.Client.DiscoveryV1().EndpointSlices(c.ns).Create(t.Context(), o, metav1.CreateOptions{})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	alpha, zulu := declare("alpha-1-a", "192.0.2.1"), declare("zulu-1-a", "192.0.2.2")
	front(service("alpha-of-zulu", 0, "api", zulu))
	s := newSite(t)
	a := s.start(t, c.args()...).ready()
	// What was listed decides from the first answer on.
	if got, want := a.providerIn(c.ns, "shop.Web"), "zulu-1-a, 1 claimants"; got != want {
		t.Errorf("provided by %s, want %s", got, want)
	}
	// One created in the same second has the higher name.
	front(service("zulu-of-alpha", 0, "api", alpha))
	harness.Eventually(t, soon, func() error {
		if got := a.must("explain", "pod", c.ns+"/alpha-1-a"); !strings.Contains(got, "stands behind "+c.ns+"/zulu-of-alpha, which leads to port 50051") {
			return fmt.Errorf("explain pod:\n%s", got)
		}
		return nil
	})
	if got, want := a.providerIn(c.ns, "shop.Web"), "zulu-1-a, 1 claimants"; got != want {
		t.Errorf("provided by %s, want %s", got, want)
	}
	if err := c.Client.CoreV1().Services(c.ns).Delete(t.Context(), "alpha-of-zulu", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	a.providedIn(c.ns, "shop.Web", "alpha-1-a, 1 claimants")
	if st := a.status(); st.Source.Error != "" {
		t.Errorf("status: %+v", st.Source)
	}
}

func ptr[T any](v T) *T { return &v }
