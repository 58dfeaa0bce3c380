package daemonset_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/test/harness"
)

// startupTaint is the base with the component.
const startupTaint = "testdata/startup-taint"

var tainted sync.Once // the component is applied once to the shared server

// withStartupTaint returns the shared server with the component applied to it.
func withStartupTaint(t *testing.T) *harness.APIServer {
	t.Helper()
	s := withBase(t)
	tainted.Do(func() {
		has := names(rendered(t, base))
		apply(t, s, slices.DeleteFunc(rendered(t, startupTaint), func(o *unstructured.Unstructured) bool {
			return slices.Contains(has, o.GetKind()+"/"+o.GetName())
		}))
	})
	return s
}

var (
	ours   = corev1.Taint{Key: kube.StartupTaint, Effect: corev1.TaintEffectNoSchedule}
	others = corev1.Taint{Key: "example.com/gpu", Value: "a", Effect: corev1.TaintEffectNoExecute, TimeAdded: &metav1.Time{Time: time.Unix(1e9, 0)}}
)

func node(t *testing.T, s *harness.APIServer, name string, taints ...corev1.Taint) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"a": "b"}}, Spec: corev1.NodeSpec{ProviderID: "p://" + name}}
	n, err := s.Client.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.Spec.Taints = taints // a new one has others, of its conditions
	if _, err := s.Client.CoreV1().Nodes().Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func taints(t *testing.T, s *harness.APIServer, name string) []string {
	t.Helper()
	n, err := s.Client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, taint := range n.Spec.Taints {
		list = append(list, taint.ToString())
	}
	slices.Sort(list)
	return list
}

func TestAnAgentMayTakeTheStartupTaintOffItsOwnNodeAlone(t *testing.T) {
	s := withStartupTaint(t)
	node(t, s, "taint-1", ours, others)
	node(t, s, "taint-2", ours)
	_, agent := agentOn(t, s, "taint-1")
	unbound := clientOf(t, s, token(t, s, nil))
	patch := func(c *kubernetes.Clientset, node, text string, dry ...string) error {
		_, err := c.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, []byte(text), metav1.PatchOptions{DryRun: dry})
		return err
	}
	with := func(taints ...corev1.Taint) string {
		text, err := json.Marshal(map[string]any{"spec": map[string]any{"taints": taints}})
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	harness.Eventually(t, 30*time.Second, refusedBy("fingerpost-startup-taint", func() error {
		return patch(agent, "taint-1", `{"metadata":{"labels":{"x":"y"}}}`, metav1.DryRunAll)
	}))
	const only = "an agent may change nothing of its node but take its taint fingerpost.dev/agent-not-ready off"
	const noOther = "an agent may take no other taint off its node than fingerpost.dev/agent-not-ready, and put none on"
	for _, c := range []struct {
		name, node, text, want string
		by                     *kubernetes.Clientset
	}{
		{"label", "taint-1", `{"metadata":{"labels":{"a":"c"}}}`, only, agent},
		{"annotation", "taint-1", `{"metadata":{"annotations":{"a":"c"}}}`, only, agent},
		{"finalizer", "taint-1", `{"metadata":{"finalizers":["example.com/x"]}}`, only, agent},
		{"cordon", "taint-1", `{"spec":{"unschedulable":true}}`, only, agent},
		{"addresses of pods", "taint-1", `{"spec":{"podCIDR":"10.0.0.0/24","podCIDRs":["10.0.0.0/24"]}}`, only, agent},
		{"all taints", "taint-1", `{"spec":{"taints":null}}`, noOther, agent},
		{"another taint on", "taint-1", with(others, corev1.Taint{Key: "x", Effect: corev1.TaintEffectNoExecute}), noOther, agent},
		{"another value", "taint-1", with(corev1.Taint{Key: others.Key, Value: "b", Effect: others.Effect}), noOther, agent},
		{"another node", "taint-2", with(), "an agent may take the taint off its own node only, which is taint-1", agent},
		{"a token without a pod", "taint-1", with(others), "the token of the agent is not bound to a pod", unbound},
		{"its own", "taint-1", with(others), "", agent},
		{"its own back on", "taint-1", with(others, ours), noOther, agent},
	} {
		checkRefused(t, c.name, patch(c.by, c.node, c.text), c.want)
	}
	_, err := agent.CoreV1().Nodes().Patch(t.Context(), "taint-1", types.MergePatchType, []byte(`{"status":{"phase":"x"}}`), metav1.PatchOptions{}, "status")
	checkRefused(t, "status", err, `cannot patch resource "nodes/status"`)
}

