package nodecache

import (
	"cmp"
	"slices"
)

// Member is a pod of an owner.
type Member struct {
	*Pod
	// Shadowed is set where another pod that is alive claims the same address:
	// the address is not this pod's any more, and it gets no calls.
	Shadowed bool
	// Behind says how the pod stands behind Services. A Service of which
	// several slices hold the pod is there several times.
	Behind []*Standing
}

// Zone is the pod's own word, else that of a slice that holds it; empty where
// neither says. Nodes are not read.
func (m Member) Zone() string {
	if m.Pod.Zone != "" {
		return m.Pod.Zone
	}
	return zoneOf(m.Behind)
}

func zoneOf(behind []*Standing) string {
	for _, st := range behind {
		if st.Zone != "" {
			return st.Zone
		}
	}
	return ""
}

// AllHints returns the hints that the pod gives and those of the Services in
// front of it, sorted by port, one per port: the pod's own word goes first.
func (m Member) AllHints() []Hint {
	hints := m.Hints
	for _, st := range m.Behind {
		for _, h := range st.Hints {
			if !slices.ContainsFunc(hints, func(g Hint) bool { return g.Port == h.Port }) {
				hints = append(slices.Clip(hints), h)
			}
		}
	}
	if len(hints) > len(m.Hints) {
		slices.SortFunc(hints, func(a, b Hint) int { return cmp.Compare(a.Port, b.Port) })
	}
	return hints
}

// DialPorts returns the hinted ports that may be dialled to learn what the pod
// serves: not declared, not opted out, and of a hostNetwork pod only where it
// opted in.
func (m Member) DialPorts() []uint16 {
	if m.shy() {
		return nil
	}
	var ports []uint16
	for _, h := range m.AllHints() {
		if !m.declares(h.Port) {
			ports = append(ports, h.Port)
		}
	}
	return ports
}

// dials tells whether DialPorts has a port.
func (m Member) dials() bool {
	undeclared := func(h Hint) bool { return !m.declares(h.Port) }
	return !m.shy() && (slices.ContainsFunc(m.Hints, undeclared) ||
		slices.ContainsFunc(m.Behind, func(st *Standing) bool { return slices.ContainsFunc(st.Hints, undeclared) }))
}

// WhyNotAsked is that of [Owner.WhyNotAsked] for one pod.
func (m Member) WhyNotAsked(node string) string {
	switch {
	case m.Shadowed:
		return "its address is another pod's"
	case m.State != Serving:
		return "its pods are " + m.State.String()
	case node != "" && m.Node != node:
		return "its pods are on other nodes"
	case !m.dials():
		return m.whyNoDial()
	}
	return ""
}

// whyNoDial says in one phrase why DialPorts is empty.
func (m Member) whyNoDial() string {
	switch {
	case m.CollectOff:
		return "collect is turned off by annotation"
	case len(m.AllHints()) == 0:
		return "no port has a gRPC hint"
	case m.Unready:
		return "pods that are not ready are not asked"
	default:
		return "hostNetwork pods are not asked unless they opt in"
	}
}

// port returns the port to which calls to the service go; answered are those
// on which the owner was found to serve it, sorted.
func (m Member) port(service string, answered []uint16) (uint16, bool) {
	var ports []uint16
	for _, d := range m.Declared {
		if d.has(service) {
			ports = append(ports, d.Port)
		}
	}
	if len(ports) == 0 {
		if len(m.Declared) == 0 {
			ports = answered
		} else {
			ports = slices.DeleteFunc(slices.Clone(answered), m.declares)
		}
	}
	return m.choose(ports)
}

// choose returns that of several ports to which calls go.
func (m Member) choose(ports []uint16) (uint16, bool) {
	switch len(ports) {
	case 0:
		return 0, false
	case 1:
		return ports[0], true
	}
	for _, h := range m.Hints {
		if h.Why == WhyAnnotation && slices.Contains(ports, h.Port) {
			return h.Port, true
		}
	}
	for _, port := range ports {
		if slices.ContainsFunc(m.Behind, func(st *Standing) bool { return slices.Contains(st.Ports, port) }) {
			return port, true
		}
	}
	return ports[0], true
}

func (d *Declared) has(service string) bool {
	_, ok := slices.BinarySearch(d.Services, service)
	return ok
}
