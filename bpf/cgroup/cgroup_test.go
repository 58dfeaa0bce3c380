package cgroup_test

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/cgroup"
	"github.com/fingerpost/fingerpost/test/harness"
)

// Where cgroup2 is mounted, as hosts and containers have it (merbridge/merbridge#60
// and #124: it is not always at /sys/fs/cgroup, nor anywhere).
func TestMountinfo(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want []string
	}{
		"cgroup2 alone": {"31 23 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n", []string{"/sys/fs/cgroup"}},
		"hybrid": {"30 23 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n31 30 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n" +
			"32 30 0:28 / /sys/fs/cgroup/systemd rw shared:10 - cgroup cgroup rw,name=systemd\n", []string{"/sys/fs/cgroup/unified"}},
		"cgroup v1 alone":       {"30 23 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n32 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", nil},
		"several":               {"31 23 0:27 / /sys/fs/cgroup ro master:2 shared:3 - cgroup2 cgroup2 rw\n40 23 0:27 /kubepods.slice /host/cg rw - cgroup2 cgroup rw\n", []string{"/sys/fs/cgroup", "/host/cg"}},
		"no optional fields":    {"31 23 0:27 / /cg rw - cgroup2 none rw\n", []string{"/cg"}},
		"spaces in its name":    {`31 23 0:27 / /a\040b\134c rw - cgroup2 none rw` + "\n", []string{`/a b\c`}},
		"a device of that name": {"31 23 8:1 / /mnt rw - ext4 cgroup2 rw\n", nil},
		"rubbish":               {"\n- cgroup2\n1 2 3 - cgroup2 x\n", nil},
		"nothing":               {"", nil},
	} {
		if got, err := cgroup.Mounts(strings.NewReader(test.text)); err != nil || !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, %v, want %q", name, got, err, test.want)
		}
	}
}

// A directory counts if it is the root, or if a kubelet makes pods' cgroups below
// it; the root goes first.
func TestDirectoryThatHoldsThePods(t *testing.T) {
	own, node := harness.NewCgroup(t), harness.NewCgroup(t)
	node.Below(t, "kubepods")
	systemd := harness.NewCgroup(t)
	systemd.Below(t, "kubelet.slice")
	lookalike := harness.NewCgroup(t)
	lookalike.Below(t, "mykubepods")
	plain := t.TempDir()
	if err := os.Mkdir(plain+"/kubepods", 0o755); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		points []string
		want   string
		reason string
	}{
		"of a node":                 {points: []string{node.Dir}, want: node.Dir},
		"of a node, systemd":        {points: []string{systemd.Dir}, want: systemd.Dir},
		"of a container":            {points: []string{own.Dir}, reason: "cgroup2 at " + own.Dir + " holds no pods"},
		"of a container and a node": {points: []string{own.Dir, node.Dir}, want: node.Dir},
		"something like it":         {points: []string{lookalike.Dir}, reason: "holds no pods"},
		"another mounted over it":   {points: []string{plain}, reason: cgroup.ErrNone.Error()},
		"it has gone":               {points: []string{"/nowhere/at/all"}, reason: cgroup.ErrNone.Error()},
		"none":                      {reason: cgroup.ErrNone.Error()},
	} {
		got, err := cgroup.Choose(test.points)
		if got != test.want || (err == nil) != (test.reason == "") || err != nil && !strings.Contains(err.Error(), test.reason) {
			t.Errorf("%s: %q, %v, want %q %q", name, got, err, test.want, test.reason)
		}
	}
	if dir, err := cgroup.Find(); err == nil {
		if got, err := cgroup.Choose([]string{node.Dir, dir}); err != nil || got != dir {
			t.Errorf("of a node and the root %s: %s, %v", dir, got, err)
		}
	} else if !errors.Is(err, cgroup.ErrNone) && !strings.Contains(err.Error(), "holds no pods") {
		t.Error(err)
	}
}

// Errors of the kernel become one line that says what is missing.
func TestWhatIsMissingIsNamed(t *testing.T) {
	for _, test := range []struct {
		got  error
		want string
	}{
		{cgroup.NotLoaded(&ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"0: R1=ctx()", "R6 pointer arithmetic prohibited"}}, "Linux 5.9"), "refuses the program: permission denied"},
		{cgroup.NotLoaded(&ebpf.VerifierError{Cause: unix.EINVAL}, "Linux 5.9"), "lacks what is needed; Linux 5.9 has it"},
		{cgroup.NotLoaded(unix.EPERM, "Linux 5.9"), "the kernel does not permit BPF here"},
		{cgroup.NotLoaded(ebpf.ErrNotSupported, "Linux 5.9"), "lacks what is needed; Linux 5.9 has it"},
		{cgroup.NotAttached(unix.EPERM, "/cg"), "without BPF_F_ALLOW_MULTI is attached to it or above"},
		{cgroup.NotAttached(unix.E2BIG, "/cg"), "it has 64 programs"},
		{cgroup.NotAttached(unix.EBADF, "/cg"), "/cg is not a directory of a cgroup2"},
		{cgroup.NotAttached(unix.EIO, "/cg"), "the cgroup /cg: input/output error"},
	} {
		if os.Geteuid() != 0 && strings.Contains(test.want, "permit") {
			continue // what is missing then is a capability
		}
		if !strings.Contains(test.got.Error(), test.want) || strings.Contains(test.got.Error(), "\n") {
			t.Errorf("%v, want %q", test.got, test.want)
		}
	}
	if err := cgroup.Permitted(ebpf.SockOps); err != nil && os.Geteuid() == 0 {
		t.Errorf("not permitted here: %v", err)
	}
	if err := cgroup.Permitted(ebpf.ProgramType(999)); err == nil || !strings.Contains(err.Error(), cgroup.Kernel()) {
		t.Errorf("a type that no kernel has: %v", err)
	}
}
