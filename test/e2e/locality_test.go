package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// The clients' node n1 and n2 are in one zone, n3 is in another of the region,
// n4 in another region.
func nodes() []any {
	var out []any
	for name, at := range map[string][2]string{"n1": {"z1", "r1"}, "n2": {"z1", "r1"}, "n3": {"z2", "r1"}, "n4": {"z3", "r2"}} {
		out = append(out, &corev1.Node{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
				corev1.LabelTopologyZone: at[0], corev1.LabelTopologyRegion: at[1],
			}},
		})
	}
	return out
}

// on starts a server and puts its pod on a node.
func (w *world) on(node, id, service string) (*corev1.Pod, *demo.Sample) {
	w.t.Helper()
	p, s := w.serve(id, []string{service})
	p.Spec.NodeName = node
	return p, s
}

// answers counts who answers so many calls, one after another.
func answers(t *testing.T, conn *grpc.ClientConn, service string, calls int) map[string]int {
	t.Helper()
	by := map[string]int{}
	for range calls {
		who, err := say(t, conn, service)
		if err != nil {
			t.Fatalf("a call of %s: %v", service, err)
		}
		by[who]++
	}
	return by
}

// layout is how many pods of a service there are on the clients' node, elsewhere
// in their zone, elsewhere in their region, and in another.
type layout [4]int

// called is how many of them are called.
func (l layout) called(policy string) (n int) {
	for i := range l {
		n += l[i]
		if n > 0 && (policy == "node" || policy == "zone" && i > 0) {
			return n
		}
	}
	return n
}

var layouts = []layout{{1, 2, 3, 0}, {1, 0, 0, 5}, {0, 2, 3, 1}, {0, 0, 3, 3}, {0, 0, 0, 6}, {3, 3, 0, 0}}

func (l layout) service() string { return fmt.Sprintf("shop.v1.Of%d%d%d%d", l[0], l[1], l[2], l[3]) }

// The shares of calls, counted at the pods, are those that docs/locality.md
// says: Envoy takes turns, so that they are exact.
func TestSharesOfCallsByLocality(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "locality.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, policy := range []string{"even", "zone", "node"} {
		// Half of the time by the flag, half by what the pods say.
		for _, by := range []string{"flag", "annotation"} {
			t.Run(policy+" by "+by, func(t *testing.T) {
				w, s := newWorld(t), newSite(t)
				w.more = nodes()
				for i, l := range layouts {
					for where, n := range l {
						for j := range n {
							p, _ := w.on(fmt.Sprint("n", where+1), fmt.Sprintf("of%d-1-%d%d", i, where, j), l.service())
							if by == "annotation" {
								p.Annotations = map[string]string{kube.LocalityAnnotation: policy}
							}
						}
					}
				}
				args := []string{"--source", w.write().source()}
				if by == "flag" {
					args = append(args, "--locality", policy)
				}
				a := s.start(t, args...).ready()
				e := s.sidecar(t, "delta", "prod/web")
				for i, l := range layouts {
					const calls = 60 // of which 1 to 6 pods get equal shares
					var got layout
					by := answers(t, e.conn, l.service(), calls)
					if len(by) != l.called(policy) {
						t.Errorf("%s: %d pods answer, want %d", l.service(), len(by), l.called(policy))
					}
					for who, n := range by {
						where := who[len(fmt.Sprintf("of%d-1-", i))] - '0'
						got[where] += n
						if want := calls / l.called(policy); n != want {
							t.Errorf("%s: %s answers %d calls, want %d", l.service(), who, n, want)
						}
					}
					row := fmt.Sprintf("| `%s` | %d | %d | %d | %d |", policy, l[0], l[1], l[2], l[3])
					for _, n := range got {
						row += fmt.Sprintf(" %.3g %% |", 100*float64(n)/calls)
					}
					t.Log(row)
					if !strings.Contains(string(doc), row) {
						t.Errorf("docs/locality.md does not have the row\n%s", row)
					}
				}
				a.connected("prod/web", "cds", "eds")
				if st := a.status(); st.Nacks != 0 {
					t.Errorf("%d refusals", st.Nacks)
				}
				e.content()
			})
		}
	}
}

