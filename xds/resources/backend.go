package resources

import (
	"cmp"
	"net/netip"
	"strconv"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"

	"github.com/fingerpost/fingerpost/nodecache"
)

// backendID is a Service's port to which a route sends calls.
type backendID struct {
	service nodecache.Name
	port    uint16
	// grpc is the gRPC service that the calls name; empty for calls of any
	// kind.
	grpc string
}

// String is the name of the cluster.
func (id backendID) String() string {
	name := "backend/" + id.service.String() + "/" + strconv.Itoa(int(id.port))
	if id.grpc != "" {
		name += "/" + id.grpc
	}
	return name
}

func (id backendID) compare(o backendID) int { return cmp.Compare(id.String(), o.String()) }

// calling is the backend for calls of one gRPC service; with an empty one the
// backend itself.
func (id backendID) calling(grpc string) backendID {
	if grpc != "" {
		id.grpc = grpc
	}
	return id
}

// backendOf is where a route of the kind sends the calls that the match takes.
// A match of a GRPCRoute that names no service, or several by a regular
// expression, leads to all pods of the Service: what each of them lacks is not
// known before the call.
func backendOf(kind nodecache.RouteKind, m *nodecache.RouteMatch, b nodecache.RouteBackend) backendID {
	id := backendID{service: b.Service, port: b.Port}
	if kind == nodecache.GRPCRoute && m.MethodType == nodecache.MatchExact && serviceName.MatchString(m.Service) {
		id.grpc = m.Service
	}
	return id
}

// portOf returns the port of the Service, false if it has none of that number
// (a headless one without ports has every port: its name means whole pods) or is
// but another name for a host (ExternalName), which no call may follow
// (kubernetes CVE-2021-25740 tells why).
func portOf(f *nodecache.Front, port uint16) (nodecache.FrontPort, bool) {
	if f == nil || f.External != "" {
		return nodecache.FrontPort{}, false
	}
	if f.Headless && len(f.Ports) == 0 {
		return nodecache.FrontPort{Port: port}, true
	}
	for _, p := range f.Ports {
		if p.Port == port {
			return p, true
		}
	}
	return nodecache.FrontPort{}, false
}

// backendCluster speaks HTTP/2 to a port of which a route or the Service says
// that it is gRPC, else what the caller speaks: a REST server gets HTTP/1.1
// from those who call it so, as if it were dialled directly. Nothing in it
// follows the pods.
func backendCluster(id backendID, port nodecache.FrontPort, p *nodecache.Policy) *clusterv3.Cluster {
	if id.grpc == "" && !port.GRPC() {
		return callersCluster(id.String(), p)
	}
	return cluster(id.String(), p)
}

// callersCluster speaks what the caller speaks.
func callersCluster(name string, p *nodecache.Policy) *clusterv3.Cluster {
	c := cluster(name, p)
	c.TypedExtensionProtocolOptions[httpProtocolOptions] = pack(callersUpstream(p))
	return c
}

func callersUpstream(p *nodecache.Policy) *upstreamv3.HttpProtocolOptions {
	o := upstream(p)
	o.UpstreamProtocolOptions = &upstreamv3.HttpProtocolOptions_UseDownstreamProtocolConfig{
		UseDownstreamProtocolConfig: &upstreamv3.HttpProtocolOptions_UseDownstreamHttpConfig{
			HttpProtocolOptions:  &corev3.Http1ProtocolOptions{},
			Http2ProtocolOptions: o.GetExplicitHttpConfig().GetHttp2ProtocolOptions(),
		},
	}
	return o
}

// behind returns where calls of a backend may go: the pods, and addresses
// without a pod, to which the Service's port leads, without those pods that are
// known not to serve what is called.
func (r *refresh) behind(v *nodecache.FrontView, port nodecache.FrontPort, grpc string) []endpoint {
	var es []endpoint
	for _, m := range v.Members() {
		if e, absence := r.place(m, port, grpc); absence == "" {
			es = append(es, e)
		}
	}
	return tidy(es)
}

// Absence says why what stands behind a Service gets no calls of a backend;
// empty if it gets some.
type Absence string

// The reasons.
const (
	NoSuchPort  Absence = "its EndpointSlice does not lead from that port to one of its own"
	NotReady    Absence = "its EndpointSlice does not say that it is ready"
	NoAddress   Absence = "its EndpointSlice names no address"
	NotServed   Absence = "it is no pod that serves"
	Lacking     Absence = "it is known not to serve what is called"
	SameAddress Absence = "another has the same address and port"
)

// place returns where the member gets calls of a backend, or why it gets none.
func (r *refresh) place(m nodecache.FrontMember, port nodecache.FrontPort, grpc string) (endpoint, Absence) {
	target, ok := targetOf(m, port)
	if !ok {
		return endpoint{}, NoSuchPort
	}
	return r.placeAt(m, target, grpc)
}

// placeAt is place for a port of the member itself.
func (r *refresh) placeAt(m nodecache.FrontMember, target uint16, grpc string) (endpoint, Absence) {
	if m.Pod == "" {
		return withoutPod(m, target)
	}
	pod, ok := r.dir.Member(m.Pod)
	if !ok || pod.Shadowed || pod.State == nodecache.Absent || !pod.Addr.IsValid() {
		return endpoint{}, NotServed
	}
	if grpc != "" && r.owner(pod.Owner).Lacks(pod.Pod, target, grpc) {
		return endpoint{}, Lacking
	}
	return endpoint{addr: netip.AddrPortFrom(pod.Addr, target), pod: pod.Pod, zone: pod.Zone()}, ""
}

// targetOf returns the port of the member to which the Service's port leads:
// that of the same name in the slice. It differs between pods where it is a
// named one of theirs.
func targetOf(m nodecache.FrontMember, port nodecache.FrontPort) (uint16, bool) {
	for _, p := range m.Ports {
		if p.Name == port.Name && p.Port != 0 {
			return p.Port, true
		}
	}
	return port.Port, m.AnyPort
}

// withoutPod is an endpoint that somebody wrote by hand. Of its addresses the
// first counts (EndpointSlice API, "addresses").
func withoutPod(e nodecache.FrontMember, port uint16) (endpoint, Absence) {
	state := nodecache.Serving
	if !e.Ready {
		state = nodecache.Draining
	}
	switch {
	case len(e.Addrs) == 0:
		return endpoint{}, NoAddress
	case state == nodecache.Draining && (!e.Serving || !e.Terminating):
		return endpoint{}, NotReady
	}
	return endpoint{
		addr: netip.AddrPortFrom(e.Addrs[0], port), zone: e.Zone,
		pod: &nodecache.Pod{State: state, Addr: e.Addrs[0], Common: &nodecache.Common{Locality: e.Locality}},
	}, ""
}
