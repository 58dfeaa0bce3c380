package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/xds"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/daemonset/preflight"
	"github.com/fingerpost/fingerpost/test/harness"
)

// injected is a pod of namespace prod after fingerpost inject.
func injected(t *testing.T, name string, args ...string) *corev1.Pod {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pod.yaml")
	manifest := "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + ", namespace: prod}\nspec: {containers: [{name: app, image: app}]}\n"
	if err := os.WriteFile(file, []byte(manifest), 0o644); err != nil {
		t.Fatal(err)
	}
	out, errs, code := run(t, append([]string{"inject", "-f", file}, args...)...)
	if code != 0 {
		t.Fatalf("fingerpost inject: exit %d, %s", code, errs)
	}
	p := &corev1.Pod{}
	if err := yaml.UnmarshalStrict([]byte(out), p); err != nil {
		t.Fatal(err)
	}
	return p
}

// reference is $(NAME) in an argument or the value of a variable; $$ escapes it.
var reference = regexp.MustCompile(`\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)`)

// kubelet returns what a kubelet would start the container with, for a pod with
// this address.
func kubelet(t *testing.T, pod *corev1.Pod, c *corev1.Container, address string) (args, env []string) {
	t.Helper()
	values := map[string]string{}
	expand := func(s string) string {
		return reference.ReplaceAllStringFunc(s, func(ref string) string {
			if ref == "$$" {
				return "$"
			}
			if v, ok := values[ref[2:len(ref)-1]]; ok {
				return v
			}
			return ref
		})
	}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			values[e.Name] = expand(e.Value)
		} else {
			v, ok := map[string]string{
				"metadata.name": pod.Name, "metadata.namespace": pod.Namespace, "status.podIP": address,
			}[e.ValueFrom.FieldRef.FieldPath]
			if !ok {
				t.Fatalf("variable %s is of %v", e.Name, e.ValueFrom)
			}
			values[e.Name] = v
		}
		env = append(env, e.Name+"="+values[e.Name])
	}
	for _, a := range c.Args {
		args = append(args, expand(a))
	}
	return args, env
}

