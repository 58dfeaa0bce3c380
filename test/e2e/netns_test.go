package e2e_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/test/harness"
)

// blackHoleEnv makes the test binary turn its network namespace, which must
// hold nothing, into one where every connect hangs, and become the program.
const blackHoleEnv = "E2E_BLACK_HOLE"

func init() {
	if os.Getenv(blackHoleEnv) == "" {
		return
	}
	err := blackHole()
	if err == nil {
		err = os.Unsetenv(blackHoleEnv)
	}
	if err == nil {
		err = syscall.Exec(os.Args[1], os.Args[1:], os.Environ())
	}
	fmt.Fprintln(os.Stderr, "black hole:", err)
	os.Exit(1)
}

// blackHole routes everything to the loopback interface, where packets to
// addresses that are not the host's are dropped without a word.
func blackHole() error {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	const lo = 1 // the first interface of every namespace
	// rtnetlink(7): struct ifinfomsg, then struct rtmsg with RTA_OIF.
	up := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(up[4:], lo)
	binary.NativeEndian.PutUint32(up[8:], unix.IFF_UP)
	binary.NativeEndian.PutUint32(up[12:], unix.IFF_UP)
	route := []byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, unix.RT_SCOPE_LINK, unix.RTN_UNICAST, 0, 0, 0, 0}
	route = binary.NativeEndian.AppendUint16(route, 8)
	route = binary.NativeEndian.AppendUint16(route, unix.RTA_OIF)
	route = binary.NativeEndian.AppendUint32(route, lo)
	for _, m := range []struct {
		kind, flags uint16
		body        []byte
	}{{unix.RTM_NEWLINK, 0, up}, {unix.RTM_NEWROUTE, unix.NLM_F_CREATE, route}} {
		b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(m.body)))
		b = binary.NativeEndian.AppendUint16(b, m.kind)
		b = binary.NativeEndian.AppendUint16(b, m.flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
		b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
		if err := unix.Sendto(s, append(b, m.body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		answer := make([]byte, 4096)
		n, _, err := unix.Recvfrom(s, answer, 0)
		if err != nil {
			return err
		}
		if n < unix.NLMSG_HDRLEN+4 {
			return fmt.Errorf("netlink answered %d bytes", n)
		}
		if errno := int32(binary.NativeEndian.Uint32(answer[unix.NLMSG_HDRLEN:])); errno != 0 {
			return unix.Errno(-errno)
		}
	}
	return nil
}

// isolated makes the command run in a network namespace of its own, from which
// only unix sockets lead out: with nothing in it every connect fails at once, in
// a black hole every connect hangs.
func isolated(t *testing.T, hole bool, name string, args ...string) *exec.Cmd {
	t.Helper()
	probe := exec.Command(program, "version")
	probe.SysProcAttr = harness.OwnNetwork()
	if err := probe.Run(); err != nil {
		t.Skipf("no network namespace can be made here: %v", err)
	}
	cmd := exec.Command(name, args...)
	if hole {
		cmd = exec.Command(os.Args[0], append([]string{name}, args...)...)
		cmd.Env = append(os.Environ(), blackHoleEnv+"=1")
	}
	cmd.SysProcAttr = harness.OwnNetwork()
	return cmd
}
