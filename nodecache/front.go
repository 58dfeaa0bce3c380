package nodecache

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Name is what the API server knows an object by, within its kind.
type Name struct{ Namespace, Name string }

// String is namespace/name.
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// Front is a Kubernetes Service as the agent remembers it: what stands in
// front of pods. ([Service] is what a pod serves.) A Front is immutable once
// it was given to a [Directory].
type Front struct {
	UID       string
	Namespace string
	Name      string
	// Type is spec.type, as ClusterIP; never empty.
	Type string
	// Headless is set where clients get the addresses of all pods.
	Headless bool
	// Selects is set where the cluster finds the pods by labels; else
	// somebody writes the slices by hand, or there are none.
	Selects bool
	// NotReady is spec.publishNotReadyAddresses.
	NotReady bool
	// External is the DNS name of an ExternalName Service, without a trailing
	// dot. Nothing stands behind one but, where it declares something, that name.
	External   string
	ClusterIPs []netip.Addr // unmapped
	// Ports holds the TCP ports, in the Service's own order.
	Ports []FrontPort
	// Created is the creationTimestamp; the zero time is unknown.
	Created time.Time
	// Declared says, of a Service that does not select, what its addresses
	// serve, or its External name. Port 0 is the one port of the slice; the name
	// has none.
	Declared []Declared
	// Export is [Common.Export] of what is declared, Locality [Common.Locality].
	Export   string
	Locality Locality
	// Policy is [Common.Policy] of what is declared.
	Policy *Policy
	// Ignored says which annotation was ignored and why; empty: none.
	Ignored string
}

// FrontPort is one port of a [Front].
type FrontPort struct {
	Name        string
	AppProtocol string
	Port        uint16
}

// GRPC tells whether the Service says of the port that it speaks gRPC.
func (p FrontPort) GRPC() bool { return grpcProtocol(p.AppProtocol) || GRPCPortName(p.Name) }

// Key is the name of the Service.
func (f *Front) Key() Name { return Name{f.Namespace, f.Name} }

// String is namespace/name.
func (f *Front) String() string { return f.Namespace + "/" + f.Name }

// Equal tells whether two Services are the same in every field.
func (f *Front) Equal(g *Front) bool {
	return f.UID == g.UID && f.Namespace == g.Namespace && f.Name == g.Name && f.Type == g.Type &&
		f.Headless == g.Headless && f.Selects == g.Selects && f.NotReady == g.NotReady && f.External == g.External &&
		f.Created.Equal(g.Created) && slices.Equal(f.ClusterIPs, g.ClusterIPs) && slices.Equal(f.Ports, g.Ports) &&
		f.Ignored == g.Ignored && f.Export == g.Export && f.Locality == g.Locality && f.Policy.Equal(g.Policy) && slices.EqualFunc(f.Declared, g.Declared, Declared.equal)
}

// Compare orders Services by creationTimestamp, an unknown one last, then by
// namespace and name. No rollout and no restart changes this order.
func (f *Front) Compare(g *Front) int {
	switch {
	case f.Created.IsZero() != g.Created.IsZero():
		if f.Created.IsZero() {
			return 1
		}
		return -1
	case !f.Created.Equal(g.Created):
		return f.Created.Compare(g.Created)
	}
	return cmp.Or(cmp.Compare(f.Namespace, g.Namespace), cmp.Compare(f.Name, g.Name))
}

// Slice is an EndpointSlice as the agent remembers it. It is immutable once it
// was given to a [Directory].
type Slice struct {
	UID       string
	Namespace string
	Name      string
	// Service is the name of the Service that it belongs to, in the same
	// namespace; empty where it belongs to none.
	Service string
	// Ports holds the TCP ports.
	Ports []SlicePort
	// AnyPort is set where the slice restricts no port, as that of a headless
	// Service without ports.
	AnyPort   bool
	Endpoints []Endpoint
}

// SlicePort is a port of the pods of a [Slice]. Its name is that of the
// Service's port which leads there.
type SlicePort struct {
	Name        string
	AppProtocol string
	Port        uint16
}

// Endpoint is one member of a [Slice].
type Endpoint struct {
	// Pod is the UID of the pod; empty where the endpoint names none.
	Pod string
	// Addrs is set where Pod is empty: a pod's addresses are its own word.
	Addrs []netip.Addr
	// Zone is where it runs; empty where the slice does not say.
	Zone string
	// Ready is what Kubernetes says of it: also of a pod that is not Ready, if
	// the Service publishes those.
	Ready, Serving, Terminating bool
}

// Key is the name of the slice.
func (s *Slice) Key() Name { return Name{s.Namespace, s.Name} }

// Equal tells whether two slices are the same in every field.
func (s *Slice) Equal(t *Slice) bool {
	return s.UID == t.UID && s.Namespace == t.Namespace && s.Name == t.Name && s.Service == t.Service &&
		s.AnyPort == t.AnyPort && slices.Equal(s.Ports, t.Ports) && slices.EqualFunc(s.Endpoints, t.Endpoints, Endpoint.equal)
}

func (e Endpoint) equal(f Endpoint) bool {
	return e.Pod == f.Pod && e.Zone == f.Zone && e.Ready == f.Ready && e.Serving == f.Serving && e.Terminating == f.Terminating &&
		slices.Equal(e.Addrs, f.Addrs)
}

