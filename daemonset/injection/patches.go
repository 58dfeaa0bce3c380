package injection

import (
	"bytes"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// Patches returns, by file name, a kustomize component that puts the sidecar into
// the workloads that have the label with the value envoy themselves: for clusters
// without MutatingAdmissionPolicies whose manifests are rendered by kustomize. It
// refuses nothing, reads no annotation and has no mode grpc, for which a patch
// would have to name each container; [Manifests] does all of these.
func Patches(o Options) (map[string][]byte, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	amounts, err := resources(nil)
	if err != nil {
		return nil, err
	}
	c, err := sidecar(o.Image, amounts)
	if err != nil {
		return nil, err
	}
	spec := map[string]any{"initContainers": []corev1.Container{c}, "volumes": []corev1.Volume{volume()}}
	template := map[string]any{"metadata": map[string]any{"labels": map[string]string{Label: Envoy}}, "spec": spec}

	var files = map[string][]byte{}
	kustomization := bytes.NewBufferString(`# Written from daemonset/injection by go generate. A strategic merge patch puts its
# containers in front of those that are there. See docs/injection.md.
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
patches:
`)
	for _, p := range []struct {
		file, kinds, first, apiVersion string
		body                           map[string]any
	}{
		{"pod.yaml", "Pod", "Pod", "v1", map[string]any{"spec": spec}},
		{"template.yaml", "Deployment|StatefulSet|DaemonSet|ReplicaSet|Job", "Deployment", "apps/v1", map[string]any{"spec": map[string]any{"template": template}}},
		{"cronjob.yaml", "CronJob", "CronJob", "batch/v1",
			map[string]any{"spec": map[string]any{"jobTemplate": map[string]any{"spec": map[string]any{"template": template}}}}},
	} {
		p.body["apiVersion"], p.body["kind"], p.body["metadata"] = p.apiVersion, p.first, map[string]any{"name": "any"}
		if files[p.file], err = yaml.Marshal(p.body); err != nil {
			return nil, err
		}
		fmt.Fprintf(kustomization, "  - path: %s\n    target:\n      kind: %s\n      labelSelector: %s=%s\n", p.file, p.kinds, Label, Envoy)
	}
	files["kustomization.yaml"] = kustomization.Bytes()
	return files, nil
}
