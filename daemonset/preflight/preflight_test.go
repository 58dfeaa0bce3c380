package preflight_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/daemonset/injection"
	"github.com/fingerpost/fingerpost/daemonset/preflight"
	"github.com/fingerpost/fingerpost/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(harness.Main{M: m}) }

func look(t *testing.T, config *rest.Config, namespace string) *preflight.Report {
	t.Helper()
	r := &preflight.Report{}
	if err := preflight.Cluster(t.Context(), r, config, namespace); err != nil {
		t.Fatal(err)
	}
	return r
}

// says checks the state of a finding and that its words have these in them.
func says(t *testing.T, r *preflight.Report, about string, state preflight.State, words ...string) {
	t.Helper()
	if err := finding(r, about, state, words...); err != nil {
		t.Error(err)
	}
}

func finding(r *preflight.Report, about string, state preflight.State, words ...string) error {
	for _, f := range r.Findings {
		if f.About != about {
			continue
		}
		for _, w := range words {
			if !strings.Contains(f.Found+" "+f.Means, w) {
				return fmt.Errorf("%+v does not say %q", f, w)
			}
		}
		if f.State != state {
			return fmt.Errorf("%+v is not %s", f, state)
		}
		return nil
	}
	return fmt.Errorf("nothing about %s: %+v", about, r.Findings)
}

