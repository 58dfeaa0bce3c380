package identity

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// patience is how long the kernel may take for one answer.
const patience = time.Second

// maxAddrs is how many addresses of each family a namespace's owner can make
// the prover look at.
const maxAddrs = 32

// network proves by the caller's network namespace.
type network struct {
	// Set by openNetwork, read-only. The handle serves one request at a time.
	handle   *netlink.Handle
	dev, ino uint64 // of our own namespace
}

// openNetwork tells whether network namespaces can be told here.
func openNetwork() (_ *network, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	ns, err := unix.IoctlRetInt(pair[0], unix.SIOCGSKNS)
	switch {
	case errors.Is(err, unix.EPERM):
		return nil, errors.New("CAP_NET_ADMIN is missing")
	case err != nil:
		return nil, fmt.Errorf("the kernel does not tell a socket's network namespace (SIOCGSKNS, Linux 4.10): %w", err)
	}
	defer unix.Close(ns)
	n := &network{}
	if n.dev, n.ino, err = inode(ns); err != nil {
		return nil, err
	}
	s, err := openAddrs()
	if err != nil {
		return nil, err
	}
	defer s.close()
	if n.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if err := n.handle.SetSocketTimeout(patience); err != nil {
		n.handle.Close()
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return n, nil
}

func (n *network) close() { n.handle.Close() }

func inode(fd int) (dev, ino uint64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, 0, fmt.Errorf("network namespace: %w", err)
	}
	return uint64(st.Dev), st.Ino, nil
}

// look says whose network namespace the caller's socket is of.
func (n *network) look(c syscall.Conn, pods Pods) verdict {
	no := func(format string, args ...any) verdict { return verdict{reason: fmt.Sprintf(format, args...)} }
	ns := -1
	err := control(c, func(fd int) (err error) {
		ns, err = unix.IoctlRetInt(fd, unix.SIOCGSKNS)
		return err
	})
	if err != nil {
		return no("the kernel does not tell the network namespace: %v", err)
	}
	defer unix.Close(ns)
	dev, ino, err := inode(ns)
	switch {
	case err != nil:
		return no("%v", err)
	case dev == n.dev && ino == n.ino:
		return verdict{host: true, reason: "the caller has the host's network, as others may"}
	}
	id, err := n.id(ns)
	if err != nil {
		return no("the network namespace gets no id: %v", err)
	}
	addrs, err := addrsIn(id)
	if err != nil {
		return no("the addresses of the network namespace: %v", err)
	}
	return n.judge(id, addrs, pods)
}

// id is the number of a namespace as seen from ours.
func (n *network) id(ns int) (int, error) {
	for {
		id, err := n.handle.GetNetNsIdByFd(ns)
		if err != nil || id >= 0 {
			return id, err
		}
		// Another proof may be faster: then the first question has an answer.
		if err := n.handle.SetNetNsIdByFd(ns, -1); err != nil && !errors.Is(err, unix.EEXIST) {
			return 0, err
		}
	}
}

// judge says which of the addresses that a namespace has are its own for the
// host too.
func (n *network) judge(id int, addrs []netip.Addr, pods Pods) verdict {
	var v verdict
	wired := false // the host finds some address in the namespace
	asked := false // it looks for one
	var proved []Pod
	for _, addr := range addrs {
		known := pods.At(addr)
		err := n.leads(addr, id)
		switch {
		case err == nil && len(known) == 0:
			wired = true
			v.reason = fmt.Sprintf("no pod of this node with the address %s is known", addr)
		case err == nil:
			wired = true
			for _, p := range known {
				if !slices.Contains(proved, p) {
					proved = append(proved, p)
				}
			}
		default:
			asked = asked || errors.Is(err, errNobody)
			if v.claims = append(v.claims, known...); !wired && (v.reason == "" || len(known) > 0) {
				v.reason = err.Error()
			}
		}
	}
	switch {
	case len(proved) == 1:
		return verdict{pod: &proved[0]}
	case len(proved) > 1:
		v.reason = fmt.Sprintf("the network namespace has the addresses of several pods (%s, %s)", proved[0], proved[1])
		v.claims = proved
	case v.reason == "":
		v.reason = "the network namespace has no address"
	}
	// An address that moves, and a pod that is being made, are known better soon.
	v.pending = wired || asked
	return v
}