// inContainer makes a command see the directory of the site's sockets, read-only,
// where the container's mounts have it.
func (s *site) inContainer(t *testing.T, c *corev1.Container, args ...string) *exec.Cmd {
	t.Helper()
	if len(c.VolumeMounts) != 1 || !c.VolumeMounts[0].ReadOnly {
		t.Fatalf("mounts %+v", c.VolumeMounts)
	}
	const script = `set -e
mount -t tmpfs none /run
mkdir -p "$2"
mount --bind "$1" "$2"
mount -o remount,bind,ro "$2"
shift 2
exec "$@"`
	cmd := exec.Command("sh", append([]string{"-c", script, "sh", filepath.Dir(s.ads), c.VolumeMounts[0].MountPath}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return cmd
}

// cilium#38997, istio#38034, with exactly what is injected: the sidecar starts
// before its agent, is found not ready for a reason that can be read, and works
// once the agent is there, without a restart.
func TestInjectedSidecarWaitsForTheAgentAndSaysSo(t *testing.T) {
	w, s := shop(t), newSite(t)
	pod := injected(t, "web")
	c := &pod.Spec.InitContainers[0]
	// Of 127.0.0.0/8, apart from others that run at the same time.
	pid := os.Getpid()
	address := fmt.Sprintf("127.%d.%d.77", 100+pid>>8%100, pid%256)
	args, env := kubelet(t, pod, c, address)
	envoy := harness.Tool(t, "envoy")
	if out, err := exec.Command(envoy, append([]string{"--mode", "validate"}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("Envoy refuses the arguments: %v\n%s", err, out)
	}

	if err := os.MkdirAll(filepath.Dir(s.ads), 0o755); err != nil { // DirectoryOrCreate
		t.Fatal(err)
	}
	cmd := s.inContainer(t, c, append([]string{envoy}, args...)...)
	log := &output{}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(env, "PATH="+os.Getenv("PATH"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		err := <-ended
		if t.Failed() {
			t.Logf("Envoy ended with %v; its log:\n%s", err, log)
		}
	})

	get := func(c http.Client, url string) error {
		resp, err := c.Get(url)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, resp.Status)
		}
		return nil
	}
	client := func(network, address string) http.Client {
		return http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, network, address)
			}}}
	}
	admin := client("unix", "@fingerpost-envoy")
	alive := func(f func() error) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			select {
			case err := <-ended:
				ended <- err
				t.Fatalf("Envoy ended: %v", err)
			default:
			}
			return f()
		})
	}
	alive(func() error { return get(admin, "http://admin/server_info") })
	probe := func() error {
		p := c.StartupProbe.HTTPGet
		return get(client("tcp", net.JoinHostPort(address, p.Port.String())), "http://"+net.JoinHostPort(address, p.Port.String())+p.Path)
	}
	tried := func(more int) {
		t.Helper()
		alive(func() error {
			resp, err := admin.Get("http://admin/stats?filter=cluster.fingerpost.upstream_cx_connect_fail$")
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			var n int
			if _, err := fmt.Fscanf(resp.Body, "cluster.fingerpost.upstream_cx_connect_fail: %d", &n); err != nil || n < more {
				return fmt.Errorf("Envoy tried %d times to reach the agent (%v)", n, err)
			}
			return nil
		})
	}
	tried(3)
	err := probe()
	if err == nil || !strings.Contains(err.Error(), "waits-for-the-fingerpost-agent-of-this-node") || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("without an agent the probe says %v", err)
	}
	t.Logf("kubectl describe would say: Startup probe failed: %v", err)

	a := s.start(t, "--source", w.source()).ready()
	alive(probe)
	conn := dial(t, fmt.Sprintf("passthrough:127.0.0.1:%d", s.egress))
	// The first call after the probe, when the application is started.
	if _, err := say(t, conn, "shop.v1.Stock"); err != nil {
		t.Errorf("the first call: %v", err)
	}
	reaches(t, conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
	a.connected("prod/web", "cds", "eds", "lds", "rds")

	// The agent is replaced: its socket is another file in the same directory.
	a.stop()
	if err := probe(); err != nil {
		t.Errorf("without its agent a sidecar that works is not ready: %v", err)
	}
	a = s.start(t, "--source", w.source()).ready()
	a.connected("prod/web") // with what it has, so nothing is sent
	reaches(t, conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
	alive(func() error { return nil })
}

func TestInjectedProgramFindsServicesWithoutAProxy(t *testing.T) {
	w, s := shop(t), newSite(t)
	a := s.start(t, "--source", w.source()).ready()
	pod := injected(t, "program", "--mode", "grpc")
	_, env := kubelet(t, pod, &pod.Spec.Containers[0], "127.0.0.1")
	config, ok := strings.CutPrefix(env[len(env)-1], "GRPC_XDS_BOOTSTRAP_CONFIG=")
	if !ok || strings.Contains(config, "$(") {
		t.Fatalf("the last variable is %s", env[len(env)-1])
	}
	// This process has no mount of its own.
	mounted := strings.ReplaceAll(config, pod.Spec.Containers[0].VolumeMounts[0].MountPath+"/ads.sock", s.ads)
	if mounted == config {
		t.Fatalf("the bootstrap leads past the mount: %s", config)
	}
	resolver, err := xds.NewXDSResolverWithConfigForTesting([]byte(mounted))
	if err != nil {
		t.Fatal(err)
	}
	reaches(t, dial(t, "xds:///shop.v1.Cart", grpc.WithResolvers(resolver)), "shop.v1.Cart", "cart-1-a", "cart-1-b")
	a.connected("prod/program", "cds", "eds", "lds")
}

func TestInjectReadsFilesAndStandardInput(t *testing.T) {
	manifest := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: app, image: app}]}\n"
	file := filepath.Join(t.TempDir(), "m.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o644); err != nil {
		t.Fatal(err)
	}
	out, errs, code := run(t, "inject", "-f", file)
	if code != 0 || !strings.Contains(out, "fingerpost-envoy") || errs != "Pod p: injected, mode envoy\n" {
		t.Errorf("exit %d, %s\n%s", code, errs, out)
	}
	cmd := exec.Command(program, "inject", "-f", "-")
	cmd.Stdin = strings.NewReader(out)
	again, err := cmd.Output()
	if err != nil || string(again) != out {
		t.Errorf("from standard input, a second time: %v\n%s", err, again)
	}
	// The environment sets flags, as of every command.
	if out, _, code = runWith(t, []string{"FINGERPOST_MODE=grpc"}, "inject", "-f", file); code != 0 || !strings.Contains(out, "GRPC_XDS_BOOTSTRAP_CONFIG") {
		t.Errorf("exit %d\n%s", code, out)
	}
	if out, _, code = run(t, "inject", "--policies", "--image", "mine:1"); code != 0 || !strings.Contains(out, "mine:1") || !strings.Contains(out, "kind: ValidatingAdmissionPolicyBinding") {
		t.Errorf("exit %d\n%.500s", code, out)
	}
}

