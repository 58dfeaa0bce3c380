package kube_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

// apiServer answers lists and watches of pods and namespaces in JSON, as a
// kube-apiserver does, and can be told to misbehave.
type apiServer struct {
	*httptest.Server

	mu         sync.Mutex
	version    int
	objects    map[string]map[string]any // by resource, by namespace/name
	watches    map[chan string]string    // resource of each
	history    []past
	noBookmark bool           // hides the end of a streamed list
	noStream   bool           // knows no streamed lists
	down       bool           // answers 503
	compacted  int            // watches from before this version are refused
	asked      map[string]int // requests by "resource list|stream|watch"
	from       []string       // resource and version of each watch
	agents     map[string]bool
}

const tooOld = `{"type":"ERROR","object":{"apiVersion":"v1","kind":"Status","status":"Failure","code":410,"reason":"Expired","message":"too old"}}`

// past is an event that a watch from an earlier version hears of.
type past struct {
	version        int
	resource, text string
}

func newAPIServer(t *testing.T) *apiServer {
	s := &apiServer{
		version: 1, objects: map[string]map[string]any{"pods": {}, "namespaces": {}, "services": {}, "endpointslices": {}},
		watches: map[chan string]string{}, asked: map[string]int{}, agents: map[string]bool{},
	}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.cut()
		s.Close()
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	})
	return s
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := path.Base(r.URL.Path)
	q := r.URL.Query()
	stream := q.Get("sendInitialEvents") == "true"
	kind := "list"
	switch {
	case q.Get("fieldSelector") != "":
		kind = "selection" // which has nothing in it
	case stream:
		kind = "stream"
	case q.Get("watch") != "":
		kind = "watch"
	}
	s.mu.Lock()
	s.asked[resource+" "+kind]++
	s.agents[r.UserAgent()] = true
	held, known := s.objects[resource]
	down := s.down
	var status *metav1.Status
	switch {
	case !known:
		status = &metav1.Status{Code: 404, Reason: metav1.StatusReasonNotFound, Message: "no such resource"}
	case down:
		status = &metav1.Status{Code: 503, Reason: metav1.StatusReasonServiceUnavailable, Message: "the server is down"}
	case stream && s.noStream:
		status = &metav1.Status{Code: 422, Reason: metav1.StatusReasonInvalid, Message: "sendInitialEvents is forbidden"}
	}
	w.Header().Set("Content-Type", "application/json")
	if status != nil {
		s.mu.Unlock()
		status.TypeMeta, status.Status = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, "Failure"
		w.WriteHeader(int(status.Code))
		_ = json.NewEncoder(w).Encode(status)
		return
	}
	if kind == "list" {
		list := map[string]any{
			"apiVersion": versionOf(resource), "kind": kinds[resource] + "List",
			"metadata": map[string]string{"resourceVersion": strconv.Itoa(s.version)}, "items": values(held),
		}
		text, _ := json.Marshal(list)
		s.mu.Unlock()
		_, _ = w.Write(text)
		return
	}
	events := make(chan string, 10000)
	if stream {
		for _, o := range values(held) {
			if kind == "stream" {
				events <- event("ADDED", o)
			}
		}
		if !s.noBookmark {
			events <- fmt.Sprintf(`{"type":"BOOKMARK","object":{"apiVersion":%q,"kind":%q,"metadata":{"resourceVersion":"%d","annotations":{"k8s.io/initial-events-end":"true"}}}}`,
				versionOf(resource), kinds[resource], s.version)
		}
	}
	if from, err := strconv.Atoi(q.Get("resourceVersion")); kind == "watch" && err == nil {
		s.from = append(s.from, resource+" "+q.Get("resourceVersion"))
		if from < s.compacted {
			events <- tooOld
		}
		for _, p := range s.history {
			if p.resource == resource && p.version > from {
				events <- p.text
			}
		}
	}
	s.watches[events] = resource
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watches, events)
		s.mu.Unlock()
	}()
	w.(http.Flusher).Flush()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				return
			}
			_, _ = fmt.Fprintln(w, e)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

var kinds = map[string]string{"pods": "Pod", "namespaces": "Namespace", "services": "Service", "endpointslices": "EndpointSlice"}

func versionOf(resource string) string {
	if resource == "endpointslices" {
		return "discovery.k8s.io/v1"
	}
	return "v1"
}

func values(m map[string]any) []any {
	all := []any{}
	for _, v := range m {
		all = append(all, v)
	}
	return all
}

