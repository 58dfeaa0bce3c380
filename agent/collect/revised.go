package collect

import (
	"cmp"
	"slices"
	"strings"
	"time"
	"unique"

	"github.com/fingerpost/fingerpost/nodecache"
)

// word is what one pod said.
type word struct {
	pod   *nodecache.Pod
	ports []nodecache.PortInfo
}

// contradicts tells whether a pod lacks something that pods with its images
// were seen to serve.
func contradicts(info *nodecache.Info, w word) bool {
	g, ok := group(info, w.pod)
	if !ok {
		return false
	}
	known := portsOf(info, g)
	return len(missing(known, carry(known, w.ports))) > 0
}

// group returns the index of the variant that holds for the images of a pod, -1
// for the info itself, and whether the images were asked before.
func group(info *nodecache.Info, p *nodecache.Pod) (int, bool) {
	for n, v := range info.Variants {
		if v.Pod == "" && v.Images == p.Images {
			return n, true
		}
	}
	return -1, p.Images == "" || len(info.Images) == 0 || slices.Contains(info.Images, p.Images)
}

func portsOf(info *nodecache.Info, g int) []nodecache.PortInfo {
	if g < 0 {
		return info.Ports
	}
	return info.Variants[g].Ports
}

// revised is what is known of an owner after one or two of its pods with equal
// images were asked again.
//
// What a pod serves beyond what was known counts at once, for all pods with its
// images. What it lacks is taken from all of them only if a second pod lacks it
// too, or there is no second pod; else it is this pod's own word.
func revised(o *nodecache.Owner, first word, second *word, now time.Time) *nodecache.Info {
	info := *o.Info
	info.Origin = nodecache.OriginSelf
	info.Images, info.Variants = slices.Clone(info.Images), slices.Clone(info.Variants)
	prune(&info, o.Pods)

	g, asked := group(&info, first.pod)
	known := portsOf(&info, g)
	heard := carry(known, first.ports)
	if !asked {
		// These images were taken for the owner's, without evidence.
		switch {
		case equalPorts(heard, info.Ports):
			info.Images = append(info.Images, first.pod.Images)
			slices.Sort(info.Images)
		case len(info.Variants) < nodecache.MaxVariants:
			info.Variants = append(info.Variants, nodecache.Variant{
				Images: first.pod.Images, Ports: heard, Collected: now, From: first.pod.String(),
			})
		}
		return &info
	}

	settled, odd := heard, []word(nil)
	if gone := missing(known, heard); len(gone) > 0 && !alone(o.Pods, first.pod) {
		switch {
		case second != nil:
			settled, odd = weigh(known, gone, word{first.pod, heard}, word{second.pod, carry(known, second.ports)})
		case echoed(&info, first.pod, heard):
		default:
			settled, odd = known, []word{{first.pod, heard}}
		}
	}
	if g < 0 {
		info.Ports, info.Collected, info.Pod = settled, now, first.pod.String()
		if len(info.Images) == 0 && first.pod.Images != "" {
			info.Images = []string{first.pod.Images}
		}
	} else {
		v := &info.Variants[g]
		v.Ports, v.Collected, v.From = settled, now, first.pod.String()
	}
	info.Variants = slices.DeleteFunc(info.Variants, func(v nodecache.Variant) bool {
		return v.Pod != "" && v.Images == first.pod.Images &&
			(v.Pod == first.pod.UID || second != nil && v.Pod == second.pod.UID || equalPorts(v.Ports, settled))
	})
	for _, w := range odd {
		if len(info.Variants) < nodecache.MaxVariants {
			info.Variants = append(info.Variants, nodecache.Variant{
				Images: w.pod.Images, Pod: w.pod.UID, Ports: w.ports, Collected: now, From: w.pod.String(),
			})
		}
	}
	return &info
}

// weigh settles what two pods say of which the first lacks something, and
// returns the words that are another than what was settled.
func weigh(known []nodecache.PortInfo, gone map[served]bool, first, second word) (settled []nodecache.PortInfo, odd []word) {
	if equalPorts(first.ports, second.ports) {
		return first.ports, nil
	}
	both := missing(known, second.ports)
	for s := range both {
		if !gone[s] {
			delete(both, s)
		}
	}
	settled = second.ports
	if kept := without(known, both); len(missing(kept, second.ports)) > 0 {
		settled = union(kept, second.ports)
		odd = append(odd, second)
	}
	return settled, append(odd, first)
}

// alone tells whether no other pod with the same images serves.
func alone(pods []nodecache.Member, p *nodecache.Pod) bool {
	return !slices.ContainsFunc(pods, func(m nodecache.Member) bool {
		return m.UID != p.UID && m.Images == p.Images && m.State == nodecache.Serving && !m.Shadowed
	})
}

// echoed tells whether another pod with the same images has said the same.
func echoed(info *nodecache.Info, p *nodecache.Pod, heard []nodecache.PortInfo) bool {
	return slices.ContainsFunc(info.Variants, func(v nodecache.Variant) bool {
		return v.Pod != "" && v.Pod != p.UID && v.Images == p.Images && equalPorts(v.Ports, heard)
	})
}

