package injection

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// A rule says which pods are refused, once in Go and once in CEL (the language
// of admission policies, over the pod as object). The two say the same of every
// pod, in the same words.
type rule struct {
	// name is that of a match condition.
	name string
	// refuses says of a pod whether the rule refuses it, and, where the rule's
	// words name a container, which.
	refuses func(p *pod) (string, bool)
	// cel is true for a pod that is refused.
	cel string
	// message are the rule's words; %s stands for the container.
	message string
	// container is the CEL expression for the container's name, for messages
	// with %s.
	container string
}

// pod is a pod, or the template of pods, that is to be injected.
type pod struct {
	corev1.PodTemplateSpec
	mode string
	port uint16 // of the agent's egress listener
}

// all returns the containers of the pod other than the sidecar.
func (p *pod) all() []corev1.Container {
	return slices.DeleteFunc(slices.Concat(p.Spec.InitContainers, p.Spec.Containers), func(c corev1.Container) bool { return c.Name == Container })
}

func (p *pod) hasVolume() bool {
	return slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == Volume })
}

func (p *pod) hasContainer() bool {
	return slices.ContainsFunc(slices.Concat(p.Spec.InitContainers, p.Spec.Containers), func(c corev1.Container) bool { return c.Name == Container })
}

// injected tells whether the pod has been injected, in whatever mode.
func (p *pod) injected() bool { return p.hasVolume() }

// some makes a rule of a condition on single containers.
func some(name string, is func(p *pod, c *corev1.Container) bool, when, cel, message string) rule {
	return rule{
		name: name,
		refuses: func(p *pod) (string, bool) {
			for _, c := range p.all() {
				if is(p, &c) {
					return c.Name, true
				}
			}
			return "", false
		},
		cel:       when + celAll + ".exists(c, " + cel + ")",
		container: celAll + ".filter(c, " + cel + ")[0].name",
		message:   message,
	}
}

// where makes a rule of a condition on the pod.
func where(name string, is func(p *pod) bool, cel, message string) rule {
	return rule{name: name, refuses: func(p *pod) (string, bool) { return "", is(p) }, cel: cel, message: message}
}

// The parts of which the CEL of the rules is made.
var (
	celEvery       = `((has(object.spec.initContainers) ? object.spec.initContainers : []) + object.spec.containers)`
	celAll         = celEvery + `.filter(c, c.name != ` + quote(Container) + `)`
	celLabel       = `object.metadata.labels[` + quote(Label) + `]`
	celEnvoy       = celLabel + ` == ` + quote(Envoy) + ` && `
	celGRPC        = celLabel + ` == ` + quote(GRPC) + ` && `
	celVolume      = `(has(object.spec.volumes) && object.spec.volumes.exists(v, v.name == ` + quote(Volume) + `))`
	celContainer   = celEvery + `.exists(c, c.name == ` + quote(Container) + `)`
	celNotInjected = `!` + celVolume + ` && `
)