func event(kind string, o any) string {
	text, err := json.Marshal(map[string]any{"type": kind, "object": o})
	if err != nil {
		panic(err)
	}
	return string(text)
}

// set changes what the server holds and tells watches, unless silent.
func (s *apiServer) set(silent bool, kind string, o metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	o.SetResourceVersion(strconv.Itoa(s.version))
	resource := "pods"
	switch o := o.(type) {
	case *corev1.Namespace:
		resource, o.TypeMeta = "namespaces", metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}
	case *corev1.Service:
		resource, o.TypeMeta = "services", metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
	case *discoveryv1.EndpointSlice:
		resource, o.TypeMeta = "endpointslices", metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	}
	key := o.GetNamespace() + "/" + o.GetName()
	if kind == "DELETED" {
		delete(s.objects[resource], key)
	} else {
		s.objects[resource][key] = o
	}
	if silent {
		return
	}
	e := event(kind, o)
	s.history = append(s.history, past{s.version, resource, e})
	for ch, of := range s.watches {
		if of == resource {
			ch <- e
		}
	}
}

// cut ends all watches.
func (s *apiServer) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.watches {
		close(ch)
		delete(s.watches, ch)
	}
}

// say sends raw text to the watches of a resource.
func (s *apiServer) say(resource, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch, of := range s.watches {
		if of == resource {
			ch <- text
		}
	}
}

