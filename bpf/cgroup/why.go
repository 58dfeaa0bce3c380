package cgroup

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/rlimit"
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

// errForbidden indicates a process that has the capabilities, and in vain.
var errForbidden = errors.New("the kernel does not permit BPF here: the agent is in a user namespace of its own, or a seccomp profile or the kernel's lockdown forbids it")

// Permitted tells whether this process may load programs of a type and attach
// them to a cgroup: it loads one that does nothing. Its error is one line.
func Permitted(kind ebpf.ProgramType) error {
	if err := Capable(); err != nil {
		return err
	}
	// Before Linux 5.11 maps count as locked memory. Where the limit stays, that
	// shows.
	_ = rlimit.RemoveMemlock()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: kind, License: "Apache-2.0", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	switch {
	case err == nil:
		return p.Close()
	case errors.Is(err, unix.EPERM):
		return errForbidden
	}
	return fmt.Errorf("the kernel, %s, knows no programs of the type %s: %w", Kernel(), kind, err)
}

// NotLoaded says in one line why programs could not be loaded. Needs says what of the kernel they need, as "Linux 5.9".
func NotLoaded(err error, needs string) error {
	var refused *ebpf.VerifierError
	switch {
	case errors.Is(err, unix.EPERM): // the library guesses at a limit of memory
		return cmp.Or(Capable(), errForbidden)
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.EINVAL) && (!errors.As(err, &refused) || len(refused.Log) == 0):
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
