package e2e_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

func TestPodsOfTheAPIServerReachTheirCallers(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		c := newCluster(t)
		a, first := c.serve("cart-1-a", []string{"shop.v1.Cart"})
		s := newSite(t)
		ag := s.start(t, c.args()...).ready()
		e := s.sidecar(t, api, c.ns+"/web")
		g := s.proxyless(t, c.ns+"/web", "shop.v1.Cart")
		name := c.ns + "/shop.v1.Cart"
		all := func(want map[string]string, pods ...string) {
			t.Helper()
			e.has(name, want)
			reaches(t, e.conn, "shop.v1.Cart", pods...)
			reaches(t, g, "shop.v1.Cart", pods...)
		}
		all(map[string]string{first.Addr(): "HEALTHY"}, "cart-1-a")

		second := sample(t, "cart-1-b", first.Port(), []string{"shop.v1.Cart"})
		b := c.create(newPod("cart-1-b", "", first.Port()), "")
		c.SetReady(t, b, false, second.IP())
		c.SetReady(t, b, true)
		all(map[string]string{first.Addr(): "HEALTHY", second.Addr(): "HEALTHY"}, "cart-1-a", "cart-1-b")
		c.SetReady(t, b, false)
		all(map[string]string{first.Addr(): "HEALTHY"}, "cart-1-a")
		c.SetReady(t, b, true)
		all(map[string]string{first.Addr(): "HEALTHY", second.Addr(): "HEALTHY"}, "cart-1-a", "cart-1-b")

		stream := onPod(t, e.conn, "shop.v1.Cart", "cart-1-a")
		c.Terminate(t, a)
		all(map[string]string{first.Addr(): "DRAINING", second.Addr(): "HEALTHY"}, "cart-1-b")
		stays(t, stream, "cart-1-a")
		c.Remove(t, a)
		all(map[string]string{second.Addr(): "HEALTHY"}, "cart-1-b")
		stays(t, stream, "cart-1-a")

		// A pod that is being deleted and not Ready any more leaves as well.
		c.Terminate(t, b)
		c.SetReady(t, b, false)
		e.has(name, map[string]string{})
		e.content()
		ag.connected(c.ns+"/web", "eds")
		if st := ag.status(); st.Source.Kind != "kube" || !st.Source.Synced || st.Source.Error != "" || st.Source.StaleSeconds != 0 || st.Nacks != 0 {
			t.Errorf("status: %+v", st)
		}
	})
}

// While two ReplicaSets of a Deployment serve, calls go where their service is.
func TestRolloutSendsCallsWhereTheirServiceIs(t *testing.T) {
	c := newCluster(t)
	old, _ := c.serve("web-1-a", []string{"shop.v1.Web"})
	s := newSite(t)
	a := s.start(t, c.args()...).ready()
	e := s.sidecar(t, "delta", c.ns+"/caller")
	reaches(t, e.conn, "shop.v1.Web", "web-1-a")
	answered, stop := load(t, e.conn, "shop.v1.Web")
	if _, err := say(t, e.conn, "shop.v1.New"); status.Code(err) != codes.Unimplemented {
		t.Errorf("before the rollout: %v, want UNIMPLEMENTED", err)
	}

	c.serve("web-2-a", []string{"shop.v1.Web", "shop.v1.New"})
	c.serve("web-2-b", []string{"shop.v1.Web", "shop.v1.New"})
	reaches(t, e.conn, "shop.v1.Web", "web-1-a", "web-2-a", "web-2-b")
	reaches(t, e.conn, "shop.v1.New", "web-2-a", "web-2-b")
	reaches(t, s.proxyless(t, c.ns+"/caller", "shop.v1.New"), "shop.v1.New", "web-2-a", "web-2-b")
	owners := map[string]string{}
	for _, o := range a.owners() {
		if o.Namespace == c.ns {
			owners[o.Name] = o.Workload + " " + strings.Join(o.Services, ",")
		}
	}
	want := map[string]string{
		"ReplicaSet/web-1": "ReplicaSet/web shop.v1.Web",
		"ReplicaSet/web-2": "ReplicaSet/web shop.v1.New,shop.v1.Web",
	}
	if !maps.Equal(owners, want) {
		t.Errorf("owners %v, want %v", owners, want)
	}

	c.Terminate(t, old)
	reaches(t, e.conn, "shop.v1.Web", "web-2-a", "web-2-b")
	c.Remove(t, old)
	reaches(t, e.conn, "shop.v1.Web", "web-2-a", "web-2-b")
	proceeds(t, answered)
	stop()
	e.content()
}