// only waits until one pod alone answers. Few calls that it answers say nothing:
// beside others that take turns with them it may answer each second one.
func only(t *testing.T, conn *grpc.ClientConn, service, pod string) {
	t.Helper()
	harness.Eventually(t, soon, func() error {
		if by := answers(t, conn, service, 40); by[pod] != 40 {
			return fmt.Errorf("calls of %s are answered by %v, want %s alone", service, by, pod)
		}
		return nil
	})
}

// What is near goes, drains and comes back: calls follow, and none fails.
func TestCallsFollowWhatIsNear(t *testing.T) {
	eachFront(t, "shop.v1.Cart", func(t *testing.T, s *site, start func() front) {
		w := newWorld(t)
		w.more = nodes()
		here, first := w.on("n1", "cart-1-here", "shop.v1.Cart")
		near, _ := w.on("n2", "cart-1-near", "shop.v1.Cart")
		w.on("n3", "cart-1-region", "shop.v1.Cart")
		w.on("n4", "cart-1-far", "shop.v1.Cart")
		w.write()
		a := s.start(t, "--source", w.source(), "--locality", "node").ready()
		f := start()
		stream := onPod(t, f.conn, "shop.v1.Cart", "cart-1-here")
		answered, stop := load(t, f.conn, "shop.v1.Cart")
		only(t, f.conn, "shop.v1.Cart", "cart-1-here")

		// Beside one that drains the other of the node gets all calls.
		also, _ := w.on("n1", "cart-1-also", "shop.v1.Cart")
		w.write()
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-here", "cart-1-also")
		terminate(here)
		w.write()
		only(t, f.conn, "shop.v1.Cart", "cart-1-also")
		spared(t, first, "shop.v1.Cart", answered)
		stays(t, stream, "cart-1-here")

		terminate(also)
		w.write()
		only(t, f.conn, "shop.v1.Cart", "cart-1-near")
		w.remove(also)
		terminate(near)
		w.write()
		only(t, f.conn, "shop.v1.Cart", "cart-1-region")
		w.remove(near)
		w.write()
		only(t, f.conn, "shop.v1.Cart", "cart-1-region")
		stays(t, stream, "cart-1-here")

		// And back, each as it comes.
		w.on("n2", "cart-1-near2", "shop.v1.Cart")
		w.write()
		only(t, f.conn, "shop.v1.Cart", "cart-1-near2")
		second := onPod(t, f.conn, "shop.v1.Cart", "cart-1-near2")
		w.on("n1", "cart-1-here2", "shop.v1.Cart")
		w.write()
		only(t, f.conn, "shop.v1.Cart", "cart-1-here2")
		stays(t, stream, "cart-1-here")
		stays(t, second, "cart-1-near2")
		proceeds(t, answered)
		stop()
		a.connected("prod/web", "cds", "eds")
		if st := a.status(); st.Nacks != 0 {
			t.Errorf("%d refusals", st.Nacks)
		}
	})
}

