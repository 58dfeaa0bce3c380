package kube_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

// routes says what the directory holds, sorted: kind, name, generation and how
// the first backend is referred to.
func routes(d *nodecache.Directory) []string {
	var out []string
	for _, r := range d.Routes() {
		text := fmt.Sprintf("%s %s %d", r.Kind, r.Key(), r.Generation)
		for _, rule := range r.Rules {
			for _, b := range rule.Backends {
				text += fmt.Sprintf(" to %s %t%s", b.Service, b.Granted, b.Refused)
			}
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return out
}

func (x *clusterFixture) waitRoutes(t *testing.T, state string, want ...string) {
	t.Helper()
	eventually(t, func() string {
		got, st := routes(x.dir), x.src.Status()
		if !slices.Equal(got, want) || st.Routes != state {
			return fmt.Sprintf("routes %q, state %q; want %q, %q; logged %q", got, st.Routes, want, state, x.log.get())
		}
		return ""
	})
}

// world writes objects of the Gateway API in one version.
type gatewayWorld struct {
	t      *testing.T
	client dynamic.Interface
	ns     string
}

func (w *gatewayWorld) put(kind, version, name, spec string) {
	w.t.Helper()
	o := &unstructured.Unstructured{}
	text := fmt.Sprintf(`{"apiVersion":"gateway.networking.k8s.io/%s","kind":%q,"metadata":{"namespace":%q,"name":%q},"spec":%s}`, version, kind, w.ns, name, spec)
	if err := json.Unmarshal([]byte(text), &o.Object); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.of(kind, version).Apply(w.t.Context(), name, o, metav1.ApplyOptions{FieldManager: "test", Force: true}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *gatewayWorld) remove(kind, version, name string) {
	w.t.Helper()
	if err := w.of(kind, version).Delete(w.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *gatewayWorld) of(kind, version string) dynamic.ResourceInterface {
	return w.client.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: version, Resource: strings.ToLower(kind) + "s"}).Namespace(w.ns)
}

const (
	toWeb   = `{"parentRefs":[{"group":"","kind":"Service","name":"web"}],"rules":[{"backendRefs":[{"name":"web","port":80}]}]}`
	toOther = `{"parentRefs":[{"name":"gw"}],"rules":[{"backendRefs":[{"name":"web","namespace":"kube-system","port":80}]}]}`
)

// served leaves a CRD the versions, of which the first is stored. One that the
// CRD has not is made of its v1.
func servedIn(crd *unstructured.Unstructured, names ...string) *unstructured.Unstructured {
	crd = crd.DeepCopy()
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	var left []any
	for i, name := range names {
		v := versions[0].(map[string]any)
		for _, have := range versions {
			if have.(map[string]any)["name"] == name {
				v = have.(map[string]any)
			}
		}
		v = (&unstructured.Unstructured{Object: v}).DeepCopy().Object
		v["name"], v["storage"], v["served"] = name, i == 0, true
		left = append(left, v)
	}
	_ = unstructured.SetNestedSlice(crd.Object, left, "spec", "versions")
	unstructured.RemoveNestedField(crd.Object, "status")
	return crd
}

// The CRDs are absent at start, come, go, and come again in older versions;
// the rest goes on.
func TestRoutesFollowTheirCRDs(t *testing.T) {
	api := harness.StartAPIServer(t)
	crds := harness.GatewayCRDs(t)
	x := newClusterAt(t, api)
	x.src.DiscoverEvery(50 * time.Millisecond)
	run(t, x.src)
	waitSynced(t, x.src)
	const none = "off: the cluster has no HTTPRoute, no GRPCRoute, no ReferenceGrant"
	x.waitRoutes(t, none)

	w := &gatewayWorld{t: t, client: api.Dynamic(t), ns: api.Namespace(t)}
	route := func(kind, name string, generation int, backend string) string {
		return fmt.Sprintf("%s %s/%s %d to %s", kind, w.ns, name, generation, backend)
	}
	web, other := w.ns+"/web true", "kube-system/web falseRefNotPermitted"
	api.InstallCRDs(t, crds...)
	w.put("HTTPRoute", "v1", "a", toWeb)
	w.put("GRPCRoute", "v1", "a", toWeb)
	w.put("HTTPRoute", "v1", "b", toOther)
	x.waitRoutes(t, "on", route("GRPCRoute", "a", 1, web), route("HTTPRoute", "a", 1, web), route("HTTPRoute", "b", 1, other))

	w.put("HTTPRoute", "v1", "a", toOther)
	x.waitRoutes(t, "on", route("GRPCRoute", "a", 1, web), route("HTTPRoute", "a", 2, other), route("HTTPRoute", "b", 1, other))
	system := &gatewayWorld{t: t, client: w.client, ns: "kube-system"}
	grant := fmt.Sprintf(`{"from":[{"group":"gateway.networking.k8s.io","kind":"HTTPRoute","namespace":%q}],"to":[{"group":"","kind":"Service"}]}`, w.ns)
	system.put("ReferenceGrant", "v1", "g", grant)
	granted := "kube-system/web true"
	x.waitRoutes(t, "on", route("GRPCRoute", "a", 1, web), route("HTTPRoute", "a", 2, granted), route("HTTPRoute", "b", 1, granted))
	system.remove("ReferenceGrant", "v1", "g")
	w.remove("HTTPRoute", "v1", "b")
	x.waitRoutes(t, "on", route("GRPCRoute", "a", 1, web), route("HTTPRoute", "a", 2, other))

	// One kind goes, and its routes with it.
	api.RemoveCRDs(t, crds[0])
	x.waitRoutes(t, "on: the cluster has no HTTPRoute", route("GRPCRoute", "a", 1, web))
	api.RemoveCRDs(t, crds[1:]...)
	x.waitRoutes(t, none)

	// They come back as a cluster of earlier days had them.
	old := []*unstructured.Unstructured{servedIn(crds[0], "v1beta1"), servedIn(crds[1], "v1alpha2"), servedIn(crds[2], "v1beta1")}
	api.InstallCRDs(t, old...)
	w.put("HTTPRoute", "v1beta1", "a", toOther)
	w.put("GRPCRoute", "v1alpha2", "a", toWeb)
	system.put("ReferenceGrant", "v1beta1", "g", grant)
	x.waitRoutes(t, "on: HTTPRoute in the older version v1beta1; GRPCRoute in the older version v1alpha2; ReferenceGrant in the older version v1beta1",
		route("GRPCRoute", "a", 1, web), route("HTTPRoute", "a", 1, granted))

	// They are served in v1 as well, which is read from then on.
	for i, version := range []string{"v1beta1", "v1alpha2", "v1beta1"} {
		api.InstallCRDs(t, servedIn(crds[i], version, "v1"))
	}
	x.waitRoutes(t, "on", route("GRPCRoute", "a", 1, web), route("HTTPRoute", "a", 1, granted))
	w.put("GRPCRoute", "v1", "b", toWeb)
	x.waitRoutes(t, "on", route("GRPCRoute", "a", 1, web), route("GRPCRoute", "b", 1, web), route("HTTPRoute", "a", 1, granted))
	api.RemoveCRDs(t, crds...)
	x.waitRoutes(t, none)

	// A version of which the form is not known.
	unknown := servedIn(crds[0], "v7")
	api.InstallCRDs(t, unknown)
	x.waitRoutes(t, "off: HTTPRoute only in version v7; the cluster has no GRPCRoute, no ReferenceGrant")
	api.RemoveCRDs(t, unknown)

	if st := x.src.Status(); st.Error != "" || !st.Synced || st.StaleSeconds != 0 {
		t.Errorf("status %+v", st)
	}
}

// Routes that are there at the start are part of what synced says, though their
// list comes last.
func TestRoutesAreThereWhenTheSourceHasSynced(t *testing.T) {
	s := newAPIServer(t)
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	applied := make(chan struct{})
	mux := http.NewServeMux()
	mux.Handle("/", s)
	mux.HandleFunc("/apis/gateway.networking.k8s.io", text(gatewayGroup))
	mux.HandleFunc("/apis/gateway.networking.k8s.io/v1", text(gatewayResources))
	mux.HandleFunc("/apis/gateway.networking.k8s.io/v1/httproutes", func(w http.ResponseWriter, r *http.Request) {
		switch q := r.URL.Query(); {
		case q.Get("watch") == "":
			select {
			case <-applied:
				text(gatewayRoutes)(w, r)
			case <-r.Context().Done():
			}
		case q.Get("sendInitialEvents") != "":
			says(422, metav1.StatusReasonInvalid)(w, r)
		default:
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	})
	front := httptest.NewServer(mux)
	t.Cleanup(front.Close)
	x := newCluster(t, front.URL)
	run(t, x.src)
	x.wait(t, "prod/a=192.0.2.1 serving")
	close(applied)
	waitSynced(t, x.src)
	if got := routes(x.dir); !slices.Equal(got, []string{"HTTPRoute a/b 0"}) {
		t.Errorf("synced with %q", got)
	}
}

func newClusterAt(t *testing.T, api *harness.APIServer) *clusterFixture {
	t.Helper()
	x := &clusterFixture{dir: nodecache.New(nodecache.Options{}), log: &lines{}}
	log := slog.New(x.log)
	x.store = kube.NewStore(x.dir, log)
	src, err := kube.NewCluster(api.Config, "v1", x.store, log)
	if err != nil {
		t.Fatal(err)
	}
	x.src = src
	return x
}

const (
	gatewayGroup     = `{"kind":"APIGroup","apiVersion":"v1","name":"gateway.networking.k8s.io","versions":[{"groupVersion":"gateway.networking.k8s.io/v1","version":"v1"}]}`
	gatewayResources = `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"gateway.networking.k8s.io/v1","resources":[{"name":"httproutes","kind":"HTTPRoute"},{"name":"httproutes/status","kind":"HTTPRoute"}]}`
	gatewayRoutes    = `{"kind":"HTTPRouteList","apiVersion":"gateway.networking.k8s.io/v1","metadata":{"resourceVersion":"5"},"items":[{"metadata":{"namespace":"a","name":"b","uid":"1"},"spec":{"rules":[{}]}}]}`
)

// says answers with a Status.
func says(code int, reason metav1.StatusReason) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: int32(code), Reason: reason, Message: "it is " + string(reason),
		})
	}
}