// TestReportFollowsTheCluster goes the way of one who installs: the report follows.
func TestReportFollowsTheCluster(t *testing.T) {
	s := harness.StartAPIServer(t)
	create := metav1.CreateOptions{}
	// It is the reconciler's, which some servers go without.
	if _, err := s.Client.CoreV1().Services("default").Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}},
	}, create); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}

	r := look(t, s.Config, "fingerpost")
	says(t, r, "native sidecars", preflight.Good, "v1.37")
	says(t, r, "EndpointSlices", preflight.Good)
	says(t, r, "HTTPRoutes", preflight.Note, "CRDs")
	says(t, r, "MutatingAdmissionPolicies", preflight.Good)
	says(t, r, "refusals", preflight.Note, "not there")
	says(t, r, "injection", preflight.Note, "not there")
	says(t, r, "IP families", preflight.Good, "IPv4")
	says(t, r, "other meshes", preflight.Good)
	says(t, r, "agents", preflight.Note, "none; 0 nodes")
	says(t, r, "namespaces", preflight.Good, "nothing asks")
	says(t, r, "rights of the agents", preflight.Note, "no DaemonSet fingerpost/fingerpost")
	if r.Missing() != 0 || r.Cluster == "" {
		t.Errorf("%+v", r)
	}
	pods, err := s.Client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(pods.Items) != 0 {
		t.Errorf("the check left pods: %v, %v", pods.Items, err)
	}

	// One policy without the other refuses every pod with the label.
	install(t, s, "Validating")
	harness.Eventually(t, time.Minute, func() error {
		r := look(t, s.Config, "fingerpost")
		if err := finding(r, "refusals", preflight.Good, "active"); err != nil {
			return err
		}
		return finding(r, "injection", preflight.Missing, "install both")
	})
	install(t, s, "Mutating")
	harness.Eventually(t, time.Minute, func() error {
		return finding(look(t, s.Config, "fingerpost"), "injection", preflight.Good, "active")
	})

	// An agent on one of three nodes, a Windows node, an account without rights.
	node := func(name, os, kernel string) {
		_, err := s.Client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelOSStable: os}},
			Status:     corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KernelVersion: kernel, OperatingSystem: os}},
		}, create)
		if err != nil {
			t.Fatal(err)
		}
	}
	node("n1", "linux", "6.12.1-generic")
	node("n2", "linux", "5.4.0-150")
	node("n3", "linux", "6.12.1-generic")
	node("w1", "windows", "10.0")
	ns := s.Namespace(t)
	labels := map[string]string{"app.kubernetes.io/name": "fingerpost"}
	_, err = s.Client.AppsV1().DaemonSets(ns).Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "fingerpost"},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "agent", Image: "fingerpost"}}},
		}},
	}, create)
	if err != nil {
		t.Fatal(err)
	}
	s.SetReady(t, s.CreatePod(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "agent-1", Namespace: ns, Labels: labels}, Spec: corev1.PodSpec{NodeName: "n1"}}), true)
	s.SetReady(t, s.CreatePod(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "agent-2", Namespace: ns, Labels: labels}, Spec: corev1.PodSpec{NodeName: "n2"}}), false)
	r = look(t, s.Config, ns)
	says(t, r, "agents", preflight.Missing, "2 of 3 nodes", "n2, n3", "do not start")
	says(t, r, "Windows nodes", preflight.Note, "w1")
	says(t, r, "kernel of 1 nodes", preflight.Note, "5.4.0-150", "from 5.8", "from 6.5")
	says(t, r, "kernel of 2 nodes", preflight.Good, "6.12.1")
	says(t, r, "rights of the agents", preflight.Missing, "system:serviceaccount:"+ns+":fingerpost may not list pods", "watch endpointslices.discovery.k8s.io", "create events")
	rules := []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods", "services", "namespaces"}, Verbs: []string{"list", "watch"}},
		{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"watch"}},
	}
	bind(t, s, ns, "fingerpost", rules)
	harness.Eventually(t, time.Minute, func() error {
		return finding(look(t, s.Config, ns), "rights of the agents", preflight.Note, "watch httproutes.gateway.networking.k8s.io", "create events")
	})

	// Namespaces that ask and cannot get it.
	asks := func(labels map[string]string, annotations map[string]string) string {
		made, err := s.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "asks-", Labels: labels, Annotations: annotations}}, create)
		if err != nil {
			t.Fatal(err)
		}
		app := map[string]string{"app": "a", injection.Label: injection.Envoy}
		_, err = s.Client.AppsV1().Deployments(made.Name).Create(t.Context(), &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Name: "a"},
			Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: app}, Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: app}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "app"}}},
			}},
		}, create)
		if err != nil {
			t.Fatal(err)
		}
		return made.Name
	}
	fine := asks(nil, nil)
	warned := asks(map[string]string{"pod-security.kubernetes.io/warn": "baseline"}, nil)
	strict := asks(map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}, nil)
	istio := asks(map[string]string{"istio-injection": "enabled"}, nil)
	r = look(t, s.Config, ns)
	says(t, r, "namespace "+fine, preflight.Good)
	says(t, r, "namespace "+warned, preflight.Note, "warns by Pod Security")
	says(t, r, "namespace "+strict, preflight.Missing, "enforces Pod Security restricted", "hostPath")
	says(t, r, "namespace "+istio, preflight.Missing, "Istio injects its pods")
	// What was foretold is what the API server does.
	_, err = s.Client.CoreV1().Pods(strict).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Labels: map[string]string{injection.Label: injection.Envoy}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err == nil || !strings.Contains(err.Error(), "hostPath") {
		t.Errorf("Pod Security says %v", err)
	}

	none := admissionv1.SideEffectClassNone
	url := "https://127.0.0.1:1/inject"
	_, err = s.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().Create(t.Context(), &admissionv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "istio-sidecar-injector"},
		Webhooks: []admissionv1.MutatingWebhook{{
			Name: "sidecar-injector.istio.io", AdmissionReviewVersions: []string{"v1"}, SideEffects: &none,
			ClientConfig: admissionv1.WebhookClientConfig{URL: &url},
		}},
	}, create)
	if err != nil {
		t.Fatal(err)
	}
	says(t, look(t, s.Config, ns), "other meshes", preflight.Note, "Istio (webhook istio-sidecar-injector)")

	// An account without rights, as the agent's own, sees less and says so.
	bind(t, s, ns, "little", nil)
	config := rest.CopyConfig(s.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + ns + ":little", Groups: []string{"system:serviceaccounts", "system:authenticated"}}
	r = look(t, config, ns)
	defer harness.CloseIdleConnections(config)
	for _, about := range []string{"namespaces", "other meshes", "agents"} {
		says(t, r, about, preflight.Unknown, "no right")
	}
	says(t, r, "injection", preflight.Unknown, "cannot be created here")
	says(t, r, "rights of the agents", preflight.Missing, "whoever runs this may not list pods")
}

