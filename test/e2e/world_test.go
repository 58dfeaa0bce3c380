package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/fingerpost/fingerpost/demo"
)

// world is a file of pods, some of which have a server behind them.
type world struct {
	t    *testing.T
	file string
	pods []*corev1.Pod
	more []any // further objects
}

func newWorld(t *testing.T) *world {
	return &world{t: t, file: filepath.Join(t.TempDir(), "pods.yaml")}
}

func (w *world) source() string { return "file:" + w.file }

// newPod makes a Ready pod of a ReplicaSet: in namespace prod, on node n1, with
// one port named grpc. An id of rs-x names pod x of the ReplicaSet rs, whose
// revision is the part behind the last dash, as in web-1.
func newPod(id, addr string, port int) *corev1.Pod {
	rs := id[:strings.LastIndexByte(id, '-')]
	hash := rs[strings.LastIndexByte(rs, '-')+1:]
	yes := true
	return &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Name: id, Namespace: "prod", UID: types.UID("uid-" + id),
			Labels:          map[string]string{"pod-template-hash": hash},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: rs, UID: types.UID("uid-" + rs), Controller: &yes}},
		},
		Spec: corev1.PodSpec{
			NodeName:   "n1",
			Containers: []corev1.Container{{Name: "app", Image: "app", Ports: []corev1.ContainerPort{{Name: "grpc", ContainerPort: int32(port)}}}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: addr, PodIPs: []corev1.PodIP{{IP: addr}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
}

// add puts a pod into the world.
func (w *world) add(p *corev1.Pod) *corev1.Pod {
	w.pods = append(w.pods, p)
	return p
}

// serve starts a server and puts its pod into the world.
func (w *world) serve(id string, services []string, opts ...grpc.ServerOption) (*corev1.Pod, *demo.Sample) {
	w.t.Helper()
	p := newPod(id, "", 0)
	s := sample(w.t, id, portOf(w.pods, p), services, opts...)
	return w.add(newPod(id, s.IP(), s.Port())), s
}

// portOf is the port of the pods that have the same template; 0 if there are
// none.
func portOf(pods []*corev1.Pod, p *corev1.Pod) int {
	for _, o := range pods {
		if len(o.OwnerReferences) > 0 && o.OwnerReferences[0].UID == p.OwnerReferences[0].UID {
			return int(o.Spec.Containers[0].Ports[0].ContainerPort)
		}
	}
	return 0
}

// sample starts a server that ends with the test, at an address of its own:
// what a pod has in a cluster. Port 0 is any.
func sample(t *testing.T, id string, port int, services []string, opts ...grpc.ServerOption) *demo.Sample {
	t.Helper()
	s, err := demo.StartSample(id, fmt.Sprintf("%s:%d", nextAddr(), port), services, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

var addrs atomic.Int64

// nextAddr is a loopback address that no test of this process had before.
func nextAddr() string {
	n := addrs.Add(1)
	return fmt.Sprintf("127.%d.%d.%d", 20+os.Getpid()%200, n/250, 2+n%250)
}

// remove takes a pod out of the world.
func (w *world) remove(p *corev1.Pod) {
	for i, o := range w.pods {
		if o == p {
			w.pods = append(w.pods[:i], w.pods[i+1:]...)
			return
		}
	}
}

// terminate makes a pod one that is being deleted and still Ready.
func terminate(p *corev1.Pod) {
	now := metav1.NewTime(time.Now())
	p.DeletionTimestamp = &now
}

// write puts the file in place, whole or not at all.
func (w *world) write() *world {
	w.t.Helper()
	items := make([]any, 0, len(w.pods))
	for _, p := range w.pods {
		items = append(items, p)
	}
	items = append(items, w.more...)
	b, err := yaml.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		w.t.Fatal(err)
	}
	w.writeRaw(string(b))
	return w
}

// writeRaw puts any text in place of the file.
func (w *world) writeRaw(text string) {
	w.t.Helper()
	tmp := w.file + ".tmp"
	if err := os.WriteFile(tmp, []byte(text), 0o644); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Rename(tmp, w.file); err != nil {
		w.t.Fatal(err)
	}
}
