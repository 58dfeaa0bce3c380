package report

import (
	"crypto/sha256"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/nodecache"
)

// The reasons of Events. They are for programs to tell Events apart, and stay.
const (
	// ReasonClaimed: another workload provides a service that this one serves
	// as well.
	ReasonClaimed = "ServiceClaimed"
	// ReasonDropped and ReasonAdded: a revision serves less, more than the one
	// before it.
	ReasonDropped = "ServicesDropped"
	ReasonAdded   = "ServicesAdded"
	// ReasonIgnored: an annotation of an owner's pods makes no sense.
	ReasonIgnored = "AnnotationIgnored"
	// ReasonRejected: the sidecar or gRPC client of a pod rejected what it was
	// sent.
	ReasonRejected = "ConfigurationRejected"
	// ReasonNotAccepted and ReasonUnresolved: a route is not served under a
	// parent, has backends that cannot be called.
	ReasonNotAccepted = "RouteNotAccepted"
	ReasonUnresolved  = "RefsNotResolved"
)

// maxText bounds what varies in one message, in bytes: in its newer form of
// Events the API server bounds the message to 1024.
const maxText = 700

// Event is something to say of an object.
type Event struct {
	Object  corev1.ObjectReference
	Warning bool
	// Own is set of what this agent alone knows: it writes it, elected or not.
	Own    bool
	Reason string
	// Message is equal for equal facts on every agent: it has no time, count or
	// node of the one that says it.
	Message string
}

// versions are the API versions of the controllers that Kubernetes has itself.
// Of others only the kind is known; an Event needs no more.
var versions = map[string]string{
	"Pod": "v1", "ReplicationController": "v1", "Job": "batch/v1",
	"ReplicaSet": "apps/v1", "StatefulSet": "apps/v1", "DaemonSet": "apps/v1",
}

// objectOf is the controller that the owner's pods name: of a Deployment the
// ReplicaSet of the revision. It is the object that is known to be there.
func objectOf(o *nodecache.Owner) corev1.ObjectReference {
	kind, name, _ := strings.Cut(o.Name, "/")
	return corev1.ObjectReference{
		APIVersion: versions[kind], Kind: kind, Namespace: o.Workload.Namespace, Name: name, UID: types.UID(o.Key.UID),
	}
}

// Rejected is what to say of a pod whose client rejected resources of a type.
func Rejected(pod *nodecache.Pod, kind, text string) Event {
	return Event{
		Object:  corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID)},
		Warning: true, Own: true, Reason: ReasonRejected,
		Message: fmt.Sprintf("the pod's client rejected a response of type %s and keeps what it accepted before: %s", kind, clip(text, maxText)),
	}
}

func list(names []string) string {
	text := ""
	for i, name := range names {
		if len(text)+len(name) > maxText {
			return fmt.Sprintf("%s and %d more", text, len(names)-i)
		}
		if i > 0 {
			text += ", "
		}
		text += name
	}
	return text
}

// eventName is that of the Event in the API: the same for the same content.
func eventName(object *corev1.ObjectReference, reason, message string) string {
	sum := sha256.Sum256([]byte(strings.Join([]string{object.Kind, object.Name, string(object.UID), reason, message}, "\x00")))
	// A name is a DNS subdomain of at most 253 bytes.
	name := object.Name
	if len(name) > 200 {
		name = strings.TrimRight(name[:200], "-.")
	}
	return fmt.Sprintf("%s.%x", name, sum[:8])
}
