package daemonset_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/test/harness"
)

// warnings keeps what the API server warns of.
type warnings struct {
	mu   sync.Mutex // protects list
	list []string
}

func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, text)
}

// take returns the warnings since the last call.
func (w *warnings) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := w.list
	w.list = nil
	return list
}

// userPod has one container, and a volume for each path; change it at will.
func userPod(paths ...string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "user-"}}
	pod.Spec.Containers = []corev1.Container{{Name: "app", Image: "app"}}
	for i, p := range paths {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{
			Name: fmt.Sprint("v", i), VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: p}},
		})
	}
	return pod
}

// mount mounts the first volume.
func mount(change ...func(*corev1.VolumeMount)) corev1.VolumeMount {
	m := corev1.VolumeMount{Name: "v0", MountPath: "/mnt"}
	for _, f := range change {
		f(&m)
	}
	return m
}

func readOnly(m *corev1.VolumeMount) { m.ReadOnly = true }

func subPath(p string) func(*corev1.VolumeMount) {
	return func(m *corev1.VolumeMount) { m.SubPath = p }
}

func subPathExpr(p string) func(*corev1.VolumeMount) {
	return func(m *corev1.VolumeMount) { m.SubPathExpr = p }
}

// What each pod gets to hear.
const (
	writable = "writable, and who can write there can replace the socket that all clients of the node follow: set readOnly: true on the volume mount"
	internal = "which is for the agent of the node alone: mount /run/fingerpost, readOnly: true"
	above    = "of the node writable, and with it what all clients of the node follow, /run/fingerpost, or the files of its agent: set readOnly: true"
)

