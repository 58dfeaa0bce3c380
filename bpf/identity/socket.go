package identity

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Origin is where the other end of a unix socket's accepted connection was made,
// and by whom. It needs no capability.
type Origin struct {
	// Network is the cookie of its network namespace, by which eBPF programs
	// know it too (SO_NETNS_COOKIE, Linux 5.14). Never zero, and never that of
	// another namespace, also after that has gone.
	Network uint64
	// User is the uid of its process in the user namespace of ours
	// (SO_PEERCRED, unix(7)).
	User uint32
}

// OriginOf asks the kernel.
func OriginOf(c syscall.Conn) (Origin, error) {
	var o Origin
	err := control(c, func(fd int) (err error) {
		if o.Network, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
			return err
		}
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			o.User = cred.Uid
		}
		return err
	})
	if err != nil {
		return Origin{}, fmt.Errorf("where a connection was made: %w", err)
	}
	return o, nil
}
