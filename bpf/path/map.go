package path

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// answer bounds one answer of the kernel, which is there in microseconds.
	answer = time.Second

	// interrupted is how often a dump is asked for again that changed while it
	// was read.
	interrupted = 3
)

// Map knows the ways from this host. It is safe for concurrent use; nil is one
// that knows nothing. A [Map] that is not run answers too, but what it has
// answered once it never asks again.
type Map struct {
	handle *netlink.Handle
	events *nl.NetlinkSocket

	// mu guards what follows. It is not held while the kernel is asked.
	mu sync.Mutex
	// era is the number of times that something has changed.
	era   uint64
	links map[int]link // nil: to be asked for
	known map[key]Path
}

type key struct {
	addr  netip.Addr
	local bool
}

// Options configures a [Map].
type Options struct {
	// ReceiveBuffer is the size in bytes of the socket that says what changes; 0
	// is the system's. It need not hold all that changes at once.
	ReceiveBuffer int
}

// Open returns the map of the network namespace of this thread, which should be
// the host's: in a pod's own everything is behind one gateway. The caller runs
// and closes it.
func Open(o Options) (*Map, error) {
	m := &Map{known: map[key]Path{}}
	var err error
	m.events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
	if err != nil {
		return nil, fmt.Errorf("the kernel's routes cannot be followed: %w", err)
	}
	if o.ReceiveBuffer > 0 {
		if err := m.events.SetReceiveBufferSize(o.ReceiveBuffer, false); err != nil {
			m.events.Close()
			return nil, err
		}
	}
	if m.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		m.events.Close()
		return nil, fmt.Errorf("the kernel cannot be asked for routes: %w", err)
	}
	if err := m.handle.SetSocketTimeout(answer); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// Close gives back what the map holds, once Run has ended.
func (m *Map) Close() {
	m.events.Close()
	m.handle.Close()
}

// Of returns the way to an address, IPv4, IPv6 or IPv4-mapped, which is of a pod
// of this node or not, as spec.nodeName says.
func (m *Map) Of(to netip.Addr, local bool) Path {
	if m == nil {
		if local {
			return Path{Class: Local, Wired: true}
		}
		return Path{}
	}
	to = to.Unmap()
	k := key{to, local}
	m.mu.Lock()
	p, ok := m.known[k]
	era, links := m.era, m.links
	m.mu.Unlock()
	if ok {
		return p
	}
	if !to.IsValid() {
		return Path{Reason: "there is no address"}
	}
	if links == nil {
		var err error
		if links, err = m.readLinks(); err != nil {
			return Path{Reason: "the kernel's links cannot be read: " + err.Error()}
		}
	}
	routes, err := m.handle.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	switch refusal, ok := refused(err, local); {
	case ok:
		p = refusal
	case err != nil:
		return Path{Reason: "the kernel tells no route: " + err.Error()}
	case len(routes) == 0:
		return Path{Reason: "the kernel tells no route"}
	default:
		p = classify(&routes[0], local, links)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	// What was asked before a change may not outlive it.
	if m.era == era {
		m.links, m.known[k] = links, p
	}
	return p
}

func (m *Map) readLinks() (map[int]link, error) {
	var list []netlink.Link
	var err error
	for range interrupted {
		// One that changed meanwhile has gaps, and is old by that change anyway.
		if list, err = m.handle.LinkList(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, err
	}
	links := make(map[int]link, len(list))
	for _, l := range list {
		a := l.Attrs()
		links[a.Index] = link{a.Name, l.Type()}
	}
	return links, nil
}

// forget makes all that is known old.
func (m *Map) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.era++
	m.links = nil
	clear(m.known)
}
