package nodecache_test

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// The model of presumption asks of one pod and one service at a time, and walks
// back through the revisions. All owners of the histories are of one workload.

// back returns the other owners that may be earlier revisions, the last first.
func (m *model) back(key, without nodecache.OwnerKey) []nodecache.OwnerKey {
	var keys []nodecache.OwnerKey
	for _, k := range worldOwners {
		there := m.lives[k] != nil || m.memories[k] != nil
		_, its := m.age(k)
		_, own := m.age(key)
		young := !its.IsZero() && !own.IsZero() && its.After(own)
		if k != key && k != without && there && !young {
			keys = append(keys, k)
		}
	}
	slices.SortStableFunc(keys, func(a, b nodecache.OwnerKey) int {
		one, _ := m.age(a)
		other, _ := m.age(b)
		return other.Compare(one)
	})
	return keys
}

// age returns when an owner came, and when it came for the first time.
func (m *model) age(key nodecache.OwnerKey) (last, first time.Time) {
	if l := m.lives[key]; l != nil {
		return l.oldest, l.ever
	}
	if mem := m.memories[key]; mem != nil {
		return mem.oldest, mem.ever
	}
	return time.Time{}, time.Time{}
}

func (m *model) info(key nodecache.OwnerKey) *nodecache.Info {
	if mem := m.memories[key]; mem != nil && mem.info != nil {
		return mem.info
	}
	return &nodecache.Info{}
}

// on returns the ports on which an info has the service.
func on(info *nodecache.Info, service string) []uint16 {
	var ports []uint16
	for _, p := range info.Ports {
		if slices.ContainsFunc(p.Services, func(s nodecache.Service) bool { return s.Name == service }) {
			ports = append(ports, p.Port)
		}
	}
	return ports
}

// word is what a port says: yes or no, and nothing where it was not asked or
// would not say.
func (m *model) word(p nodecache.Pod, port uint16, service string) string {
	for _, d := range p.Declared {
		if d.Port == port {
			return map[bool]string{true: "yes", false: "no"}[slices.Contains(d.Services, service)]
		}
	}
	for _, i := range m.info(p.Owner).Ports {
		if i.Port == port && i.State != nodecache.PortDenied {
			return map[bool]string{true: "yes", false: "no"}[slices.Contains(on(m.info(p.Owner), service), port)]
		}
	}
	return ""
}

// maybe returns the ports of a pod that may have the service which another has
// on was; yes is set where the pod says itself that it has it.
func (m *model) maybe(p nodecache.Pod, service string, was []uint16) (ports []uint16, yes bool) {
	named, candidates := map[uint16]bool{}, map[uint16]bool{}
	for _, h := range p.Hints {
		named[h.Port] = true
	}
	for _, d := range p.Declared {
		named[d.Port] = true
		yes = yes || slices.Contains(d.Services, service)
	}
	for _, i := range m.info(p.Owner).Ports {
		named[i.Port] = true
	}
	for _, port := range on(m.info(p.Owner), service) {
		yes = yes || !declares(p, port)
	}
	for _, port := range was {
		if named[port] || len(named) == 0 {
			candidates[port] = true
		}
	}
	if len(candidates) == 0 {
		candidates = named
	}
	for port := range candidates {
		if m.word(p, port, service) == "" {
			ports = append(ports, port)
		}
	}
	slices.Sort(ports)
	return ports, yes
}

// presumes returns the port on which a pod is presumed to have a service, and
// from which owner; 0 if it is not.
func (m *model) presumes(p nodecache.Pod, service string, without nodecache.OwnerKey) (uint16, nodecache.OwnerKey) {
	var passed []nodecache.OwnerKey
	for _, k := range m.back(p.Owner, without) {
		was := on(m.info(k), service)
		if len(was) == 0 {
			passed = append(passed, k)
			continue
		}
		ports, yes := m.maybe(p, service, was)
		if yes || len(ports) == 0 || slices.ContainsFunc(passed, func(k nodecache.OwnerKey) bool { return m.ends(k, service, was) }) {
			break
		}
		return ports[0], k
	}
	return 0, nodecache.OwnerKey{}
}

// ends tells whether a revision that was not found to have a service has none
// that may.
func (m *model) ends(k nodecache.OwnerKey, service string, was []uint16) bool {
	pods := m.of(k)
	if len(pods) == 0 { // the last one speaks for them, but its hints are gone
		p := m.memories[k].last
		p.Hints = nil
		for _, port := range was {
			p.Hints = append(p.Hints, nodecache.Hint{Port: port})
		}
		pods = []nodecache.Pod{p}
	}
	return !slices.ContainsFunc(pods, func(p nodecache.Pod) bool {
		ports, yes := m.maybe(p, service, was)
		return yes || len(ports) > 0
	})
}

// presumed lists all that the pods of an owner are presumed to have.
func (m *model) presumed(key, without nodecache.OwnerKey) []string {
	var out []string
	for _, p := range m.of(key) {
		for _, service := range worldServices {
			if port, from := m.presumes(p, service, without); port != 0 {
				out = append(out, fmt.Sprintf("%s:%d has %s by %s", p.UID, port, service, from))
			}
		}
	}
	return out
}

// decides tells whether what is known of an owner changes what the pods of
// another are presumed to have.
func (m *model) decides(key, of nodecache.OwnerKey) bool {
	return key != of && !slices.Equal(m.presumed(of, nodecache.OwnerKey{}), m.presumed(of, key))
}

// presumedIn lists the same of a view.
func presumedIn(o *nodecache.Owner) []string {
	var out []string
	for _, m := range o.Pods {
		m.Shadowed = false // who gets no calls has services all the same
		alone := *o
		alone.Pods = []nodecache.Member{m}
		for _, service := range worldServices {
			for _, t := range alone.Targets(service) {
				if t.Presumed != nil {
					out = append(out, fmt.Sprintf("%s:%d has %s by %s", m.UID, t.Addr.Port(), service, t.Presumed.From))
				}
			}
		}
	}
	return out
}

// listed are the services of the list of presumptions.
func listed(o *nodecache.Owner) []string {
	var names []string
	for _, p := range o.Presumed {
		names = append(names, p.Service)
	}
	return names
}

// servicesOf are those of lines that presumed wrote.
func servicesOf(lines []string) []string {
	var names []string
	for _, line := range lines {
		names = append(names, strings.Fields(line)[2])
	}
	return sorted(names)
}
