package kube

import (
	"cmp"
	"slices"
	"strings"

	"github.com/fingerpost/fingerpost/nodecache"
)

// locality reads who is to call the pod first.
func (t *template) locality(a annotation) nodecache.Locality {
	if !a.there {
		return nodecache.LocalityUnsaid
	}
	l, bad := parseLocality(a.value)
	if bad != "" {
		t.note(LocalityAnnotation, a.value, "%s", bad)
	}
	return l
}

func parseLocality(value string) (l nodecache.Locality, bad string) {
	l, ok := nodecache.ParseLocality(strings.TrimSpace(value))
	if !ok {
		bad = `it is none of "even", "zone" and "node"`
	}
	return l, bad
}

// topology is where a node is.
type topology struct{ zone, region string }

// on returns the place with what the node's own labels say, where the pod's do
// not.
func (p place) on(n topology) place {
	if p.zone == "" || p.zone == n.zone {
		p.zone, p.region = n.zone, cmp.Or(p.region, n.region)
	}
	return p
}

// append is the place in a checkpoint.
func (p place) append(b []byte) []byte {
	for _, s := range [...]string{p.node, p.zone, p.region, p.peer} {
		b = appendText(b, s)
	}
	return b
}

// votes counts the pods that say so. Who may make pods may make one that says
// anything, so that of several words the one of most pods counts.
type votes map[topology]int

func (v votes) add(r *Record, n int) {
	at := r.at.Value()
	if at.zone == "" || at.region == "" {
		return
	}
	t := topology{at.zone, at.region}
	if v[t] += n; v[t] == 0 {
		delete(v, t)
	}
}

// regions is the region of each zone; of several with as many votes the first
// by name.
func (v votes) regions() map[string]string {
	out := map[string]string{}
	most := map[string]int{}
	for t, n := range v {
		if n > most[t.zone] || n == most[t.zone] && t.region < out[t.zone] {
			out[t.zone], most[t.zone] = t.region, n
		}
	}
	return out
}

// Moves tells whether [Store.Place] may be another one than before: it is another
// number then, unless the directory has told of a change.
func (s *Store) Moves() uint64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.moves
}

// Place says where the local node is: by the labels of pods, for which
// EndpointSlices speak where they have none, and by a Node itself where there is
// a file that has it. It looks at each pod of the node.
func (s *Store) Place() nodecache.Place {
	s.mu.RLock()
	own, regions := s.own, s.regions.regions()
	zones, silent := map[string]int{}, []string(nil)
	for _, r := range s.here {
		if r.Zone != "" {
			zones[r.Zone]++
		} else {
			silent = append(silent, r.UID)
		}
	}
	s.mu.RUnlock()
	if own.zone == "" {
		for _, uid := range silent {
			if zone := s.dir.ZoneOf(uid); zone != "" {
				zones[zone]++
			}
		}
		most := 0
		for z, n := range zones {
			if n > most || n == most && z < own.zone {
				own.zone, most = z, n
			}
		}
	}
	p := nodecache.Place{Zone: own.zone, Region: cmp.Or(own.region, regions[own.zone])}
	for z, r := range regions {
		if r == p.Region {
			p.Near = append(p.Near, z)
		}
	}
	slices.Sort(p.Near)
	return p
}

// setOwn takes note of what the local node itself says.
func (s *Store) setOwn(own topology) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	s.own = own
	s.moves++
	s.mu.Unlock()
}
