// Package path says by netlink how far an address is from this node: what stands
// between the host's network and a pod's.
//
//	address ─▶ the kernel's route to it ─▶ the link it leaves by ─▶ class
//	           (RTM_GETROUTE, FIB_MATCH)   (kind, up or not)
//
// Whether a pod is of this node is never a matter of routes: spec.nodeName alone
// says so. Routes add whether a local pod is wired (its route is there, its link
// is up), and what a remote one costs. Link kinds prove little: the uplink of a
// node that is a container is a veth, and with Cilium the routes to local and to
// tunnelled pods leave by one veth and cannot be told apart.
//
// Answers are kept until links, routes or rules change. Who changes them is not
// asked what they did: any message of the kernel, and its word that some were
// lost, only says that what is kept is old.
package path

import (
	"net/netip"
	"strings"
	"time"
)

// Class is how far an address is, the nearest first, but for Unknown.
type Class uint8

// The classes. The zero value is Unknown.
const (
	// Unknown: the route does not tell, or there is nobody to ask.
	Unknown Class = iota
	// Host: the address is the host's own, as that of a pod of the host's network.
	Host
	// Local: a pod of this node.
	Local
	// SameL2: no gateway is between.
	SameL2
	// Gateway: a router is between.
	Gateway
	// Tunnel: packets are wrapped (VXLAN, Geneve, IP in IP, WireGuard and the like).
	Tunnel
	// Unreachable: the kernel would not send.
	Unreachable
)

var classes = [...]string{Unknown: "unknown", Host: "host", Local: "local", SameL2: "same-L2", Gateway: "gateway", Tunnel: "tunnel", Unreachable: "unreachable"}

// String is the class as commands show it.
func (c Class) String() string { return classes[c] }

// usual is what a connection costs by its class where nobody has measured it:
// right in their order, and roughly in their size. What is not known is taken to
// be as far as what is far, what cannot be reached as farther than all.
var usual = [...]time.Duration{
	Host: 20 * time.Microsecond, Local: 40 * time.Microsecond, SameL2: 200 * time.Microsecond,
	Gateway: 400 * time.Microsecond, Tunnel: 500 * time.Microsecond, Unknown: 500 * time.Microsecond, Unreachable: time.Hour,
}

// Cost is the round trip that is usual for the class; an hour for Unreachable.
func (c Class) Cost() time.Duration { return usual[c] }

// Path is the way to one address.
type Path struct {
	Class Class
	// Wired is set, of a local pod or the host, where a route leads to it. One
	// without cannot be called from here yet, or no more.
	Wired bool
	// Link and Kind are those of the link by which it leaves; of several the
	// first. Empty where there is no route.
	Link, Kind string
	// Via is the next router, or the first of several; invalid: none.
	Via netip.Addr
	// Reason says in a few words why it is Unknown or Unreachable, or not Wired;
	// of a route that contradicts spec.nodeName, how. Else empty.
	Reason string
	// Contrary is set where the route contradicts spec.nodeName, which counts.
	Contrary bool
}

// String is the path in a few words: "gateway 10.0.0.1 by eth0 (veth)".
func (p Path) String() string {
	var b strings.Builder
	b.WriteString(p.Class.String())
	if (p.Class == Local || p.Class == Host) && !p.Wired {
		b.WriteString(", not wired")
	}
	if p.Via.IsValid() {
		b.WriteString(" " + p.Via.String())
	}
	if p.Link != "" {
		b.WriteString(" by " + p.Link + " (" + p.Kind + ")")
	}
	if p.Reason != "" {
		b.WriteString(": " + p.Reason)
	}
	return b.String()
}
