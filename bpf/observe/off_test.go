package observe_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/observe"
	"github.com/fingerpost/fingerpost/test/harness"
)

// off wants nothing to be observed at a cgroup, for a reason of one line.
func off(t *testing.T, dir, why string) {
	t.Helper()
	o, err := observe.Open(observe.Options{Cgroup: dir})
	if err == nil {
		o.Close()
		t.Fatalf("%s is observed, though %s", dir, why)
	}
	if !strings.Contains(err.Error(), why) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%s is off: %v, want %q", dir, err, why)
	}
}

// asks is what an agent says that is started so.
func asks(t *testing.T, c *harness.Cgroup, change func(*exec.Cmd)) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"=agent")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if c != nil {
		cmd.Env = append(cmd.Env, "CGROUP="+c.Dir)
	}
	change(cmd)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// Each capability that is missing is named, and both are enough, for whoever has
// no other.
func TestCapabilities(t *testing.T) {
	c := harness.NewCgroup(t)
	// One who is not root cannot reach the binary where go test has it.
	dir, err := os.MkdirTemp("", "observe-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	program, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "agent"), program, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	for want, caps := range map[string][]uintptr{
		"on":                            {unix.CAP_BPF, unix.CAP_NET_ADMIN},
		"off: CAP_BPF is missing":       {unix.CAP_NET_ADMIN},
		"off: CAP_NET_ADMIN is missing": {unix.CAP_BPF},
		"off: CAP_BPF and CAP_NET_ADMIN are missing": nil,
	} {
		got := asks(t, c, func(cmd *exec.Cmd) {
			cmd.Path, cmd.Dir = filepath.Join(dir, "agent"), "/"
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
			cmd.SysProcAttr.AmbientCaps = caps
		})
		if got != want {
			t.Errorf("with %v: %s, want %s", caps, got, want)
		}
	}
	// The capabilities of a user namespace's root are worth nothing.
	got := asks(t, c, func(cmd *exec.Cmd) {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
	})
	if !strings.HasPrefix(got, "off: the kernel does not permit BPF here: ") {
		t.Errorf("in a user namespace: %s", got)
	}
}

// mounts are those of cgroup file systems, the last first.
func mounts(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	var dirs []string
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); strings.HasPrefix(f[2], "cgroup") || f[2] == "tracefs" || f[2] == "debugfs" {
			dirs = append([]string{f[1]}, dirs...)
		}
	}
	return strings.Join(dirs, " ")
}

// private gives a command mounts of its own.
func private(cmd *exec.Cmd) {
	cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNS
	cmd.SysProcAttr.Unshareflags = unix.CLONE_NEWNS // makes them private
}

// A host without cgroup2, or an agent that has none mounted (kmesh-net/kmesh#1797,
// merbridge/merbridge#124).
func TestNoCgroup2(t *testing.T) {
	harness.NewCgroup(t)
	got := asks(t, nil, func(cmd *exec.Cmd) {
		private(cmd)
		cmd.Env = append(cmd.Env, "UNMOUNT="+mounts(t))
	})
	if want := "off: no cgroup2 is mounted here"; !strings.HasPrefix(got, want) {
		t.Errorf("%s, want %s", got, want)
	}
}

// A container with a cgroup namespace of its own that mounts cgroup2 afresh sees
// itself alone: nothing is observed, rather than nobody (cilium/cilium#27900).
func TestCgroupNamespaceOfItsOwn(t *testing.T) {
	c := harness.NewCgroup(t)
	at := t.TempDir()
	got := asks(t, nil, func(cmd *exec.Cmd) {
		private(cmd)
		cmd.SysProcAttr.Unshareflags |= unix.CLONE_NEWCGROUP
		c.Hold(cmd.SysProcAttr)
		cmd.Env = append(cmd.Env, "UNMOUNT="+mounts(t), "MOUNT="+at)
	})
	if want := "off: cgroup2 at " + at + " holds no pods"; !strings.HasPrefix(got, want) {
		t.Errorf("%s, want %s", got, want)
	}
	// A node that is a container, as kind's are: its pods are below.
	c.Below(t, "kubelet.slice")
	got = asks(t, nil, func(cmd *exec.Cmd) {
		private(cmd)
		cmd.SysProcAttr.Unshareflags |= unix.CLONE_NEWCGROUP
		c.Hold(cmd.SysProcAttr)
		cmd.Env = append(cmd.Env, "UNMOUNT="+mounts(t), "MOUNT="+at)
	})
	if got != "on" {
		t.Errorf("a node that is a container: %s", got)
	}
}

// Neither tracefs nor debugfs is needed (coroot/coroot#245).
func TestNoTracefs(t *testing.T) {
	got := asks(t, harness.NewCgroup(t), func(cmd *exec.Cmd) {
		private(cmd)
		var tracing []string
		for _, dir := range strings.Fields(mounts(t)) {
			if strings.Contains(dir, "trac") || strings.Contains(dir, "debug") {
				tracing = append(tracing, dir)
			}
		}
		cmd.Env = append(cmd.Env, "UNMOUNT="+strings.Join(append(tracing, "/sys/kernel/tracing", "/sys/kernel/debug"), " "))
	})
	if got != "on" {
		t.Error(got)
	}
}

func TestDirectoryThatIsNoCgroup(t *testing.T) {
	off(t, t.TempDir(), "is not a directory of a cgroup2")
}

// What is not there sees nothing, and says so to nobody.
func TestNoObserver(t *testing.T) {
	var none *observe.Observer
	if err := none.Read(); err != nil {
		t.Error(err)
	}
	none.All(func(s observe.Stat) { t.Errorf("%+v", s) })
	if totals, err := none.Totals(); err != nil || totals.Connects != 0 {
		t.Errorf("%+v, %v", totals, err)
	}
}
