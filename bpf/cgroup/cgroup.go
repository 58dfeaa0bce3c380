// Package cgroup finds the cgroup to which a program is attached that is to see
// the sockets of all pods of the node, and says in words why a part of the agent
// that needs BPF is off.
//
// A program counts for the sockets below its cgroup alone. So the directory must
// be that of the host's hierarchy, not of a container's: an agent with a cgroup
// namespace of its own that mounts cgroup2 afresh would watch only itself, and
// nothing would say so (cilium/cilium#16259, #27900).
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNone says that no cgroup2 is mounted where this process sees it.
var ErrNone = errors.New("no cgroup2 is mounted here; mount the host's /sys/fs/cgroup into the agent's container (a host with cgroup v1 alone has none)")

// Find returns the directory of the cgroup2 hierarchy that holds the node's pods:
// its root, or the one below which kubelets make the cgroups of pods (the root of
// a node that is a container itself, as kind's are). Of several mounts the root
// of the hierarchy goes first.
func Find() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	points, err := mounts(f)
	if err != nil {
		return "", err
	}
	return choose(points)
}

// mounts returns where cgroup2 is mounted, by the lines of mountinfo (proc(5)):
//
//	36 35 0:29 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
func mounts(r io.Reader) ([]string, error) {
	var points []string
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		mount, fs, ok := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(mount)
		if kind, _, _ := strings.Cut(fs, " "); !ok || kind != "cgroup2" || len(fields) < 5 {
			continue
		}
		// Space, tab, end of line and backslash are written as octal numbers.
		points = append(points, strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(fields[4]))
	}
	return points, lines.Err()
}

func choose(points []string) (string, error) {
	var holds, refused []string
	for _, dir := range points {
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
			continue // something else is mounted over it
		}
		switch {
		case isRoot(dir):
			return dir, nil
		case hasPods(dir):
			holds = append(holds, dir)
		default:
			refused = append(refused, dir)
		}
	}
	switch {
	case len(holds) > 0:
		return holds[0], nil
	case len(refused) > 0:
		return "", fmt.Errorf("cgroup2 at %s holds no pods: it is a container's own; mount the host's /sys/fs/cgroup into the agent's container", strings.Join(refused, ", "))
	}
	return "", ErrNone
}

// isRoot tells whether the directory is the root of the hierarchy: inode 1, and
// without cgroup.events, which each other cgroup has.
func isRoot(dir string) bool {
	var st unix.Stat_t
	if unix.Stat(dir, &st) != nil || st.Ino != 1 {
		return false
	}
	_, err := os.Stat(filepath.Join(dir, "cgroup.events"))
	return errors.Is(err, os.ErrNotExist)
}

// hasPods tells whether a kubelet makes cgroups right below the directory, with
// either driver: kubepods, kubepods.slice, kubelet, kubelet.slice.
func hasPods(dir string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, e := range entries {
		if e.IsDir() && (strings.HasPrefix(e.Name(), "kubepods") || strings.HasPrefix(e.Name(), "kubelet")) {
			return true
		}
	}
	return false
}