// Standing says that pods stand behind a Service, and to which of their ports
// it leads. It is immutable and shared by the pods of a slice that are in one
// zone.
type Standing struct {
	*Front
	// Zone is that of the pods; empty where the slice does not say, and where
	// pods of several are meant.
	Zone string
	// Ports is sorted. The Service leads to every port if AnyPort is set.
	Ports   []uint16
	AnyPort bool
	// Hints are the ports of which the Service says that they speak gRPC.
	Hints []Hint
}

// Leads tells whether the Service leads to the port.
func (s *Standing) Leads(port uint16) bool { return s.AnyPort || slices.Contains(s.Ports, port) }

// equal does not look at the zone.
func (s *Standing) equal(t *Standing) bool {
	return s == t || s != nil && t != nil && s.Front == t.Front && s.AnyPort == t.AnyPort &&
		slices.Equal(s.Ports, t.Ports) && slices.Equal(s.Hints, t.Hints)
}

// GRPCPortName tells whether a port of this name speaks gRPC.
func GRPCPortName(name string) bool { return name == "grpc" || strings.HasPrefix(name, "grpc-") }

// grpcProtocol tells whether a port of this appProtocol speaks gRPC
// (KEP-3726 for the prefixed name).
func grpcProtocol(name string) bool { return name == "grpc" || name == "kubernetes.io/h2c" }

// stand returns how the pods of the slice stand behind the Service. Of the
// grpc ports of the Service a GRPCRoute says that they speak gRPC.
func stand(f *Front, s *Slice, grpc []uint16) *Standing {
	st := &Standing{Front: f, AnyPort: s.AnyPort}
	for _, p := range s.Ports {
		st.Ports = append(st.Ports, p.Port)
		protocol, routed := p.AppProtocol, false
		for _, fp := range f.Ports {
			if fp.Name != p.Name {
				continue
			}
			routed = slices.Contains(grpc, fp.Port)
			if protocol == "" {
				protocol = fp.AppProtocol
			}
		}
		why := ""
		switch {
		case grpcProtocol(protocol):
			why = "appProtocol of Service " + f.Name
		case GRPCPortName(p.Name):
			why = "port name of Service " + f.Name
		case routed:
			why = "GRPCRoute to Service " + f.Name
		default:
			continue
		}
		if !slices.ContainsFunc(st.Hints, func(h Hint) bool { return h.Port == p.Port }) {
			st.Hints = append(st.Hints, Hint{Port: p.Port, Why: why})
		}
	}
	slices.Sort(st.Ports)
	st.Ports = slices.Compact(st.Ports)
	return st
}

// union merges standings into one for each Service, the oldest Service first.
func union(sts []*Standing) []*Standing {
	var out []*Standing
	for _, st := range sts {
		i := slices.IndexFunc(out, func(o *Standing) bool { return o.Front == st.Front })
		switch {
		case i < 0:
			out = append(out, st)
		case !out[i].equal(st):
			m := &Standing{Front: st.Front, AnyPort: st.AnyPort || out[i].AnyPort}
			m.Ports = slices.Concat(out[i].Ports, st.Ports)
			slices.Sort(m.Ports)
			m.Ports = slices.Compact(m.Ports)
			m.Hints = slices.Concat(out[i].Hints, st.Hints)
			slices.SortStableFunc(m.Hints, func(a, b Hint) int { return cmp.Compare(a.Port, b.Port) })
			m.Hints = slices.CompactFunc(m.Hints, func(a, b Hint) bool { return a.Port == b.Port })
			out[i] = m
		}
	}
	slices.SortFunc(out, func(a, b *Standing) int { return a.Compare(b.Front) })
	return out
}

// FrontView is an immutable view of a Service at one moment.
type FrontView struct {
	*Front
	// Slices is sorted by name.
	Slices []*Slice
}

// FrontMember is what stands behind a Service: a pod, or addresses without
// one.
type FrontMember struct {
	Endpoint
	// Ports is sorted; empty with AnyPort set means all.
	Ports   []SlicePort
	AnyPort bool
	// Locality is the Service's; a pod has its own.
	Locality Locality
}

// Members returns what the slices hold, each pod once: it may stand in two
// slices while it moves between them, and does where it has two addresses.
// Then it is Ready if one of them says so. Sorted by pod UID; addresses
// without a pod come first.
func (v *FrontView) Members() []FrontMember {
	var ms []FrontMember
	for _, s := range v.Slices {
		for _, e := range s.Endpoints {
			ms = append(ms, FrontMember{Endpoint: e, Ports: s.Ports, AnyPort: s.AnyPort, Locality: v.Locality})
		}
	}
	slices.SortStableFunc(ms, func(a, b FrontMember) int { return cmp.Compare(a.Pod, b.Pod) })
	var out []FrontMember
	for _, m := range ms {
		last := len(out) - 1
		if last < 0 || m.Pod == "" || out[last].Pod != m.Pod {
			out = append(out, m)
			continue
		}
		o := &out[last]
		o.Ready, o.Serving, o.Terminating = o.Ready || m.Ready, o.Serving || m.Serving, o.Terminating && m.Terminating
		o.AnyPort = o.AnyPort || m.AnyPort
		for _, p := range m.Ports {
			if !slices.Contains(o.Ports, p) {
				o.Ports = append(slices.Clip(o.Ports), p)
			}
		}
	}
	for i := range out {
		out[i].Ports = slices.Clone(out[i].Ports)
		slices.SortFunc(out[i].Ports, func(a, b SlicePort) int {
			return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Name, b.Name))
		})
	}
	return out
}
