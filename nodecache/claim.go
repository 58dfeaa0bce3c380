package nodecache

import (
	"cmp"
	"net/netip"
	"slices"
)

// claim needs mu. Pods with an address of their own claim it; those of the
// host's network share their node's. Of several pods that claim an address the
// first by compareClaims has it, in every order of arrival.
func (d *Directory) claim(p *Pod) {
	if p.HostNetwork {
		return
	}
	d.claimAddr(p, p.Addr.Unmap())
	for _, a := range p.More {
		d.claimAddr(p, a.Unmap())
	}
}

// claimAddr needs mu.
func (d *Directory) claimAddr(p *Pod, a netip.Addr) {
	switch q := d.claims[a]; {
	case q == p: // listed twice
	case q == nil:
		d.claims[a] = p
	case compareClaims(p, q) < 0:
		d.claims[a] = p
		d.rivals[a] = append(d.rivals[a], q)
		d.changedPod(q)
	case !slices.Contains(d.rivals[a], p):
		d.rivals[a] = append(d.rivals[a], p)
	}
}

// disclaim needs mu.
func (d *Directory) disclaim(p *Pod) {
	if p.HostNetwork {
		return
	}
	d.disclaimAddr(p, p.Addr.Unmap())
	for _, a := range p.More {
		d.disclaimAddr(p, a.Unmap())
	}
}

// disclaimAddr needs mu.
func (d *Directory) disclaimAddr(p *Pod, a netip.Addr) {
	rivals := d.rivals[a]
	if d.claims[a] == p {
		if len(rivals) == 0 {
			delete(d.claims, a)
			return
		}
		p = slices.MinFunc(rivals, compareClaims)
		d.claims[a] = p
		d.changedPod(p)
	}
	i := slices.Index(rivals, p)
	if i < 0 {
		return
	}
	if rivals = slices.Delete(rivals, i, i+1); len(rivals) > 0 {
		d.rivals[a] = rivals
	} else {
		delete(d.rivals, a)
	}
}

// compareClaims orders pods that claim one address: a serving one goes before
// a draining one, then the one created last, for addresses are used again at
// once.
func compareClaims(a, b *Pod) int {
	return cmp.Or(
		cmp.Compare(a.State, b.State), // Serving is the lower one
		b.Created.Compare(a.Created),
		cmp.Compare(b.UID, a.UID),
	)
}
