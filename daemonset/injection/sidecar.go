package injection

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fingerpost/fingerpost/xds/bootstrap"
)

// Label is the label of a pod that says whether and how it is injected.
const Label = "fingerpost.dev/inject"

// The values of [Label].
const (
	Envoy = "envoy" // a sidecar
	GRPC  = "grpc"  // the bootstrap of gRPC's own xDS client
	Never = "false"
)

// The annotations of a pod about its sidecar.
const (
	imageAnnotation         = "fingerpost.dev/sidecar-image"
	cpuRequestAnnotation    = "fingerpost.dev/sidecar-cpu-request"
	memoryRequestAnnotation = "fingerpost.dev/sidecar-memory-request"
	cpuLimitAnnotation      = "fingerpost.dev/sidecar-cpu-limit"
	memoryLimitAnnotation   = "fingerpost.dev/sidecar-memory-limit"
)

const (
	// Container is the name of the sidecar.
	Container = "fingerpost-envoy"
	// Volume is the name of the volume with the agent's sockets. A pod that has
	// it is injected already.
	Volume = "fingerpost-sockets"
	// UID is the user and group id of the sidecar, by which its own calls are
	// told from those of the application. It is below 65,536, so that it exists
	// in a pod with a user namespace of its own.
	UID = 15001
	// ReadyPort is the port of the pod's address on which the sidecar answers
	// once the agent has told it all it starts with.
	ReadyPort = 15002
	// ReadyPath is what the kubelet asks there; any path is answered. It stands
	// in the message of a probe that fails.
	ReadyPath = "/waits-for-the-fingerpost-agent-of-this-node"
	// AdminSocket is where the sidecar serves Envoy's admin pages: an abstract
	// socket, which all containers of the pod reach and nobody else.
	AdminSocket = "@fingerpost-envoy"

	// DefaultImage is Envoy's own image without a shell.
	DefaultImage = "docker.io/envoyproxy/envoy:distroless-v1.40.0"
	// DefaultEgressPort is the agent's --egress-port.
	DefaultEgressPort = 15001

	defaultCPURequest    = "10m"
	defaultMemoryRequest = "64Mi"

	grpcConfig = "GRPC_XDS_BOOTSTRAP_CONFIG" // gRFC A27
	grpcFile   = "GRPC_XDS_BOOTSTRAP"        // the same, goes before it
)

var socketDir = filepath.Dir(bootstrap.DefaultADSSocket)

// Options say what is injected. The zero value works.
type Options struct {
	// Mode is that of pods without the label: [Envoy] or [GRPC]; empty is Envoy.
	Mode string
	// Image is the sidecar's, for pods without the annotation; empty is
	// [DefaultImage]. Its /usr/local/bin/envoy is run.
	Image string
	// EgressPort is the agent's --egress-port; 0 is [DefaultEgressPort]. No other
	// container of the pod may have it.
	EgressPort uint16
}

func (o *Options) check() error {
	o.Mode = cmp.Or(o.Mode, Envoy)
	o.Image = cmp.Or(o.Image, DefaultImage)
	o.EgressPort = cmp.Or(o.EgressPort, DefaultEgressPort)
	switch {
	case o.Mode != Envoy && o.Mode != GRPC:
		return fmt.Errorf("mode %q is not %s or %s", o.Mode, Envoy, GRPC)
	case !imageForm.MatchString(o.Image):
		return fmt.Errorf("image %q is not the name of an image", o.Image)
	case o.EgressPort == ReadyPort:
		return errors.New("port " + strconv.Itoa(ReadyPort) + " is the one on which the sidecar answers the kubelet")
	}
	return nil
}

