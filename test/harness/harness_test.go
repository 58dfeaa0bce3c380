package harness_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/tools"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(harness.Main{M: m}) }

func examplePod(namespace, name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name,
			Labels:          map[string]string{"pod-template-hash": "5d9"},
			OwnerReferences: []metav1.OwnerReference{harness.OwnedBy("ReplicaSet", "a-5d9", "uid-1")},
		},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "app", Ports: []corev1.ContainerPort{{Name: "grpc", ContainerPort: 50051}},
		}}},
	}
}

func isReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func TestPodLivesAsTheTestWritesIt(t *testing.T) {
	s := harness.SharedAPIServer(t)
	ns := s.Namespace(t)
	pods := s.Client.CoreV1().Pods(ns)

	pod := s.CreatePod(t, examplePod(ns, "a-1"))
	s.SetReady(t, pod, true, "10.0.0.1", "fd00::1")
	list, err := pods.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 1 {
		t.Fatalf("%d pods, want 1", len(list.Items))
	}
	got := &list.Items[0]
	if got.UID != pod.UID || got.Status.PodIP != "10.0.0.1" || len(got.Status.PodIPs) != 2 || got.Status.Phase != corev1.PodRunning || !isReady(got) {
		t.Errorf("listed pod is %v", got.Status)
	}
	if ref := metav1.GetControllerOf(got); ref == nil || ref.UID != "uid-1" || ref.Kind != "ReplicaSet" {
		t.Errorf("controller is %v", ref)
	}

	s.Terminate(t, pod)
	got, err = pods.Get(t.Context(), "a-1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got.DeletionTimestamp == nil || !isReady(got) {
		t.Errorf("terminating pod: deletionTimestamp %v, ready %v", got.DeletionTimestamp, isReady(got))
	}
	s.SetReady(t, pod, false)

	s.Remove(t, pod)
	if _, err := pods.Get(t.Context(), "a-1", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("removed pod: %v", err)
	}
	s.Remove(t, pod)
}

func TestAPIServerIsOfThePinnedVersion(t *testing.T) {
	s := harness.SharedAPIServer(t)
	v, err := s.Client.Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	if tool, err := tools.Find("kube-apiserver"); err != nil || v.GitVersion != tool.Version {
		t.Errorf("server says %s, pinned is %s", v.GitVersion, tool.Version)
	}
}

func TestRestartedAPIServerKeepsAddressAndContents(t *testing.T) {
	s := harness.StartAPIServer(t)
	ns := s.Namespace(t)
	s.CreatePod(t, examplePod(ns, "a-1"))

	s.Stop()
	if _, err := s.Client.CoreV1().Pods(ns).Get(t.Context(), "a-1", metav1.GetOptions{}); err == nil {
		t.Error("a stopped server answers")
	}
	s.Restart(t)

	config, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { harness.CloseIdleConnections(config) })
	if _, err := client.CoreV1().Pods(ns).Get(t.Context(), "a-1", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
}

// direct is a bootstrap with one listener that answers by itself.
func direct(port int) string {
	return fmt.Sprintf(`
static_resources:
  listeners:
  - name: direct
    address: {socket_address: {address: 127.0.0.1, port_value: %d}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: direct
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: "/"}, direct_response: {status: 204}}]
          http_filters:
          - name: router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`, port)
}

func TestEnvoyServesAStaticBootstrapAndCounts(t *testing.T) {
	port := harness.FreePort(t)
	e := harness.StartEnvoy(t, direct(port), harness.EnvoyOptions{})
	e.WaitReady(t, 20*time.Second)
	if got := e.Admin(t, "/ready"); !strings.Contains(got, "LIVE") {
		t.Errorf("/ready says %q", got)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/", port))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Errorf("status %d", resp.StatusCode)
	}
	e.WaitFor(t, 10*time.Second, func() error {
		if n, ok := e.Stat("http.direct.downstream_rq_total"); !ok || n != 1 {
			return fmt.Errorf("downstream_rq_total is %d, %v", n, ok)
		}
		return nil
	})
	if _, ok := e.Stat("no.such.stat"); ok {
		t.Error("a stat that does not exist is found")
	}
}

func TestEnvoyAdminOnAUnixSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "admin-") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	e := harness.StartEnvoy(t, "admin: {address: {pipe: {path: "+dir+"/admin.sock}}}", harness.EnvoyOptions{})
	e.WaitReady(t, 20*time.Second)
}

func TestStoppedEnvoyLeavesNoProcess(t *testing.T) {
	e := harness.StartEnvoy(t, "{}", harness.EnvoyOptions{Concurrency: 2})
	if err := syscall.Kill(e.Pid(), 0); err != nil {
		t.Fatalf("running Envoy: %v", err)
	}
	e.Stop()
	e.Stop()
	if err := syscall.Kill(e.Pid(), 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("stopped Envoy: %v, want no such process", err)
	}
}

// What the server sends and Envoy refuses shows in no call that a test makes.
func TestTestFailsWhereEnvoyRefusedAnUpdate(t *testing.T) {
	harness.Tool(t, "envoy")
	for _, refuses := range []bool{false, true} {
		dir := t.TempDir()
		lds := filepath.Join(dir, "lds.json")
		if err := os.WriteFile(lds, []byte(`{"resources": [{"@type": "type.googleapis.com/envoy.config.listener.v3.Listener", "name": "no-address"}]}`), 0o600); err != nil {
			t.Fatal(err)
		}
		r := &recorder{TB: t}
		e := harness.StartEnvoy(r, "node: {id: a, cluster: b}\ndynamic_resources: {lds_config: {path_config_source: {path: "+lds+"}}}", harness.EnvoyOptions{Refuses: refuses})
		e.WaitFor(t, 20*time.Second, func() error {
			if n, _ := e.Stat("listener_manager.lds.update_rejected"); n == 0 {
				return errors.New("not refused yet")
			}
			return nil
		})
		e.Stop()
		if failed := strings.Contains(r.failed, "listener_manager.lds.update_rejected is 1"); failed == refuses {
			t.Errorf("refuses %v: the test fails with %q", refuses, r.failed)
		}
	}
}

// recorder is a testing.TB that takes the end of a test for itself.
type recorder struct {
	testing.TB
	failed, skipped string
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failed = fmt.Sprintf(format, args...)
	panic(r)
}

func (r *recorder) Errorf(format string, args ...any) { r.failed = fmt.Sprintf(format, args...) }

func (r *recorder) Skipf(format string, args ...any) {
	r.skipped = fmt.Sprintf(format, args...)
	panic(r)
}

func TestMissingToolSkipsUnlessToolsAreRequired(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: every tool is skipped")
	}
	t.Setenv(tools.DirEnv, t.TempDir())
	find := func() *recorder {
		r := &recorder{TB: t}
		func() {
			defer func() { _ = recover() }()
			harness.Tool(r, "etcd")
		}()
		return r
	}
	t.Setenv(harness.RequireEnv, "")
	if r := find(); !strings.Contains(r.skipped, "etcd") || r.failed != "" {
		t.Errorf("not required: skipped %q, failed %q", r.skipped, r.failed)
	}
	t.Setenv(harness.RequireEnv, "1")
	if r := find(); !strings.Contains(r.failed, "etcd") || r.skipped != "" {
		t.Errorf("required: skipped %q, failed %q", r.skipped, r.failed)
	}
}
