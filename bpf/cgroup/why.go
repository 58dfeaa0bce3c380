package cgroup

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Capable returns an error that names the capability that is missing to load
// programs and to attach them to a cgroup: CAP_BPF (or CAP_SYS_ADMIN, as before
// Linux 5.8) and CAP_NET_ADMIN.
func Capable() error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&head, &sets[0]); err != nil {
		return fmt.Errorf("the capabilities cannot be read: %w", err)
	}
	has := func(c uint) bool { return sets[c/32].Effective&(1<<(c%32)) != 0 }
	var missing []string
	if !has(unix.CAP_BPF) && !has(unix.CAP_SYS_ADMIN) {
		missing = append(missing, "CAP_BPF")
	}
	if !has(unix.CAP_NET_ADMIN) && !has(unix.CAP_SYS_ADMIN) {
		missing = append(missing, "CAP_NET_ADMIN")
	}
	switch len(missing) {
	case 0:
		return nil
	case 1:
		return errors.New(missing[0] + " is missing")
	}
	return errors.New(strings.Join(missing, " and ") + " are missing")
}

// Kernel is the release of the running kernel, as uname prints it.
func Kernel() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// NotLoaded says in one line why programs could not be loaded. Needs says what of
// the kernel they need, as "Linux 5.9".
func NotLoaded(err error, needs string) error {
	var refused *ebpf.VerifierError
	switch {
	case errors.Is(err, unix.EPERM):
		// The library guesses at RLIMIT_MEMLOCK, which it has raised.
		if missing := Capable(); missing != nil {
			return missing
		}
		return errors.New("the kernel does not permit BPF here: the agent is in a user namespace of its own, or a seccomp profile or the kernel's lockdown forbids it")
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.EINVAL) && !(errors.As(err, &refused) && len(refused.Log) > 0):
		return fmt.Errorf("the kernel, %s, lacks what is needed; %s has it (%w)", Kernel(), needs, err)
	case errors.As(err, &refused):
		return fmt.Errorf("the verifier of the kernel, %s, refuses the program: %w", Kernel(), refused.Cause)
	}
	return err
}

// NotAttached says in one line why a program could not be attached to the cgroup
// at dir.
func NotAttached(err error, dir string) error {
	switch {
	case errors.Is(err, unix.EPERM):
		if missing := Capable(); missing != nil {
			return missing
		}
		return fmt.Errorf("nothing can be attached to the cgroup %s: a program without BPF_F_ALLOW_MULTI is attached to it or above (bpftool cgroup show %s)", dir, dir)
	case errors.Is(err, unix.E2BIG):
		return fmt.Errorf("nothing can be attached to the cgroup %s: it has 64 programs of this kind, which is all it can (bpftool cgroup show %s)", dir, dir)
	case errors.Is(err, unix.EBADF):
		return fmt.Errorf("%s is not a directory of a cgroup2", dir)
	}
	return fmt.Errorf("nothing can be attached to the cgroup %s: %w", dir, err)
}
