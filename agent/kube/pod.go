package kube

import (
	"net/netip"
	"reflect"
	"slices"
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
	zoneLabel         = "topology.kubernetes.io/zone"
)

// Record is what is kept of one pod. It is immutable.
type Record struct {
	*nodecache.Pod
	// Notes says, one line each, what of the pod's annotations was ignored and
	// why.
	Notes []string

	// optedOut is the pod's own word; Pod.CollectOff is its namespace's too.
	optedOut bool
	// These keep the interned strings of Pod shared: package unique forgets
	// a value that no handle refers to.
	of  unique.Handle[origin]
	at  unique.Handle[place]
	run unique.Handle[string]
}

// origin is what the pods of one owner have in common.
type origin struct {
	namespace, uid, revision, display, kind, name string
}

// place is what the pods of one node have in common.
type place struct{ node, zone string }

// Convert makes the record of a pod. Nothing in it refers to the pod. The
// rules are those of the Kubernetes EndpointSlice controller for which pods
// get traffic, with terminating pods that are still Ready as Draining.
func Convert(pod *corev1.Pod) *Record { return seePod(pod).record() }

// record copies what it keeps.
func (s *seen) record() *Record {
	r := &Record{
		of:  unique.Make(s.owner()),
		at:  unique.Make(place{s.node, s.zone}),
		run: unique.Make(images(s.images)),
	}
	of, at := r.of.Value(), r.at.Value()
	var own strings.Builder // one piece of memory for the two
	own.Grow(len(s.uid) + len(s.name))
	own.WriteString(s.uid)
	own.WriteString(s.name)
	p := &nodecache.Pod{
		UID:         own.String()[:len(s.uid)],
		Namespace:   of.namespace,
		Name:        own.String()[len(s.uid):],
		Node:        at.node,
		Zone:        at.zone,
		Owner:       nodecache.OwnerKey{UID: of.uid, Revision: of.revision},
		OwnerName:   of.display,
		Workload:    nodecache.Workload{Namespace: of.namespace, Kind: of.kind, Name: of.name},
		Images:      r.run.Value(),
		Created:     s.created,
		HostNetwork: s.hostNetwork,
	}
	p.Addr, p.More = s.addresses()
	p.State, p.Reason = s.state(p.Addr.IsValid())
	p.Hints = r.hints(s)
	p.Declared = r.declared(s.services, p.Hints)
	p.CollectOff, p.CollectOn = r.collect(s.collect)
	p.Export = r.exports(s.export)
	r.Pod, r.optedOut = p, p.CollectOff
	return r
}

// GetObjectMeta lets client-go key a record as it keys the pod.
func (r *Record) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: r.Namespace, Name: r.Name}
}

// inNamespace returns the record as it is in a namespace that did or did not
// opt out of being asked.
func (r *Record) inNamespace(off bool) *Record {
	off = off || r.optedOut
	if off == r.CollectOff {
		return r
	}
	pod, record := *r.Pod, *r
	pod.CollectOff = off
	record.Pod = &pod
	return &record
}

func (r *Record) equal(o *Record) bool {
	return r.Equal(o.Pod) && slices.Equal(r.Notes, o.Notes)
}

// share makes the record, which nobody else has seen yet, use the lists of
// another of the same owner where they are equal, as they mostly are.
func (r *Record) share(o *Record) {
	if o == nil {
		return
	}
	if slices.Equal(r.Hints, o.Hints) {
		r.Hints = o.Hints
	}
	if r.Export == o.Export {
		r.Export = o.Export
	}
	if reflect.DeepEqual(r.Declared, o.Declared) {
		r.Declared = o.Declared
	}
}

// owner follows the one controller of the pod. A mirror pod's controller is
// its Node, which all static pods of the node share: it says nothing of the
// program.
func (s *seen) owner() origin {
	hash := s.templateHash
	revision := hash
	if revision == "" {
		revision = s.revisionHash
	}
	if hash == "" {
		hash = s.rolloutsHash
	}
	o := origin{namespace: s.namespace, uid: s.uid, revision: revision, kind: "Pod", name: s.name}
	if s.controlled && s.controller.kind != "Node" {
		o.uid, o.kind, o.name = s.controller.uid, s.controller.kind, s.controller.name
	}
	o.display = o.kind + "/" + o.name
	if hash != "" && o.kind != "Pod" {
		o.name = strings.TrimSuffix(o.name, "-"+hash)
	}
	return o
}

// imageIDs returns what the node reports for each container.
func imageIDs(pod *corev1.Pod) []string {
	ids := make([]string, len(pod.Status.ContainerStatuses))
	for i := range ids {
		ids[i] = pod.Status.ContainerStatuses[i].ImageID
	}
	return ids
}

// images names what the containers run: the digests among their image IDs,
// sorted, in place. It is empty as long as one has not started.
func images(ids []string) string {
	for i, id := range ids {
		if id == "" {
			return ""
		}
		// Runtimes put a scheme and the repository before the digest.
		ids[i] = id[strings.LastIndexByte(id, '@')+1:]
	}
	slices.Sort(ids)
	return strings.Join(ids, " ")
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
