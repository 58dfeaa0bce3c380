package injection_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/daemonset/injection"
	"github.com/fingerpost/fingerpost/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(harness.Main{M: m}) }

// install creates the policies of daemonset/components/injection on the server, in
// a form that holds for one namespace alone, and returns when both are active.
func install(t *testing.T, s *harness.APIServer) string {
	t.Helper()
	text, err := injection.Policies(injection.Options{})
	if err != nil {
		t.Fatal(err)
	}
	api, ns := s.Client.AdmissionregistrationV1(), s.Namespace(t)
	strict := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
	only := &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: ns}}
	for document := range bytes.SplitSeq(text, []byte("\n---\n")) {
		decode := func(v metav1.Object) {
			if err := yaml.UnmarshalStrict(document, v); err != nil {
				t.Fatal(err)
			}
			v.SetName(v.GetName() + "-" + ns)
		}
		var head metav1.TypeMeta
		if err := yaml.Unmarshal(document, &head); err != nil {
			t.Fatal(err)
		}
		switch head.Kind {
		case "MutatingAdmissionPolicy":
			var p admissionv1.MutatingAdmissionPolicy
			decode(&p)
			p.Spec.MatchConstraints.NamespaceSelector = only
			_, err = api.MutatingAdmissionPolicies().Create(t.Context(), &p, strict)
		case "MutatingAdmissionPolicyBinding":
			var b admissionv1.MutatingAdmissionPolicyBinding
			decode(&b)
			b.Spec.PolicyName += "-" + ns
			_, err = api.MutatingAdmissionPolicyBindings().Create(t.Context(), &b, strict)
		case "ValidatingAdmissionPolicy":
			var p admissionv1.ValidatingAdmissionPolicy
			decode(&p)
			p.Spec.MatchConstraints.NamespaceSelector = only
			_, err = api.ValidatingAdmissionPolicies().Create(t.Context(), &p, strict)
		case "ValidatingAdmissionPolicyBinding":
			var b admissionv1.ValidatingAdmissionPolicyBinding
			decode(&b)
			b.Spec.PolicyName += "-" + ns
			_, err = api.ValidatingAdmissionPolicyBindings().Create(t.Context(), &b, strict)
		default:
			t.Fatalf("a %s", head.Kind)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for name, remove := range map[string]func(context.Context, string, metav1.DeleteOptions) error{
			"mutating": api.MutatingAdmissionPolicies().Delete, "mutating binding": api.MutatingAdmissionPolicyBindings().Delete,
			"validating": api.ValidatingAdmissionPolicies().Delete, "validating binding": api.ValidatingAdmissionPolicyBindings().Delete,
		} {
			if err := remove(context.Background(), injection.PolicyName+"-"+ns, metav1.DeleteOptions{}); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
	harness.Eventually(t, time.Minute, func() error {
		_, err := dryRun(s, ns, pod("unknown", nil))
		if err == nil {
			return context.DeadlineExceeded
		}
		if !strings.Contains(err.Error(), "is none of") {
			return err
		}
		_, err = dryRun(s, ns, pod(injection.Envoy, nil))
		return err
	})
	return ns
}

func dryRun(s *harness.APIServer, namespace string, pod *corev1.Pod) (*corev1.Pod, error) {
	return s.Client.CoreV1().Pods(namespace).Create(context.Background(), pod, metav1.CreateOptions{
		DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict,
	})
}

// pod is one with a container, the label, and what change makes of it.
func pod(label string, change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{injection.Label: label}, Annotations: map[string]string{}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}
	if change != nil {
		change(p)
	}
	return p
}

// podOf is the pod that an object is, or that its controller would make.
func podOf(t *testing.T, object map[string]any) *corev1.Pod {
	t.Helper()
	var template any = object
	switch object["kind"] {
	case "Pod":
	case "CronJob":
		template, _, _ = unstructured.NestedMap(object, "spec", "jobTemplate", "spec", "template")
	case "PodTemplate":
		template = object["template"]
	default:
		template, _, _ = unstructured.NestedMap(object, "spec", "template")
	}
	var p corev1.PodTemplateSpec
	text, err := json.Marshal(template)
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Spec.Containers) == 0 {
		return nil
	}
	p.Name, p.Namespace = object["metadata"].(map[string]any)["name"].(string), ""
	if _, ok := p.Labels[injection.Label]; !ok {
		if p.Labels == nil {
			p.Labels = map[string]string{}
		}
		p.Labels[injection.Label] = injection.Envoy
	}
	return &corev1.Pod{ObjectMeta: p.ObjectMeta, Spec: p.Spec}
}

