package identity

import (
	"regexp"
	"slices"
	"strings"
)

// podUID finds what kubelets call a pod's cgroup, with either driver: "pod" and
// the UID, as a whole name or behind the names of the slices above it, in which
// the systemd driver writes "_" for "-". A static pod's is a hash without dashes.
//
//	/kubepods/burstable/pod<uid>/<container>
//	/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<container>.scope
//	/system.slice/containerd.service/kubepods-pod<uid>.slice:cri-containerd:<container>
var podUID = regexp.MustCompile(`(?:^|[/:-])pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?:[/:]|$)`)

// uidsIn returns the UIDs of pods that the lines of /proc/<pid>/cgroup name,
// each once, with dashes. A process can make cgroups below its own and call them
// as it likes, but not leave those above: so more than one is no answer.
func uidsIn(text string) []string {
	var uids []string
	for line := range strings.Lines(text) {
		// hierarchy-ID:controllers:path (cgroups(7)); the path may hold colons.
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) < 3 {
			continue
		}
		for rest := parts[2]; ; {
			m := podUID.FindStringSubmatchIndex(rest)
			if m == nil {
				break
			}
			uid := strings.ReplaceAll(rest[m[2]:m[3]], "_", "-")
			if !slices.Contains(uids, uid) {
				uids = append(uids, uid)
			}
			rest = rest[m[3]:] // the separator may begin the next
		}
	}
	return uids
}

// static tells that a UID is the hash by which a kubelet calls a static pod,
// which the API server knows by another one.
func static(uid string) bool { return !strings.Contains(uid, "-") }