// A pod whose server has gone without a word, as far as anybody knows, is called
// no more once its connections were refused; back, it gets all calls again.
func TestDeadPodNearbyIsPassedOver(t *testing.T) {
	t.Parallel()
	s, w := newSite(t), newWorld(t)
	w.more = nodes()
	_, dead := w.on("n1", "cart-1-here", "shop.v1.Cart")
	for _, name := range []string{"b", "c", "d"} {
		w.on("n3", "cart-1-"+name, "shop.v1.Cart")
	}
	s.start(t, "--source", w.write().source(), "--locality", "node").ready()
	e := s.sidecar(t, "delta", "prod/web")
	only(t, e.conn, "shop.v1.Cart", "cart-1-here")
	dead.Stop()
	// Envoy tries a call three times, and ejects who refused five times.
	failed := 0
	for {
		if _, err := say(t, e.conn, "shop.v1.Cart"); err == nil {
			break
		}
		if failed++; failed > 5 {
			t.Fatal("calls go on to fail")
		}
	}
	if by := answers(t, e.conn, "shop.v1.Cart", 30); by["cart-1-b"] != 10 || by["cart-1-c"] != 10 || by["cart-1-d"] != 10 {
		t.Errorf("the others answer %v, want 10 calls each", by)
	}
	again, err := demo.StartSample("cart-1-here", dead.Addr(), []string{"shop.v1.Cart"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Stop)
	only(t, e.conn, "shop.v1.Cart", "cart-1-here")
}

// By the gRPC service alone, by a Service's name and by a route: the pods' word
// holds for each cluster in which they are.
func TestEveryWayToAPodPrefersWhatIsNear(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, api string) {
		m := newMesh(t)
		here, _ := m.on("n1", "users-1-here", "shop.Users")
		near, _ := m.on("n2", "users-1-near", "shop.Users")
		far, _ := m.on("n3", "users-1-far", "shop.Users")
		ask := func(policy string) {
			for _, p := range []*corev1.Pod{here, near, far} {
				p.Annotations = map[string]string{kube.LocalityAnnotation: policy}
			}
			m.put()
		}
		m.services["nodes"] = nodes()
		m.front("users", here, near, far)
		m.front("routed", here, near, far)
		m.route("GRPCRoute", "prod", "r", "routed", "  - {backendRefs: [{name: users, port: 80}]}")
		ask("node")
		e := m.sidecar(t, api, "prod/me")
		conns := []*grpc.ClientConn{e.conn, m.at("users.prod:80"), m.at("routed.prod:80")}
		for _, conn := range conns {
			only(t, conn, "shop.Users", "users-1-here")
		}
		clusters := slices.Sorted(slices.Values(e.clusters()))
		ask("zone")
		for _, conn := range conns {
			reaches(t, conn, "shop.Users", "users-1-here", "users-1-near")
		}
		terminate(here)
		m.put()
		for _, conn := range conns {
			only(t, conn, "shop.Users", "users-1-near")
		}
		ask("even")
		for _, conn := range conns {
			reaches(t, conn, "shop.Users", "users-1-near", "users-1-far")
		}
		if after := slices.Sorted(slices.Values(e.clusters())); !slices.Equal(after, clusters) {
			t.Errorf("clusters %v, before %v", after, clusters)
		}
		if n, _ := e.Stat("cluster_manager.cluster_modified"); n != 0 {
			t.Errorf("%d clusters were changed", n)
		}
		e.content()
	})
}

// What is asked for, and whether the agent can follow it, is told.
func TestLocalityIsExplained(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	here, _ := m.on("n1", "users-1-here", "shop.Users")
	near, _ := m.on("n2", "users-1-near", "shop.Users")
	far, _ := m.on("n4", "users-1-far", "shop.Users")
	m.front("users", here, near, far)
	m.put()
	a := m.agent
	explained := func(want string) {
		t.Helper()
		for _, args := range [][]string{
			{"explain", "call", "--from", "prod/me", "/shop.Users/Say"},
			{"explain", "call", "--from", "prod/me", "--authority", "users.prod:80", "/shop.Users/Say"},
			{"explain", "service", "shop.Users"},
		} {
			harness.Eventually(t, soon, func() error {
				if out := a.must(args...); !strings.Contains(out, want) {
					return fmt.Errorf("%v does not say %q:\n%s", args, want, out)
				}
				return nil
			})
		}
	}
	explained("even, by --locality: 3 endpoints get the same share each")
	if part := a.part("locality"); !strings.HasPrefix(part, "off: --locality even") {
		t.Errorf("part locality is %q", part)
	}
	here.Annotations = map[string]string{kube.LocalityAnnotation: "node"}
	near.Annotations, far.Annotations = here.Annotations, here.Annotations
	m.put()
	explained(`node, by annotation, without zones, since nobody says in which one node "n1" is: 1 of 3 endpoints, on node n1, take all calls; 2 elsewhere take over`)
	if part := a.part("locality"); !strings.HasPrefix(part, `on: nobody says in which zone node "n1" is`) {
		t.Errorf("part locality is %q", part)
	}
	m.services["nodes"] = nodes()
	far.Annotations = map[string]string{kube.LocalityAnnotation: "zone"}
	m.put()
	explained("zone, what prefers least, as the pods ask for node and zone: 2 of 3 endpoints, in zone z1, take all calls; 1 elsewhere take over as those before them fail")
	if part := a.part("locality"); part != "on" {
		t.Errorf("part locality is %q", part)
	}
	far.Annotations = map[string]string{kube.LocalityAnnotation: "rack"}
	m.put()
	a.logs(`\"rack\" is ignored`)
}

