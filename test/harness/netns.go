package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
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

// Network is a network namespace that holds a loopback interface and what the
// test puts into it: a pod's, or a host's that several are wired to.
type Network struct {
	*netlink.Handle
	ns netns.NsHandle
}

// NewNetwork makes a namespace, which ends with the test. It skips the test
// where none can be made.
func NewNetwork(t testing.TB) *Network {
	t.Helper()
	n := &Network{}
	err := onThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if n.ns, err = netns.Get(); err != nil {
			return err
		}
		n.Handle, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		t.Skipf("no network namespace can be made here: %v", err)
	}
	t.Cleanup(func() { n.Close(); _ = n.ns.Close() })
	if err := n.up("lo"); err != nil {
		t.Fatal(err)
	}
	return n
}

// ThisNetwork is the namespace of this process, which the test may change: it
// runs in one of its own.
func ThisNetwork(t testing.TB) *Network {
	t.Helper()
	ns, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close(); _ = ns.Close() })
	return &Network{Handle: h, ns: ns}
}

// onThread runs f on a thread that it may take elsewhere, and brings that back.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		home, err := andBack(f)
		if home {
			runtime.UnlockOSThread()
		} // else the thread ends with its goroutine
		done <- err
	}()
	return <-done
}

// andBack runs f, which may take the thread elsewhere, and tells whether that is
// back where it was. The caller has locked it.
func andBack(f func() error) (home bool, err error) {
	here, err := netns.Get()
	if err != nil {
		return true, err
	}
	err = f()
	back := netns.Set(here)
	return back == nil, errors.Join(err, back, here.Close())
}

// in is f in the namespace; it takes the thread there.
func (n *Network) in(f func() error) func() error {
	return func() error {
		if err := netns.Set(n.ns); err != nil {
			return err
		}
		return f()
	}
}

// Do calls f in the namespace: sockets that it makes are of it, and commands that
// it starts are in it. f must not leave its goroutine.
func (n *Network) Do(f func() error) error { return onThread(n.in(f)) }

// Start starts a command in the namespace.
func (n *Network) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Dial connects from the namespace; from this process's own if n is nil.
func (n *Network) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	dial := func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	}
	if n == nil {
		return c, dial()
	}
	err = n.Do(dial)
	return c, err
}

func (n *Network) up(name string) error {
	link, err := n.LinkByName(name)
	if err != nil {
		return err
	}
	return n.LinkSetUp(link)
}

// Claim sets an address in the namespace, on its loopback interface.
func (n *Network) Claim(t testing.TB, addr string) {
	t.Helper()
	if err := n.address("lo", netip.MustParseAddr(addr)); err != nil {
		t.Fatal(err)
	}
}

// Local makes all addresses of the prefix the namespace's own.
func (n *Network) Local(t testing.TB, prefix string) {
	t.Helper()
	link, err := n.LinkByName("lo")
	if err == nil {
		p := netip.MustParsePrefix(prefix)
		err = n.RouteReplace(&netlink.Route{
			LinkIndex: link.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
			Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		})
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (n *Network) address(link string, addr netip.Addr) error {
	l, err := n.LinkByName(link)
	if err != nil {
		return err
	}
	return n.AddrReplace(l, &netlink.Addr{IPNet: host(addr), Flags: unix.IFA_F_NODAD})
}

func host(addr netip.Addr) *net.IPNet {
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}
}

// Wire puts a link between the namespace, as a host, and a pod's, as most
// network plugins do: the pod has the addresses, and the host's routes to them
// leave by its end of the link, whose name is given.
func (n *Network) Wire(t testing.TB, name string, pod *Network, addrs ...string) {
	t.Helper()
	if err := n.wire(name, pod, "", addrs); err != nil {
		t.Fatal(err)
	}
}

// Default routes what the namespace has no other route for by its link eth0, to the
// gateway, an address of the other end's host. So the host is its one neighbour: the
// kernel bounds the neighbours of all namespaces together.
func (n *Network) Default(t testing.TB, gateway string) {
	t.Helper()
	link, err := n.LinkByName("eth0")
	if err == nil {
		err = n.RouteReplace(&netlink.Route{
			LinkIndex: link.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
			Gw: netip.MustParseAddr(gateway).AsSlice(), Flags: int(netlink.FLAG_ONLINK),
		})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Bridge makes a bridge whose network the prefix's address, the host's own, is in.
func (n *Network) Bridge(t testing.TB, name, prefix string) {
	t.Helper()
	// A bridge without an address of its own takes one of its ports', and forgets
	// what it knows of others when that changes.
	own := net.HardwareAddr{0x02, 0, 0, 0, 0, 0x01}
	err := n.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name, HardwareAddr: own}})
	var link netlink.Link
	if err == nil {
		link, err = n.LinkByName(name)
	}
	if err == nil {
		p := netip.MustParsePrefix(prefix)
		err = n.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}, Flags: unix.IFA_F_NODAD})
	}
	if err == nil {
		err = n.LinkSetUp(link)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Plug wires a pod to a port of a bridge.
func (n *Network) Plug(t testing.TB, bridge, name string, pod *Network, addrs ...string) {
	t.Helper()
	if err := n.wire(name, pod, bridge, addrs); err != nil {
		t.Fatal(err)
	}
}

func (n *Network) wire(name string, pod *Network, bridge string, addrs []string) error {
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "eth0", PeerNamespace: netlink.NsFd(pod.ns)}
	if err := n.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth %s: %w", name, err)
	}
	for _, addr := range addrs {
		if err := pod.address("eth0", netip.MustParseAddr(addr)); err != nil {
			return err
		}
	}
	if err := pod.up("eth0"); err != nil {
		return err
	}
	link, err := n.LinkByName(name)
	if err != nil {
		return err
	}
	if bridge != "" {
		master, err := n.LinkByName(bridge)
		if err != nil {
			return err
		}
		if err := n.LinkSetMaster(link, master); err != nil {
			return err
		}
	}
	if err := n.LinkSetUp(link); err != nil || bridge != "" {
		return err
	}
	for _, addr := range addrs {
		r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: host(netip.MustParseAddr(addr)), Scope: netlink.SCOPE_LINK}
		if err := n.RouteReplace(r); err != nil {
			return fmt.Errorf("route to %s: %w", addr, err)
		}
	}
	return nil
}
