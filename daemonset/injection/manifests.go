package injection

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	goyaml "go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
)

// Outcome is what became of one workload.
type Outcome struct {
	Document int    // counted from 1, as in errors
	Object   string // "Deployment shop/web"
	// Mode is [Envoy] or [GRPC] where it was injected; else it is empty, and
	// Reason says why the workload was left as it is.
	Mode, Reason string
}

// Manifests returns the manifests, a stream of YAML or JSON documents, with what
// is injected. Documents in which nothing is injected come out byte for byte, the
// others with their comments and the order of their fields; YAML aliases in these
// are written out.
//
// Pods and templates of pods in Deployments, StatefulSets, DaemonSets,
// ReplicaSets, ReplicationControllers, Jobs, CronJobs, PodTemplates and lists of
// these are injected in the mode that their label says, else in that of the
// options; then they get the label too. What is injected already stays as it is,
// so that a second pass changes nothing. Namespaces among the documents say
// whether another mesh injects what is in them.
//
// The error names the document and the workload, and is about the first one of
// which there is something to say; then nothing is returned but it.
func Manifests(in []byte, o Options) ([]byte, []Outcome, error) {
	if err := o.check(); err != nil {
		return nil, nil, err
	}
	if !utf8.Valid(in) {
		return nil, nil, errors.New("the input is not UTF-8 text")
	}
	documents := split(in)
	// Namespaces may stand behind what is in them.
	namespaces := map[string]*corev1.Namespace{}
	for _, d := range documents {
		if err := d.read(namespaces); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", d, err)
		}
	}
	var out bytes.Buffer
	var outcomes []Outcome
	for _, d := range documents {
		changed := false
		for _, w := range d.workloads {
			outcome, err := w.inject(o, namespaces[w.namespace])
			if err != nil {
				return nil, nil, fmt.Errorf("%s, %s: %w", d, w, err)
			}
			outcome.Document, outcome.Object = d.number, w.String()
			outcomes = append(outcomes, outcome)
			changed = changed || outcome.Mode != ""
		}
		if changed {
			if err := d.write(); err != nil {
				return nil, nil, fmt.Errorf("%s: %w", d, err)
			}
		}
		out.Write(d.before)
		out.Write(d.text)
	}
	return out.Bytes(), outcomes, nil
}

// workload is an object with a pod, or a template of pods, in it.
type workload struct {
	kind, namespace, name string
	template              corev1.PodTemplateSpec
	node                  *goyaml.Node // the same, in the document
}

func (w *workload) String() string {
	if w.namespace == "" {
		return w.kind + " " + w.name
	}
	return w.kind + " " + w.namespace + "/" + w.name
}

// inject changes the workload's node, or says why it leaves it alone.
func (w *workload) inject(o Options, namespace *corev1.Namespace) (Outcome, error) {
	mode := w.template.Labels[Label]
	switch {
	case mode == Never:
		return Outcome{Reason: Label + " is false"}, nil
	case len(w.template.Spec.Containers) == 0:
		return Outcome{Reason: "it has no containers"}, nil
	}
	p := &pod{PodTemplateSpec: w.template, mode: cmp.Or(mode, o.Mode), port: o.EgressPort}
	if why := p.refusal(namespace); why != "" {
		return Outcome{}, errors.New(why)
	}
	if p.injected() {
		return Outcome{Reason: "it is injected already"}, nil
	}
	if _, ok := w.template.Labels[Label]; !ok {
		set(mapping(mapping(w.node, "metadata"), "labels"), Label, nodeOf(p.mode))
	}
	spec := mapping(w.node, "spec")
	insert(spec, "volumes", -1, nodeOf(volume()))
	if p.mode == GRPC {
		return Outcome{Mode: GRPC}, w.injectProgram(spec)
	}
	amounts, err := resources(w.template.Annotations)
	if err != nil {
		return Outcome{}, err
	}
	c, err := sidecar(cmp.Or(w.template.Annotations[imageAnnotation], o.Image), amounts)
	if err != nil {
		return Outcome{}, err
	}
	insert(spec, "initContainers", 0, nodeOf(c))
	return Outcome{Mode: Envoy}, nil
}

func (w *workload) injectProgram(spec *goyaml.Node) error {
	env, err := program()
	if err != nil {
		return err
	}
	for _, c := range slices.Concat(items(spec, "initContainers"), items(spec, "containers")) {
		for _, v := range env {
			insert(c, "env", -1, nodeOf(v))
		}
		insert(c, "volumeMounts", -1, nodeOf(mount()))
	}
	return nil
}
