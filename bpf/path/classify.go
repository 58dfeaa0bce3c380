package path

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// link is what counts of a link of the host.
type link struct{ name, kind string }

// tunnels are the kinds of links that wrap packets.
var tunnels = []string{"vxlan", "geneve", "ipip", "ip6tnl", "sit", "gre", "gretap", "ip6gre", "ip6gretap", "wireguard", "tun", "tuntap", "fou", "xfrm", "vti", "vti6"}

// linkdown are the flags by which a route says that its link is down
// (RTNH_F_DEAD, RTNH_F_LINKDOWN of rtnetlink(7)).
const linkdown = unix.RTNH_F_DEAD | unix.RTNH_F_LINKDOWN

// refusals are what the kernel says where it would not send, by the type of the
// route that it met.
var refusals = map[syscall.Errno]string{
	unix.ENETUNREACH:  "there is no route",
	unix.EHOSTUNREACH: "the route is of the type unreachable",
	unix.EACCES:       "the route is of the type prohibit",
	unix.EINVAL:       "the route is of the type blackhole",
}

// refused is the path where the kernel would not send, false if the error says
// nothing of the way.
func refused(err error, local bool) (Path, bool) {
	var errno syscall.Errno
	if !errors.As(err, &errno) || refusals[errno] == "" {
		return Path{}, false
	}
	return cut(refusals[errno], local), true
}

// cut is a way that leads nowhere.
func cut(reason string, local bool) Path {
	if local {
		return Path{Class: Local, Reason: reason}
	}
	return Path{Class: Unreachable, Reason: reason}
}

// classify judges the route that the kernel matches (not what it would do with
// it: that hides prefix and scope). local is what spec.nodeName says.
func classify(r *netlink.Route, local bool, links map[int]link) Path {
	p := Path{}
	switch why := p.leave(r, links); {
	case why != "":
		c := cut(why, local)
		p.Class, p.Reason = c.Class, c.Reason
		return p
	case r.Type == unix.RTN_LOCAL:
		p.Class, p.Wired = Host, true
		return p
	case local:
		p.Class, p.Wired = Local, !isDefault(r.Dst)
		if !p.Wired {
			p.Reason, p.Contrary = "no route leads to it, but the default one", true
		}
		return p
	}
	l := links[r.LinkIndex]
	switch {
	case len(r.MultiPath) > 0:
		p.Class = Gateway
		if !slices.ContainsFunc(r.MultiPath, func(n *netlink.NexthopInfo) bool { return !tunnel(links[n.LinkIndex]) }) {
			p.Class = Tunnel
		}
	case tunnel(l):
		p.Class = Tunnel
	case l.name == "cilium_host" && p.Via.IsValid():
		p.Reason = "with Cilium the route does not tell what is local and what is behind a tunnel"
	case p.Via.IsValid():
		p.Class = Gateway
	case one(r.Dst):
		p.Reason, p.Contrary = "the route leads to this very address, as to a pod of this node", true
	default:
		p.Class = SameL2
	}
	return p
}

// leave notes how the route leaves, and returns why it does not.
func (p *Path) leave(r *netlink.Route, links map[int]link) string {
	index, flags, gw, via := r.LinkIndex, r.Flags, r.Gw, r.Via
	if len(r.MultiPath) > 0 {
		// A hop that is down is not taken, unless all are.
		hop := r.MultiPath[0]
		for _, h := range r.MultiPath {
			if h.Flags&linkdown == 0 {
				hop = h
				break
			}
		}
		index, flags, gw, via = hop.LinkIndex, hop.Flags, hop.Gw, hop.Via
	}
	l := links[index]
	p.Link, p.Kind = l.name, l.kind
	if gw != nil {
		p.Via = addr(gw)
	} else if v, ok := via.(*netlink.Via); ok && v != nil {
		p.Via = addr(v.Addr)
	}
	switch r.Type {
	case unix.RTN_UNICAST, unix.RTN_LOCAL:
	case unix.RTN_BLACKHOLE:
		return refusals[unix.EINVAL]
	case unix.RTN_UNREACHABLE:
		return refusals[unix.EHOSTUNREACH]
	case unix.RTN_PROHIBIT:
		return refusals[unix.EACCES]
	default:
		return fmt.Sprintf("the route is of type %d", r.Type)
	}
	if r.Type == unix.RTN_LOCAL {
		return "" // whichever link has the address
	}
	if flags&linkdown != 0 {
		return fmt.Sprintf("link %s is down", l.name)
	}
	return ""
}

func tunnel(l link) bool { return slices.Contains(tunnels, l.kind) }

// isDefault tells whether a route is to everywhere.
func isDefault(dst *net.IPNet) bool {
	if dst == nil {
		return true
	}
	ones, _ := dst.Mask.Size()
	return ones == 0
}

// one tells whether a route is to one address.
func one(dst *net.IPNet) bool {
	if dst == nil {
		return false
	}
	ones, bits := dst.Mask.Size()
	return bits > 0 && ones == bits
}

func addr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}
