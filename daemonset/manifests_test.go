package daemonset_test

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/bpf/redirect"
)

func agentPod(t *testing.T) (corev1.PodSpec, corev1.Container) {
	t.Helper()
	return agentPodOf(t, base)
}

func agentPodOf(t *testing.T, dir string) (corev1.PodSpec, corev1.Container) {
	t.Helper()
	pod := daemonSet(t, dir).Spec.Template.Spec
	if len(pod.Containers) != 1 {
		t.Fatalf("%d containers, want 1", len(pod.Containers))
	}
	return pod, pod.Containers[0]
}

func TestAgentUsesHostNetworkAndDeclaresNoPorts(t *testing.T) {
	pod, agent := agentPod(t)
	if !pod.HostNetwork {
		t.Error("hostNetwork is off")
	}
	if pod.HostPID || pod.HostIPC {
		t.Error("hostPID or hostIPC is on")
	}
	if len(agent.Ports) != 0 {
		t.Errorf("declares ports %v, which hostNetwork makes host ports", agent.Ports)
	}
}

func TestProbesAreByExec(t *testing.T) {
	_, agent := agentPod(t)
	for name, p := range map[string]*corev1.Probe{"startup": agent.StartupProbe, "liveness": agent.LivenessProbe, "readiness": agent.ReadinessProbe} {
		if p == nil || p.Exec == nil || len(p.Exec.Command) < 2 || p.Exec.Command[0] != "/fingerpost" {
			t.Errorf("%s probe is not fingerpost by exec: %v", name, p)
		}
	}
	if slices.Contains(agent.LivenessProbe.Exec.Command, "--check") {
		t.Error("a stale source would restart the agent")
	}
}

func TestAgentKnowsItsNodeAndPodAndKeepsItsDirectoriesOnTheHost(t *testing.T) {
	pod, agent := agentPod(t)
	for name, field := range map[string]string{
		"NODE_NAME": "spec.nodeName", "POD_NAMESPACE": "metadata.namespace", "POD_NAME": "metadata.name", "POD_UID": "metadata.uid",
	} {
		if !slices.ContainsFunc(agent.Env, func(e corev1.EnvVar) bool {
			return e.Name == name && e.ValueFrom != nil && e.ValueFrom.FieldRef != nil && e.ValueFrom.FieldRef.FieldPath == field
		}) {
			t.Errorf("%s is not %s", name, field)
		}
	}
	// The agent reads FINGERPOST_<FLAG>, and a Service by that name sets
	// FINGERPOST_PORT.
	if pod.EnableServiceLinks == nil || *pod.EnableServiceLinks {
		t.Error("Services set variables of the agent")
	}
	onHost := map[string]string{}
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			onHost[v.Name] = v.HostPath.Path
		}
	}
	for _, dir := range []string{"/run/fingerpost", "/run/fingerpost-admin", "/var/lib/fingerpost"} {
		if !slices.ContainsFunc(agent.VolumeMounts, func(m corev1.VolumeMount) bool {
			return m.MountPath == dir && onHost[m.Name] == dir && !m.ReadOnly
		}) {
			t.Errorf("%s is not the host's", dir)
		}
	}
}

func TestRolloutTakesOneNodeAtATimeAndEveryNodeHasAnAgent(t *testing.T) {
	spec := daemonSet(t, base).Spec
	u := spec.UpdateStrategy.RollingUpdate
	if u == nil || u.MaxUnavailable == nil || u.MaxUnavailable.IntValue() != 0 || u.MaxSurge == nil || u.MaxSurge.IntValue() != 1 {
		t.Errorf("rollout is %v, want maxSurge 1 and maxUnavailable 0", u)
	}
	// So long the old agent can take the sockets back.
	if spec.MinReadySeconds < 5 {
		t.Errorf("the old agent is ended %d s after the new one was ready", spec.MinReadySeconds)
	}
	// Without it the second agent of a node ends at once.
	if _, agent := agentPod(t); !slices.Contains(agent.Args, "--takeover") {
		t.Errorf("a surge without --takeover: %v", agent.Args)
	}
	// What tells the probes of two agents of a node apart is that each is the
	// first process of its own pid namespace.
	pod, agent := agentPod(t)
	if pod.ShareProcessNamespace != nil && *pod.ShareProcessNamespace {
		t.Error("the containers of the pod share a pid namespace")
	}
	if len(agent.Command) != 0 || len(agent.Args) == 0 || agent.Args[0] != "agent" {
		t.Errorf("the first process is %v %v, want the image's with the argument agent", agent.Command, agent.Args)
	}
	if !slices.ContainsFunc(spec.Template.Spec.Tolerations, func(tol corev1.Toleration) bool {
		return tol.Operator == corev1.TolerationOpExists && tol.Key == "" && tol.Effect == ""
	}) {
		t.Error("some taint keeps the agent off a node")
	}
	if pod.PriorityClassName != "system-node-critical" {
		t.Errorf("the agent is of priority %q, and others may evict it", pod.PriorityClassName)
	}
	for k, v := range spec.Selector.MatchLabels {
		if spec.Template.Labels[k] != v {
			t.Errorf("selector %s=%s does not match the template", k, v)
		}
	}
}