// bare leaves of a pod what does not differ by the time and the writer.
func bare(p *corev1.Pod) string {
	p = p.DeepCopy()
	p.ObjectMeta = metav1.ObjectMeta{Name: p.Name, Labels: p.Labels, Annotations: p.Annotations}
	text, err := yaml.Marshal(p)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// TestPolicyMakesThePodThatInjectMakes: the pod that the API server makes of one
// with the label is, field by field, what it stores of the same pod after
// Manifests.
func TestPolicyMakesThePodThatInjectMakes(t *testing.T) {
	s := harness.SharedAPIServer(t)
	under, plain := install(t, s), s.Namespace(t)
	compared := 0
	for name, in := range files(t, "inject/*.[yj]*") {
		for _, object := range objects(t, in) {
			before := podOf(t, object)
			if before == nil {
				continue
			}
			t.Run(filepath.Base(name)+"/"+before.Name, func(t *testing.T) {
				before.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
				text, err := yaml.Marshal(before)
				if err != nil {
					t.Fatal(err)
				}
				out, _, err := injection.Manifests(text, injection.Options{})
				if err != nil {
					t.Fatal(err)
				}
				after := injectedPod(t, out)
				byPolicy, err := dryRun(s, under, before)
				if err != nil {
					t.Fatal(err)
				}
				byInject, err := dryRun(s, plain, &after)
				if err != nil {
					t.Fatal(err)
				}
				if a, b := bare(byPolicy), bare(byInject); a != b {
					t.Errorf("the policy makes\n%s\ninject makes\n%s", a, b)
				}
				injected := slices.ContainsFunc(byPolicy.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == injection.Volume })
				if injected == (before.Labels[injection.Label] == injection.Never) {
					t.Errorf("injected: %v, label %q", injected, before.Labels[injection.Label])
				}
				// What is injected already passes as it is.
				again, err := dryRun(s, under, &after)
				if err != nil || bare(again) != bare(byInject) {
					t.Errorf("of a pod that is injected the policy makes another: %v", err)
				}
			})
			compared++
		}
	}
	if compared < 15 {
		t.Errorf("only %d pods were compared", compared)
	}
}

func TestPolicyRefusesInTheWordsOfInject(t *testing.T) {
	s := harness.SharedAPIServer(t)
	ns := install(t, s)
	compared := 0
	for name, in := range files(t, "refuse/*.yaml") {
		_, _, err := injection.Manifests(in, injection.Options{})
		if err == nil {
			t.Errorf("%s: not refused", name)
			continue
		}
		// Those that cannot be read and those about their namespace have no pod
		// with a label in its first line.
		_, words, ok := strings.Cut(err.Error(), "Pod shop/p: ")
		if !ok || !strings.Contains(string(in), injection.Label) {
			continue
		}
		compared++
		pod := podOf(t, objects(t, in)[0])
		if _, err := dryRun(s, ns, pod); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: the policy says\n%v\ninject says\n%s", name, err, words)
		}
	}
	if compared < 20 {
		t.Errorf("only %d refusals were compared", compared)
	}
}

func TestPolicyRefusesWhereTheNamespaceIsOfAnotherMesh(t *testing.T) {
	s := harness.SharedAPIServer(t)
	ns := install(t, s)
	for _, c := range []struct {
		labels, annotations map[string]string
		words               string
		out                 func(*corev1.Pod)
	}{
		{map[string]string{"istio-injection": "enabled"}, nil, "Istio injects the pods of this namespace",
			func(p *corev1.Pod) { p.Labels["sidecar.istio.io/inject"] = "false" }},
		{nil, map[string]string{"linkerd.io/inject": "enabled"}, "Linkerd injects the pods of this namespace",
			func(p *corev1.Pod) { p.Annotations["linkerd.io/inject"] = "disabled" }},
		{map[string]string{"kuma.io/sidecar-injection": "true"}, nil, "Kuma injects the pods of this namespace",
			func(p *corev1.Pod) { p.Labels["kuma.io/sidecar-injection"] = "disabled" }},
	} {
		update(t, s, ns, func(n *corev1.Namespace) {
			n.Labels, n.Annotations = maps.Clone(c.labels), c.annotations
			if n.Labels == nil {
				n.Labels = map[string]string{}
			}
			n.Labels[corev1.LabelMetadataName] = ns
		})
		// The policies read the namespace from a watch of their own.
		harness.Eventually(t, time.Minute, func() error {
			if _, err := dryRun(s, ns, pod(injection.Envoy, nil)); err == nil || !strings.Contains(err.Error(), c.words) {
				return fmt.Errorf("%v, want %q", err, c.words)
			}
			return nil
		})
		if _, err := dryRun(s, ns, pod(injection.Envoy, c.out)); err != nil {
			t.Errorf("a pod that is out: %v", err)
		}
		if _, err := dryRun(s, ns, pod(injection.Never, nil)); err != nil {
			t.Errorf("a pod that asks for nothing: %v", err)
		}
		// inject says the same where it sees the namespace.
		n, err := s.Client.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}
		p := pod(injection.Envoy, func(p *corev1.Pod) { p.Namespace = ns })
		p.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
		a, _ := yaml.Marshal(p)
		b, _ := yaml.Marshal(n)
		if _, _, err := injection.Manifests(slices.Concat(a, []byte("---\n"), b), injection.Options{}); err == nil || !strings.Contains(err.Error(), c.words) {
			t.Errorf("inject says %v, want %q", err, c.words)
		}
	}
}