// rules returns the rules, in the order in which they are asked.
func rules(port uint16) []rule {
	sidecarPorts := []int32{int32(port), ReadyPort}
	list := []rule{
		where("label",
			func(p *pod) bool { return p.mode != Envoy && p.mode != GRPC },
			`!(`+celLabel+` in ['envoy', 'grpc'])`,
			"the label "+Label+" is none of envoy, grpc and false"),
		where("windows",
			func(p *pod) bool {
				return p.Spec.OS != nil && p.Spec.OS.Name == corev1.Windows || p.Spec.NodeSelector[corev1.LabelOSStable] == "windows"
			},
			`object.spec.?os.name.orValue('') == 'windows' || object.spec.?nodeSelector[?'kubernetes.io/os'].orValue('') == 'windows'`,
			"the pod is for Windows, and there is no agent on Windows nodes"),
		where("host-network",
			func(p *pod) bool { return p.mode == Envoy && p.Spec.HostNetwork },
			celEnvoy+`has(object.spec.hostNetwork) && object.spec.hostNetwork`,
			fmt.Sprintf("the pod has hostNetwork, and the ports %d and %d of its sidecar would be the node's: "+
				"take the label %s away, or set it to grpc, which needs no ports", port, ReadyPort, Label)),
		where("half",
			func(p *pod) bool {
				return p.mode == Envoy && p.hasVolume() != p.hasContainer() || p.mode == GRPC && p.hasContainer()
			},
			celEnvoy+celVolume+` != `+celContainer+` || `+celGRPC+celContainer,
			fmt.Sprintf("the pod is injected in part, or in another mode than its label says: take the container %s and the volume %s out of it", Container, Volume)),
		some("port",
			func(p *pod, c *corev1.Container) bool {
				return p.mode == Envoy && slices.ContainsFunc(c.Ports, func(port corev1.ContainerPort) bool {
					return slices.Contains(sidecarPorts, port.ContainerPort) && (port.Protocol == "" || port.Protocol == corev1.ProtocolTCP)
				})
			},
			celEnvoy,
			fmt.Sprintf(`has(c.ports) && c.ports.exists(p, p.containerPort in [%d, %d] && (!has(p.protocol) || p.protocol == 'TCP'))`, port, ReadyPort),
			fmt.Sprintf("container %%s has one of the ports %d and %d, which are its sidecar's", port, ReadyPort)),
		where("uid",
			func(p *pod) bool {
				return p.mode == Envoy && p.Spec.SecurityContext != nil && p.Spec.SecurityContext.RunAsUser != nil && *p.Spec.SecurityContext.RunAsUser == UID
			},
			celEnvoy+fmt.Sprintf(`object.spec.?securityContext.runAsUser.orValue(-1) == %d`, UID),
			fmt.Sprintf("the pod runs as user %d, which is its sidecar's", UID)),
		some("container-uid",
			func(p *pod, c *corev1.Container) bool {
				return p.mode == Envoy && c.SecurityContext != nil && c.SecurityContext.RunAsUser != nil && *c.SecurityContext.RunAsUser == UID
			},
			celEnvoy,
			fmt.Sprintf(`c.?securityContext.runAsUser.orValue(-1) == %d`, UID),
			fmt.Sprintf("container %%s runs as user %d, which is its sidecar's", UID)),
		some("bootstrap",
			func(p *pod, c *corev1.Container) bool {
				return p.mode == GRPC && !p.injected() && slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == grpcConfig || e.Name == grpcFile })
			},
			celGRPC+celNotInjected,
			`has(c.env) && c.env.exists(e, e.name in [`+quote(grpcConfig)+`, `+quote(grpcFile)+`])`,
			"container %s has "+grpcConfig+" or "+grpcFile+" already"),
		some("mount",
			func(p *pod, c *corev1.Container) bool {
				return p.mode == GRPC && !p.injected() && slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == socketDir })
			},
			celGRPC+celNotInjected,
			`has(c.volumeMounts) && c.volumeMounts.exists(m, m.mountPath == `+quote(socketDir)+`)`,
			"container %s has a mount at "+socketDir+" already"),
		where("image",
			func(p *pod) bool {
				image, ok := p.Annotations[imageAnnotation]
				return ok && !imageForm.MatchString(image)
			},
			`!object.metadata.?annotations[?`+quote(imageAnnotation)+`].orValue('x').matches(`+quote(imageForm.String())+`)`,
			"the annotation "+imageAnnotation+" is not the name of an image"),
	}
	for _, annotation := range []string{cpuRequestAnnotation, memoryRequestAnnotation, cpuLimitAnnotation, memoryLimitAnnotation} {
		list = append(list, where(strings.TrimPrefix(annotation, "fingerpost.dev/sidecar-"),
			func(p *pod) bool {
				text, ok := p.Annotations[annotation]
				_, err := resource.ParseQuantity(text)
				return ok && err != nil
			},
			`!isQuantity(object.metadata.?annotations[?`+quote(annotation)+`].orValue('1'))`,
			"the annotation "+annotation+" is not a quantity, such as 100m or 64Mi"))
	}
	for _, m := range meshes {
		list = append(list, where(strings.ToLower(m.name),
			m.refuses,
			m.cel(),
			fmt.Sprintf("%s has injected the pod, or would, and a pod takes one sidecar: take the label %s away, or %s", m.name, Label, m.otherwise)))
	}
	return list
}

// imageForm is loose: what is wrong in other ways the kubelet says.
var imageForm = regexp.MustCompile(`^[^\s]+$`)

// mesh is another one that injects sidecars, and how one sees that.
type mesh struct {
	name      string
	otherwise string // what keeps it away
	// container is the name of its sidecar.
	container string
	// has marks a pod that it has injected, or has been asked to.
	has []mark
	// off marks a pod that it leaves alone whatever its namespace says.
	off []mark
	// namespace marks a namespace whose pods it injects.
	namespace []mark
}

// mark is a label or annotation; it is there if its value is one of those named,
// or, without any, whatever it is.
type mark struct {
	annotation bool
	key        string
	values     []string
}

func label(key string, values ...string) mark      { return mark{key: key, values: values} }
func annotation(key string, values ...string) mark { return mark{true, key, values} }