func TestAgentHasNoPrivileges(t *testing.T) {
	_, agent := agentPod(t)
	sc := agent.SecurityContext
	if sc == nil || sc.Capabilities == nil || !slices.Contains(sc.Capabilities.Drop, "ALL") || len(sc.Capabilities.Add) != 0 {
		t.Errorf("capabilities are not dropped: %v", sc)
	}
	if sc.Privileged != nil && *sc.Privileged || sc.AllowPrivilegeEscalation == nil || *sc.AllowPrivilegeEscalation {
		t.Error("privileged, or may become so")
	}
	if sc.ReadOnlyRootFilesystem == nil || !*sc.ReadOnlyRootFilesystem {
		t.Error("the root can be written")
	}
	if sc.SeccompProfile == nil || sc.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("seccomp profile is %v", sc.SeccompProfile)
	}
	if agent.Resources.Requests.Memory().IsZero() || agent.Resources.Limits.Memory().IsZero() {
		t.Error("no memory request or limit")
	}
}

func TestAgentReadsNeitherSecretsNorNodes(t *testing.T) {
	want := []string{"endpointslices", "grpcroutes", "httproutes", "namespaces", "pods", "referencegrants", "services"}
	var got []string
	for _, role := range objects[rbacv1.ClusterRole](t, base, "ClusterRole") {
		if role.Name == reports {
			continue
		}
		for _, rule := range role.Rules {
			got = append(got, rule.Resources...)
			for _, v := range rule.Verbs {
				if v != "get" && v != "list" && v != "watch" {
					t.Errorf("%v may be %q", rule.Resources, v)
				}
			}
			if slices.Contains(rule.APIGroups, "*") {
				t.Error("all API groups")
			}
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("reads %v, want %v", got, want)
	}
}

// reports is the name of the roles for what the elected agent writes.
const reports = "fingerpost-reports"

func TestAgentWritesEventsStatusesOfRoutesItsLeaseAndPodsOfItsNamespaceAlone(t *testing.T) {
	rules := func(rules []rbacv1.PolicyRule) string {
		text, err := yaml.Marshal(rules)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	roles := objects[rbacv1.ClusterRole](t, base, "ClusterRole")
	i := slices.IndexFunc(roles, func(r rbacv1.ClusterRole) bool { return r.Name == reports })
	if len(roles) != 2 || i < 0 {
		t.Fatalf("%d cluster roles, want one to read and %s", len(roles), reports)
	}
	cluster := []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create"}},
		{APIGroups: []string{"gateway.networking.k8s.io"}, Resources: []string{"httproutes/status", "grpcroutes/status"}, Verbs: []string{"patch"}},
	}
	if got, want := rules(roles[i].Rules), rules(cluster); got != want {
		t.Errorf("in the cluster:\n%s\nwant\n%s", got, want)
	}
	lease := []rbacv1.PolicyRule{
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{reports}, Verbs: []string{"get", "update"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"create"}},
	}
	// What the policy fingerpost-agent-pods makes less of.
	pods := []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"patch"}}}
	got := map[string]string{}
	for _, r := range objects[rbacv1.Role](t, base, "Role") {
		if r.Namespace != "fingerpost" {
			t.Errorf("role %s is in the namespace %q", r.Name, r.Namespace)
		}
		got[r.Name] = rules(r.Rules)
	}
	if want := map[string]string{reports: rules(lease), "fingerpost-peer": rules(pods)}; !maps.Equal(got, want) {
		t.Errorf("in its namespace:\n%v\nwant\n%v", got, want)
	}
}

