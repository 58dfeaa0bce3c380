package nodecache

import (
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Owner is an immutable view of one owner at one moment.
type Owner struct {
	Key       OwnerKey
	Name      string // display name, as ReplicaSet/a-5d9
	Workload  Workload
	Created   time.Time // of the oldest pod seen in this generation; zero if unknown
	Knowledge Knowledge
	// Reason says why the knowledge is None or Failed.
	Reason string
	// NextTry is when a Failed owner is asked again.
	NextTry time.Time
	// Hung is set of a Failed owner whose server gave no answer in time; see
	// [Directory.Hang].
	Hung bool
	// Origin is that of Info, else declared, else empty.
	Origin Origin
	// Generation is 0 for an owner without pods.
	Generation uint64
	// Pods is sorted by namespace, name and UID. It is empty where only what
	// was learned is left.
	Pods []Member
	// Info is nil unless the owner was collected. Where there are no pods it
	// also holds what the last of them declared.
	Info *Info
	// Presumed is what pods are presumed to serve beyond what is known of them,
	// sorted by service.
	Presumed []Presumption
	// Behind says behind which Services the pods stand, the oldest first: one
	// entry for each. Where no pod stands anywhere, it is where they stood.
	Behind []*Standing
	// Export holds what the pods say together of [Pod.Export], sorted; where
	// there are none, what the last of them said. Nil where none says anything.
	Export []string
	// Policy is what the owner's workload says of calls; nil: nothing.
	Policy *Policy
	// Ignored says what of the pods' annotations is ignored, and why, sorted.
	Ignored []string
	// Routes holds the matches that lead to the Services of Behind. It is
	// sorted by route UID, rule and match.
	Routes []RouteEntry
}

// Target is where a call to a service may go.
type Target struct {
	// Addr holds the port alone where the pod stands for a DNS name
	// ([Common.Host]).
	Addr netip.AddrPort
	Pod  *Pod
	// Zone is [Member.Zone].
	Zone string
	// Presumed says why where that is not known of the pod itself; else nil.
	Presumed *Presumption
}

// Services returns the names of the services of the owner, sorted: those of
// its info, where there are pods only what one of them serves by it, and those
// that its pods declare.
func (o *Owner) Services() []string {
	var names []string
	if o.Info != nil {
		for n := -1; n < len(o.Info.Variants); n++ {
			if len(o.Info.Variants) > 0 && !o.uses(n) {
				continue
			}
			for _, p := range o.Info.program(n) {
				for _, s := range p.Services {
					names = append(names, s.Name)
				}
			}
		}
	}
	for _, m := range o.Pods {
		for _, d := range m.Declared {
			names = append(names, d.Services...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Names returns the services to which calls may go, sorted: Services, and those
// that pods are presumed to serve.
func (o *Owner) Names() []string {
	names := o.Services()
	if len(o.Presumed) == 0 {
		return names
	}
	for _, p := range o.Presumed {
		names = append(names, p.Service)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Presumption returns that of the service, nil if there is none.
func (o *Owner) Presumption(service string) *Presumption {
	i, ok := slices.BinarySearchFunc(o.Presumed, service, func(p Presumption, name string) int { return strings.Compare(p.Service, name) })
	if !ok {
		return nil
	}
	return &o.Presumed[i]
}

// Programs yields every port that is known to serve something for the owner:
// those of its info, then of the owners by which something is presumed.
func (o *Owner) Programs() iter.Seq[*PortInfo] {
	return func(yield func(*PortInfo) bool) {
		var infos []*Info
		if o.Info != nil {
			infos = append(infos, o.Info)
		}
		for _, p := range o.Presumed {
			if !slices.Contains(infos, p.Info) {
				infos = append(infos, p.Info)
			}
		}
		for _, info := range infos {
			for p := range info.All() {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// uses tells whether a variant of the info is that of some pod; where there are
// none, every one is.
func (o *Owner) uses(variant int) bool {
	return len(o.Pods) == 0 || slices.ContainsFunc(o.Pods, func(m Member) bool { return o.Info.index(m.Pod) == variant })
}

// Targets returns where the service is served, in the order of Pods, each pod
// once. A pod's own declaration goes before the owner's info, of which the part
// counts that holds for the pod; of a pod of which neither says it, it may be
// presumed. Of several ports that serve it, one that the pod's annotation names
// is taken, else one behind some Service, else the lowest.
func (o *Owner) Targets(service string) []Target {
	var ts []Target
	var answered []uint16
	if o.Info != nil {
		answered = portsOf(o.Info.Ports, service)
	}
	presumed := o.Presumption(service)
	for _, m := range o.Pods {
		if m.Shadowed {
			continue
		}
		answered := answered
		if o.Info != nil && len(o.Info.Variants) > 0 {
			answered = portsOf(o.Info.For(m.Pod), service)
		}
		if port, ok := m.port(service, answered); ok {
			ts = append(ts, Target{Addr: netip.AddrPortFrom(m.Addr, port), Pod: m.Pod, Zone: m.Zone()})
		} else if presumed == nil {
			continue
		} else if port, ok := m.choose(m.open(presumed.Ports, o.Info)); ok {
			ts = append(ts, Target{Addr: netip.AddrPortFrom(m.Addr, port), Pod: m.Pod, Zone: m.Zone(), Presumed: presumed})
		}
	}
	return ts
}

// Ports returns the ports on which the service answered, is declared or is
// presumed, sorted.
func (o *Owner) Ports(service string) []uint16 {
	var ports []uint16
	if o.Info != nil {
		for p := range o.Info.All() {
			ports = append(ports, portsOf([]PortInfo{*p}, service)...)
		}
	}
	for _, m := range o.Pods {
		for _, d := range m.Declared {
			if d.has(service) {
				ports = append(ports, d.Port)
			}
		}
	}
	if o.Presumption(service) != nil {
		for _, t := range o.Targets(service) {
			ports = append(ports, t.Addr.Port())
		}
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// WhyNotAsked says in one phrase why no pod of the owner may be asked what it
// serves now, and "" if one may. node is the one node whose pods may be asked,
// empty for all.
func (o *Owner) WhyNotAsked(node string) string {
	why := "it has no pod"
	for _, m := range o.Pods {
		if why = m.WhyNotAsked(node); why == "" {
			return ""
		}
	}
	return why
}

// judge says what is known of an owner, from what its record stores, its info
// (nil if there is none) and its pods: one that nobody needs to ask is Known by
// declaration, or None for the reason returned.
func judge(stored Knowledge, info *Info, pods []Member) (Knowledge, string) {
	if stored == Known {
		return Known, ""
	}
	declared, dials, why := false, false, ""
	for _, p := range pods {
		declared = declared || len(p.Declared) > 0
		if p.dials() {
			dials = true
		} else if why == "" {
			why = p.whyNoDial()
		}
	}
	asks := stored == Unknown || stored == Failed
	switch {
	case declared && (stored == None || !dials):
		return Known, ""
	case stored == None:
		return None, info.Reason()
	case asks && !dials && info != nil && knowledgeOf(info) == Known:
		return Known, ""
	case asks && !dials:
		return None, why
	}
	return stored, ""
}

// setKnowledge fills Knowledge, Reason and Origin. Info must be set.
func (o *Owner) setKnowledge(stored Knowledge) {
	o.Knowledge, o.Reason = judge(stored, o.Info, o.Pods)
	if o.Info != nil {
		o.Origin = o.Info.Origin
	}
	if o.Knowledge == Known && (o.Info == nil || knowledgeOf(o.Info) == None) {
		o.Origin = OriginDeclared
	}
}
