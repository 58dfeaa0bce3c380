package e2e_test

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// caller puts a pod into the world that serves nothing and declares what it
// calls.
func (w *world) caller(id, addr, upstreams string) *corev1.Pod {
	p := newPod(id, addr, 50051)
	p.Spec.Containers[0].Ports = nil
	if upstreams != "" {
		p.Annotations = map[string]string{"fingerpost.dev/upstreams": upstreams}
	}
	return w.add(p)
}

// foreign moves a Service and its pods to another namespace.
func foreign(namespace string, objects []any, pods ...*corev1.Pod) {
	for _, p := range pods {
		p.Namespace = namespace
	}
	for _, o := range objects {
		switch o := o.(type) {
		case *corev1.Service:
			o.Namespace = namespace
		case *discoveryv1.EndpointSlice:
			o.Namespace = namespace
			for i := range o.Endpoints {
				o.Endpoints[i].TargetRef.Namespace = namespace
			}
		}
	}
}

// given are the clusters that a client was given, with their origins, sorted.
func (a *agentProcess) given(id string) []string {
	var all []string
	for _, p := range a.proxies() {
		if p.ID != id {
			continue
		}
		for _, u := range p.Upstreams {
			all = append(all, u.Origin+" "+u.Cluster)
		}
	}
	slices.Sort(all)
	return all
}

// What a pod declares its sidecar has before the first call: such a call needs no
// agent any more.
func TestDeclaredUpstreamsAreThereBeforeTheFirstCall(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	web, _ := m.serve("web-1-a", []string{"shop.Web", "shop.Other"})
	users, _ := m.serve("users-1-a", []string{"shop.Users"})
	m.front("web", web)
	m.front("users", users)
	m.caller("me-1-a", "10.9.9.9", "shop.Web, users.prod:80, Web/shop.Web,, shop.Late, what is this, late:80/shop.Late")
	m.put()
	e := m.sidecar(t, "delta", "prod/me-1-a")
	want := []string{"at/late:80/shop.Late", "at/users.prod:80/shop.Users", "at/web/shop.Web", "prod/shop.Late", "prod/shop.Web"}
	got := e.clusters()
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("before the first call the sidecar has %v, want %v", got, want)
	}
	for i := range want {
		want[i] = "declared " + want[i]
	}
	if got := m.agent.given("prod/me-1-a"); !slices.Equal(got, want) {
		t.Errorf("proxies shows %v, want %v", got, want)
	}
	out := m.agent.must("explain", "pod", "prod/me-1-a")
	for _, says := range []string{
		"declares that it calls /shop.Web, by prod/shop.Web\n", "declares that it calls users.prod:80, by at/users.prod:80/shop.Users\n",
		"declares that it calls late:80/shop.Late, by at/late:80/shop.Late: no Service and no pod of a headless Service has the name",
		`annotation fingerpost.dev/upstreams: "what is this" is ignored: it is no name of a Service`,
	} {
		if !strings.Contains(out, says) {
			t.Errorf("explain pod does not say %q:\n%s", says, out)
		}
	}
	if out := m.agent.must("proxies"); !strings.Contains(out, "on-demand (5 declared)") {
		t.Errorf("proxies:\n%s", out)
	}
	// One that comes later is there before it is called, too.
	late, _ := m.serve("late-1-a", []string{"shop.Late"})
	m.front("late", late)
	m.put()
	e.WaitFor(t, soon, func() error {
		for _, name := range []string{"prod/shop.Late", "at/late:80/shop.Late"} {
			if d := e.dump()["dynamic_active_clusters "+name]; !strings.Contains(d, `"EDS"`) {
				return fmt.Errorf("%s is %s", name, d)
			}
		}
		return nil
	})
	m.agent.stop()
	for authority, c := range map[string][2]string{
		"users.prod:80": {"shop.Users", "users-1-a"}, "web": {"shop.Web", "web-1-a"}, "late:80": {"shop.Late", "late-1-a"},
	} {
		if who, err := say(t, m.at(authority), c[0]); err != nil || who != c[1] {
			t.Errorf("first call of %s at %s: %q, %v", c[0], authority, who, err)
		}
	}
	for service, pod := range map[string]string{"shop.Web": "web-1-a", "shop.Late": "late-1-a"} {
		if who, err := say(t, e.conn, service); err != nil || who != pod {
			t.Errorf("first call of %s: %q, %v", service, who, err)
		}
	}
	if _, err := say(t, e.conn, "shop.Other"); status.Code(err) != codes.Unavailable {
		t.Errorf("what is not declared: %v", err)
	}
}