func TestRolesAreBoundToTheAgentsAccount(t *testing.T) {
	account := objects[corev1.ServiceAccount](t, base, "ServiceAccount")[0]
	check := func(role rbacv1.RoleRef, subjects []rbacv1.Subject) {
		t.Helper()
		if len(subjects) != 1 || subjects[0].Name != account.Name || subjects[0].Namespace != account.Namespace {
			t.Errorf("%s is bound to %v, not to %s/%s", role.Name, subjects, account.Namespace, account.Name)
		}
	}
	for _, b := range objects[rbacv1.ClusterRoleBinding](t, base, "ClusterRoleBinding") {
		check(b.RoleRef, b.Subjects)
	}
	for _, b := range objects[rbacv1.RoleBinding](t, base, "RoleBinding") {
		check(b.RoleRef, b.Subjects)
	}
	pod, _ := agentPod(t)
	if pod.ServiceAccountName != account.Name {
		t.Errorf("pod runs as %q", pod.ServiceAccountName)
	}
}

func TestEveryFileIsPartOfAKustomization(t *testing.T) {
	err := filepath.WalkDir(".", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".yaml" || d.Name() == "kustomization.yaml" || !strings.Contains(path, "/") {
			return err
		}
		text, err := os.ReadFile(filepath.Join(filepath.Dir(path), "kustomization.yaml"))
		if err != nil {
			return nil // no kustomization there
		}
		var k struct {
			Resources []string
			Patches   []struct{ Path string }
		}
		if err := yaml.Unmarshal(text, &k); err != nil {
			return err
		}
		for _, p := range k.Patches {
			k.Resources = append(k.Resources, p.Path)
		}
		if !slices.Contains(k.Resources, d.Name()) {
			t.Errorf("%s is not in the kustomization.yaml beside it", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestOverlayKindTakesTheImageThatWasLoadedAndInjects(t *testing.T) {
	_, agent := agentPodOf(t, kind)
	if agent.Image != "fingerpost:kind" || agent.ImagePullPolicy != corev1.PullIfNotPresent {
		t.Errorf("image %s, pulled %s: want fingerpost:kind of the node", agent.Image, agent.ImagePullPolicy)
	}
	// A fresh cluster has no CRDs; what injects sidecars needs none.
	want := append(names(rendered(t, base)),
		"MutatingAdmissionPolicy/fingerpost-inject", "MutatingAdmissionPolicyBinding/fingerpost-inject",
		"ValidatingAdmissionPolicy/fingerpost-inject", "ValidatingAdmissionPolicyBinding/fingerpost-inject")
	slices.Sort(want)
	if got := names(rendered(t, kind)); !slices.Equal(got, want) {
		t.Errorf("objects are\n%v\nwant those of the base and of the injection\n%v", got, want)
	}
}

func TestOverlayProductionAddsAPodMonitorAndNothingElse(t *testing.T) {
	want := append(names(rendered(t, base)), "PodMonitor/fingerpost")
	slices.Sort(want)
	list := rendered(t, production)
	if got := names(list); !slices.Equal(got, want) {
		t.Errorf("objects are\n%v\nwant\n%v", got, want)
	}
	pod, agent := agentPodOf(t, production)
	if !pod.HostNetwork || len(agent.Ports) != 0 {
		t.Errorf("ports %v, which hostNetwork makes host ports", agent.Ports)
	}
	// What Prometheus asks is where the agent answers.
	i := slices.IndexFunc(agent.Env, func(e corev1.EnvVar) bool { return e.Name == "FINGERPOST_HTTP_ADDRESS" })
	if i < 0 || agent.Env[i].Value != ":9641" {
		t.Fatalf("the agent answers on loopback alone: %v", agent.Env)
	}
	monitor := list[slices.IndexFunc(list, func(o *unstructured.Unstructured) bool { return o.GetKind() == "PodMonitor" })]
	text, err := yaml.Marshal(monitor.Object)
	if err != nil {
		t.Fatal(err)
	}
	var m struct {
		Spec struct {
			Selector            struct{ MatchLabels map[string]string }
			PodMetricsEndpoints []struct {
				Path        string
				Relabelings []struct {
					SourceLabels                    []string
					Regex, TargetLabel, Replacement string
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	if len(m.Spec.PodMetricsEndpoints) != 1 {
		t.Fatalf("%d endpoints, want 1", len(m.Spec.PodMetricsEndpoints))
	}
	for address, want := range map[string]string{"10.0.0.7": "10.0.0.7:9641", "fd00::7": "[fd00::7]:9641"} {
		target := address
		for _, r := range m.Spec.PodMetricsEndpoints[0].Relabelings {
			re := regexp.MustCompile("^(?:" + r.Regex + ")$") // as Prometheus anchors it
			if r.TargetLabel == "__address__" && slices.Equal(r.SourceLabels, []string{"__meta_kubernetes_pod_ip"}) && re.MatchString(address) {
				target = re.ReplaceAllString(address, r.Replacement)
			}
		}
		if target != want {
			t.Errorf("a pod at %s is asked at %s, want %s", address, target, want)
		}
	}
	template := daemonSet(t, production).Spec.Template.Labels
	for k, v := range m.Spec.Selector.MatchLabels {
		if template[k] != v {
			t.Errorf("the monitor looks for %s=%s, which the pods have not: %v", k, v, template)
		}
	}
}

func TestComponentStartupTaintAddsItsRightWithThePolicyThatBoundsIt(t *testing.T) {
	want := append(names(rendered(t, base)), "ClusterRole/fingerpost-startup-taint", "ClusterRoleBinding/fingerpost-startup-taint",
		"ValidatingAdmissionPolicy/fingerpost-startup-taint", "ValidatingAdmissionPolicyBinding/fingerpost-startup-taint")
	slices.Sort(want)
	if got := names(rendered(t, startupTaint)); !slices.Equal(got, want) {
		t.Errorf("objects are\n%v\nwant\n%v", got, want)
	}
	lifts := corev1.EnvVar{Name: "FINGERPOST_LIFT_TAINT", Value: "true"}
	if _, agent := agentPodOf(t, startupTaint); !slices.Contains(agent.Env, lifts) {
		t.Errorf("the agent lifts nothing: %v", agent.Env)
	}
	if _, agent := agentPod(t); slices.Contains(agent.Env, lifts) {
		t.Error("the base lifts it too, and has no right to")
	}
}

func TestComponentIdentityAddsOneCapabilityAndNothingElse(t *testing.T) {
	const dir = "testdata/identity"
	if got, want := names(rendered(t, dir)), names(rendered(t, base)); !slices.Equal(got, want) {
		t.Errorf("objects are\n%v\nwant\n%v", got, want)
	}
	with, without := daemonSet(t, dir), daemonSet(t, base)
	capabilities := with.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities
	if !slices.Equal(capabilities.Add, []corev1.Capability{"NET_ADMIN"}) {
		t.Errorf("capabilities added: %v", capabilities.Add)
	}
	capabilities.Add = nil
	if !reflect.DeepEqual(with.Spec, without.Spec) {
		t.Errorf("more differs:\n%v\nfrom\n%v", with.Spec, without.Spec)
	}
}

// The parts that ask something of the kernel: each component adds what
// docs/operations.md says, and the base and the production overlay have none of it.
func TestKernelPartsAddTheirCapabilitiesAndMountsAndNothingElse(t *testing.T) {
	const dir = "overlays/kernel"
	if got, want := names(rendered(t, dir)), names(rendered(t, production)); !slices.Equal(got, want) {
		t.Errorf("objects are\n%v\nwant\n%v", got, want)
	}
	with, without := daemonSet(t, dir).Spec, daemonSet(t, production).Spec
	agent, plain := &with.Template.Spec.Containers[0], &without.Template.Spec.Containers[0]
	if add := agent.SecurityContext.Capabilities.Add; !slices.Equal(add, []corev1.Capability{"BPF", "NET_ADMIN"}) {
		t.Errorf("capabilities added: %v", add)
	}
	agent.SecurityContext.Capabilities.Add = nil
	if add := plain.SecurityContext.Capabilities.Add; len(add) > 0 {
		t.Errorf("the production overlay adds %v", add)
	}
	extra := map[string]bool{}
	agent.Env = slices.DeleteFunc(agent.Env, func(e corev1.EnvVar) bool {
		own := e.Name == "FINGERPOST_REDIRECT" && e.Value == "true"
		extra["redirect"] = extra["redirect"] || own
		return own
	})
	agent.VolumeMounts = slices.DeleteFunc(agent.VolumeMounts, func(m corev1.VolumeMount) bool {
		own := reflect.DeepEqual(m, corev1.VolumeMount{Name: "cgroups", MountPath: "/host/sys/fs/cgroup", ReadOnly: true}) ||
			reflect.DeepEqual(m, corev1.VolumeMount{Name: "bpf", MountPath: filepath.Dir(redirect.DefaultDir)})
		extra[m.Name] = extra[m.Name] || own
		return own
	})
	with.Template.Spec.Volumes = slices.DeleteFunc(with.Template.Spec.Volumes, func(v corev1.Volume) bool {
		return v.Name == "cgroups" && v.HostPath.Path == "/sys/fs/cgroup" || v.Name == "bpf" && v.HostPath.Path == "/sys/fs/bpf"
	})
	if !extra["redirect"] || !extra["cgroups"] || !extra["bpf"] {
		t.Errorf("it has only %v", extra)
	}
	if !reflect.DeepEqual(with, without) {
		t.Errorf("more differs:\n%v\nfrom\n%v", with, without)
	}
}

func TestComponentObserveAddsTwoCapabilitiesAndSightOfTheCgroups(t *testing.T) {
	const dir = "testdata/observe"
	if got, want := names(rendered(t, dir)), names(rendered(t, base)); !slices.Equal(got, want) {
		t.Errorf("objects are\n%v\nwant\n%v", got, want)
	}
	with, without := daemonSet(t, dir), daemonSet(t, base)
	pod := &with.Spec.Template.Spec
	agent := &pod.Containers[0]
	if caps := agent.SecurityContext.Capabilities; !slices.Equal(caps.Add, []corev1.Capability{"BPF", "NET_ADMIN"}) {
		t.Errorf("capabilities added: %v", caps.Add)
	}
	agent.SecurityContext.Capabilities.Add = nil
	for _, m := range agent.VolumeMounts {
		if m.Name == "cgroups" && !m.ReadOnly {
			t.Error("the host's cgroups are mounted writable")
		}
	}
	for _, v := range pod.Volumes {
		if v.Name == "cgroups" && (v.HostPath == nil || v.HostPath.Path != "/sys/fs/cgroup") {
			t.Errorf("cgroups are %+v", v)
		}
	}
	mounts, volumes := len(agent.VolumeMounts), len(pod.Volumes)
	agent.VolumeMounts = slices.DeleteFunc(agent.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "cgroups" })
	pod.Volumes = slices.DeleteFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "cgroups" })
	if len(agent.VolumeMounts) != mounts-1 || len(pod.Volumes) != volumes-1 || !reflect.DeepEqual(with.Spec, without.Spec) {
		t.Errorf("more differs, or less:\n%v\nfrom\n%v", with.Spec, without.Spec)
	}
}

func TestOperationsSaysOfEveryObjectWhyItIsThere(t *testing.T) {
	text, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "## What is installed")
	table, _, _ = strings.Cut(table, "\n## ")
	var listed []string
	for line := range strings.SplitSeq(table, "\n") {
		if cells := strings.Split(line, "|"); len(cells) > 2 && strings.Contains(cells[1], "/") {
			listed = append(listed, strings.Split(strings.TrimSpace(cells[1]), ", ")...)
		}
	}
	slices.Sort(listed)
	if want := names(rendered(t, production)); !slices.Equal(listed, want) {
		t.Errorf("the table has\n%v\nwant\n%v", listed, want)
	}
	for _, o := range rendered(t, production) {
		if o.GetLabels()["app.kubernetes.io/part-of"] != "fingerpost" {
			t.Errorf("%s/%s is not labelled as a part", o.GetKind(), o.GetName())
		}
	}
}

func daemonSet(t *testing.T, dir string) appsv1.DaemonSet {
	t.Helper()
	return objects[appsv1.DaemonSet](t, dir, "DaemonSet")[0]
}