// install creates one of the policies and its binding.
func install(t *testing.T, s *harness.APIServer, which string) {
	t.Helper()
	text, err := injection.Policies(injection.Options{})
	if err != nil {
		t.Fatal(err)
	}
	client, err := dynamic.NewForConfig(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var u unstructured.Unstructured
		if err := yaml.Unmarshal([]byte(document), &u.Object); err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(u.GetKind(), which) {
			continue
		}
		resource := strings.ToLower(strings.Replace(u.GetKind()+"s", "Policys", "Policies", 1))
		if _, err := client.Resource(schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: resource}).Create(t.Context(), &u, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

func bind(t *testing.T, s *harness.APIServer, namespace, account string, rules []rbacv1.PolicyRule) {
	t.Helper()
	name := namespace + "-" + account
	_, err := s.Client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}, metav1.CreateOptions{})
	if err == nil {
		_, err = s.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Name: account, Namespace: namespace}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestAnOldClusterIsToldWhatItLacks(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/version" {
			_ = json.NewEncoder(w).Encode(map[string]string{"major": "1", "minor": "28+", "gitVersion": "v1.28.9-gke"})
			return
		}
		w.WriteHeader(http.StatusNotFound)
		_ = json.NewEncoder(w).Encode(metav1.Status{Message: "the server could not find the requested resource"})
	}))
	defer server.Close()
	r := look(t, &rest.Config{Host: server.URL}, "fingerpost")
	says(t, r, "native sidecars", preflight.Missing, "v1.28.9-gke", "1.29", "grpc works")
	says(t, r, "EndpointSlices", preflight.Missing)
	says(t, r, "MutatingAdmissionPolicies", preflight.Note, "1.36", "fingerpost inject")
	says(t, r, "ValidatingAdmissionPolicies", preflight.Note, "1.30")
	if r.Missing() != 2 {
		t.Errorf("%+v", r)
	}
}

func TestAClusterThatCannotBeReachedIsAnError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := preflight.Cluster(t.Context(), &preflight.Report{}, &rest.Config{Host: "http://" + l.Addr().String()}, "x"); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("%v", err)
	}
}

func TestMachine(t *testing.T) {
	root, socket := t.TempDir(), filepath.Join(t.TempDir(), "a.sock")
	write := func(path, text string) {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	machine := func() *preflight.Report {
		r := &preflight.Report{}
		preflight.Machine(context.Background(), r, root, socket)
		return r
	}
	write("proc/self/mountinfo", "30 1 0:1 / / rw - ext4 x rw\n")
	r := machine()
	says(t, r, "node: SELinux", preflight.Good, "not there")
	says(t, r, "node: IPv6", preflight.Note, "off")
	says(t, r, "node: cgroup2", preflight.Note, "redirect")
	says(t, r, "node: agent", preflight.Note, socket)

	write("proc/self/mountinfo", "31 1 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	write("sys/fs/selinux/enforce", "1")
	write("proc/sys/net/ipv6/conf/all/disable_ipv6", "0\n")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r = machine()
	says(t, r, "node: SELinux", preflight.Note, "enforcing", "permission denied")
	says(t, r, "node: IPv6", preflight.Good)
	says(t, r, "node: cgroup2", preflight.Good)
	says(t, r, "node: agent", preflight.Good)
	if r.Node == "" || r.Missing() != 0 {
		t.Errorf("%+v", r)
	}
}