// A StatefulSet's pod comes back under its name with another UID, at another
// address, and its controller's UID stays.
func TestPodRecreatedUnderItsNameMoves(t *testing.T) {
	c := newCluster(t)
	member := func(port int) *corev1.Pod {
		p := newPod("db-1-0", "", port)
		p.Name = "db-0"
		p.Labels = map[string]string{"controller-revision-hash": "db-5d9"}
		p.OwnerReferences = []metav1.OwnerReference{harness.OwnedBy("StatefulSet", "db", types.UID("uid-db-"+c.ns))}
		return p
	}
	first := sample(t, "first", 0, []string{"shop.v1.DB"})
	p := c.create(member(first.Port()), first.IP())
	s := newSite(t)
	a := s.start(t, c.args()...).ready()
	e := s.sidecar(t, "delta", c.ns+"/web")
	reaches(t, e.conn, "shop.v1.DB", "first")
	for _, next := range []string{"second", "third"} {
		server := sample(t, next, first.Port(), []string{"shop.v1.DB"})
		c.Remove(t, p)
		p = c.create(member(first.Port()), server.IP())
		reaches(t, e.conn, "shop.v1.DB", next)
		e.has(c.ns+"/shop.v1.DB", map[string]string{server.Addr(): "HEALTHY"})
	}
	n := 0
	for _, o := range a.owners() {
		if o.Namespace == c.ns {
			n++
			if o.Name != "StatefulSet/db" || !slices.Equal(o.Pods, []string{c.ns + "/db-0"}) {
				t.Errorf("owner %+v", o)
			}
		}
	}
	if n != 1 {
		t.Errorf("%d owners, want one", n)
	}
}

func TestPodWithoutControllerIsServed(t *testing.T) {
	c := newCluster(t)
	server := sample(t, "alone", 0, []string{"shop.v1.Alone"})
	p := newPod("alone-1", "", server.Port())
	p.OwnerReferences, p.Labels = nil, nil
	p = c.create(p, server.IP())
	s := newSite(t)
	a := s.start(t, c.args()...).ready()
	e := s.sidecar(t, "delta", c.ns+"/web")
	reaches(t, e.conn, "shop.v1.Alone", "alone")
	i := slices.IndexFunc(a.owners(), func(o agent.OwnerView) bool { return o.Key == string(p.UID)+"/" })
	if i < 0 || a.owners()[i].Name != "Pod/alone-1" {
		t.Errorf("owners %+v", a.owners())
	}
}

func TestNamespacesDoNotLeak(t *testing.T) {
	c, other := newCluster(t), newCluster(t)
	c.serve("cart-1-a", []string{"shop.v1.Cart", "shop.v1.Here"})
	theirs := newPod("cart-9-z", "", 0)
	server := sample(t, "cart-9-z", 0, []string{"shop.v1.Cart", "shop.v1.There"})
	theirs.Spec.Containers[0].Ports[0].ContainerPort = int32(server.Port())
	other.create(theirs, server.IP())
	s := newSite(t)
	s.start(t, c.args()...).ready()
	e := s.sidecar(t, "delta", c.ns+"/web")
	reaches(t, e.conn, "shop.v1.Cart", "cart-1-a")
	reaches(t, s.proxyless(t, other.ns+"/web", "shop.v1.Cart"), "shop.v1.Cart", "cart-9-z")
	if _, err := say(t, e.conn, "shop.v1.There"); status.Code(err) != codes.Unimplemented {
		t.Errorf("a service of another namespace: %v, want UNIMPLEMENTED", err)
	}
	if text := e.Admin(t, "/clusters"); strings.Contains(text, other.ns) {
		t.Errorf("Envoy has clusters of another namespace:\n%s", text)
	}
}