func TestPodsMountTheSocketDirectoryReadOnlyAndTheAgentsOthersNotAtAll(t *testing.T) {
	s := withBase(t)
	ns := s.Namespace(t)
	heard := &warnings{}
	config := rest.CopyConfig(s.Config)
	config.WarningHandler = heard
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { harness.CloseIdleConnections(config) })
	try := func(ns string, pod *corev1.Pod) error {
		_, err := client.CoreV1().Pods(ns).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	app := func(path string, change ...func(*corev1.VolumeMount)) *corev1.Pod {
		pod := userPod(path)
		pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{mount(change...)}
		return pod
	}
	harness.Eventually(t, 30*time.Second, refusedBy("fingerpost-socket-directory", func() error { return try(ns, app("/run/fingerpost")) }))
	harness.Eventually(t, 30*time.Second, func() error {
		heard.take()
		if err := try(ns, app("/run")); err != nil {
			return err
		}
		if len(heard.take()) == 0 {
			return fmt.Errorf("fingerpost-socket-parents is not at work")
		}
		return nil
	})

	recursively := func(mode corev1.RecursiveReadOnlyMode) func(*corev1.VolumeMount) {
		return func(m *corev1.VolumeMount) { m.ReadOnly, m.RecursiveReadOnly = true, &mode }
	}
	privileged := func(pod *corev1.Pod, p corev1.MountPropagationMode) *corev1.Pod {
		yes := true
		pod.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &yes}
		pod.Spec.Containers[0].VolumeMounts[0].MountPropagation = &p
		return pod
	}
	initContainer := func(pod *corev1.Pod, policy corev1.ContainerRestartPolicy) *corev1.Pod {
		c := pod.Spec.Containers[0]
		c.Name = "init"
		if policy != "" {
			c.RestartPolicy = &policy
		}
		pod.Spec.Containers[0].VolumeMounts = nil
		pod.Spec.InitContainers = []corev1.Container{c}
		return pod
	}
	withVariable := func(pod *corev1.Pod) *corev1.Pod {
		pod.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "X", Value: "fingerpost"}}
		return pod
	}
	second := userPod("/run/fingerpost", "/srv")
	second.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v1", MountPath: "/srv"}, mount(readOnly)}
	second.Spec.Containers = append(second.Spec.Containers, corev1.Container{Name: "two", Image: "i", VolumeMounts: []corev1.VolumeMount{mount()}})
	twice := app("/run/fingerpost", readOnly)
	twice.Spec.Containers[0].VolumeMounts = append(twice.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: "v0", MountPath: "/again"})
	sidecar := app("/run/fingerpost", readOnly)
	sidecar.Spec.InitContainers = initContainer(app("/run/fingerpost", readOnly), corev1.ContainerRestartPolicyAlways).Spec.InitContainers

	for _, c := range []struct {
		name   string
		pod    *corev1.Pod
		denied string // what the refusal says; empty: admitted
		warned string // what the warning says; empty: none
	}{
		{name: "no volumes", pod: userPod()},
		{name: "as an application does", pod: app("/run/fingerpost", readOnly)},
		{name: "an application with a sidecar", pod: sidecar},
		{name: "a directory of one's own", pod: app("/srv/data")},
		{name: "declared, not mounted", pod: userPod("/run/fingerpost")},
		{name: "a name that begins alike", pod: app("/run/fingerpost2")},
		{name: "another below /run", pod: app("/run/containerd")},
		{name: "another of /var/lib", pod: app("/var/lib/kubelet")},
		{name: "/ with a harmless subPath", pod: app("/", subPath("opt/x"))},

		{name: "writable", pod: app("/run/fingerpost"), denied: "container app mounts /run/fingerpost/ " + writable},
		{name: "slash at the end", pod: app("/run/fingerpost/"), denied: writable},
		{name: "slashes and dots", pod: app("//run/.//fingerpost/./"), denied: "mounts /run/fingerpost/ " + writable},
		{name: "by /var/run", pod: app("/var/run/fingerpost"), denied: "mounts /run/fingerpost/ " + writable},
		{name: "below", pod: app("/run/fingerpost/x"), denied: "mounts /run/fingerpost/x/ " + writable},
		{name: "the socket itself", pod: app("/run/fingerpost/ads.sock"), denied: writable},
		{name: "subPath of it", pod: app("/run/fingerpost", subPath("x")), denied: writable},
		{name: "subPath of /run", pod: app("/run", subPath("fingerpost")), denied: "mounts /run/fingerpost/ " + writable},
		{name: "subPath of /", pod: app("/", subPath("run/./fingerpost/")), denied: writable},
		{name: "subPath of /, by /var/run", pod: app("/", subPath("var/run/fingerpost")), denied: writable},
		{name: "subPath, read-only", pod: app("/run", subPath("fingerpost"), readOnly)},
		{name: "subPathExpr without a variable", pod: app("/run", subPathExpr("fingerpost")), denied: writable},
		{name: "in the second container", pod: second, denied: "container two mounts /run/fingerpost/ " + writable},
		{name: "in an init container", pod: initContainer(app("/run/fingerpost"), ""), denied: "container init mounts"},
		{name: "in a native sidecar", pod: initContainer(app("/run/fingerpost"), corev1.ContainerRestartPolicyAlways), denied: "container init mounts"},
		{name: "once read-only and once not", pod: twice, denied: writable},
		{name: "privileged, HostToContainer", pod: privileged(app("/run/fingerpost"), corev1.MountPropagationHostToContainer), denied: writable},
		{name: "privileged, Bidirectional", pod: privileged(app("/run/fingerpost"), corev1.MountPropagationBidirectional), denied: writable},

		{name: "the admin sockets", pod: app("/run/fingerpost-admin"), denied: "container app mounts /run/fingerpost-admin/, " + internal},
		{name: "the admin sockets, read-only", pod: app("/run/fingerpost-admin", readOnly), denied: internal},
		{name: "an admin socket by subPath", pod: app("/var/run", subPath("fingerpost-admin/admin.sock"), readOnly), denied: internal},
		{name: "the state", pod: app("/var/lib/fingerpost", readOnly), denied: "mounts /var/lib/fingerpost/, " + internal},

		{name: "/run writable", pod: app("/run"), warned: "container app mounts /run/ " + above},
		{name: "/var/run writable", pod: app("/var/run/"), warned: "mounts /run/ " + above},
		{name: "/ writable", pod: app("/"), warned: "mounts / " + above},
		{name: "/var/lib writable", pod: app("/var/lib"), warned: above},
		{name: "/run read-only", pod: app("/run", readOnly)},
		{name: "/ read-only, /run within is not", pod: app("/", readOnly), warned: above},
		{name: "/ read-only recursively", pod: app("/", recursively(corev1.RecursiveReadOnlyIfPossible))},
		{name: "a variable decides", pod: withVariable(app("/run", subPathExpr("$(X)"))), warned: above},
		{name: "privileged node daemon", pod: privileged(app("/"), corev1.MountPropagationBidirectional), warned: above},
	} {
		heard.take()
		err := try(ns, c.pod)
		checkRefused(t, c.name, err, c.denied)
		got := heard.take()
		ours := slices.DeleteFunc(slices.Clone(got), func(w string) bool { return !strings.Contains(w, "fingerpost-socket-") })
		if (c.warned != "") != (len(ours) > 0) || len(ours) > 0 && !strings.Contains(ours[0], c.warned) {
			t.Errorf("%s: warnings %q, want %q", c.name, got, c.warned)
		} else if len(ours) > 0 {
			t.Logf("%s: Warning: %s", c.name, ours[0])
		}
	}
	if err := try(agents, app("/run/fingerpost")); err != nil {
		t.Errorf("in the agents' namespace: %v", err)
	}
}