// prune forgets pods and images that are gone. Where none is left for which the
// info itself holds, a variant takes its place.
func prune(info *nodecache.Info, pods []nodecache.Member) {
	runs := func(images string) bool {
		return slices.ContainsFunc(pods, func(m nodecache.Member) bool { return m.Images == images })
	}
	info.Variants = slices.DeleteFunc(info.Variants, func(v nodecache.Variant) bool {
		if v.Pod == "" {
			return !runs(v.Images)
		}
		return !slices.ContainsFunc(pods, func(m nodecache.Member) bool { return m.UID == v.Pod && m.Images == v.Images })
	})
	if slices.ContainsFunc(info.Images, runs) {
		info.Images = slices.DeleteFunc(info.Images, func(images string) bool { return !runs(images) })
		return
	}
	own := func(m nodecache.Member) bool {
		return !slices.ContainsFunc(info.Variants, func(v nodecache.Variant) bool {
			return v.Images == m.Images && (v.Pod == "" || v.Pod == m.UID)
		})
	}
	n := slices.IndexFunc(info.Variants, func(v nodecache.Variant) bool { return v.Pod == "" })
	if n < 0 || slices.ContainsFunc(pods, own) {
		return
	}
	v := info.Variants[n]
	info.Ports, info.Images, info.Collected, info.Pod = v.Ports, []string{v.Images}, v.Collected, v.From
	info.Variants = slices.Delete(info.Variants, n, n+1)
}

// carry completes what a pod said by what was known: a port that was not asked
// or that did not say what it serves is no evidence against it.
func carry(known, said []nodecache.PortInfo) []nodecache.PortInfo {
	out := slices.Clone(said)
	for _, k := range known {
		n := slices.IndexFunc(out, func(p nodecache.PortInfo) bool { return p.Port == k.Port })
		switch {
		case n < 0:
			out = append(out, k)
		case len(k.Services) > 0 && (out[n].State == nodecache.PortNoReflection || out[n].State == nodecache.PortDenied):
			out[n] = k
		}
	}
	slices.SortFunc(out, func(a, b nodecache.PortInfo) int { return cmp.Compare(a.Port, b.Port) })
	return out
}

// served is a service at a port.
type served struct {
	port uint16
	name string
}

// missing returns what the known ports serve and the others do not.
func missing(known, ports []nodecache.PortInfo) map[served]bool {
	gone := map[served]bool{}
	for _, p := range known {
		for _, s := range p.Services {
			gone[served{p.Port, s.Name}] = true
		}
	}
	for _, p := range ports {
		for _, s := range p.Services {
			delete(gone, served{p.Port, s.Name})
		}
	}
	return gone
}

func without(ports []nodecache.PortInfo, gone map[served]bool) []nodecache.PortInfo {
	out := slices.Clone(ports)
	for n := range out {
		p := &out[n]
		p.Services = slices.DeleteFunc(slices.Clone(p.Services), func(s nodecache.Service) bool { return gone[served{p.Port, s.Name}] })
		if len(p.Services) == 0 && p.State == nodecache.PortServes {
			p.State = nodecache.PortEmpty
		}
		p.Hash = hash(p)
	}
	return out
}

// union is what either serves; of a service in both, what b says.
func union(a, b []nodecache.PortInfo) []nodecache.PortInfo {
	out := slices.Clone(b)
	for _, p := range a {
		n := slices.IndexFunc(out, func(q nodecache.PortInfo) bool { return q.Port == p.Port })
		if n < 0 {
			out = append(out, p)
			continue
		}
		q := &out[n]
		all := slices.Clone(q.Services)
		for _, s := range p.Services {
			if !slices.ContainsFunc(all, func(t nodecache.Service) bool { return t.Name == s.Name }) {
				all = append(all, s)
			}
		}
		slices.SortFunc(all, func(a, b nodecache.Service) int { return strings.Compare(a.Name, b.Name) })
		q.Services = all
		if len(all) > 0 {
			q.State, q.Detail = nodecache.PortServes, ""
		}
		q.Linkable = q.Linkable && p.Linkable && q.Hash == p.Hash
		q.Files = slices.Concat(q.Files, p.Files)
		slices.SortFunc(q.Files, func(a, b unique.Handle[string]) int { return strings.Compare(a.Value(), b.Value()) })
		q.Files = slices.Compact(q.Files)
		q.Hash = hash(q)
	}
	slices.SortFunc(out, func(a, b nodecache.PortInfo) int { return cmp.Compare(a.Port, b.Port) })
	return out
}

// equalPorts tells whether two pods serve the same.
func equalPorts(a, b []nodecache.PortInfo) bool {
	return slices.EqualFunc(a, b, func(p, q nodecache.PortInfo) bool {
		return p.Port == q.Port && p.State == q.State && p.Hash == q.Hash &&
			slices.EqualFunc(p.Services, q.Services, func(s, t nodecache.Service) bool { return s.Name == t.Name })
	})
}