// A namespace that opted out is not asked, whether it said so before its pods
// came or after; one that declares its services need not be.
func TestAnnotationsDecideWhoIsAsked(t *testing.T) {
	c := newCluster(t)
	ns, err := c.Client.CoreV1().Namespaces().Get(t.Context(), c.ns, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ns.Annotations = map[string]string{"fingerpost.dev/collect": "false"}
	if ns, err = c.Client.CoreV1().Namespaces().Update(t.Context(), ns, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	h := newReflectionHold()
	h.hold()
	defer h.release()
	c.serve("quiet-1-a", []string{"shop.v1.Quiet"}, h.option())
	said := sample(t, "said-1-a", 0, []string{"shop.v1.Said"}, h.option())
	p := newPod("said-1-a", "", said.Port())
	p.Annotations = map[string]string{"fingerpost.dev/services": "shop.v1.Said"}
	c.create(p, said.IP())
	s := newSite(t)
	a := s.start(t, c.args()...).ready()
	e := s.sidecar(t, "delta", c.ns+"/web")
	reaches(t, e.conn, "shop.v1.Said", "said-1-a")
	if _, err := say(t, e.conn, "shop.v1.Quiet"); err == nil {
		t.Error("a pod of a namespace that opted out is called")
	}
	for _, o := range a.owners() {
		if o.Namespace == c.ns && o.Name == "ReplicaSet/said-1" && (o.Knowledge != "known" || o.Origin != "declared") {
			t.Errorf("owner %+v", o)
		}
	}
	select {
	case <-h.asked:
		t.Error("a pod was asked")
	default:
	}

	ns.Annotations = nil
	if _, err := c.Client.CoreV1().Namespaces().Update(t.Context(), ns, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	h.waitAsked(t)
}

func TestAPIServerAwayChangesNothing(t *testing.T) {
	c := inCluster(t, harness.StartAPIServer(t))
	gone, _ := c.serve("cart-1-a", []string{"shop.v1.Cart"})
	c.serve("cart-1-b", []string{"shop.v1.Cart"})
	args := c.args()
	s := newSite(t)
	a := s.start(t, args...).ready()
	e := s.sidecar(t, "delta", c.ns+"/web")
	reaches(t, e.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
	dump := e.dump()
	answered, stop := load(t, e.conn, "shop.v1.Cart")

	c.Stop()
	harness.Eventually(t, 2*soon, func() error {
		if st := a.status(); !st.Source.Synced || st.Source.Error == "" || st.Source.StaleSeconds == 0 {
			return fmt.Errorf("source %+v, want it stale", st.Source)
		}
		return nil
	})
	if out, errs, code := run(t, "status", "--check", "--admin-socket", a.admin); code != 1 {
		t.Errorf("status --check: exit %d, want 1\n%s%s", code, out, errs)
	}
	for _, path := range []string{"/live", "/ready"} {
		if code, body, err := a.get(path); err != nil || code != 200 {
			t.Errorf("%s: %d %s %v, want 200: what was known last is served", path, code, body, err)
		}
	}
	proceeds(t, answered)
	reaches(t, s.proxyless(t, c.ns+"/late", "shop.v1.Cart"), "shop.v1.Cart", "cart-1-a", "cart-1-b")
	same(t, "without the API server", dump, e.dump())

	// An agent that starts now knows nothing, and says nothing.
	s2 := newSite(t)
	a2 := s2.start(t, args...)
	harness.Eventually(t, soon, func() error {
		code, body, err := a2.get("/ready")
		if err == nil && (code != 503 || !strings.Contains(body, "the source has not synced: ")) {
			err = fmt.Errorf("/ready: %d %s", code, body)
		}
		return err
	})
	if code, body, err := a2.get("/live"); err != nil || code != 200 {
		t.Errorf("/live: %d %s %v", code, body, err)
	}
	if st := a2.status(); st.Gate != "closed" || !strings.Contains(st.Reason, "refused") {
		t.Errorf("gate %s, %s", st.Gate, st.Reason)
	}
	held := raw(t, s2, c.ns+"/web")
	if err := held.Subscribe(xds.Cluster); err != nil {
		t.Fatal(err)
	}
	if r, err := held.Next(t.Context()); status.Code(err) != codes.Unavailable || !strings.Contains(status.Convert(err).Message(), "still starting") {
		t.Errorf("a client of an agent that knows nothing: %v, %v, want UNAVAILABLE", r, err)
	}

	c.Restart(t)
	c.Remove(t, gone)
	c.serve("cart-1-c", []string{"shop.v1.Cart"})
	harness.Eventually(t, 2*soon, func() error {
		if st := a.status(); st.Source.Error != "" || st.Source.StaleSeconds != 0 {
			return fmt.Errorf("source %+v", st.Source)
		}
		return nil
	})
	reaches(t, e.conn, "shop.v1.Cart", "cart-1-b", "cart-1-c")
	proceeds(t, answered)
	stop()
	e.content()
	for name, value := range e.stats("(cluster|listener)_(modified|removed)$") {
		if value != "0" {
			t.Errorf("%s is %s", name, value)
		}
	}
	a.must("status", "--check")
	harness.Eventually(t, 2*soon, func() error {
		code, body, err := a2.get("/ready")
		if err == nil && code != 200 {
			err = fmt.Errorf("/ready: %s", body)
		}
		return err
	})
	reaches(t, s2.proxyless(t, c.ns+"/web", "shop.v1.Cart"), "shop.v1.Cart", "cart-1-b", "cart-1-c")
}

// raw opens a bare delta stream.
func raw(t *testing.T, s *site, id string) *client.Stream {
	t.Helper()
	conn, err := client.Dial(s.ads)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	stream, err := client.Open(t.Context(), conn, client.Options{Delta: true, Node: &corev3.Node{Id: id}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stream.Close)
	return stream
}

// A drained node's pod goes at the moment in which its successor is Ready:
// whatever comes first, the successor is there in the end, without being asked.
func TestSuccessorOfLastPodAlwaysArrives(t *testing.T) {
	c := newCluster(t)
	s := newSite(t)
	last, server := c.serve("cart-1-a", []string{"shop.v1.Cart"})
	a := s.start(t, c.args()...).ready()
	stream := raw(t, s, c.ns+"/web")
	name := c.ns + "/shop.v1.Cart"
	if err := stream.Subscribe(xds.Endpoint, name); err != nil {
		t.Fatal(err)
	}
	// until takes responses until the CLA is at one address only.
	until := func(want string) {
		t.Helper()
		for got := []string{"nothing"}; !slices.Equal(got, []string{want}); {
			got = nil
			r, err := stream.Next(deadline(t))
			if err != nil {
				t.Fatalf("waited for %s: %v; the agent has %+v", want, err, a.services())
			}
			if len(r.Removed) > 0 {
				t.Fatalf("removed: %v", r.Removed)
			}
			var cla endpointv3.ClusterLoadAssignment
			if err := r.Resources[0].Body.UnmarshalTo(&cla); err != nil {
				t.Fatal(err)
			}
			for _, l := range cla.GetEndpoints() {
				for _, lb := range l.GetLbEndpoints() {
					got = append(got, lb.GetEndpoint().GetAddress().GetSocketAddress().GetAddress())
				}
			}
		}
	}
	until(server.IP())
	collects := a.metric(`fingerpost_collects_total{result="known"}`)
	for i := range 30 {
		// Nobody listens there: what the owner serves is known already.
		addr := fmt.Sprintf("192.0.2.%d", 1+i)
		next := c.create(newPod(fmt.Sprintf("cart-1-%d", i), "", server.Port()), "")
		c.SetReady(t, next, false, addr)
		var both sync.WaitGroup
		begin := make(chan struct{})
		both.Go(func() { <-begin; c.Remove(t, last) })
		both.Go(func() { <-begin; c.SetReady(t, next, true) })
		close(begin)
		both.Wait()
		until(addr)
		last = next
	}
	if n := a.metric(`fingerpost_collects_total{result="known"}`); n != collects {
		t.Errorf("%s collects, %s of them needed", n, collects)
	}
}
