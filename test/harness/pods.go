package harness

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
)

// Namespace creates a namespace with a name of its own and returns the name. It
// is not removed: without a controller it would stay in termination.
func (s *APIServer) Namespace(t testing.TB) string {
	t.Helper()
	ns, err := s.Client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return ns.Name
}

// OwnedBy is the reference that makes an object of this kind, name and UID the
// pod's controller. The object need not exist.
func OwnedBy(kind, name string, uid types.UID) metav1.OwnerReference {
	controller := true
	version := "apps/v1"
	if kind == "Job" {
		version = "batch/v1"
	}
	return metav1.OwnerReference{APIVersion: version, Kind: kind, Name: name, UID: uid, Controller: &controller}
}

// CreatePod creates the pod and returns it as stored. A pod without containers
// gets one named "app", one without node is put on "node-1": the API server
// would remove an unscheduled pod at once when it is deleted.
func (s *APIServer) CreatePod(t testing.TB, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	pod = pod.DeepCopy()
	if len(pod.Spec.Containers) == 0 {
		pod.Spec.Containers = []corev1.Container{{Name: "app"}}
	}
	for i := range pod.Spec.Containers {
		if c := &pod.Spec.Containers[i]; c.Image == "" {
			c.Image = "app"
		}
	}
	if pod.Spec.NodeName == "" {
		pod.Spec.NodeName = "node-1"
	}
	made, err := s.Client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// SetStatus changes a pod's status as a kubelet would and returns the pod as
// stored. It tries again when another writer was faster.
func (s *APIServer) SetStatus(t testing.TB, namespace, name string, change func(*corev1.PodStatus)) *corev1.Pod {
	t.Helper()
	pods := s.Client.CoreV1().Pods(namespace)
	var stored *corev1.Pod
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		pod, err := pods.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(&pod.Status)
		stored, err = pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return stored
}

// SetReady makes the pod run and sets its Ready condition. With addresses given
// they replace those of the pod, the first being status.podIP; the second of a
// dual-stack pod is of the other family.
func (s *APIServer) SetReady(t testing.TB, pod *corev1.Pod, ready bool, ips ...string) *corev1.Pod {
	t.Helper()
	return s.SetStatus(t, pod.Namespace, pod.Name, func(st *corev1.PodStatus) {
		st.Phase = corev1.PodRunning
		if len(ips) > 0 {
			st.PodIP, st.PodIPs = ips[0], nil
			for _, ip := range ips {
				st.PodIPs = append(st.PodIPs, corev1.PodIP{IP: ip})
			}
		}
		value := corev1.ConditionFalse
		if ready {
			value = corev1.ConditionTrue
		}
		condition := corev1.PodCondition{Type: corev1.PodReady, Status: value, LastTransitionTime: metav1.Now()}
		for i := range st.Conditions {
			if st.Conditions[i].Type == corev1.PodReady {
				st.Conditions[i] = condition
				return
			}
		}
		st.Conditions = append(st.Conditions, condition)
	})
}

// Terminate deletes the pod with a long grace period: it has a
// deletionTimestamp and keeps its status until [APIServer.Remove].
func (s *APIServer) Terminate(t testing.TB, pod *corev1.Pod) { t.Helper(); s.delete(t, pod, 3600) }

// Remove removes the pod at once. That it has gone already is no error.
func (s *APIServer) Remove(t testing.TB, pod *corev1.Pod) { t.Helper(); s.delete(t, pod, 0) }

func (s *APIServer) delete(t testing.TB, pod *corev1.Pod, graceSeconds int64) {
	t.Helper()
	// Not the test's context: this is of use in cleanups too.
	err := s.Client.CoreV1().Pods(pod.Namespace).Delete(context.Background(), pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: &graceSeconds,
		Preconditions:      &metav1.Preconditions{UID: &pod.UID},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
}
