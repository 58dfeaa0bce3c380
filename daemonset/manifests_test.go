package daemonset_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// documents returns the documents of kind in a manifest, decoded strictly, so
// that a misspelt field fails.
func documents[T any](t *testing.T, file, kind string) []T {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var list []T
	for d := utilyaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(text))); ; {
		buf := make([]byte, len(text)+1)
		n, err := d.Read(buf)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		var head struct{ Kind string }
		if err := yaml.Unmarshal(buf[:n], &head); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if head.Kind != kind {
			continue
		}
		var v T
		if err := yaml.UnmarshalStrict(buf[:n], &v); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		list = append(list, v)
	}
	if len(list) == 0 {
		t.Fatalf("%s: no %s", file, kind)
	}
	return list
}

func agentPod(t *testing.T) (corev1.PodSpec, corev1.Container) {
	t.Helper()
	pod := documents[appsv1.DaemonSet](t, "daemonset.yaml", "DaemonSet")[0].Spec.Template.Spec
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

func TestAgentKnowsItsNodeAndKeepsItsDirectoriesOnTheHost(t *testing.T) {
	pod, agent := agentPod(t)
	if !slices.ContainsFunc(agent.Env, func(e corev1.EnvVar) bool {
		return e.Name == "NODE_NAME" && e.ValueFrom != nil && e.ValueFrom.FieldRef != nil && e.ValueFrom.FieldRef.FieldPath == "spec.nodeName"
	}) {
		t.Error("NODE_NAME is not spec.nodeName")
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
	spec := documents[appsv1.DaemonSet](t, "daemonset.yaml", "DaemonSet")[0].Spec
	u := spec.UpdateStrategy.RollingUpdate
	if u == nil || u.MaxUnavailable == nil || u.MaxUnavailable.IntValue() != 0 || u.MaxSurge == nil || u.MaxSurge.IntValue() != 1 {
		t.Errorf("rollout is %v, want maxSurge 1 and maxUnavailable 0", u)
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
	if sc.Privileged != nil && *sc.Privileged {
		t.Error("privileged")
	}
	if agent.Resources.Requests.Memory().IsZero() || agent.Resources.Limits.Memory().IsZero() {
		t.Error("no memory request or limit")
	}
}

func TestAgentReadsNeitherSecretsNorNodes(t *testing.T) {
	want := []string{"endpointslices", "grpcroutes", "httproutes", "namespaces", "pods", "referencegrants", "services"}
	var got []string
	for _, role := range documents[rbacv1.ClusterRole](t, "rbac.yaml", "ClusterRole") {
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

func TestAgentWritesEventsStatusesOfRoutesAndItsLeaseAlone(t *testing.T) {
	rules := func(rules []rbacv1.PolicyRule) string {
		text, err := yaml.Marshal(rules)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	roles := documents[rbacv1.ClusterRole](t, "rbac.yaml", "ClusterRole")
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
	role := documents[rbacv1.Role](t, "rbac.yaml", "Role")
	if len(role) != 1 || rules(role[0].Rules) != rules(lease) {
		t.Errorf("in its namespace: %v\nwant\n%s", role, rules(lease))
	}
	_, agent := agentPod(t)
	if !slices.ContainsFunc(agent.Env, func(e corev1.EnvVar) bool {
		return e.Name == "POD_NAMESPACE" && e.ValueFrom != nil && e.ValueFrom.FieldRef != nil && e.ValueFrom.FieldRef.FieldPath == "metadata.namespace"
	}) {
		t.Error("POD_NAMESPACE is not metadata.namespace, where the Lease may be")
	}
}

func TestRolesAreBoundToTheAgentsAccount(t *testing.T) {
	account := documents[corev1.ServiceAccount](t, "rbac.yaml", "ServiceAccount")[0]
	check := func(role rbacv1.RoleRef, subjects []rbacv1.Subject) {
		t.Helper()
		if len(subjects) != 1 || subjects[0].Name != account.Name || subjects[0].Namespace != account.Namespace {
			t.Errorf("%s is bound to %v, not to %s/%s", role.Name, subjects, account.Namespace, account.Name)
		}
	}
	for _, b := range documents[rbacv1.ClusterRoleBinding](t, "rbac.yaml", "ClusterRoleBinding") {
		check(b.RoleRef, b.Subjects)
	}
	for _, b := range documents[rbacv1.RoleBinding](t, "rbac.yaml", "RoleBinding") {
		check(b.RoleRef, b.Subjects)
	}
	pod, _ := agentPod(t)
	if pod.ServiceAccountName != account.Name {
		t.Errorf("pod runs as %q", pod.ServiceAccountName)
	}
}

func TestKustomizationListsEveryManifest(t *testing.T) {
	text, err := os.ReadFile("kustomization.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var k struct{ Resources []string }
	if err := yaml.Unmarshal(text, &k); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		name := e.Name()
		if len(name) > 5 && name[len(name)-5:] == ".yaml" && name != "kustomization.yaml" && !slices.Contains(k.Resources, name) {
			t.Errorf("%s is not in kustomization.yaml", name)
		}
	}
}