// leads returns nil if what the host sends to addr arrives in the namespace.
func (n *network) leads(addr netip.Addr, id int) error {
	routes, err := n.handle.RouteGetWithOptions(addr.AsSlice(), nil)
	if err != nil {
		return fmt.Errorf("the host has no route to %s: %w", addr, err)
	}
	if len(routes) != 1 {
		return fmt.Errorf("the host has %d routes to %s", len(routes), addr)
	}
	r := routes[0]
	if r.Type != unix.RTN_UNICAST || r.Gw != nil || r.Via != nil || len(r.MultiPath) > 0 {
		return fmt.Errorf("the host's route to %s leads to no pod of this node", addr)
	}
	link, err := n.handle.LinkByIndex(r.LinkIndex)
	if err != nil {
		return fmt.Errorf("the link of the host's route to %s: %w", addr, err)
	}
	if _, ok := link.(*netlink.Bridge); ok {
		if link, err = n.port(link, addr); err != nil {
			return err
		}
	}
	if a := link.Attrs(); a.NetNsID != id {
		return fmt.Errorf("the host's route to %s leaves by %s, which does not lead into the caller's network namespace", addr, a.Name)
	}
	return nil
}

// errNobody indicates that the host asked for an address, and has no answer yet.
var errNobody = errors.New("nobody has")

// resolveFor is how long an address is waited for that the host has not asked
// for yet; on the links of one host it answers in some microseconds.
const resolveFor = 20 * time.Millisecond

