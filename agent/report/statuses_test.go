package report_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/agent/report"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

// routeWorld is a namespace of an API server that has routes.
type routeWorld struct {
	t       *testing.T
	api     *harness.APIServer
	ns      string
	version string // in which the test reads and writes
	// patches counts the statuses that were written by all agents.
	patches atomic.Int32
	reads   atomic.Int32 // of routes, by all agents
	// onRead, if set, is called after each of them.
	onRead atomic.Pointer[func()]
}

func newRouteWorld(t *testing.T) *routeWorld { return routeWorldOf(t, harness.GatewayCRDs(t)...) }

func routeWorldOf(t *testing.T, crds ...*unstructured.Unstructured) *routeWorld {
	api := harness.SharedAPIServer(t)
	api.InstallCRDs(t, crds...)
	t.Cleanup(func() { api.RemoveCRDs(t, crds...) })
	return &routeWorld{t: t, api: api, ns: api.Namespace(t), version: "v1"}
}

type counted struct {
	w    *routeWorld
	next http.RoundTripper
}

func (c counted) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := c.next.RoundTrip(r)
	if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "routes/") {
		c.w.reads.Add(1)
		if f := c.w.onRead.Load(); f != nil {
			(*f)()
		}
	}
	if err == nil && r.Method == http.MethodPatch && resp.StatusCode == http.StatusOK {
		c.w.patches.Add(1)
	}
	return resp, err
}

// agent starts what an agent has to do with routes, as soon as it knows the
// world.
func (w *routeWorld) agent(node string) *writer { return w.agentWith(node, "") }

// agentWith starts one to which the API server refuses a resource.
func (w *routeWorld) agentWith(node, refuses string) *writer {
	w.t.Helper()
	log := slog.New(slog.DiscardHandler)
	dir := nodecache.New(nodecache.Options{})
	store := kube.NewStore(dir, log)
	a := start(w.t, w.api, w.ns, node)
	a.net.refuses.Store(refuses)
	config := rest.CopyConfig(w.api.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return through{a.net, counted{w, next}} })
	source, err := kube.NewCluster(config, "test", store, log)
	if err != nil {
		w.t.Fatal(err)
	}
	statuses, err := report.NewStatuses(config, report.StatusOptions{
		Directory: dir, Routes: store.Routes(), Writer: a.Writer, Current: func() bool { return source.Status().RoutesCurrent },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{}, 2)
	go func() { _ = source.Run(ctx); done <- struct{}{} }()
	go func() {
		select {
		case <-source.Synced():
			statuses.Run(ctx)
		case <-ctx.Done():
		}
		done <- struct{}{}
	}()
	stop := a.stop
	a.stop = func() {
		stop()
		cancel()
		<-done
		<-done
		done <- struct{}{}
		done <- struct{}{}
		harness.CloseIdleConnections(config)
	}
	w.t.Cleanup(a.stop)
	return a
}

func (w *routeWorld) routes(kind string) dynamic.ResourceInterface {
	gvr := schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: w.version, Resource: strings.ToLower(kind) + "s"}
	return w.api.Dynamic(w.t).Resource(gvr).Namespace(w.ns)
}

// put writes the spec of a route.
func (w *routeWorld) put(kind, name, spec string) {
	w.t.Helper()
	o := &unstructured.Unstructured{}
	text := fmt.Sprintf("{apiVersion: gateway.networking.k8s.io/%s, kind: %s, metadata: {name: %s}, spec: %s}", w.version, kind, name, spec)
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.routes(kind).Apply(w.t.Context(), name, o, metav1.ApplyOptions{FieldManager: "test", Force: true}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *routeWorld) service(name string, ports ...int32) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprintf("p%d", p), Port: p})
	}
	return s
}