func update(t *testing.T, s *harness.APIServer, name string, change func(*corev1.Namespace)) {
	t.Helper()
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		n, err := s.Client.CoreV1().Namespaces().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(n)
		_, err = s.Client.CoreV1().Namespaces().Update(t.Context(), n, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestAPodThatAsksAndComesWithoutIsRefused(t *testing.T) {
	s := harness.SharedAPIServer(t)
	ns := install(t, s)
	api, name := s.Client.AdmissionregistrationV1(), injection.PolicyName+"-"+ns
	binding, err := api.MutatingAdmissionPolicyBindings().Get(t.Context(), name, metav1.GetOptions{})
	if err == nil {
		err = api.MutatingAdmissionPolicyBindings().Delete(t.Context(), name, metav1.DeleteOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{injection.Envoy, injection.GRPC} {
		harness.Eventually(t, time.Minute, func() error {
			if _, err := dryRun(s, ns, pod(mode, nil)); err == nil || !strings.Contains(err.Error(), "is not there, or not active yet") {
				return fmt.Errorf("mode %s: %v", mode, err)
			}
			return nil
		})
	}
	binding.ResourceVersion, binding.UID = "", ""
	if _, err := api.MutatingAdmissionPolicyBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestMirrorPodsAreLeftAlone(t *testing.T) {
	s := harness.SharedAPIServer(t)
	p, err := dryRun(s, install(t, s), pod(injection.Envoy, func(p *corev1.Pod) {
		p.Annotations["kubernetes.io/config.mirror"] = "x"
		p.Spec.NodeName, p.Spec.HostNetwork = "n1", true
	}))
	if err != nil || len(p.Spec.InitContainers) != 0 {
		t.Errorf("%v", err)
	}
}

// TestAPIServerAcceptsWhatInjectPrints creates the injected manifests of all kinds,
// strictly, as kubectl apply --dry-run=server does.
func TestAPIServerAcceptsWhatInjectPrints(t *testing.T) {
	s := harness.SharedAPIServer(t)
	ns := s.Namespace(t)
	client, err := dynamic.NewForConfig(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]bool{}
	for name, text := range files(t, "injected/*.[yj]*") {
		for _, object := range objects(t, text) {
			u := unstructured.Unstructured{Object: object}
			switch u.GroupVersionKind().Group {
			case "", "apps", "batch":
			default:
				continue
			}
			if u.GetKind() == "" { // an item of a DeploymentList
				u.SetAPIVersion("apps/v1")
				u.SetKind("Deployment")
			}
			if u.GetKind() == "Namespace" || u.GetKind() == "Deployment" && u.GetName() == "patch" {
				continue
			}
			u.SetNamespace(ns)
			kinds[u.GetKind()] = true
			resource, _ := meta.UnsafeGuessKindToResource(u.GroupVersionKind())
			_, err := client.Resource(resource).Namespace(ns).Create(t.Context(), &u, metav1.CreateOptions{
				DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict,
			})
			if err != nil {
				t.Errorf("%s: %s %s: %v", name, u.GetKind(), u.GetName(), err)
			}
		}
	}
	for _, kind := range []string{"Pod", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController", "Job", "CronJob", "PodTemplate"} {
		if !kinds[kind] {
			t.Errorf("no %s", kind)
		}
	}
}

// TestPolicyTakesLargePods: what a policy may compute is bounded by the API
// server, and beyond it the pod would be refused.
func TestPolicyTakesLargePods(t *testing.T) {
	s := harness.SharedAPIServer(t)
	ns := install(t, s)
	for _, mode := range []string{injection.Envoy, injection.GRPC} {
		large := pod(mode, func(p *corev1.Pod) {
			p.Spec.Containers = nil
			for i := range 40 {
				c := corev1.Container{Name: fmt.Sprintf("app-%d", i), Image: "app"}
				for j := range 100 {
					c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("VARIABLE_%d", j), Value: strings.Repeat("x", 50)})
				}
				for j := range 20 {
					c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: int32(1000 + 20*i + j)})
					volume := fmt.Sprintf("v-%d", j)
					c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: volume, MountPath: "/" + volume})
					if i == 0 {
						p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: volume})
					}
				}
				p.Spec.Containers = append(p.Spec.Containers, c)
			}
		})
		made, err := dryRun(s, ns, large)
		if err != nil {
			t.Fatalf("mode %s: %.500s", mode, err.Error())
		}
		if !injection.Injected(made) {
			t.Errorf("mode %s: not injected", mode)
		}
	}
}
