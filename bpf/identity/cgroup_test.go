package identity_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/bpf/identity"
)

// The forms that kubelets, drivers and runtimes give to the cgroups of a pod;
// several are those of spiffe/spire#1535, #1081, #2578 and #4088.
func TestCgroupNamesItsPod(t *testing.T) {
	const (
		uid   = "a1b2c3d4-e5f6-4789-8abc-0123456789ab"
		under = "a1b2c3d4_e5f6_4789_8abc_0123456789ab"
		other = "ffffffff-e5f6-4789-8abc-0123456789ab"
		hash  = "0123456789abcdef0123456789abcdef" // a static pod's
		id    = "45490e76e0878aaa4d9808f7d2eefba37f093c3efbba9838b6d8ab804d9bd814"
	)
	for name, test := range map[string]struct {
		text string
		want []string
	}{
		"cgroupfs, burstable":  {"4:memory:/kubepods/burstable/pod" + uid + "/" + id, []string{uid}},
		"cgroupfs, guaranteed": {"4:memory:/kubepods/pod" + uid + "/" + id, []string{uid}},
		"cgroupfs, v2":         {"0::/kubepods/besteffort/pod" + uid + "/" + id, []string{uid}},
		"cgroupfs, the pod's":  {"0::/kubepods/besteffort/pod" + uid, []string{uid}},
		"systemd, burstable":   {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + under + ".slice/cri-containerd-" + id + ".scope", []string{uid}},
		"systemd, guaranteed":  {"0::/kubepods.slice/kubepods-pod" + under + ".slice/crio-" + id + ".scope", []string{uid}},
		"systemd, the pod's":   {"0::/kubepods.slice/kubepods-pod" + under + ".slice", []string{uid}},
		"systemd by containerd's own name": {"0::/system.slice/containerd.service/kubepods-burstable-pod" + under +
			".slice:cri-containerd:" + id, []string{uid}},
		"kind, systemd":  {"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + under + ".slice/cri-containerd-" + id + ".scope", []string{uid}},
		"kind, cgroupfs": {"0::/kubelet/kubepods/besteffort/pod" + uid + "/" + id, []string{uid}},
		"kind, seen from its host": {"11:cpu:/docker/" + id + "/kubelet/kubepods/pod" + uid + "/" + id + "\n10:memory:/docker/" + id +
			"/kubelet/kubepods/pod" + uid + "/" + id, []string{uid}},
		"another cgroup namespace":          {"0::/../../pod" + uid + "/" + id, []string{uid}},
		"another cgroup namespace, systemd": {"0::/../../kubepods-besteffort-pod" + under + ".slice/cri-containerd-" + id + ".scope", []string{uid}},
		"another cgroup namespace, no pod":  {"0::/../crio-" + id + ".scope", nil},
		"hybrid":                            {"12:pids:/kubepods/pod" + uid + "/" + id + "\n1:name=systemd:/kubepods/pod" + uid + "/" + id + "\n0::/", []string{uid}},
		"CRI-O's monitor": {"9:cpu:/kubepods.slice/kubepods-pod" + under + ".slice/crio-" + id + ".scope\n1:name=systemd:/kubepods.slice/kubepods-pod" + under +
			".slice/crio-conmon-" + id + ".scope", []string{uid}},
		"static pod":      {"0::/kubepods/burstable/pod" + hash + "/" + id, []string{hash}},
		"a cgroup below":  {"0::/kubepods/pod" + uid + "/" + id + "/kubepods/pod" + other, []string{uid, other}},
		"lines disagree":  {"2:cpu:/kubepods/pod" + uid + "/" + id + "\n1:memory:/kubepods/pod" + other + "/" + id, []string{uid, other}},
		"a lookalike":     {"0::/user.slice/mypod" + uid + "/x", nil},
		"another ending":  {"0::/kubepods/pod" + uid + "x/" + id, nil},
		"a controller":    {"5:pod" + uid + ":/", nil},
		"not a UID":       {"0::/kubepods/podinfo/" + id, nil},
		"the host":        {"0::/init.scope", nil},
		"a user's":        {"0::/user.slice/user-0.slice/session-1.scope", nil},
		"nothing":         {"", nil},
		"no such line":    {"rubbish\n::\n", nil},
		"colon in a name": {"0::/a:b/kubepods/pod" + uid + "/" + id, []string{uid}},
	} {
		if got := identity.UIDsIn(test.text); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
		if got := identity.UIDsIn(test.text + "\n"); !slices.Equal(got, test.want) {
			t.Errorf("%s, with an end of line: %q, want %q", name, got, test.want)
		}
	}
}

func TestTwoMethodsMakeOneProof(t *testing.T) {
	a := identity.Pod{Namespace: "prod", Name: "a", UID: "ua"}
	b := identity.Pod{Namespace: "prod", Name: "b", UID: "ub"}
	h := identity.Pod{Namespace: "kube-system", Name: "h", UID: "uh", HostNetwork: true}
	type v = identity.Verdict
	off := v{Reason: "off"}
	for name, test := range map[string]struct {
		net, proc v
		pod       string
		method    identity.Method
		reason    string
		pending   bool
	}{
		"both the same":             {v{Pod: &a}, v{Pod: &a, UID: "ua"}, "prod/a", identity.NetNS, "", false},
		"netns alone":               {v{Pod: &a}, off, "prod/a", identity.NetNS, "", false},
		"pidfd alone":               {off, v{Pod: &a, UID: "ua"}, "prod/a", identity.PIDFD, "", false},
		"they differ":               {v{Pod: &a}, v{Pod: &b, UID: "ub"}, "", identity.None, "of pod prod/a, the process of pod prod/b", false},
		"a UID of no pod":           {v{Pod: &a}, v{UID: "new", Pending: true, Reason: "unknown"}, "", identity.None, "UID new, which is not known", true},
		"a pod of the host":         {v{Host: true, Reason: "host"}, v{Pod: &h, UID: "uh"}, "kube-system/h", identity.PIDFD, "", false},
		"a pod with a host's":       {v{Host: true, Reason: "host"}, v{Pod: &a, UID: "ua"}, "", identity.None, "has its own", false},
		"a host's, with a pod's":    {v{Pod: &a}, v{Pod: &h, UID: "uh"}, "", identity.None, "kube-system/h", false},
		"the link says nothing":     {v{Reason: "cilium_host", Claims: []identity.Pod{a}}, v{Pod: &a, UID: "ua"}, "prod/a", identity.PIDFD, "", false},
		"nested, nothing claimed":   {v{Reason: "no address"}, v{Pod: &a, UID: "ua"}, "prod/a", identity.PIDFD, "", false},
		"nested, another's claimed": {v{Reason: "no link", Claims: []identity.Pod{b}}, v{Pod: &a, UID: "ua"}, "", identity.None, "claims the address of pod prod/b", false},
		"neither":                   {v{Reason: "n"}, v{Reason: "p"}, "", identity.None, "netns: n; pidfd: p", false},
		"neither, not yet":          {v{Reason: "n", Pending: true}, v{Reason: "p"}, "", identity.None, "netns: n; pidfd: p", true},
		"not yet, by the process":   {v{Reason: "n"}, v{Reason: "p", UID: "x", Pending: true}, "", identity.None, "netns: n; pidfd: p", true},
	} {
		got := identity.Join(test.net, test.proc)
		pod := ""
		if got.Method != identity.None {
			pod = got.Pod.String()
		}
		if pod != test.pod || got.Method != test.method || !strings.Contains(got.Reason, test.reason) || (got.Reason == "") != (test.pod != "") || got.Pending != test.pending {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
