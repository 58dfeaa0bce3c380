package injection_test

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

func TestTry(t *testing.T) {
	s := harness.SharedAPIServer(t)
	ns := install(t, s)
	for _, m := range []string{"envoy", "grpc"} {
		p, err := dryRun(s, ns, pod(m, nil))
		if err != nil {
			t.Fatal(err)
		}
		text, _ := yaml.Marshal(p)
		t.Logf("%s", text)
	}
}
