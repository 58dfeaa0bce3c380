package redirect

import (
	"errors"
	"fmt"
)

// Reason names, for people and for metrics, why connections cannot be redirected
// on a node.
type Reason string

// The reasons.
const (
	// NoCgroup2 is a host without cgroups of the second version, or a directory
	// that is none.
	NoCgroup2 Reason = "no-cgroup2"
	// AttachPoint is a hierarchy of cgroups that is not the one of the pods.
	AttachPoint Reason = "attach-point"
	// NoBPFFS is a directory for pins that is on no bpf file system.
	NoBPFFS Reason = "no-bpffs"
	// ReadOnlyBPFFS is a bpf file system on which nothing can be pinned.
	ReadOnlyBPFFS Reason = "read-only-bpffs"
	// Capability is a capability that this process lacks.
	Capability Reason = "missing-capability"
	// Exclusive is a program of somebody else on the cgroup, or on one above it,
	// that was attached to be the only one (without BPF_F_ALLOW_MULTI).
	Exclusive Reason = "exclusive-program"
	// Garbage is something in the place of a pin that is not what is pinned there.
	Garbage Reason = "garbage-pin"
	// Kernel is a kernel that does not take the programs or their maps.
	Kernel Reason = "kernel"
	// Busy is another process that redirects by the same pins.
	Busy Reason = "busy"
)

// Unavailable is why connections cannot be redirected.
type Unavailable struct {
	Reason Reason
	Err    error
}

func (u *Unavailable) Error() string { return fmt.Sprintf("%s: %v", u.Reason, u.Err) }

func (u *Unavailable) Unwrap() error { return u.Err }

// ErrHost indicates that the network is the host's own: what is allowed there
// is allowed to every process of the node.
var ErrHost = errors.New("the network namespace is the host's")

func unavailable(r Reason, format string, args ...any) error {
	return &Unavailable{Reason: r, Err: fmt.Errorf(format, args...)}
}
