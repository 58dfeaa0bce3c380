package peer

import (
	"cmp"
	"slices"

	"github.com/fingerpost/fingerpost/nodecache"
)

// This file is who does what, computed by everybody for himself from what all of
// them see: owners, and the members. Nothing is negotiated. It depends on names
// alone, so that a release must not change it: for as long as two versions run,
// they would place owners differently.

// hashOf is FNV-1a of the parts, each ended by a zero byte.
func hashOf(parts ...string) uint64 {
	h := uint64(14695981039346656037)
	for _, s := range parts {
		for i := range len(s) {
			h = (h ^ uint64(s[i])) * 1099511628211
		}
		h *= 1099511628211
	}
	return mix(h)
}

// mix is the finalizer of SplitMix64: every bit of the input moves every bit of
// the output.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func hashOfOwner(key nodecache.OwnerKey) uint64 { return hashOf(key.UID, key.Revision) }

// weigh is the weight of a node for an owner, by the hashes of both.
func weigh(owner, node uint64) uint64 { return mix(owner ^ mix(node)) }

// rank sorts nodes by who collects the owner: the first does, and each one of
// the rest if all before it are gone. A node that comes or goes moves no owner
// between two others (rendezvous hashing).
func rank(key nodecache.OwnerKey, nodes []string) {
	owner := hashOfOwner(key)
	slices.SortFunc(nodes, func(a, b string) int {
		return cmp.Or(cmp.Compare(weigh(owner, hashOf(b)), weigh(owner, hashOf(a))), cmp.Compare(a, b))
	})
}

// first returns the head of the ranking of those nodes that may be it, "" if
// there is none. It allocates nothing.
func first(key nodecache.OwnerKey, nodes []string, may func(string) bool) string {
	owner, best, weight := hashOfOwner(key), "", uint64(0)
	for _, n := range nodes {
		if !may(n) {
			continue
		}
		w := weigh(owner, hashOf(n))
		if best == "" || w > weight || w == weight && n < best {
			best, weight = n, w
		}
	}
	return best
}

// roster is the members at one moment. It is immutable.
type roster struct {
	byNode map[string]*seat
	byKey  map[Fingerprint]string
	// ring is sorted by zone, then by hash: neighbours on it mostly share a
	// zone, and from each one every other can be reached along it.
	ring []*seat
}

type seat struct {
	Member
	hash uint64
	at   int // in the ring
}

func newRoster(ms []Member) *roster {
	r := &roster{byNode: make(map[string]*seat, len(ms)), byKey: make(map[Fingerprint]string, len(ms)), ring: make([]*seat, 0, len(ms))}
	for _, m := range ms {
		if m.Node == "" || r.byNode[m.Node] != nil {
			continue
		}
		s := &seat{Member: m, hash: hashOf(m.Node)}
		r.byNode[m.Node] = s
		r.ring = append(r.ring, s)
		for _, k := range m.Keys {
			r.byKey[k] = m.Node
		}
	}
	slices.SortFunc(r.ring, func(a, b *seat) int {
		return cmp.Or(cmp.Compare(a.Zone, b.Zone), cmp.Compare(a.hash, b.hash), cmp.Compare(a.Node, b.Node))
	})
	for i, s := range r.ring {
		s.at = i
	}
	return r
}

func (r *roster) equal(s *roster) bool {
	return slices.EqualFunc(r.ring, s.ring, func(a, b *seat) bool { return a.equal(b.Member) })
}

// sameNodes tells whether both have the same nodes.
func (r *roster) sameNodes(s *roster) bool {
	if len(r.ring) != len(s.ring) {
		return false
	}
	for node := range r.byNode {
		if s.byNode[node] == nil {
			return false
		}
	}
	return true
}

// neighbours are the members from which the node lets itself be told: the two
// beside it on the ring, so that everybody has two who listen to it, and two
// more by rendezvous, one of its own zone and one of any, so that the way
// between any two is short. Those to avoid are passed over. A node that is no
// member has two of rendezvous alone.
func (r *roster) neighbours(node, zone string, avoid func(string) bool) []string {
	out := make([]string, 0, 4)
	free := func(s *seat) bool { return s.Node != node && !slices.Contains(out, s.Node) && !avoid(s.Node) }
	if self := r.byNode[node]; self != nil {
		zone = self.Zone
		for _, step := range [...]int{1, len(r.ring) - 1} {
			for n, at := 1, self.at; n < len(r.ring); n++ {
				at = (at + step) % len(r.ring)
				if s := r.ring[at]; free(s) {
					out = append(out, s.Node)
					break
				}
			}
		}
	}
	owner := hashOf("neighbours of", node)
	for _, near := range [...]bool{true, false} {
		var best *seat
		for _, s := range r.ring {
			if near && s.Zone != zone || !free(s) {
				continue
			}
			if best == nil || weigh(owner, s.hash) > weigh(owner, best.hash) {
				best = s
			}
		}
		if best != nil {
			out = append(out, best.Node)
		}
	}
	return out
}
