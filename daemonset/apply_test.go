package daemonset_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"

	"github.com/fingerpost/fingerpost/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(harness.Main{M: m}) }

// agents is the agents' namespace.
const agents = "fingerpost"

var applied sync.Once // the base is applied once to the shared server

// withBase returns the shared API server with the base applied to it and the
// policies at work, which takes them some seconds.
func withBase(t *testing.T) *harness.APIServer {
	t.Helper()
	s := harness.SharedAPIServer(t)
	applied.Do(func() { apply(t, s, rendered(t, base)) })
	return s
}

// apply makes objects of any kind, as kubectl apply does, and without fields that
// the API server does not know.
func apply(t *testing.T, s *harness.APIServer, list []*unstructured.Unstructured) {
	t.Helper()
	groups, err := restmapper.GetAPIGroupResources(s.Client.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	client, err := dynamic.NewForConfig(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range list {
		gvk := o.GroupVersionKind()
		m, err := restmapper.NewDiscoveryRESTMapper(groups).RESTMapping(gvk.GroupKind(), gvk.Version)
		if err != nil {
			t.Fatal(err)
		}
		at := dynamic.ResourceInterface(client.Resource(m.Resource))
		if ns := o.GetNamespace(); ns != "" {
			at = client.Resource(m.Resource).Namespace(ns)
		}
		if _, err := at.Create(t.Context(), o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}); err != nil {
			t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
		}
	}
}

// refusedBy returns a function for [harness.Eventually] that wants a request
// refused by the named policy.
func refusedBy(policy string, request func() error) func() error {
	return func() error {
		err := request()
		if err == nil || !strings.Contains(err.Error(), "'"+policy+"'") {
			return fmt.Errorf("%s is not at work: %v", policy, err)
		}
		return nil
	}
}

func TestAPIServerAcceptsTheManifests(t *testing.T) {
	s := withBase(t)
	set, err := s.Client.AppsV1().DaemonSets(agents).Get(t.Context(), "fingerpost", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// Defaulting must not have added a port of the host.
	for _, container := range set.Spec.Template.Spec.Containers {
		if len(container.Ports) != 0 {
			t.Errorf("%s has ports %v", container.Name, container.Ports)
		}
	}
}

// agentOn makes the pod of an agent and returns it with a client that has its
// token, as the kubelet would mount it.
func agentOn(t *testing.T, s *harness.APIServer, node string) (*corev1.Pod, *kubernetes.Clientset) {
	t.Helper()
	spec := daemonSet(t, base).Spec.Template
	pod, err := s.Client.CoreV1().Pods(agents).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: "fingerpost-", Labels: spec.Labels,
			Annotations: map[string]string{"other.example/annotation": "stays", "fingerpost.dev/grpc-port": "1"},
		},
		Spec: func() corev1.PodSpec { p := spec.Spec; p.NodeName, p.PriorityClassName = node, ""; return p }(),
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod, clientOf(t, s, token(t, s, &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}))
}

// token is one of the agents' account.
func token(t *testing.T, s *harness.APIServer, bound *authenticationv1.BoundObjectReference) string {
	t.Helper()
	r, err := s.Client.CoreV1().ServiceAccounts(agents).CreateToken(t.Context(), "fingerpost",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status.Token
}

func clientOf(t *testing.T, s *harness.APIServer, token string) *kubernetes.Clientset {
	t.Helper()
	config := rest.CopyConfig(s.Config)
	config.BearerToken = token
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { harness.CloseIdleConnections(config) })
	return c
}