// port is the port of a bridge behind which the host finds an address.
func (n *network) port(bridge netlink.Link, addr netip.Addr) (netlink.Link, error) {
	b := bridge.Attrs()
	mac, err := n.neighbour(b.Index, addr)
	for end := time.Now().Add(resolveFor); mac == nil && err == nil && time.Now().Before(end); {
		// What a packet to the address would do (NTF_USE); the host does as it
		// always does, and asks the link for it.
		err = n.handle.NeighSet(&netlink.Neigh{LinkIndex: b.Index, Family: family(addr), Flags: netlink.NTF_USE, IP: addr.AsSlice()})
		if err == nil {
			time.Sleep(100 * time.Microsecond)
			mac, err = n.neighbour(b.Index, addr)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("who has %s on bridge %s: %w", addr, b.Name, err)
	}
	if mac == nil {
		return nil, fmt.Errorf("%w %s on bridge %s", errNobody, addr, b.Name)
	}
	// A bridge's table of addresses (RTM_GETNEIGH of one, Linux 5.0).
	entry, err := n.entry(&netlink.Ndmsg{Family: unix.AF_BRIDGE},
		nl.NewRtAttr(netlink.NDA_LLADDR, mac), nl.NewRtAttr(netlink.NDA_MASTER, nl.Uint32Attr(uint32(b.Index))))
	if err == nil && entry == nil {
		err = unix.ENOENT
	}
	var link netlink.Link
	if err == nil {
		link, err = n.handle.LinkByIndex(entry.LinkIndex)
	}
	if err != nil {
		return nil, fmt.Errorf("the port of bridge %s behind which %s is: %w", b.Name, addr, err)
	}
	return link, nil
}

func family(addr netip.Addr) int {
	if addr.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// neighbour is the hardware address that the host has for an address on a link;
// nil if it has none.
func (n *network) neighbour(link int, addr netip.Addr) (net.HardwareAddr, error) {
	e, err := n.entry(&netlink.Ndmsg{Family: uint8(family(addr)), Index: uint32(link)}, nl.NewRtAttr(netlink.NDA_DST, addr.AsSlice()))
	const known = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT
	if err != nil || e == nil || e.State&known == 0 || len(e.HardwareAddr) == 0 {
		return nil, err
	}
	return e.HardwareAddr, nil
}

// entry gets one entry of a table of neighbours; nil if there is none.
func (n *network) entry(about *netlink.Ndmsg, attrs ...*nl.RtAttr) (*netlink.Neigh, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	req.AddData(about)
	for _, a := range attrs {
		req.AddData(a)
	}
	answers, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil || len(answers) == 0 {
		return nil, err
	}
	return netlink.NeighDeserialize(answers[0])
}

// addrSocket is a socket by which another namespace's addresses are read. It serves
// one list: who cuts a long one short closes it.
type addrSocket struct{ fd int }

func openAddrs() (*addrSocket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	s := &addrSocket{fd}
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		s.close()
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		s.close()
		return nil, fmt.Errorf("the kernel does not list another namespace's addresses (NETLINK_GET_STRICT_CHK, Linux 4.20): %w", err)
	}
	return s, nil
}

func (s *addrSocket) close() { _ = unix.Close(s.fd) }

// addrsIn returns addresses of a namespace, but for those that belong to a
// machine or a link: the first few of each family.
func addrsIn(id int) ([]netip.Addr, error) {
	var all []netip.Addr
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		s, err := openAddrs()
		if err != nil {
			return nil, err
		}
		some, err := s.list(family, id)
		s.close()
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// ifaTargetNetNSID is IFA_TARGET_NETNSID (Linux 4.20, <linux/if_addr.h>).
const ifaTargetNetNSID = 10

func (s *addrSocket) list(family uint8, id int) ([]netip.Addr, error) {
	// rtnetlink(7): struct nlmsghdr, struct ifaddrmsg, the attribute.
	req := binary.NativeEndian.AppendUint32(nil, unix.SizeofNlMsghdr+unix.SizeofIfAddrmsg+8)
	req = binary.NativeEndian.AppendUint16(req, unix.RTM_GETADDR)
	req = binary.NativeEndian.AppendUint16(req, unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	req = append(req, 0, 0, 0, 0, 0, 0, 0, 0)
	req = append(req, family, 0, 0, 0, 0, 0, 0, 0)
	req = binary.NativeEndian.AppendUint16(req, 8)
	req = binary.NativeEndian.AppendUint16(req, ifaTargetNetNSID)
	req = binary.NativeEndian.AppendUint32(req, uint32(id))
	if err := unix.Sendto(s.fd, req, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	var all []netip.Addr
	room := make([]byte, 32<<10) // what the kernel fills at a time at most
	for {
		n, from, err := unix.Recvfrom(s.fd, room, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if from, ok := from.(*unix.SockaddrNetlink); !ok || from.Pid != 0 {
			continue // not from the kernel
		}
		messages, err := syscall.ParseNetlinkMessage(room[:n])
		if err != nil {
			return nil, err
		}
		for i := range messages {
			switch m := &messages[i]; m.Header.Type {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				if len(m.Data) < 4 {
					return nil, unix.EBADMSG
				}
				if errno := -int32(binary.NativeEndian.Uint32(m.Data)); errno != 0 {
					return nil, syscall.Errno(errno)
				}
				return all, nil
			case unix.RTM_NEWADDR:
				if addr, ok := addrOf(m, id); ok {
					all = append(all, addr)
				}
				if len(all) == maxAddrs {
					return all, nil
				}
			}
		}
	}
}

// addrOf reads one address; false for one that is of no use.
func addrOf(m *syscall.NetlinkMessage, id int) (netip.Addr, bool) {
	attrs, err := syscall.ParseNetlinkRouteAttr(m)
	if err != nil {
		return netip.Addr{}, false
	}
	var addr, local netip.Addr
	there := false // it is of that namespace, and not of ours
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.IFA_ADDRESS:
			addr, _ = netip.AddrFromSlice(a.Value)
		case unix.IFA_LOCAL: // of a link between two, ADDRESS is the other's
			local, _ = netip.AddrFromSlice(a.Value)
		case ifaTargetNetNSID:
			there = len(a.Value) == 4 && int(int32(binary.NativeEndian.Uint32(a.Value))) == id
		}
	}
	if local.IsValid() {
		addr = local
	}
	return addr, there && addr.IsValid() && !addr.IsLoopback() && !addr.IsLinkLocalUnicast()
}
