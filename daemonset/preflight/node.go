package preflight

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

// Machine looks at the machine on which it runs. In the agent's pod that is the
// node; its network and its kernel are then the node's.
func Machine(ctx context.Context, r *Report, root, adsSocket string) {
	r.Node, _ = os.Hostname()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		r.add("node: kernel", Unknown, err.Error(), "")
	} else {
		r.kernel("node: kernel", unix.ByteSliceToString(u.Release[:]))
	}

	switch text, err := os.ReadFile(filepath.Join(root, "sys/fs/selinux/enforce")); {
	case err != nil:
		r.add("node: SELinux", Good, "not there, or not to be seen from here", "")
	case strings.TrimSpace(string(text)) == "1":
		r.add("node: SELinux", Note, "enforcing",
			"containers may be kept from the sockets below /run/fingerpost: calls fail with permission denied until the policy lets container_t connect there")
	default:
		r.add("node: SELinux", Good, "permissive", "")
	}

	switch text, err := os.ReadFile(filepath.Join(root, "proc/sys/net/ipv6/conf/all/disable_ipv6")); {
	case err != nil || strings.TrimSpace(string(text)) != "0":
		r.add("node: IPv6", Note, "off", "pods are reached by IPv4 alone")
	default:
		r.add("node: IPv6", Good, "on", "")
	}

	if text, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo")); err != nil {
		r.add("node: cgroup2", Unknown, err.Error(), "")
	} else if !strings.Contains(string(text), " - cgroup2 ") {
		r.add("node: cgroup2", Note, "not mounted, or not to be seen from here", "redirect and observe will be off; nothing else depends on it")
	} else {
		r.add("node: cgroup2", Good, "mounted", "")
	}

	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var d net.Dialer
	if conn, err := d.DialContext(ctx, "unix", adsSocket); err != nil {
		r.add("node: agent", Note, fmt.Sprintf("nobody answers at %s: %v", adsSocket, err), "of no importance if this is no node; else its pods wait for their configuration")
	} else {
		conn.Close()
		r.add("node: agent", Good, "answers at "+adsSocket, "")
	}
}

// kernelParts are the parts that need a kernel of some age (the changelogs of
// Linux; docs.ebpf.io for the attach types).
var kernelParts = []struct {
	major, minor int
	part         string
}{
	{5, 8, "redirect and observe (cgroup links 5.7, getpeername 5.8)"},
	{6, 5, "the second proof of who calls (SO_PEERPIDFD)"},
}

// kernel judges a release of Linux.
func (r *Report) kernel(about, release string) {
	var major, minor int
	if _, err := fmt.Sscanf(strings.TrimLeftFunc(release, unicode.IsSpace), "%d.%d", &major, &minor); err != nil {
		r.add(about, Unknown, release, "")
		return
	}
	var off []string
	for _, p := range kernelParts {
		if major < p.major || major == p.major && minor < p.minor {
			off = append(off, fmt.Sprintf("%s, from %d.%d", p.part, p.major, p.minor))
		}
	}
	if len(off) == 0 {
		r.add(about, Good, release, "")
		return
	}
	r.add(about, Note, release, "too old for "+strings.Join(off, "; ")+"; nothing else depends on it")
}