// A sidecar that has all clusters has those of Services of its own namespace, and
// of others' what its pod declares.
func TestDeclaredUpstreamsOfOtherNamespacesWhereASidecarHasAllClusters(t *testing.T) {
	t.Parallel()
	for _, api := range []string{"all", "sotw"} {
		t.Run(api, func(t *testing.T) {
			m := newMesh(t)
			web, _ := m.serve("web-1-a", []string{"shop.Web"})
			m.front("web", web)
			foreign("far", m.services["web"], web)
			m.caller("other-1-a", "10.9.9.8", "")
			m.caller("me-1-a", "10.9.9.9", "web.far.svc/shop.Web,late.far,shop.X,web.prod")
			m.put()
			e := m.sidecar(t, api, "prod/me-1-a")
			want := []string{"at/web.far:80/shop.Web"}
			if got := e.clusters(); !slices.Equal(got, want) {
				t.Errorf("the sidecar has %v, want %v", got, want)
			}
			for _, authority := range []string{"web.far", "web.far.svc.cluster.local:80", "Web.far."} {
				if who, err := say(t, m.at(authority), "shop.Web"); err != nil || who != "web-1-a" {
					t.Errorf("%s: %q, %v", authority, who, err)
				}
			}
			if out := m.agent.must("explain", "call", "--from", "prod/me-1-a", "--authority", "web.far", "/shop.Web/Say"); !strings.Contains(out, "OK: it goes to 1 endpoint of port 80 of Service far/web") || !strings.Contains(out, "cluster of at/web.far:80/shop.Web: acknowledged") {
				t.Errorf("explain call:\n%s", out)
			}
			// Another pod of the namespace does not have it.
			other := connectRaw(t, m.ads, client.Options{Delta: api == "all", Node: &corev3.Node{Id: "prod/other-1-a"}})
			other.subscribeAll()
			other.until(func() error {
				if len(other.names(xds.Route)) == 0 {
					return errors.New("no route table yet")
				}
				return nil
			})
			if got := other.names(xds.Cluster); len(got) != 0 {
				t.Errorf("a client that declares nothing has %v", got)
			}
			if out := m.agent.must("explain", "call", "--from", "prod/other-1-a", "--authority", "web.far", "/shop.Web/Say"); !strings.Contains(out, "declare web.far:80 on the caller's pod (annotation fingerpost.dev/upstreams)") {
				t.Errorf("explain call of a pod that does not declare it:\n%s", out)
			}
			// Restarts take nothing away, and what appears comes.
			answered, stop := load(t, m.at("web.far"), "shop.Web")
			defer stop()
			m.agent.stop()
			m.agent = m.start(t, "--source", m.source()).ready()
			m.agent.connected("prod/me-1-a", "cds", "lds")
			proceeds(t, answered)
			late, _ := m.serve("late-1-a", []string{"shop.Late"})
			m.front("late", late)
			foreign("far", m.services["late"], late)
			m.put()
			reaches(t, m.at("late.far"), "shop.Late", "late-1-a")
			proceeds(t, answered)
			stop()
		})
	}
}

// demander is a raw client in a network with clusters on demand, which says that
// it is id.
func (s *site) demander(t *testing.T, from *harness.Network, id string) *rawClient {
	t.Helper()
	meta, err := structpb.NewStruct(map[string]any{"fingerpost.dev/clusters": "on-demand"})
	if err != nil {
		t.Fatal(err)
	}
	return openRaw(t, dialFrom(t, from, s.ads, "localhost"), client.Options{Delta: true, Node: &corev3.Node{Id: id, Metadata: meta}})
}

// first waits for the first answer for clusters, and returns their names.
func (c *rawClient) first() []string {
	c.t.Helper()
	c.until(func() error {
		if len(c.of(xds.Cluster)) == 0 {
			return fmt.Errorf("no clusters yet; stream: %v", c.Err())
		}
		return nil
	})
	names := c.of(xds.Cluster)[0].Names()
	slices.Sort(names)
	return names
}

