package agent_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// apiServer streams the list of each resource and then its changes, in JSON,
// as a kube-apiserver does. Unlike that it takes any address.
type apiServer struct {
	*httptest.Server
	// before is called before each pod of a list, by its place; nil: nothing.
	before func(i int)

	// mu guards what follows, and the order of events.
	mu      sync.Mutex
	version int
	held    map[string]map[string]metav1.Object // by resource, by namespace/name
	watches map[chan string]string              // resource of each
}

var kinds = map[string]metav1.TypeMeta{
	"namespaces":     {APIVersion: "v1", Kind: "Namespace"},
	"pods":           {APIVersion: "v1", Kind: "Pod"},
	"services":       {APIVersion: "v1", Kind: "Service"},
	"endpointslices": {APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
}

func newAPIServer(t *testing.T) *apiServer {
	s := &apiServer{version: 1, held: map[string]map[string]metav1.Object{}, watches: map[chan string]string{}}
	for r := range kinds {
		s.held[r] = map[string]metav1.Object{}
	}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// kubeconfig writes the file that leads to the server.
func (s *apiServer) kubeconfig(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: k}}], clusters: [{name: k, cluster: {server: %q}}]}`, s.URL)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, q := path.Base(r.URL.Path), r.URL.Query()
	kind, known := kinds[resource]
	w.Header().Set("Content-Type", "application/json")
	if !known || q.Get("watch") == "" {
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"Status","status":"Failure","code":404,"reason":"NotFound","message":"only streamed lists of what is known"}`))
		return
	}
	events := make(chan string, 1<<14)
	s.mu.Lock()
	var first []string
	if q.Get("sendInitialEvents") == "true" {
		if q.Get("fieldSelector") == "" { // which selects nothing
			for _, o := range s.held[resource] {
				first = append(first, event("ADDED", o))
			}
		}
		first = append(first, fmt.Sprintf(`{"type":"BOOKMARK","object":{"apiVersion":%q,"kind":%q,"metadata":{"resourceVersion":"%d","annotations":{"k8s.io/initial-events-end":"true"}}}}`,
			kind.APIVersion, kind.Kind, s.version))
	}
	s.watches[events] = resource
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watches, events)
		s.mu.Unlock()
	}()
	for i, e := range first {
		if s.before != nil && resource == "pods" {
			s.before(i)
			w.(http.Flusher).Flush()
		}
		_, _ = fmt.Fprintln(w, e)
	}
	w.(http.Flusher).Flush()
	for {
		select {
		case e := <-events:
			_, _ = fmt.Fprintln(w, e)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func event(kind string, o any) string {
	text, err := json.Marshal(map[string]any{"type": kind, "object": o})
	if err != nil {
		panic(err)
	}
	return string(text)
}

// put adds or changes an object and tells the watches.
func (s *apiServer) put(o metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	held, key := s.held[resourceOf(o)], o.GetNamespace()+"/"+o.GetName()
	kind := "ADDED"
	if held[key] != nil {
		kind = "MODIFIED"
	}
	held[key] = o
	s.tell(kind, o)
}

// remove takes an object away and tells the watches.
func (s *apiServer) remove(o metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.held[resourceOf(o)], o.GetNamespace()+"/"+o.GetName())
	s.tell("DELETED", o)
}

// tell needs mu.
func (s *apiServer) tell(kind string, o metav1.Object) {
	s.version++
	o.SetResourceVersion(strconv.Itoa(s.version))
	e := event(kind, o)
	for ch, of := range s.watches {
		if of == resourceOf(o) {
			ch <- e
		}
	}
}

// resourceOf also says in the object what it is.
func resourceOf(o metav1.Object) string {
	switch o := o.(type) {
	case *corev1.Pod:
		o.TypeMeta = kinds["pods"]
		return "pods"
	case *corev1.Service:
		o.TypeMeta = kinds["services"]
		return "services"
	case *discoveryv1.EndpointSlice:
		o.TypeMeta = kinds["endpointslices"]
		return "endpointslices"
	}
	panic(fmt.Sprintf("no resource of %T", o))
}
