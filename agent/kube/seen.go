package kube

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// seen is what is read of a pod, in whatever form it came. Its strings may lie
// in a buffer that is used again: record copies what it keeps.
type seen struct {
	namespace, name, uid string
	created              time.Time
	deleted              bool
	// Labels.
	templateHash, revisionHash, rolloutsHash, zone, region   string
	grpcPort, services, collect, export, locality, upstreams annotation
	policy                                                   policyTexts
	controlled                                               bool // controller is set
	controller                                               struct{ kind, name, uid string }

	node        string
	peer        string // the annotation of an agent's pod
	hostNetwork bool
	phase, ip   string
	ips         []string
	conditioned bool // the condition Ready is there
	ready       bool
	images      []string // the image ID of each container's status, which may be empty

	// What speaks for gRPC: ports by name, and those of gRPC probes.
	named, probed []int32
}

type annotation struct {
	value string
	there bool
}

func (s *seen) label(key, value string) {
	switch key {
	case templateHashLabel:
		s.templateHash = value
	case revisionHashLabel:
		s.revisionHash = value
	case rolloutsHashLabel:
		s.rolloutsHash = value
	case zoneLabel:
		s.zone = value
	case regionLabel:
		s.region = value
	}
}

func (s *seen) annotation(key, value string) {
	switch key {
	case GRPCPortAnnotation:
		s.grpcPort = annotation{value, true}
	case ServicesAnnotation:
		s.services = annotation{value, true}
	case CollectAnnotation:
		s.collect = annotation{value, true}
	case ExportAnnotation:
		s.export = annotation{value, true}
	case LocalityAnnotation:
		s.locality = annotation{value, true}
	case UpstreamsAnnotation:
		s.upstreams = annotation{value, true}
	case PeerAnnotation:
		s.peer = value[:min(len(value), maxPeer)]
	default:
		s.policy.see(key, value)
	}
}

// condition reads the first condition Ready.
func (s *seen) condition(kind, status string) {
	if kind == string(corev1.PodReady) && !s.conditioned {
		s.conditioned, s.ready = true, status == string(corev1.ConditionTrue)
	}
}

func (s *seen) port(name, protocol string, port int32) {
	named := name == "grpc" || strings.HasPrefix(name, "grpc-")
	if named && (protocol == "" || protocol == string(corev1.ProtocolTCP)) {
		s.named = append(s.named, port)
	}
}

// seePod reads a v1.Pod.
func seePod(pod *corev1.Pod) *seen {
	s := &seen{
		namespace: pod.Namespace, name: pod.Name, uid: string(pod.UID),
		created: pod.CreationTimestamp.UTC(), deleted: pod.DeletionTimestamp != nil,
		node: pod.Spec.NodeName, hostNetwork: pod.Spec.HostNetwork,
		phase: string(pod.Status.Phase), ip: pod.Status.PodIP,
		images: imageIDs(pod),
	}
	for key, value := range pod.Labels {
		s.label(key, value)
	}
	for key, value := range pod.Annotations {
		s.annotation(key, value)
	}
	if ref := metav1.GetControllerOfNoCopy(pod); ref != nil {
		s.controlled = true
		s.controller.kind, s.controller.name, s.controller.uid = ref.Kind, ref.Name, string(ref.UID)
	}
	for _, ip := range pod.Status.PodIPs {
		s.ips = append(s.ips, ip.IP)
	}
	for i := range pod.Status.Conditions {
		s.condition(string(pod.Status.Conditions[i].Type), string(pod.Status.Conditions[i].Status))
	}
	for i := range pod.Spec.Containers {
		s.container(&pod.Spec.Containers[i])
	}
	for i := range pod.Spec.InitContainers {
		// One that restarts always is a sidecar and runs beside the others.
		c := &pod.Spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			s.container(c)
		}
	}
	return s
}

func (s *seen) container(c *corev1.Container) {
	for i := range c.Ports {
		s.port(c.Ports[i].Name, string(c.Ports[i].Protocol), c.Ports[i].ContainerPort)
	}
	for _, probe := range [...]*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
		if probe != nil && probe.GRPC != nil {
			s.probed = append(s.probed, probe.GRPC.Port)
		}
	}
}