// What proved pods of a workload asked for, and had, its later pods are given with
// the first answer; nobody teaches another's.
func TestUpstreamsAreLearnedFromProvedPodsOfTheWorkloadAlone(t *testing.T) {
	s, w := newSite(t), newWorld(t)
	s.network = harness.NewNetwork(t)
	s.wiredPod(w, "prod", "web-1-a", "10.79.0.2", "shop.Web,shop.Secret,shop.Late2")
	networks := map[string]*harness.Network{}
	for i, id := range []string{"me-1-a", "me-2-b", "other-1-a", "me-2-c"} {
		addr := fmt.Sprintf("10.79.0.%d", 10+i)
		networks[id] = harness.NewNetwork(t)
		s.network.Wire(t, "v"+id, networks[id], addr)
		w.caller(id, addr, "")
	}
	state := filepath.Join(t.TempDir(), "state")
	args := []string{"--source", w.write().source(), "--state-dir", state}
	a := s.start(t, args...).ready()

	one := s.demander(t, networks["me-1-a"], "prod/me-1-a")
	one.subscribe(xds.Cluster)
	if got := one.first(); len(got) != 0 {
		t.Errorf("the first pod is given %v", got)
	}
	one.subscribe(xds.Cluster, "prod/shop.Web", "prod/shop.Nobody", "at/nobody:80/shop.Web", "prod/shop.Late", "at/10.79.0.3:50051/shop.Late", "at/10.79.0.2:50051/shop.Web")
	for _, name := range []string{"prod/shop.Web", "prod/shop.Nobody", "at/10.79.0.2:50051/shop.Web"} {
		one.gets(name)
	}
	// A claim by node.id, unproved or another's, teaches the workload nothing.
	loose := s.demander(t, harness.NewNetwork(t), "prod/me-1-a")
	loose.subscribe(xds.Cluster, "*", "prod/shop.Secret")
	loose.gets("prod/shop.Secret")
	if got := a.given("prod/me-1-a"); len(got) != 0 {
		t.Errorf("one who merely claims to be a pod is given %v", got)
	}
	liar := s.demander(t, networks["other-1-a"], "prod/me-1-a")
	liar.subscribe(xds.Cluster, "*", "prod/shop.Late2")
	liar.gets("prod/shop.Late2")
	// A header at unknown.sock neither.
	if out := a.must("explain", "workload", "prod/me"); !strings.Contains(out, "calls prod/shop.Web, last asked for") || strings.Contains(out, "Secret") || strings.Contains(out, "Late2") || strings.Contains(out, "Nobody") {
		t.Errorf("explain workload:\n%s", out)
	}
	learned := []string{"at/10.79.0.2:50051/shop.Web", "prod/shop.Web"}
	two := s.demander(t, networks["me-2-b"], "prod/me-2-b") // of a later revision
	two.subscribe(xds.Cluster)
	if got := two.first(); !slices.Equal(got, learned) {
		t.Errorf("a later pod is given %v, want %v", got, learned)
	}
	if got, want := a.given("prod/me-2-b"), []string{"learned " + learned[0], "learned " + learned[1]}; !slices.Equal(got, want) {
		t.Errorf("proxies shows %v, want %v", got, want)
	}
	if got := a.metric("fingerpost_learned_upstreams"); got != "3" {
		t.Errorf("%s names are learned", got)
	}
	// What nobody had when it was asked for is learned once somebody has it.
	late := func() string { return one.versions()["cds prod/shop.Late"] }
	one.gets("prod/shop.Late")
	nobodys := late()
	pod, _ := s.wiredPod(w, "prod", "late-1-a", "10.79.0.3", "shop.Late")
	w.write()
	one.until(func() error {
		if late() == nobodys {
			return errors.New("shop.Late has not come")
		}
		return nil
	})
	one.close()
	two.close()
	a.stop()
	if got, want := learnedNames(t, state), []string{
		"at/10.79.0.2:50051/shop.Web", "at/10.79.0.3:50051/shop.Late", "prod/shop.Late", "prod/shop.Late2", "prod/shop.Web",
	}; !slices.Equal(got, want) {
		t.Errorf("the checkpoint has %v, want %v", got, want)
	}
	// What leads nowhere now is not given.
	w.remove(pod)
	w.write()
	s.start(t, args...).ready()
	three := s.demander(t, networks["me-2-c"], "prod/me-2-c")
	three.subscribe(xds.Cluster)
	if got := three.first(); !slices.Equal(got, learned) {
		t.Errorf("after a restart a pod is given %v, want %v", got, learned)
	}
	four := s.demander(t, networks["other-1-a"], "prod/other-1-a")
	four.subscribe(xds.Cluster)
	if got := four.first(); !slices.Equal(got, []string{"prod/shop.Late2"}) {
		t.Errorf("the other workload is given %v", got)
	}
}