func text(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(body))
	}
}

// Whatever is wrong with the Gateway API of a cluster, its pods are served.
func TestErringGatewayAPIHoldsUpNothing(t *testing.T) {
	hang := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for _, c := range []struct {
		name              string
		discovery, routes http.HandlerFunc
		state             string
	}{
		{"discovery is forbidden", says(403, metav1.StatusReasonForbidden), nil, "off: it is Forbidden"},
		{"discovery fails", says(500, metav1.StatusReasonInternalError), nil, "off: it is InternalError"},
		{"discovery hangs", hang, nil, "off: the cluster was not asked yet"},
		{"discovery is garbage", text("<html>"), nil, "off: "},
		{"lists are forbidden", text(gatewayGroup), says(403, metav1.StatusReasonForbidden), "on: the cluster has no GRPCRoute, no ReferenceGrant; httproutes: not synced"},
		{"lists fail", text(gatewayGroup), says(500, metav1.StatusReasonInternalError), "on: the cluster has no GRPCRoute, no ReferenceGrant; httproutes: not synced"},
		{"lists hang", text(gatewayGroup), hang, "on: the cluster has no GRPCRoute, no ReferenceGrant; httproutes: not synced"},
		{"lists are garbage", text(gatewayGroup), text(`{"kind":"HTTPRouteList","apiVersion":"gateway.networking.k8s.io/v1","items":3}`), "on: the cluster has no GRPCRoute, no ReferenceGrant; httproutes: not synced"},
		{"lists are not there", text(gatewayGroup), says(404, metav1.StatusReasonNotFound), "on: the cluster has no GRPCRoute, no ReferenceGrant; httproutes: not synced"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newAPIServer(t)
			s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
			mux := http.NewServeMux()
			mux.Handle("/", s)
			mux.HandleFunc("/apis/gateway.networking.k8s.io", c.discovery)
			mux.HandleFunc("/apis/gateway.networking.k8s.io/v1", text(gatewayResources))
			if c.routes != nil {
				mux.HandleFunc("/apis/gateway.networking.k8s.io/v1/httproutes", c.routes)
			}
			front := httptest.NewServer(mux)
			t.Cleanup(front.Close)
			x := newCluster(t, front.URL)
			run(t, x.src)
			waitSynced(t, x.src)
			x.wait(t, "prod/a=192.0.2.1 serving")
			eventually(t, func() string {
				if st := x.src.Status(); !strings.HasPrefix(st.Routes, c.state) || st.Error != "" {
					return fmt.Sprintf("state %q, error %q", st.Routes, st.Error)
				}
				return ""
			})
		})
	}
}

