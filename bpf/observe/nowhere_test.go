package observe_test

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// unspecified is an address of no family, by which a socket is disconnected.
var unspecified = unix.RawSockaddrInet6{Family: unix.AF_UNSPEC}

func nowhere() unsafe.Pointer { return unsafe.Pointer(&unspecified) }