// From an API server, whose Nodes the agent may not read.
func TestLocalityByWhatPodsSayOfTheirNodes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for node, zone := range map[string]string{"n1": "z1", "n2": "z1", "n3": "z2"} {
		p := newPod("cart-1-"+node, "", 0)
		s := sample(t, p.Name, portOf(c.pods, p), []string{"shop.v1.Cart"})
		p = newPod("cart-1-"+node, "", s.Port())
		p.Spec.NodeName = node
		p.Labels[corev1.LabelTopologyZone] = zone
		p.Annotations = map[string]string{kube.LocalityAnnotation: "zone"}
		c.create(p, s.IP())
	}
	s := newSite(t)
	a := s.start(t, c.args()...).ready()
	conn := s.proxyless(t, c.ns+"/web", "shop.v1.Cart")
	reaches(t, conn, "shop.v1.Cart", "cart-1-n1", "cart-1-n2")
	c.Remove(t, c.pods[slices.IndexFunc(c.pods, func(p *corev1.Pod) bool { return p.Spec.NodeName == "n1" })])
	// The agent knows no more in which zone it is.
	reaches(t, conn, "shop.v1.Cart", "cart-1-n2", "cart-1-n3")
	if part := a.part("locality"); !strings.HasPrefix(part, "on: nobody says") {
		t.Errorf("part locality is %q", part)
	}
	a.connected(c.ns+"/web", "lds", "cds", "eds")
	if st := a.status(); st.Nacks != 0 {
		t.Errorf("%d refusals", st.Nacks)
	}
}

// As long as 71 % of the near pods are healthy they get all calls; below that a
// part goes elsewhere (Envoy's overprovisioning factor of 1.4).
func TestSomeDeadPodsNearbySendAPartAway(t *testing.T) {
	t.Parallel()
	s, w := newSite(t), newWorld(t)
	w.more = nodes()
	var near []*demo.Sample
	for i := range 4 {
		_, server := w.on("n1", fmt.Sprint("cart-1-near", i), "shop.v1.Cart")
		near = append(near, server)
	}
	for i := range 4 {
		w.on("n3", fmt.Sprint("cart-1-far", i), "shop.v1.Cart")
	}
	s.start(t, "--source", w.write().source(), "--locality", "node").ready()
	e := s.sidecar(t, "delta", "prod/web")
	reaches(t, e.conn, "shop.v1.Cart", "cart-1-near0", "cart-1-near1", "cart-1-near2", "cart-1-near3")
	thrown := func(dead uint64) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			_, _ = say(t, e.conn, "shop.v1.Cart")
			if n, _ := e.Stat("cluster.prod/shop_v1_Cart.outlier_detection.ejections_active"); n != dead {
				return fmt.Errorf("%d are thrown out, want %d", n, dead)
			}
			return nil
		})
	}
	far := func() (n int) {
		for who, k := range answers(t, e.conn, "shop.v1.Cart", 200) {
			if strings.HasPrefix(who, "cart-1-far") {
				n += k
			}
		}
		return n
	}
	near[0].Stop()
	thrown(1)
	if n := far(); n != 0 {
		t.Errorf("with 3 of 4 healthy %d of 200 calls go elsewhere", n)
	}
	// 30 % are 60 of 200, and the priority of each call is drawn: five standard
	// deviations to either side. It is less at first.
	near[1].Stop()
	thrown(2)
	harness.Eventually(t, soon, func() error {
		if n := far(); n < 28 || n > 92 {
			return fmt.Errorf("with 2 of 4 healthy %d of 200 calls go elsewhere, want 30 %%", n)
		}
		return nil
	})
}