func TestAnAgentMayChangeOneAnnotationOfItsOwnPodAlone(t *testing.T) {
	s := withBase(t)
	own, agent := agentOn(t, s, "node-1")
	other, _ := agentOn(t, s, "node-2")
	unbound := clientOf(t, s, token(t, s, nil))
	elsewhere, err := s.Client.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: own.Name},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	patch := func(c *kubernetes.Clientset, pod *corev1.Pod, text string, dry bool, sub ...string) error {
		o := metav1.PatchOptions{}
		if dry {
			o.DryRun = []string{metav1.DryRunAll}
		}
		_, err := c.CoreV1().Pods(pod.Namespace).Patch(t.Context(), pod.Name, types.MergePatchType, []byte(text), o, sub...)
		return err
	}
	harness.Eventually(t, 30*time.Second, refusedBy("fingerpost-agent-pods", func() error {
		return patch(agent, own, `{"metadata":{"labels":{"x":"y"}}}`, true)
	}))

	const key = "9642 sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	peer := `{"metadata":{"annotations":{"fingerpost.dev/peer":"` + key + `"}}}`
	const only = "only the annotation fingerpost.dev/peer"
	for _, c := range []struct {
		name string
		by   *kubernetes.Clientset
		pod  *corev1.Pod
		text string
		want string // what the one refused reads; empty: accepted
	}{
		{"sets its own", agent, own, peer, ""},
		{"changes its own", agent, own, strings.Replace(peer, "0123", "4567", 1), ""},
		{"label", agent, own, `{"metadata":{"labels":{"app.kubernetes.io/name":"other"}}}`, "labels, finalizers and owners of its pod, " + only},
		{"removes its labels", agent, own, `{"metadata":{"labels":null}}`, "labels, finalizers and owners of its pod, " + only},
		{"finalizer", agent, own, `{"metadata":{"finalizers":["example.com/x"]}}`, "labels, finalizers and owners of its pod, " + only},
		{"owner", agent, own, `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"c","uid":"u"}]}}`, "labels, finalizers and owners of its pod, " + only},
		{"image", agent, own, `{"spec":{"terminationGracePeriodSeconds":30,"activeDeadlineSeconds":5}}`, "spec of its pod, " + only},
		{"adds another annotation", agent, own, `{"metadata":{"annotations":{"fingerpost.dev/services":"50051=a.B"}}}`, "other annotations of its pod than fingerpost.dev/peer"},
		{"changes another annotation", agent, own, `{"metadata":{"annotations":{"fingerpost.dev/grpc-port":"2"}}}`, "other annotations of its pod than fingerpost.dev/peer"},
		{"removes another annotation", agent, own, `{"metadata":{"annotations":{"other.example/annotation":null}}}`, "other annotations of its pod than fingerpost.dev/peer"},
		{"its own and another", agent, own, `{"metadata":{"annotations":{"fingerpost.dev/peer":"` + key + `","x":"y"}}}`, "other annotations of its pod than fingerpost.dev/peer"},
		{"a large one", agent, own, `{"metadata":{"annotations":{"fingerpost.dev/peer":"` + strings.Repeat("x", 257) + `"}}}`, "256 characters at most"},
		{"another agent's pod", agent, other, peer, "an agent may change its own pod only, which is " + own.Name + " with the UID " + string(own.UID)},
		{"the same name in another namespace", agent, elsewhere, peer, `cannot patch resource "pods"`},
		{"a token without a pod", unbound, own, peer, "the token of the agent is not bound to a pod"},
		{"removes its own", agent, own, `{"metadata":{"annotations":{"fingerpost.dev/peer":null}}}`, ""},
	} {
		err := patch(c.by, c.pod, c.text, false)
		checkRefused(t, c.name, err, c.want)
	}

	// Whoever gives the account more rights than the base does gives it no
	// other pods and no subresources.
	admin := rest.CopyConfig(s.Config)
	admin.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:fingerpost:fingerpost", Groups: []string{"system:masters"},
		Extra: map[string][]string{"authentication.kubernetes.io/pod-name": {own.Name}, "authentication.kubernetes.io/pod-uid": {string(own.UID)}},
	}
	strong, err := kubernetes.NewForConfig(admin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { harness.CloseIdleConnections(admin) })
	checkRefused(t, "status", patch(strong, own, `{"status":{"podIP":"10.0.0.1"}}`, false, "status"), "may not change status of its pod, "+only)
	checkRefused(t, "the same name elsewhere", patch(strong, elsewhere, peer, false), "an agent may change its own pod only")
	admin.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/pod-name": {own.Name}, "authentication.kubernetes.io/pod-uid": {"another"}}
	if strong, err = kubernetes.NewForConfig(admin); err != nil {
		t.Fatal(err)
	}
	checkRefused(t, "a predecessor of the same name", patch(strong, own, peer, false), "an agent may change its own pod only")

	// Others are none of its business.
	if _, err := s.Client.CoreV1().Pods(agents).Patch(t.Context(), own.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"x":"y"}}}`), metav1.PatchOptions{}); err != nil {
		t.Errorf("an administrator: %v", err)
	}
}

// checkRefused wants a request refused with a text, or accepted if that is
// empty, and shows the message as a user reads it.
func checkRefused(t *testing.T, name string, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("%s: %v", name, err)
	case want != "" && err == nil:
		t.Errorf("%s: accepted", name)
	case want != "" && (!strings.Contains(err.Error(), want) || !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err)):
		t.Errorf("%s: %v\nwant %q", name, err, want)
	case err != nil:
		t.Logf("%s: %v", name, err)
	}
}

func TestPoliciesNameTheAccountAndTheNamespaceOfTheAgents(t *testing.T) {
	account := objects[corev1.ServiceAccount](t, base, "ServiceAccount")[0]
	policies := map[string]admissionv1.ValidatingAdmissionPolicy{}
	for _, p := range objects[admissionv1.ValidatingAdmissionPolicy](t, base, "ValidatingAdmissionPolicy") {
		policies[p.Name] = p
	}
	user := `"system:serviceaccount:` + account.Namespace + ":" + account.Name + `"`
	if c := policies["fingerpost-agent-pods"].Spec.MatchConditions; len(c) != 1 || !strings.Contains(c[0].Expression, user) {
		t.Errorf("conditions %v do not name %s", c, user)
	}
	for _, name := range []string{"fingerpost-socket-directory", "fingerpost-socket-parents"} {
		m := policies[name].Spec.MatchConstraints
		if m == nil || m.NamespaceSelector == nil || len(m.NamespaceSelector.MatchExpressions) != 1 ||
			m.NamespaceSelector.MatchExpressions[0].Operator != metav1.LabelSelectorOpNotIn ||
			strings.Join(m.NamespaceSelector.MatchExpressions[0].Values, " ") != account.Namespace {
			t.Errorf("%s leaves out %v, want the agents' namespace alone", name, m)
		}
	}
	// What both say of the mounts of a pod is the same.
	a, b := policies["fingerpost-socket-directory"].Spec, policies["fingerpost-socket-parents"].Spec
	for i, v := range a.Variables[:3] {
		if b.Variables[i] != v {
			t.Errorf("variable %s differs:\n%s\n%s", v.Name, v.Expression, b.Variables[i].Expression)
		}
	}
}

func TestAgentsRequestsAreOfTheirOwnPriorityLevel(t *testing.T) {
	s := withBase(t)
	level, err := s.Client.FlowcontrolV1().PriorityLevelConfigurations().Get(t.Context(), "fingerpost", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if level.Spec.Type != flowcontrolv1.PriorityLevelEnablementLimited {
		t.Errorf("level is %s", level.Spec.Type)
	}
	pod, _ := agentOn(t, s, "node-3")
	config := rest.CopyConfig(s.Config)
	config.BearerToken = token(t, s, &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID})
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	harness.Eventually(t, 30*time.Second, func() error {
		r, err := client.Get(config.Host + "/api/v1/pods?limit=1")
		if err != nil {
			return err
		}
		defer func() { _ = r.Body.Close() }()
		if got := r.Header.Get(flowcontrolv1.ResponseHeaderMatchedPriorityLevelConfigurationUID); r.StatusCode != http.StatusOK || got != string(level.UID) {
			return fmt.Errorf("%s, of level %q, want %s", r.Status, got, level.UID)
		}
		return nil
	})
}