func (w *routeWorld) create(s *corev1.Service) *corev1.Service {
	w.t.Helper()
	s, err := w.api.Client.CoreV1().Services(w.ns).Create(w.t.Context(), s, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *routeWorld) get(kind, name string) *unstructured.Unstructured {
	w.t.Helper()
	o, err := w.routes(kind).Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return o
}

// conditions are those of a route, in its own order, as "controller parent
// type=status/reason@generation". Those of the agent have no controller.
func conditions(o *unstructured.Unstructured) []string {
	var out []string
	parents, _, _ := unstructured.NestedSlice(o.Object, "status", "parents")
	for _, p := range parents {
		p := p.(map[string]any)
		controller := ""
		if c := p["controllerName"].(string); c != "fingerpost.dev/agent" {
			controller = c + " "
		}
		cs, _ := p["conditions"].([]any)
		for _, c := range cs {
			c := c.(map[string]any)
			out = append(out, fmt.Sprintf("%s%s %s=%s/%s@%v", controller, p["parentRef"].(map[string]any)["name"], c["type"], c["status"], c["reason"], c["observedGeneration"]))
		}
	}
	return out
}

// says waits until the status of a route says just that.
func (w *routeWorld) says(kind, name string, want ...string) *unstructured.Unstructured {
	w.t.Helper()
	var o *unstructured.Unstructured
	harness.Eventually(w.t, soon, func() error {
		o = w.get(kind, name)
		if got := conditions(o); !slices.Equal(got, want) {
			return fmt.Errorf("%s %s says\n%s\nwant\n%s", kind, name, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		return nil
	})
	return o
}

// settled makes sure that nobody writes the route any more: after one that is
// written later it still has its version.
func (w *routeWorld) settled(kind, name string) {
	w.t.Helper()
	before := w.get(kind, name).GetResourceVersion()
	for i := range 2 {
		mark := fmt.Sprintf("mark-%d-%s", i, before)
		w.put("HTTPRoute", mark, toNobody)
		w.says("HTTPRoute", mark, "nobody Accepted=False/NoMatchingParent@1", "nobody ResolvedRefs=True/ResolvedRefs@1")
		if err := w.routes("HTTPRoute").Delete(w.t.Context(), mark, metav1.DeleteOptions{}); err != nil {
			w.t.Fatal(err)
		}
	}
	if after := w.get(kind, name).GetResourceVersion(); after != before {
		w.t.Errorf("%s %s was written again: %v", kind, name, conditions(w.get(kind, name)))
	}
}

const toNobody = `{parentRefs: [{group: "", kind: Service, name: nobody}], rules: [{}]}`

// routeEvents are those about routes, as "reason kind/name: message".
func (w *routeWorld) routeEvents() []string {
	w.t.Helper()
	l, err := w.api.Client.CoreV1().Events(w.ns).List(w.t.Context(), metav1.ListOptions{FieldSelector: "source=fingerpost"})
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, e := range l.Items {
		if e.Type != corev1.EventTypeWarning || e.InvolvedObject.APIVersion != "gateway.networking.k8s.io/"+w.version {
			w.t.Errorf("event %+v", e)
		}
		if !strings.HasPrefix(e.InvolvedObject.Name, "mark") {
			out = append(out, fmt.Sprintf("%s %s/%s: %s", e.Reason, e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Message))
		}
	}
	slices.Sort(out)
	return out
}

func TestStatusOfARouteFollowsTheWorld(t *testing.T) {
	w := newRouteWorld(t)
	w.agent("n1").is("on: writer")
	spec := func(backend string) string {
		return fmt.Sprintf(`{parentRefs: [{name: gw}, {group: "", kind: Service, name: web}], rules: [{backendRefs: [{name: %s, port: 80}]}]}`, backend)
	}
	// The route comes first, its Services one by one.
	w.put("HTTPRoute", "r", spec("api"))
	first := w.says("HTTPRoute", "r", "web Accepted=False/NoMatchingParent@1", "web ResolvedRefs=False/BackendNotFound@1")
	refs, _, _ := unstructured.NestedSlice(first.Object, "spec", "parentRefs")
	entries, _, _ := unstructured.NestedSlice(first.Object, "status", "parents")
	if got, want := fmt.Sprint(entries[0].(map[string]any)["parentRef"]), fmt.Sprint(refs[1]); got != want {
		t.Errorf("the status is of the parent %s, not %s as in the spec", got, want)
	}
	web := w.create(w.service("web", 80, 81))
	w.says("HTTPRoute", "r", "web Accepted=True/Accepted@1", "web ResolvedRefs=False/BackendNotFound@1")
	w.create(w.service("api", 80))
	o := w.says("HTTPRoute", "r", "web Accepted=True/Accepted@1", "web ResolvedRefs=True/ResolvedRefs@1")
	w.settled("HTTPRoute", "r")
	since := transitions(o)

	// Another generation that changes nothing keeps the times.
	harness.Eventually(t, soon, func() error { // times are whole seconds
		for _, at := range since {
			if s, err := time.Parse(time.RFC3339, at); err != nil || time.Since(s) < 2*time.Second {
				return fmt.Errorf("transition at %s, %v", at, err)
			}
		}
		return nil
	})
	w.put("HTTPRoute", "r", `{parentRefs: [{group: "", kind: Service, name: web}], rules: [{name: x, backendRefs: [{name: api, port: 80}]}]}`)
	o = w.says("HTTPRoute", "r", "web Accepted=True/Accepted@2", "web ResolvedRefs=True/ResolvedRefs@2")
	if now := transitions(o); !slices.Equal(now, since) {
		t.Errorf("conditions that hold since %v are of %v", since, now)
	}

	// The port goes, a GRPCRoute takes it, and gives it back.
	web.Spec.Ports = web.Spec.Ports[1:]
	if _, err := w.api.Client.CoreV1().Services(w.ns).Update(t.Context(), web, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.put("HTTPRoute", "r", `{parentRefs: [{group: "", kind: Service, name: web, port: 80}], rules: [{backendRefs: [{name: web, port: 80}]}]}`)
	o = w.says("HTTPRoute", "r", "web Accepted=False/NoMatchingParent@3", "web ResolvedRefs=False/BackendNotFound@3")
	if now := transitions(o); slices.Contains(now, since[0]) {
		t.Errorf("conditions that hold no more since %v are of %v", since, now)
	}
	w.put("HTTPRoute", "r", spec("api"))
	w.says("HTTPRoute", "r", "web Accepted=True/Accepted@4", "web ResolvedRefs=True/ResolvedRefs@4")
	w.put("GRPCRoute", "g", spec("web"))
	w.says("GRPCRoute", "g", "web Accepted=True/Accepted@1", "web ResolvedRefs=False/BackendNotFound@1")
	w.says("HTTPRoute", "r", "web Accepted=False/Conflicted@4", "web ResolvedRefs=True/ResolvedRefs@4")
	if err := w.routes("GRPCRoute").Delete(t.Context(), "g", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.says("HTTPRoute", "r", "web Accepted=True/Accepted@4", "web ResolvedRefs=True/ResolvedRefs@4")

	// A route that leaves the Service leaves nothing behind.
	w.put("HTTPRoute", "r", `{parentRefs: [{name: gw}], rules: [{}]}`)
	w.says("HTTPRoute", "r")
	w.settled("HTTPRoute", "r")

	harness.Eventually(t, soon, func() error {
		ns := w.ns
		want := []string{
			"RefsNotResolved GRPCRoute/g: BackendNotFound: rule 0, backend 0: Service " + ns + "/web has no TCP port 80 (it has 81 p81): correct backendRefs, or the Service. Their share of the calls fails",
			"RefsNotResolved HTTPRoute/r: BackendNotFound: rule 0, backend 0: Service " + ns + "/web has no TCP port 80 (it has 81 p81): correct backendRefs, or the Service. Their share of the calls fails",
			"RefsNotResolved HTTPRoute/r: BackendNotFound: rule 0, backend 0: there is no Service " + ns + "/api: create it, or correct backendRefs. Their share of the calls fails",
			"RouteNotAccepted HTTPRoute/r: under Service " + ns + "/web 80: NoMatchingParent: Service " + ns + "/web has no TCP port 80 (it has 81 p81): correct parentRefs, or the Service",
			"RouteNotAccepted HTTPRoute/r: under Service " + ns + "/web: Conflicted: GRPCRoute " + ns + "/g has port 81 of Service " + ns + "/web, and a GRPCRoute goes before an HTTPRoute: attach the routes to different ports, or put all calls into GRPCRoutes",
			"RouteNotAccepted HTTPRoute/r: under Service " + ns + "/web: NoMatchingParent: there is no Service " + ns + "/web: create it, or correct parentRefs",
		}
		if got := w.routeEvents(); !slices.Equal(got, want) {
			return fmt.Errorf("events\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		return nil
	})
}

// transitions are the times of the conditions of the agent.
func transitions(o *unstructured.Unstructured) []string {
	var out []string
	parents, _, _ := unstructured.NestedSlice(o.Object, "status", "parents")
	for _, p := range parents {
		for _, c := range p.(map[string]any)["conditions"].([]any) {
			out = append(out, c.(map[string]any)["lastTransitionTime"].(string))
		}
	}
	return out
}

// What other controllers say stays, also what they write in the same moment;
// what somebody makes of the agent's own words is put right.
func TestWhatOthersSayStays(t *testing.T) {
	w := newRouteWorld(t)
	w.agent("n1").is("on: writer")
	w.create(w.service("web", 80))
	w.put("HTTPRoute", "r", `{parentRefs: [{name: gw}], rules: [{}]}`)
	at := "2026-01-02T03:04:05Z"
	other := func(controller, parent string, more map[string]any) map[string]any {
		return map[string]any{"controllerName": controller, "parentRef": reference(parent), "conditions": []any{
			map[string]any{"type": "Accepted", "status": "Unknown", "reason": "Pending", "message": "m", "lastTransitionTime": at, "observedGeneration": int64(1)},
			more,
		}}
	}
	special := map[string]any{"type": "example.org/Special", "status": "True", "reason": "R", "message": "m", "lastTransitionTime": at, "observedGeneration": int64(9)}
	set := func(entries ...any) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			o := w.get("HTTPRoute", "r")
			if err := unstructured.SetNestedSlice(o.Object, entries, "status", "parents"); err != nil {
				t.Fatal(err)
			}
			_, err := w.routes("HTTPRoute").UpdateStatus(t.Context(), o, metav1.UpdateOptions{})
			return err
		})
	}
	foreign := other("example.org/gateway", "gw", special)
	// Besides, what an earlier agent left, of a Gateway and of a Service.
	set(foreign, other("fingerpost.dev/agent", "gw", special), other("fingerpost.dev/agent", "web", special))
	kept := []string{"example.org/gateway gw Accepted=Unknown/Pending@1", "example.org/gateway gw example.org/Special=True/R@9"}
	w.says("HTTPRoute", "r", kept...)

	w.put("HTTPRoute", "r", `{parentRefs: [{name: gw}, {group: "", kind: Service, name: web}], rules: [{}]}`)
	own := []string{"web Accepted=True/Accepted@2", "web ResolvedRefs=True/ResolvedRefs@2"}
	w.says("HTTPRoute", "r", append(slices.Clone(kept), own...)...)

	// The other one changes its mind just when the agent has read the route. A
	// condition that somebody added to the agent's own entry stays as well.
	spoilt, later := other("fingerpost.dev/agent", "web", special), other("example.org/gateway", "gw", special)
	later["conditions"].([]any)[0].(map[string]any)["status"] = "True"
	var once atomic.Bool
	changes := func() {
		if !once.Swap(true) {
			set(spoilt, later)
		}
	}
	w.onRead.Store(&changes)
	set(spoilt, foreign)
	o := w.says("HTTPRoute", "r", "example.org/gateway gw Accepted=True/Pending@1", kept[1], own[0], "web example.org/Special=True/R@9", own[1])
	parents, _, _ := unstructured.NestedSlice(o.Object, "status", "parents")
	if got, want := fmt.Sprint(parents[0]), fmt.Sprint(later); got != want {
		t.Errorf("the other's entry is\n%s\nwas\n%s", got, want)
	}
	w.settled("HTTPRoute", "r")
}

func reference(name string) map[string]any {
	if name == "gw" {
		return map[string]any{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "gw"}
	}
	return map[string]any{"group": "", "kind": "Service", "name": name}
}

// One of two agents writes; its successor finds all as it should be.
func TestElectionRewritesNoStatus(t *testing.T) {
	w := newRouteWorld(t)
	a := w.agent("n1").is("on: writer")
	b := w.agent("n2").is("on: follower of n1-")
	w.create(w.service("web", 80))
	for _, name := range []string{"r", "s", "t"} {
		w.put("HTTPRoute", name, `{parentRefs: [{group: "", kind: Service, name: web}], rules: [{}]}`)
	}
	own := []string{"web Accepted=True/Accepted@1", "web ResolvedRefs=True/ResolvedRefs@1"}
	versions := map[string]string{}
	for _, name := range []string{"r", "s", "t"} {
		versions[name] = w.says("HTTPRoute", name, own...).GetResourceVersion()
	}
	if n := w.patches.Load(); n != 3 {
		t.Errorf("%d statuses written, want 3", n)
	}
	w.settled("HTTPRoute", "r")
	a.stop()
	b.is("on: writer")
	// What comes now is written by the successor, which has looked at all.
	w.settled("HTTPRoute", "r")
	for name, before := range versions {
		if after := w.get("HTTPRoute", name).GetResourceVersion(); after != before {
			t.Errorf("%s was written again", name)
		}
	}
	if n, m := w.reads.Load(), w.patches.Load(); n >= 3+4+3 || m != 3+4 { // the marks are four
		t.Errorf("%d statuses read and %d written, want 7", n, m)
	}
}

// Without the right it is said, and what was missed is written once it is there.
func TestStatusesThatMayNotBeWrittenAreNamed(t *testing.T) {
	w := newRouteWorld(t)
	a := w.agent("n1").is("on: writer")
	w.create(w.service("web", 80))
	a.net.refuses.Store("httproutes/r/status")
	w.put("HTTPRoute", "r", `{parentRefs: [{group: "", kind: Service, name: web}], rules: [{}]}`)
	a.is("off: statuses of routes cannot be written: httproutes/r/status is forbidden")
	w.put("HTTPRoute", "s", toNobody) // has to wait for nobody
	w.says("HTTPRoute", "s", "nobody Accepted=False/NoMatchingParent@1", "nobody ResolvedRefs=True/ResolvedRefs@1")
	a.net.refuses.Store("")
	w.says("HTTPRoute", "r", "web Accepted=True/Accepted@1", "web ResolvedRefs=True/ResolvedRefs@1")
	a.is("on: writer")
	a.stop()
	if n := strings.Count(a.log.String(), "level=WARN"); n != 1 {
		t.Errorf("the log has %d warnings, want 1:\n%s", n, a.log)
	}
}

// A status is written in the version in which its route is read.
func TestStatusInAnOlderVersion(t *testing.T) {
	crds := harness.GatewayCRDs(t)
	for _, crd := range crds {
		versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
		old := versions[0].(map[string]any) // their form is one
		old["name"], old["storage"], old["served"] = "v1beta1", true, true
		if err := unstructured.SetNestedSlice(crd.Object, []any{old}, "spec", "versions"); err != nil {
			t.Fatal(err)
		}
	}
	w := routeWorldOf(t, crds...)
	w.version = "v1beta1"
	w.agent("n1").is("on: writer")
	for _, kind := range []string{"HTTPRoute", "GRPCRoute"} {
		w.put(kind, "r", toNobody)
		w.says(kind, "r", "nobody Accepted=False/NoMatchingParent@1", "nobody ResolvedRefs=True/ResolvedRefs@1")
	}
	harness.Eventually(t, soon, func() error {
		if got := w.routeEvents(); len(got) != 2 {
			return fmt.Errorf("events %q", got)
		}
		return nil
	})
}

// As long as Services may not be read nothing is said of routes to them, nor as
// long as routes may not that could have what these want.
func TestNothingIsSaidOfRoutesInTheDark(t *testing.T) {
	w := newRouteWorld(t)
	const route = `{parentRefs: [{group: "", kind: Service, name: web}], rules: [{}]}`
	w.create(w.service("web", 80))
	w.put("HTTPRoute", "r", route)
	w.put("GRPCRoute", "r", route)
	for _, refuses := range []string{"v1/services", "v1/grpcroutes"} {
		a := w.agentWith("n1", refuses)
		a.is("on: writer")
		harness.Eventually(t, soon, func() error {
			if n := a.net.refused.Load(); n < 3 {
				return fmt.Errorf("%s were refused %d times", refuses, n)
			}
			return nil
		})
		if n := w.patches.Load(); n != 0 {
			t.Errorf("%d statuses written without knowing %s", n, refuses)
		}
		a.stop()
	}
	w.agent("n2").is("on: writer")
	w.says("GRPCRoute", "r", "web Accepted=True/Accepted@1", "web ResolvedRefs=True/ResolvedRefs@1")
	w.says("HTTPRoute", "r", "web Accepted=False/Conflicted@1", "web ResolvedRefs=True/ResolvedRefs@1")
	if n, got := w.patches.Load(), w.routeEvents(); n != 2 || len(got) > 1 {
		t.Errorf("%d statuses written, want 2; events %q", n, got)
	}
}