func TestAnEphemeralContainerMountsTheSocketDirectoryReadOnlyToo(t *testing.T) {
	s := withBase(t)
	ns := s.Namespace(t)
	pod := userPod("/run/fingerpost")
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{mount(readOnly)}
	pod, err := s.Client.CoreV1().Pods(ns).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	debug := func(name string, m corev1.VolumeMount, dry ...string) error {
		patch, err := json.Marshal(map[string]any{"spec": map[string]any{"ephemeralContainers": []any{
			map[string]any{"name": name, "image": "debug", "volumeMounts": []corev1.VolumeMount{m}},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Client.CoreV1().Pods(ns).Patch(t.Context(), pod.Name, types.StrategicMergePatchType, patch,
			metav1.PatchOptions{DryRun: dry}, "ephemeralcontainers")
		return err
	}
	harness.Eventually(t, 30*time.Second, refusedBy("fingerpost-socket-directory", func() error {
		return debug("probe", mount(), metav1.DryRunAll)
	}))
	checkRefused(t, "writable", debug("bad", mount()), "container bad mounts /run/fingerpost/ "+writable)
	checkRefused(t, "read-only", debug("good", mount(readOnly)), "")
}

// The limit on what one policy may cost is the API server's: 10 million units.
// A pod that is too large for it would be refused.
func TestTheLargestPodsAreNotTooDearForThePolicies(t *testing.T) {
	s := withBase(t)
	ns := s.Namespace(t)
	var paths []string
	for i := range 100 {
		paths = append(paths, fmt.Sprintf("/var/lib/some/directory/of/the/node/number-%d", i))
	}
	pod := userPod(append(paths, "/run")...)
	pod.Spec.Containers = nil
	for c := range 20 {
		container := corev1.Container{Name: fmt.Sprint("c", c), Image: "i"}
		for i := range pod.Spec.Volumes {
			container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{Name: fmt.Sprint("v", i), MountPath: fmt.Sprint("/mnt/", i), SubPath: "one/two/three"})
		}
		pod.Spec.Containers = append(pod.Spec.Containers, container)
	}
	bad := userPod("/run/fingerpost")
	bad.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{mount()}
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	harness.Eventually(t, 30*time.Second, refusedBy("fingerpost-socket-directory", func() error {
		_, err := s.Client.CoreV1().Pods(ns).Create(t.Context(), bad, dry)
		return err
	}))
	if _, err := s.Client.CoreV1().Pods(ns).Create(t.Context(), pod, dry); err != nil {
		t.Error(err)
	}
}