// meshes are those whose injection one sees in the pod or its namespace. What
// another one's webhook is told by other ways shows once it has injected.
var meshes = []mesh{
	{
		name: "Istio", container: "istio-proxy",
		otherwise: "label the pod sidecar.istio.io/inject: \"false\"",
		has: []mark{
			annotation("sidecar.istio.io/status"),
			label("sidecar.istio.io/inject", "true"), annotation("sidecar.istio.io/inject", "true"),
		},
		off:       []mark{label("sidecar.istio.io/inject", "false"), annotation("sidecar.istio.io/inject", "false")},
		namespace: []mark{label("istio-injection", "enabled"), label("istio.io/rev")},
	},
	{
		name: "Linkerd", container: "linkerd-proxy",
		otherwise: "annotate the pod linkerd.io/inject: disabled",
		has:       []mark{annotation("linkerd.io/proxy-version"), annotation("linkerd.io/inject", "enabled", "ingress")},
		off:       []mark{annotation("linkerd.io/inject", "disabled")},
		namespace: []mark{annotation("linkerd.io/inject", "enabled", "ingress")},
	},
	{
		name: "Kuma", container: "kuma-sidecar",
		otherwise: "label the pod kuma.io/sidecar-injection: disabled",
		has: []mark{
			annotation("kuma.io/sidecar-injected", "true"),
			label("kuma.io/sidecar-injection", "enabled", "true"), annotation("kuma.io/sidecar-injection", "enabled", "true"),
		},
		off:       []mark{label("kuma.io/sidecar-injection", "disabled", "false"), annotation("kuma.io/sidecar-injection", "disabled", "false")},
		namespace: []mark{label("kuma.io/sidecar-injection", "enabled", "true"), annotation("kuma.io/sidecar-injection", "enabled", "true")},
	},
	{
		name: "Consul", container: "consul-dataplane",
		otherwise: "annotate the pod consul.hashicorp.com/connect-inject: \"false\"",
		has:       []mark{annotation("consul.hashicorp.com/connect-inject-status", "injected"), annotation("consul.hashicorp.com/connect-inject", "true")},
	},
}

func (m mark) of(labels, annotations map[string]string) bool {
	from := labels
	if m.annotation {
		from = annotations
	}
	value, ok := from[m.key]
	return ok && (len(m.values) == 0 || slices.Contains(m.values, value))
}

// cel is [mark.of] of an object.
func (m mark) cel(object string) string {
	from := "labels"
	if m.annotation {
		from = "annotations"
	}
	value := object + ".metadata.?" + from + "[?" + quote(m.key) + "]"
	if len(m.values) == 0 {
		return value + ".hasValue()"
	}
	return value + ".orValue('') in [" + strings.Join(mapped(m.values, quote), ", ") + "]"
}

func (m mesh) refuses(p *pod) bool {
	return slices.ContainsFunc(slices.Concat(p.Spec.InitContainers, p.Spec.Containers), func(c corev1.Container) bool { return c.Name == m.container }) ||
		marked(m.has, p.Labels, p.Annotations)
}

func (m mesh) cel() string {
	return celEvery + `.exists(c, c.name == ` + quote(m.container) + `) || ` + anyOf(m.has, "object")
}

// byNamespace tells whether the mesh injects the pod since its namespace says so.
func (m mesh) byNamespace(p *pod, labels, annotations map[string]string) bool {
	return marked(m.namespace, labels, annotations) && !marked(m.off, p.Labels, p.Annotations)
}

// celByNamespace is byNamespace, over object and namespaceObject; empty for a
// mesh that no namespace asks for.
func (m mesh) celByNamespace() string {
	if len(m.namespace) == 0 {
		return ""
	}
	return `(` + anyOf(m.namespace, "namespaceObject") + `) && !(` + anyOf(m.off, "object") + `)`
}

func (m mesh) namespaceMessage() string {
	return fmt.Sprintf("%s injects the pods of this namespace, and a pod takes one sidecar: %s, or take the label %s away", m.name, m.otherwise, Label)
}

func marked(marks []mark, labels, annotations map[string]string) bool {
	return slices.ContainsFunc(marks, func(m mark) bool { return m.of(labels, annotations) })
}

func anyOf(marks []mark, object string) string {
	return strings.Join(mapped(marks, func(m mark) string { return m.cel(object) }), " || ")
}

// refusal returns why the pod is refused, empty if it is not. namespace are the
// labels and annotations of the pod's namespace where they are known.
func (p *pod) refusal(namespace *corev1.Namespace) string {
	for _, r := range rules(p.port) {
		if container, yes := r.refuses(p); yes {
			return strings.ReplaceAll(r.message, "%s", container)
		}
	}
	if namespace == nil {
		return ""
	}
	for _, m := range meshes {
		if m.byNamespace(p, namespace.Labels, namespace.Annotations) {
			return m.namespaceMessage()
		}
	}
	return ""
}

// quote writes a CEL string.
func quote(s string) string {
	q := strconv.Quote(s)
	return "'" + strings.ReplaceAll(strings.ReplaceAll(q[1:len(q)-1], `\"`, `"`), "'", `\'`) + "'"
}

// Meshes are the names of the other meshes that are looked for.
func Meshes() []string { return mapped(meshes, func(m mesh) string { return m.name }) }

// MeshOf returns the name of the mesh that injects the pods of the namespace,
// empty if none does.
func MeshOf(ns *corev1.Namespace) string {
	for _, m := range meshes {
		if marked(m.namespace, ns.Labels, ns.Annotations) {
			return m.name
		}
	}
	return ""
}

// Injected tells whether the pod has been injected, in whatever mode.
func Injected(p *corev1.Pod) bool {
	return (&pod{PodTemplateSpec: corev1.PodTemplateSpec{Spec: p.Spec}}).injected()
}
