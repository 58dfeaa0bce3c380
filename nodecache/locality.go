package nodecache

import "slices"

// Locality says which of several endpoints are called first, by where they run.
// They are ordered: what prefers least is the lowest.
type Locality uint8

const (
	// LocalityUnsaid leaves it to the agent's flag. It is the zero value.
	LocalityUnsaid Locality = iota
	// LocalityEven prefers none.
	LocalityEven
	// LocalityZone prefers those of the caller's zone, then of its region.
	LocalityZone
	// LocalityNode prefers those of the caller's node, then of its zone, then of
	// its region.
	LocalityNode

	numLocalities = iota
)

var localities = [numLocalities]string{LocalityEven: "even", LocalityZone: "zone", LocalityNode: "node"}

// String is even, zone or node; empty of LocalityUnsaid.
func (l Locality) String() string {
	if l >= numLocalities {
		return ""
	}
	return localities[l]
}

// ParseLocality reads even, zone or node.
func ParseLocality(text string) (Locality, bool) {
	for l := LocalityEven; l < numLocalities; l++ {
		if localities[l] == text {
			return l, true
		}
	}
	return LocalityUnsaid, false
}

// Place is where the node of an agent is. The zero Place is one of which nobody
// says anything.
type Place struct {
	// Zone and Region may be empty.
	Zone, Region string
	// Near are the zones of the region that are known, sorted. No zone is in two
	// regions (Kubernetes, "Well-Known Labels", topology.kubernetes.io/zone).
	Near []string
}

// Equal tells whether two places are the same in every field.
func (p Place) Equal(q Place) bool {
	return p.Zone == q.Zone && p.Region == q.Region && slices.Equal(p.Near, q.Near)
}
