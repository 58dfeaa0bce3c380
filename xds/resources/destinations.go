package resources

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Destinations are the addresses whose calls can be redirected to a sidecar: those
// of Services and of pods, with the ports that are known to speak plaintext gRPC.
// What speaks TLS or something else is not among them, nor is a port of which
// nothing is known. It follows a subscription to owners and Services; the zero
// value is not of use, see [NewDestinations]. It is not safe for concurrent use.
type Destinations struct {
	dir      Services
	services map[nodecache.Name][]netip.AddrPort
	owners   map[nodecache.OwnerKey][]netip.AddrPort
}

// NewDestinations returns what knows none yet.
func NewDestinations(dir Services) *Destinations {
	return &Destinations{dir: dir, services: map[nodecache.Name][]netip.AddrPort{}, owners: map[nodecache.OwnerKey][]netip.AddrPort{}}
}

// Apply reads the owners and Services that changed, and tells whether that changed
// anything.
func (d *Destinations) Apply(keys []nodecache.OwnerKey, names []nodecache.Name) (changed bool) {
	r := &refresh{dir: d.dir, views: map[nodecache.Name]*nodecache.FrontView{}, owners: map[nodecache.OwnerKey]*nodecache.Owner{}}
	for _, key := range keys {
		changed = put(d.owners, key, ofPods(r.owner(key))) || changed
	}
	for _, name := range names {
		changed = put(d.services, name, r.ofService(r.view(name))) || changed
	}
	return changed
}

func put[K comparable](m map[K][]netip.AddrPort, key K, now []netip.AddrPort) (changed bool) {
	slices.SortFunc(now, netip.AddrPort.Compare)
	now = slices.Compact(now)
	if slices.Equal(m[key], now) {
		return false
	}
	if len(now) == 0 {
		delete(m, key)
	} else {
		m[key] = now
	}
	return true
}

// List returns them, those of Services first.
func (d *Destinations) List() []netip.AddrPort {
	var list []netip.AddrPort
	for _, m := range [][]netip.AddrPort{slices.Concat(slices.Collect(maps.Values(d.services))...), slices.Concat(slices.Collect(maps.Values(d.owners))...)} {
		slices.SortFunc(m, netip.AddrPort.Compare)
		list = append(list, slices.Compact(m)...)
	}
	return list
}

// ofPods are the addresses of an owner's pods. Those of the host's network are
// the node's, where others listen as well.
func ofPods(o *nodecache.Owner) (as []netip.AddrPort) {
	if o == nil {
		return nil
	}
	for _, m := range o.Pods {
		if m.Shadowed || m.HostNetwork || m.State == nodecache.Absent || !m.Addr.IsValid() {
			continue
		}
		ports := map[uint16]bool{}
		for i := range m.Declared {
			ports[m.Declared[i].Port] = true
		}
		if o.Info != nil {
			for _, p := range o.Info.For(m.Pod) {
				ports[p.Port] = true
			}
		}
		for port := range ports {
			if speaks(o, m.Pod, port) != plainGRPC {
				continue
			}
			for _, a := range append(slices.Clone(m.More), m.Addr) {
				as = append(as, netip.AddrPortFrom(a.Unmap(), port))
			}
		}
	}
	return as
}

// ofService are the addresses of a Service with those ports behind which somebody
// is known to speak plaintext gRPC, and nobody to speak anything else.
func (r *refresh) ofService(v *nodecache.FrontView) (as []netip.AddrPort) {
	if v == nil || v.Headless || v.External != "" {
		return nil
	}
	for _, fp := range v.Ports {
		p := place{port: fp.Port}
		r.findService(&p, v)
		plain, other := false, false
		for _, s := range r.crowd(&p, "") {
			if s.absent != "" || s.member.Pod == nil {
				continue
			}
			switch speaks(s.owner, s.member.Pod, s.target) {
			case plainGRPC:
				plain = true
			case otherProtocol:
				other = true
			}
		}
		if plain && !other {
			for _, ip := range v.ClusterIPs {
				as = append(as, netip.AddrPortFrom(ip.Unmap(), fp.Port))
			}
		}
	}
	return as
}

// speech is what a port is known to speak.
type speech uint8

const (
	notKnown speech = iota
	plainGRPC
	otherProtocol
)

func speaks(o *nodecache.Owner, p *nodecache.Pod, port uint16) speech {
	if slices.ContainsFunc(p.Declared, func(d nodecache.Declared) bool { return d.Port == port }) {
		return plainGRPC
	}
	if o == nil || o.Info == nil {
		return notKnown
	}
	for _, info := range o.Info.For(p) {
		if info.Port != port {
			continue
		}
		switch info.State {
		case nodecache.PortServes:
			return plainGRPC
		case nodecache.PortTLS, nodecache.PortNotGRPC:
			return otherProtocol
		}
	}
	return notKnown
}