func (s *apiServer) do(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

type clusterFixture struct {
	dir   *nodecache.Directory
	store *kube.Store
	log   *lines
	src   *kube.Cluster
}

func newCluster(t *testing.T, url string) *clusterFixture {
	t.Helper()
	x := &clusterFixture{dir: nodecache.New(nodecache.Options{}), log: &lines{}}
	log := slog.New(x.log)
	x.store = kube.NewStore(x.dir, log)
	src, err := kube.NewCluster(&rest.Config{Host: url}, "v1", x.store, log)
	if err != nil {
		t.Fatal(err)
	}
	x.src = src
	return x
}

func (x *clusterFixture) wait(t *testing.T, want ...string) {
	t.Helper()
	eventually(t, func() string {
		if got := served(x.dir); !slices.Equal(got, want) {
			return fmt.Sprintf("%q, want %q; %+v; logged %q", got, want, x.src.Status(), x.log.get())
		}
		return ""
	})
}

func (x *clusterFixture) waitError(t *testing.T, want string) {
	t.Helper()
	eventually(t, func() string {
		if st := x.src.Status(); !strings.Contains(st.Error, want) || (want == "") != (st.Error == "") {
			return fmt.Sprintf("status %+v, want error %q", st, want)
		}
		return ""
	})
}

func TestClusterFollowsPods(t *testing.T) {
	for _, noStream := range []bool{false, true} {
		t.Run(fmt.Sprintf("streamed list %t", !noStream), func(t *testing.T) {
			s := newAPIServer(t)
			s.noStream = noStream
			s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
			s.set(true, "ADDED", readyPod("b", "ub", "192.0.2.2"))
			x := newCluster(t, s.URL)
			run(t, x.src)
			waitSynced(t, x.src)
			// Synced means applied.
			if got := served(x.dir); len(got) != 2 {
				t.Fatalf("synced with %q", got)
			}
			s.set(false, "ADDED", readyPod("c", "uc", "192.0.2.3"))
			s.set(false, "DELETED", readyPod("a", "ua", "192.0.2.1"))
			s.set(false, "MODIFIED", readyPod("b", "ub2", "192.0.2.4"))
			x.wait(t, "prod/b=192.0.2.4 serving", "prod/c=192.0.2.3 serving")
			x.waitError(t, "")
			if x.dir.Pod("ub") != nil {
				t.Error("the pod that was created again is there twice")
			}
			s.do(func() {
				if got, want := s.asked["pods list"] > 0, noStream; got != want {
					t.Errorf("plain list: %t, want %t", got, want)
				}
				if len(s.agents) != 1 || !s.agents["fingerpost/v1"] {
					t.Errorf("user agents %v", s.agents)
				}
			})
			if got := x.log.get(); slices.ContainsFunc(got, func(l string) bool { return strings.Contains(l, "watch fails") }) {
				t.Errorf("logged %q", got)
			}
		})
	}
}

func TestLostWatchKeepsTheLastState(t *testing.T) {
	s := newAPIServer(t)
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	x := newCluster(t, s.URL)
	run(t, x.src)
	waitSynced(t, x.src)
	s.do(func() { s.down = true })
	s.cut()
	x.waitError(t, "the server is down")
	if st := x.src.Status(); !st.Synced || st.Since.IsZero() || st.StaleSeconds < 0 {
		t.Errorf("status %+v", st)
	}
	if got := served(x.dir); len(got) != 1 {
		t.Errorf("while the server is down: %q", got)
	}
	s.do(func() { s.down = false })
	x.waitError(t, "")
}

func TestRelistRemovesWhatIsAbsent(t *testing.T) {
	s := newAPIServer(t)
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	s.set(true, "ADDED", readyPod("b", "ub", "192.0.2.2"))
	x := newCluster(t, s.URL)
	run(t, x.src)
	waitSynced(t, x.src)
	s.set(true, "DELETED", readyPod("a", "ua", "192.0.2.1"))
	s.set(true, "ADDED", readyPod("c", "uc", "192.0.2.3"))
	s.say("pods", tooOld)
	x.wait(t, "prod/b=192.0.2.2 serving", "prod/c=192.0.2.3 serving")
	x.waitError(t, "")
}

func TestMissingBookmarkIsReported(t *testing.T) {
	s := newAPIServer(t)
	s.noBookmark = true
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	x := newCluster(t, s.URL)
	run(t, x.src)
	x.waitError(t, "pods: not synced for ")
	eventually(t, func() string {
		var n int
		s.do(func() { n = s.asked["pods stream"] })
		if n == 0 {
			return "pods wait for the namespaces"
		}
		return ""
	})
	if st := x.src.Status(); st.Synced || !strings.Contains(st.Error, "pods: not synced for ") {
		t.Errorf("status %+v", st)
	}
}

func TestUnreachableServerIsTriedAgain(t *testing.T) {
	s := newAPIServer(t)
	s.Close()
	x := newCluster(t, s.URL)
	run(t, x.src)
	x.waitError(t, "refused")
	if x.src.Status().Synced {
		t.Error("synced without a server")
	}
	eventually(t, func() string {
		if got := x.log.get(); len(got) == 0 {
			return "nothing logged"
		}
		return ""
	})
}

func TestServerWithoutPodsIsSynced(t *testing.T) {
	x := newCluster(t, newAPIServer(t).URL)
	run(t, x.src)
	waitSynced(t, x.src)
	if st := x.src.Status(); st.Pods != 0 || st.Kind != "kube" {
		t.Errorf("status %+v", st)
	}
}

func TestNamespaceOptsItsPodsOut(t *testing.T) {
	s := newAPIServer(t)
	ns := func(off string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod", Annotations: map[string]string{kube.CollectAnnotation: off}}}
	}
	s.set(true, "ADDED", ns("false"))
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	x := newCluster(t, s.URL)
	run(t, x.src)
	waitSynced(t, x.src)
	if p := x.dir.Pod("ua"); p == nil || !p.CollectOff {
		t.Fatalf("pod %+v, want opted out", p)
	}
	waitOff := func(want bool) {
		t.Helper()
		eventually(t, func() string {
			if p := x.dir.Pod("ua"); p == nil || p.CollectOff != want {
				return fmt.Sprintf("pod %+v, want off %t", p, want)
			}
			return ""
		})
	}
	s.set(false, "MODIFIED", ns("true"))
	waitOff(false)
	s.set(false, "MODIFIED", ns("false"))
	waitOff(true)
	s.set(false, "DELETED", ns("false"))
	waitOff(false)
}

func TestConfigSaysWhatToDo(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("HOME", t.TempDir())
	if _, err := kube.Config(""); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Errorf("got %v", err)
	}
	path := filepath.Join(t.TempDir(), "config")
	if _, err := kube.Config(path); err == nil || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v", err)
	}
	write(t, path, `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: k}}], clusters: [{name: k, cluster: {server: "http://127.0.0.1:1"}}]}`)
	if c, err := kube.Config(path); err != nil || c.Host != "http://127.0.0.1:1" {
		t.Errorf("got %+v, %v", c, err)
	}
	t.Setenv("KUBECONFIG", path)
	if c, err := kube.Config(""); err != nil || c.Host != "http://127.0.0.1:1" {
		t.Errorf("got %+v, %v", c, err)
	}
}

// client-go/kubernetes alone costs more memory than the agent.
func TestClientsetIsNotLinked(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	for dep := range strings.Lines(string(out)) {
		for _, p := range []string{"kubernetes", "informers", "listers"} {
			if strings.HasPrefix(dep, "k8s.io/client-go/"+p) {
				t.Errorf("imports %s", dep)
			}
		}
	}
}
