package kube

import (
	"net/netip"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// The annotations that pods carry; CollectAnnotation is read on namespaces
// too.
const (
	// GRPCPortAnnotation lists, separated by commas, ports that speak gRPC.
	GRPCPortAnnotation = "fingerpost.dev/grpc-port"
	// ServicesAnnotation declares services, as "50051=pkg.A,pkg.B".
	ServicesAnnotation = "fingerpost.dev/services"
	// CollectAnnotation "false" opts out of being asked, "true" opts a
	// hostNetwork pod in.
	CollectAnnotation = "fingerpost.dev/collect"
	// ExportAnnotation lists the namespaces, separated by commas, whose callers
	// may reach the services by name alone; "*" is all of them.
	ExportAnnotation = "fingerpost.dev/export-to"
	// LocalityAnnotation says who is called first: "even", "zone" or "node".
	LocalityAnnotation = "fingerpost.dev/locality"
	// UpstreamsAnnotation lists, separated by commas, what the pod calls: gRPC
	// services, and Services with or without one; see parseUpstreams.
	UpstreamsAnnotation = "fingerpost.dev/upstreams"
	// PeerAnnotation is on the pods of agents alone: where this one answers the
	// others, and with which key; see [ParsePeer].
	PeerAnnotation = "fingerpost.dev/peer"
)

// Why a pod is absent: the values of nodecache.Pod.Reason.
const (
	ReasonSucceeded   = "has finished"
	ReasonFailed      = "has failed"
	ReasonNoAddress   = "has no address"
	ReasonNotReady    = "is not ready"
	ReasonTerminating = "is terminating and not ready"
)

// Labels that name the revision of a pod's program, see OwnerKey.
const (
	templateHashLabel = "pod-template-hash"
	revisionHashLabel = "controller-revision-hash"
	// Argo Rollouts name their ReplicaSets by a label of their own.
	rolloutsHashLabel = "rollouts-pod-template-hash"
	// The API server copies these two from the node (PodTopologyLabels, on by
	// default from Kubernetes 1.35).
	zoneLabel   = "topology.kubernetes.io/zone"
	regionLabel = "topology.kubernetes.io/region"
)

// Record is what is kept of one pod. It is immutable.
type Record struct {
	nodecache.Pod
	of *template // of which Pod.Common is a part
	// at keeps the interned strings of Pod shared: package unique forgets a
	// value that no handle refers to.
	at unique.Handle[place]
}

// place is what the pods of one node have in common. The pod of an agent has one
// for itself, in which its PeerAnnotation stands: other pods have no room for it.
type place struct{ node, zone, region, peer string }

// Notes says, one line each, what of the pod's annotations was ignored and
// why.
func (r *Record) Notes() []string { return r.of.Ignored }

// Convert makes the record of a pod. Nothing in it refers to the pod. The
// rules are those of the Kubernetes EndpointSlice controller for which pods
// get traffic, with terminating pods that are still Ready as Draining.
func Convert(pod *corev1.Pod) *Record { return seePod(pod).record() }

// record copies what it keeps.
func (s *seen) record() *Record {
	var room [1024]byte
	r := newRecord(templates.get(s.templateKey(room[:0])), unique.Make(place{s.node, s.zone, s.region, s.peer}), s.uid, s.name)
	r.Created = s.created
	r.HostNetwork = s.hostNetwork
	r.Addr, r.More = s.addresses()
	r.State, r.Reason = s.state(r.Addr.IsValid())
	return r
}

// newRecord copies the UID and the name.
func newRecord(t *template, at unique.Handle[place], uid, name string) *Record {
	r := &Record{of: t, at: at}
	var own strings.Builder // one piece of memory for the two
	own.Grow(len(uid) + len(name))
	own.WriteString(uid)
	own.WriteString(name)
	r.UID, r.Name = own.String()[:len(uid)], own.String()[len(uid):]
	r.Common = &t.Common
	r.Node, r.Zone = at.Value().node, at.Value().zone
	r.CollectOff, r.CollectOn = t.optedOut, t.collectOn
	return r
}

// GetObjectMeta lets client-go key a record as it keys the pod.
func (r *Record) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: r.Namespace, Name: r.Name}
}

// inNamespace returns the record as it is in a namespace that did or did not
// opt out of being asked.
func (r *Record) inNamespace(off bool) *Record {
	off = off || r.of.optedOut
	if off == r.CollectOff {
		return r
	}
	record := *r
	record.CollectOff = off
	return &record
}

func (r *Record) equal(o *Record) bool {
	return r.Equal(&o.Pod) && r.at == o.at
}

// imageIDs returns what the node reports for each container.
func imageIDs(pod *corev1.Pod) []string {
	ids := make([]string, len(pod.Status.ContainerStatuses))
	for i := range ids {
		ids[i] = pod.Status.ContainerStatuses[i].ImageID
	}
	return ids
}

// addresses returns the primary address, which may be none, and the others.
func (s *seen) addresses() (netip.Addr, []netip.Addr) {
	if len(s.ips) == 0 {
		first, _ := parseAddr(s.ip)
		return first, nil
	}
	first, _ := parseAddr(s.ips[0])
	var more []netip.Addr
	for _, ip := range s.ips[1:] {
		if a, ok := parseAddr(ip); ok && a != first {
			more = append(more, a)
		}
	}
	return first, more
}

func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.IsUnspecified() {
		return netip.Addr{}, false
	}
	return a.Unmap().WithZone(""), true
}

// state reads no clock: a terminal phase ends a pod at once, a
// deletionTimestamp outranks Ready, and a phase that the node could not report
// changes nothing.
func (s *seen) state(addressed bool) (nodecache.PodState, string) {
	switch {
	case s.phase == string(corev1.PodSucceeded):
		return nodecache.Absent, ReasonSucceeded
	case s.phase == string(corev1.PodFailed):
		return nodecache.Absent, ReasonFailed
	case s.deleted && !s.ready:
		return nodecache.Absent, ReasonTerminating
	case !addressed:
		return nodecache.Absent, ReasonNoAddress
	case !s.ready:
		return nodecache.Absent, ReasonNotReady
	case s.deleted:
		return nodecache.Draining, ""
	}
	return nodecache.Serving, ""
}

// alive tells whether the pod's addresses are its own to be found by: a
// terminal pod's may be another's already, a host's are many pods'.
func alive(p *nodecache.Pod) bool {
	return p.Addr.IsValid() && !p.HostNetwork &&
		(p.State == nodecache.Serving || p.State == nodecache.Absent && p.Reason == ReasonNotReady)
}