// sidecar returns the container that is added in mode envoy.
func sidecar(image string, resources corev1.ResourceRequirements) (corev1.Container, error) {
	config, err := bootstrap.EnvoyJSON(bootstrap.Options{
		NodeID:       bootstrap.PodNodeID,
		AdminSocket:  AdminSocket,
		ReadyAddress: bootstrap.PodAddress,
		ReadyPort:    ReadyPort,
		Redirect:     true,
	})
	if err != nil {
		return corev1.Container{}, err
	}
	return corev1.Container{
		Name:    Container,
		Image:   image,
		Command: []string{"/usr/local/bin/envoy"},
		Args: []string{
			"--config-yaml", string(config),
			// It would need shared memory that two sidecars of a node must not
			// share.
			"--disable-hot-restart",
			// The default is one thread for each CPU of the node.
			"--concurrency", "2",
			"--log-level", "warning",
		},
		Env: append(identity(), corev1.EnvVar{
			Name: bootstrap.EnvPodAddress, ValueFrom: field("status.podIP"),
		}),
		Resources:     resources,
		RestartPolicy: new(corev1.ContainerRestartPolicyAlways),
		VolumeMounts:  []corev1.VolumeMount{mount()},
		// Containers behind this one start when it has succeeded. It never gives
		// up: a sidecar that is ended because no agent is there would not work
		// sooner.
		StartupProbe: &corev1.Probe{
			ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
				Path: ReadyPath, Port: intstr.FromInt32(ReadyPort),
			}},
			PeriodSeconds:    1,
			FailureThreshold: math.MaxInt32,
		},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		SecurityContext: &corev1.SecurityContext{
			RunAsUser:                new(int64(UID)),
			RunAsGroup:               new(int64(UID)),
			RunAsNonRoot:             new(true),
			Privileged:               new(false),
			AllowPrivilegeEscalation: new(false),
			ReadOnlyRootFilesystem:   new(true),
			Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
	}, nil
}

// program returns the environment that each container gets in mode grpc.
func program() ([]corev1.EnvVar, error) {
	config, err := bootstrap.GRPC(bootstrap.Options{NodeID: bootstrap.PodNodeID})
	if err != nil {
		return nil, err
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, config); err != nil {
		return nil, err
	}
	// Only variables that stand before it are replaced in its value.
	return append(identity(), corev1.EnvVar{Name: grpcConfig, Value: compact.String()}), nil
}

func identity() []corev1.EnvVar {
	return []corev1.EnvVar{
		{Name: bootstrap.EnvPodNamespace, ValueFrom: field("metadata.namespace")},
		{Name: bootstrap.EnvPodName, ValueFrom: field("metadata.name")},
	}
}

// field spells out what the API server would add, so that manifests and stored
// objects are the same.
func field(path string) *corev1.EnvVarSource {
	return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: path}}
}

// mount is of the directory, since the socket files in it are replaced when the
// agent is, and read-only, since over a writable mount a pod could put its own
// socket in their place.
func mount() corev1.VolumeMount {
	return corev1.VolumeMount{Name: Volume, MountPath: socketDir, ReadOnly: true}
}

func volume() corev1.Volume {
	return corev1.Volume{Name: Volume, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{
		Path: socketDir, Type: new(corev1.HostPathDirectoryOrCreate),
	}}}
}

// resources are those of the sidecar. There is no limit unless the pod says so.
func resources(annotations map[string]string) (corev1.ResourceRequirements, error) {
	var r corev1.ResourceRequirements
	for _, q := range []struct {
		list       *corev1.ResourceList
		name       corev1.ResourceName
		annotation string
		otherwise  string
	}{
		{&r.Requests, corev1.ResourceCPU, cpuRequestAnnotation, defaultCPURequest},
		{&r.Requests, corev1.ResourceMemory, memoryRequestAnnotation, defaultMemoryRequest},
		{&r.Limits, corev1.ResourceCPU, cpuLimitAnnotation, ""},
		{&r.Limits, corev1.ResourceMemory, memoryLimitAnnotation, ""},
	} {
		text, ok := annotations[q.annotation]
		if !ok {
			text = q.otherwise
		}
		if !ok && text == "" {
			continue
		}
		amount, err := resource.ParseQuantity(text)
		if err != nil {
			return r, fmt.Errorf("%s: %w", q.annotation, err)
		}
		if *q.list == nil {
			*q.list = corev1.ResourceList{}
		}
		(*q.list)[q.name] = amount
	}
	return r, nil
}