// learnedNames are those in the checkpoint, of all workloads.
func learnedNames(t *testing.T, state string) (names []string) {
	t.Helper()
	saved, err := (&nodecache.Checkpoint{Dir: state}).Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range saved.Learned {
		names = slices.AppendSeq(names, maps.Keys(l.Names))
	}
	slices.Sort(names)
	return names
}

// served starts a server in a network, and puts its pod into the world, which
// declares what it serves: it can be called from there alone.
func (w *world) served(in *harness.Network, id string, services ...string) *demo.Sample {
	w.t.Helper()
	var server *demo.Sample
	if err := in.Do(func() (err error) {
		server, err = demo.StartSample(id, nextAddr()+":0", services)
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(server.Stop)
	p := newPod(id, server.IP(), server.Port())
	p.Annotations = map[string]string{"fingerpost.dev/services": strings.Join(services, ",")}
	w.add(p)
	return server
}

// Envoy's own hot restart begins with nothing but what the agent gives it: what
// the workload called before is among it, so that it is there though the agent
// has gone again when it is called.
func TestNamesKnownOrLearnedNeverFailOverEnvoysHotRestartWithTheAgentDown(t *testing.T) {
	harness.Tool(t, "envoy")
	s, w := newSite(t), newWorld(t)
	s.network = harness.NewNetwork(t)
	me := harness.NewNetwork(t)
	s.network.Wire(t, "vme", me, "10.80.0.2")
	w.served(me, "web-1-a", "shop.Web", "shop.Once", "shop.Never")
	w.served(me, "cart-1-a", "shop.Cart")
	w.caller("me-1-a", "10.80.0.2", "shop.Cart")
	args := []string{"--source", w.write().source(), "--state-dir", filepath.Join(t.TempDir(), "state")}
	a := s.start(t, args...).ready()
	e := s.hotRestartingIn(t, me, "delta", "prod/me-1-a")
	if p, err := a.identityOf("prod/me-1-a"); err != nil || p.Identity.Pod != "prod/me-1-a" {
		t.Fatalf("%+v, %v", p, err)
	}
	reaches(t, e.current.conn, "shop.Web", "web-1-a")
	reaches(t, e.current.conn, "shop.Once", "web-1-a")
	unary, stopUnary := load(t, e.current.conn, "shop.Web")
	fresh, stopFresh := e.fresh("shop.Web")
	streams, stopStreams := e.streams("shop.Web")
	flows := func() {
		t.Helper()
		proceeds(t, unary)
		proceeds(t, fresh)
		before := streams()
		harness.Eventually(t, soon, func() error {
			if streams() == before {
				return errors.New("no stream has ended well")
			}
			return nil
		})
	}
	a.stop()
	flows()
	parent := e.next()
	flows() // the child waits, the parent goes on
	if _, err := say(t, e.current.conn, "shop.Once"); err != nil {
		t.Errorf("what the parent knows, while the child waits: %v", err)
	}
	a = s.start(t, args...).ready()
	e.current.WaitReady(t, soon)
	a.kill()
	flows()
	parent.Ended(t, soon)
	flows()
	for _, name := range []string{"shop.Once", "shop.Cart"} {
		if _, err := say(t, e.current.conn, name); err != nil {
			t.Errorf("%s, which the child was never asked for: %v", name, err)
		}
	}
	if _, err := say(t, e.current.conn, "shop.Never"); status.Code(err) != codes.Unavailable {
		t.Errorf("what nobody called before, without an agent: %v", err)
	}
	// Right after the agent's return all is as ever.
	a = s.start(t, args...).ready()
	reaches(t, e.current.conn, "shop.Never", "web-1-a")
	a.connected("prod/me-1-a", "cds", "lds")
	flows()
	for _, stop := range []func(){stopUnary, stopFresh, stopStreams} {
		stop()
	}
	given := a.given("prod/me-1-a")
	for _, want := range []string{"declared prod/shop.Cart", "learned prod/shop.Once", "learned prod/shop.Web"} {
		if !slices.Contains(given, want) {
			t.Errorf("%s is not among %v", want, given)
		}
	}
	// What it was given and has called without asking is not learned of that.
	if out := a.must("explain", "workload", "prod/me"); strings.Contains(out, "calls prod/shop.Cart") || !strings.Contains(out, "declares that it calls /shop.Cart") {
		t.Errorf("explain workload:\n%s", out)
	}
	e.current.content()
}