// holding passes requests on to the API server with a token, those of pods once
// it is told to, and notes which came.
type holding struct {
	*httptest.Server
	goOn chan struct{}

	mu   sync.Mutex // protects seen
	seen []string
}

func newHolding(t *testing.T, s *harness.APIServer, token string) *holding {
	t.Helper()
	to, err := url.Parse(s.Config.Host)
	if err != nil {
		t.Fatal(err)
	}
	config := &rest.Config{Host: s.Config.Host, TLSClientConfig: s.Config.TLSClientConfig}
	transport, err := rest.TransportFor(config)
	if err != nil {
		t.Fatal(err)
	}
	h := &holding{goOn: make(chan struct{})}
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		r.Out.Header.Set("Authorization", "Bearer "+token)
	}, Transport: transport, FlushInterval: -1}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/pods" {
			select {
			case <-h.goOn:
			case <-r.Context().Done():
				return
			}
		}
		h.mu.Lock()
		h.seen = append(h.seen, r.Method+" "+r.URL.Path)
		h.mu.Unlock()
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(func() { h.CloseClientConnections(); h.Close(); harness.CloseIdleConnections(config) })
	return h
}

func (h *holding) requests(path string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.seen), func(r string) bool { return !strings.Contains(r, path) })
}

func TestAnAgentLiftsTheStartupTaintOnceItIsReady(t *testing.T) {
	s := withStartupTaint(t)
	node(t, s, "taint-3", ours, corev1.Taint{Key: ours.Key, Value: "x", Effect: corev1.TaintEffectNoExecute}, others)
	pod, _ := agentOn(t, s, "taint-3")
	h := newHolding(t, s, token(t, s, &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}))
	k := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: h.URL}},
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c"}},
		CurrentContext: "c",
	}, k); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var log bytes.Buffer
	c := agent.Defaults()
	c.Kubeconfig, c.NodeName, c.LeaseNamespace, c.LiftTaint = k, "taint-3", agents, true
	c.ADSSocket, c.AdminSocket = filepath.Join(dir, "ads", "ads.sock"), filepath.Join(dir, "admin", "admin.sock")
	c.HTTPAddress, c.PeerAddress, c.StateDir, c.LogTo = "", "", "", &log
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx, c) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("the agent: %v", err)
		}
		if t.Failed() {
			t.Logf("requests %q, the agent:\n%s", h.requests(""), log.String())
		}
	}()
	admin := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", c.AdminSocket)
	}}}
	defer admin.CloseIdleConnections()
	part := func(want string) func() error {
		return func() error {
			r, err := admin.Get("http://agent/status")
			if err != nil {
				return err
			}
			defer func() { _ = r.Body.Close() }()
			var status agent.Status
			if err := json.NewDecoder(r.Body).Decode(&status); err != nil {
				return err
			}
			if got := status.Parts["startup-taint"]; got != want {
				return fmt.Errorf("startup-taint: %q, want %q", got, want)
			}
			return nil
		}
	}
	harness.Eventually(t, 30*time.Second, part("off: waits until this agent is ready"))
	if got := h.requests("/nodes/"); len(got) != 0 {
		t.Errorf("an agent that is not ready asks for %v", got)
	}
	close(h.goOn)
	harness.Eventually(t, 30*time.Second, part("on"))
	if got, want := taints(t, s, "taint-3"), []string{others.ToString()}; !slices.Equal(got, want) {
		t.Errorf("taints are %v, want %v", got, want)
	}
}
