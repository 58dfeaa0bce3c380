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

// Table knows the ways from this host. It is safe for concurrent use; nil is one
// that knows nothing. A [Table] that is not run answers too, but what it has
// answered once it never asks again.
type Table struct {
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

// Options configures a [Table].
type Options struct {
	// ReceiveBuffer is the size in bytes of the socket that says what changes; 0
	// is the system's. It need not hold all that changes at once.
	ReceiveBuffer int
}

// Open returns the table of the network namespace of this thread, which should be
// the host's: in a pod's own everything is behind one gateway. The caller runs
// and closes it.
func Open(o Options) (*Table, error) {
	t := &Table{known: map[key]Path{}}
	var err error
	t.events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
	if err != nil {
		return nil, fmt.Errorf("the kernel's routes cannot be followed: %w", err)
	}
	if o.ReceiveBuffer > 0 {
		if err := t.events.SetReceiveBufferSize(o.ReceiveBuffer, false); err != nil {
			t.events.Close()
			return nil, err
		}
	}
	if t.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		t.events.Close()
		return nil, fmt.Errorf("the kernel cannot be asked for routes: %w", err)
	}
	if err := t.handle.SetSocketTimeout(answer); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// Close gives back what the table holds, once Run has ended.
func (t *Table) Close() {
	t.events.Close()
	t.handle.Close()
}

// Of returns the way to an address, IPv4, IPv6 or IPv4-mapped, which is of a pod
// of this node or not, as spec.nodeName says.
func (t *Table) Of(to netip.Addr, local bool) Path {
	if t == nil {
		if local {
			return Path{Class: Local, Wired: true}
		}
		return Path{}
	}
	to = to.Unmap()
	k := key{to, local}
	t.mu.Lock()
	p, ok := t.known[k]
	era, links := t.era, t.links
	t.mu.Unlock()
	if ok {
		return p
	}
	if !to.IsValid() {
		return Path{Reason: "there is no address"}
	}
	if links == nil {
		var err error
		if links, err = t.readLinks(); err != nil {
			return Path{Reason: "the kernel's links cannot be read: " + err.Error()}
		}
	}
	routes, err := t.handle.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
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
	t.mu.Lock()
	defer t.mu.Unlock()
	// What was asked before a change may not outlive it.
	if t.era == era {
		t.links, t.known[k] = links, p
	}
	return p
}

func (t *Table) readLinks() (map[int]link, error) {
	var list []netlink.Link
	var err error
	for range interrupted {
		// One that changed meanwhile has gaps, and is old by that change anyway.
		if list, err = t.handle.LinkList(); !errors.Is(err, netlink.ErrDumpInterrupted) {
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
func (t *Table) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.era++
	t.links = nil
	clear(t.known)
}