func TestInjectThatFailsPrintsNothingButWhy(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	pod := "apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec: {hostNetwork: %v, containers: [{name: app, image: app}]}\n"
	second := file("second", fmt.Sprintf(pod, "a", false)+"---\n"+fmt.Sprintf(pod, "b", true))
	refused(t, 1, second+": document 2 (line 6), Pod b: the pod has hostNetwork", nil, "inject", "-f", second)
	refused(t, 1, "document 1 (line 1): cannot be read", nil, "inject", "-f", file("broken", "a: [\nb: c\n"))
	refused(t, 1, "there is nothing in it", nil, "inject", "-f", file("empty", "\n"))
	refused(t, 1, "no such file", nil, "inject", "-f", filepath.Join(dir, "none"))
	refused(t, 2, "--filename is needed", nil, "inject")
	refused(t, 2, `--mode "x"`, nil, "inject", "-f", second, "--mode", "x")
	refused(t, 2, "is the one on which the sidecar answers", nil, "inject", "--policies", "--egress-port", "15002")
	refused(t, 2, "--policies reads no file", nil, "inject", "--policies", "-f", second)
}

func TestCheckWithoutAClusterLooksAtTheNode(t *testing.T) {
	none := []string{"KUBECONFIG=" + filepath.Join(t.TempDir(), "none"), "HOME=" + t.TempDir()}
	out, errs, code := runWith(t, none, "check", "-o", "json")
	var r preflight.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 || errs != "" {
		t.Fatalf("exit %d, %v, %s\n%s", code, err, errs, out)
	}
	last := r.Findings[len(r.Findings)-1]
	if r.Cluster != "" || last.About != "cluster" || last.State != preflight.Unknown || !strings.Contains(last.Means, "only the node") {
		t.Errorf("%+v", r)
	}
	out, _, code = runWith(t, none, "check", "--node")
	if code != 0 || !strings.Contains(out, "node: kernel") || strings.Contains(out, "cluster ") {
		t.Errorf("exit %d\n%s", code, out)
	}
	refused(t, 1, "kubeconfig", nil, "check", "--kubeconfig", filepath.Join(t.TempDir(), "none"))
	away := filepath.Join(t.TempDir(), "away")
	config := fmt.Sprintf("{apiVersion: v1, kind: Config, current-context: x, contexts: [{name: x, context: {cluster: x}}], clusters: [{name: x, cluster: {server: 'https://127.0.0.1:%d'}}]}", harness.FreePort(t))
	if err := os.WriteFile(away, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	refused(t, 1, "connection refused; --node looks at this machine alone", []string{"KUBECONFIG=" + away}, "check")
	refused(t, 2, "--output", nil, "check", "-o", "xml")
}

func TestCheckOfAClusterThatLacksSomethingExits1(t *testing.T) {
	s := harness.SharedAPIServer(t)
	ns := s.Namespace(t)
	_, err := s.Client.CoreV1().Pods(ns).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "asks", Labels: map[string]string{"fingerpost.dev/inject": "envoy"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if out, errs, code := run(t, "check", "--kubeconfig", s.Kubeconfig); code != 0 || !strings.Contains(out, "namespace "+ns) {
		t.Errorf("exit %d, %s\n%s", code, errs, out)
	}
	n, err := s.Client.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.Labels["pod-security.kubernetes.io/enforce"] = "baseline"
	if _, err := s.Client.CoreV1().Namespaces().Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	out, errs, code := run(t, "check", "--kubeconfig", s.Kubeconfig, "-o", "yaml")
	if code != 1 || !strings.Contains(out, "enforces Pod Security baseline") || !strings.Contains(errs, "rows that say so: 1") {
		t.Errorf("exit %d, %s\n%s", code, errs, out)
	}
}