// An object that cannot be read is left out of the list that it stands in.
func TestListWithAnUnreadableRouteIsAList(t *testing.T) {
	const list = `{"kind":"HTTPRouteList","apiVersion":"gateway.networking.k8s.io/v1","metadata":{"resourceVersion":"5"},"items":[
		{"metadata":{"namespace":"a","name":"b","uid":"1"},"spec":{"rules":7}},
		{"metadata":{"namespace":"a","name":"c","uid":"2"},"spec":{"rules":[{}]}}]}`
	for text, want := range map[string]string{
		list: "2 1 <nil>",
		`{"kind":"HTTPRoute","apiVersion":"gateway.networking.k8s.io/v1","metadata":{"name":"b"},"spec":{"rules":7}}`: "1 1 <nil>",
		`{"kind":"Status","apiVersion":"v1"}`: "0 0 <nil>",
		`{`:                                   "0 0 <nil>",
	} {
		objects, unreadable, err := kube.DecodeGateway([]byte(text))
		if got := fmt.Sprintln(objects, unreadable, err); got != want+"\n" {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

func (x *fileFixture) waitRoutes(t *testing.T, want ...string) {
	t.Helper()
	eventually(t, func() string {
		if got := routes(x.dir); !slices.Equal(got, want) {
			return fmt.Sprintf("routes %q, want %q; %+v", got, want, x.src.Status())
		}
		return ""
	})
}

func TestFileSourceReadsRoutesOfEveryVersion(t *testing.T) {
	object := func(kind, version, meta, spec string) string {
		return fmt.Sprintf("---\n{apiVersion: gateway.networking.k8s.io/%s, kind: %s, metadata: {%s}, spec: %s}\n", version, kind, meta, spec)
	}
	const grant = `{"from":[{"group":"gateway.networking.k8s.io","kind":"HTTPRoute","namespace":"prod"}],"to":[{"group":"","kind":"Service"}]}`
	http := object("HTTPRoute", "v1beta1", "name: a, namespace: prod, uid: u1, generation: 2", toOther)
	grpc := object("GRPCRoute", "v1alpha2", "name: a", toWeb)
	grants := object("ReferenceGrant", "v1beta1", "name: g, namespace: kube-system", grant)
	path := filepath.Join(t.TempDir(), "world.yaml")
	write(t, path, http+grpc+grants)
	x := newFile(path)
	run(t, x.src)
	waitSynced(t, x.src)
	const granted, refused = "HTTPRoute prod/a 2 to kube-system/web true", "HTTPRoute prod/a 2 to kube-system/web falseRefNotPermitted"
	const web = "GRPCRoute default/a 0 to default/web true"
	x.waitRoutes(t, web, granted)
	if st := x.src.Status(); st.Routes != "on" || len(st.Ignored) > 0 {
		t.Errorf("status %+v", st)
	}
	replace(t, path, http+grpc)
	x.waitRoutes(t, web, refused)
	// An edit that was taken back has an earlier generation.
	replace(t, path, strings.Replace(http, "generation: 2", "generation: 1", 1)+grants)
	x.waitRoutes(t, "HTTPRoute prod/a 1 to kube-system/web true")
	// What has another form is an unknown kind; what is broken is a broken edit.
	for text, want := range map[string]string{
		object("HTTPRoute", "v1", "namespace: b", `{}`):                                       "HTTPRoute has no metadata.name",
		http + object("GRPCRoute", "v1", "name: b, uid: u1", `{}`):                            "GRPCRoute default/b has the metadata.uid of HTTPRoute prod/a",
		object("HTTPRoute", "v1", `name: b, creationTimestamp: "yesterday"`, `{rules: [{}]}`): "is not a HTTPRoute",
	} {
		replace(t, path, text)
		eventually(t, func() string {
			if st := x.src.Status(); !strings.Contains(st.Error, want) {
				return fmt.Sprintf("error %q, want %q", st.Error, want)
			}
			return ""
		})
		x.waitRoutes(t, "HTTPRoute prod/a 1 to kube-system/web true")
	}
	// One that cannot be read takes nothing with it, and of a route the last state
	// that could be read stays.
	odd := object("HTTPRoute", "v1", "name: b", `{rules: 7}`) + object("HTTPRoute", "v1", "name: a, namespace: prod, uid: u1, generation: 3", `{rules: 7}`)
	replace(t, path, odd+grpc+grants)
	x.waitRoutes(t, web, "HTTPRoute prod/a 1 to kube-system/web true")
	if st := x.src.Status(); st.Error != "" {
		t.Errorf("status %+v", st)
	}
	replace(t, path, object("HTTPRoute", "v1alpha1", "name: c", `{rules: 7}`))
	x.waitRoutes(t)
	if st := x.src.Status(); fmt.Sprint(st.Ignored) != "map[HTTPRoute.gateway.networking.k8s.io:1]" {
		t.Errorf("status %+v", st)
	}
}

// An API server that comes up says at no moment that it has no routes, and one
// that is away says nothing.
func TestRestartOfTheAPIServerTakesNoRouteAway(t *testing.T) {
	api := harness.StartAPIServer(t)
	api.InstallCRDs(t, harness.GatewayCRDs(t)...)
	w := &gatewayWorld{t: t, client: api.Dynamic(t), ns: api.Namespace(t)}
	w.put("HTTPRoute", "v1", "a", toWeb)
	x := newClusterAt(t, api)
	x.src.DiscoverEvery(5 * time.Millisecond)
	run(t, x.src)
	waitSynced(t, x.src)
	web := nodecache.Name{Namespace: w.ns, Name: "web"}
	api.Stop()
	eventually(t, func() string {
		if st := x.src.Status(); st.Error == "" {
			return "the source has not noticed"
		}
		return ""
	})
	api.Restart(t)
	eventually(t, func() string { return x.src.Status().Error })
	w.put("GRPCRoute", "v1", "b", toWeb)
	x.waitRoutes(t, "on", fmt.Sprintf("GRPCRoute %s/b 1 to %s true", w.ns, web), fmt.Sprintf("HTTPRoute %s/a 1 to %s true", w.ns, web))
	for _, line := range x.log.get() {
		if strings.Contains(line, "routes of the Gateway API") && !strings.Contains(line, "state=on") {
			t.Errorf("logged %q", line)
		}
	}
}

// What a cluster has not any more must be said twice before it counts.
func TestKindThatIsMissingOnceIsKept(t *testing.T) {
	s := newAPIServer(t)
	var absent, lists, asked atomic.Int32
	mux := http.NewServeMux()
	mux.Handle("/", s)
	mux.HandleFunc("/apis/gateway.networking.k8s.io", func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if absent.Add(-1) >= 0 {
			says(404, metav1.StatusReasonNotFound)(w, r)
		} else {
			text(gatewayGroup)(w, r)
		}
	})
	mux.HandleFunc("/apis/gateway.networking.k8s.io/v1", text(gatewayResources))
	mux.HandleFunc("/apis/gateway.networking.k8s.io/v1/httproutes", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			lists.Add(1)
			text(gatewayRoutes)(w, r)
		} else if r.URL.Query().Get("sendInitialEvents") != "" {
			says(422, metav1.StatusReasonInvalid)(w, r)
		} else {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	})
	front := httptest.NewServer(mux)
	t.Cleanup(front.Close)
	x := newCluster(t, front.URL)
	x.src.DiscoverEvery(5 * time.Millisecond)
	run(t, x.src)
	waitSynced(t, x.src)
	const on, route = "on: the cluster has no GRPCRoute, no ReferenceGrant", "HTTPRoute a/b 0"
	x.waitRoutes(t, on, route)
	for range 5 {
		before := asked.Load()
		absent.Store(1)
		eventually(t, func() string {
			if asked.Load() < before+3 {
				return "not asked"
			}
			return ""
		})
		x.waitRoutes(t, on, route)
	}
	if n := lists.Load(); n != 1 {
		t.Errorf("listed %d times", n)
	}
	absent.Store(1 << 30)
	x.waitRoutes(t, "off: the cluster has no HTTPRoute, no GRPCRoute, no ReferenceGrant")
	absent.Store(0)
	x.waitRoutes(t, on, route)
}
