package harness

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// OwnNetwork makes a command run in a network namespace of its own, which holds
// nothing. One who is not root becomes root in a user namespace. A caller that
// cannot start such a command says so.
func OwnNetwork() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if os.Geteuid() != 0 {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return attr
}
