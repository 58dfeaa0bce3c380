package kube_test

import (
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

// loadPod is a pod as large as those of real clusters: 8 kB, more than half of it
// managedFields.
func loadPod(n int, ns string) *corev1.Pod {
	r := rand.New(rand.NewPCG(uint64(n), 1))
	hex := func(digits int) string {
		b := make([]byte, digits)
		for i := range b {
			b[i] = "0123456789abcdef"[r.IntN(16)]
		}
		return string(b)
	}
	rs := n / 10
	yes := true
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ns, Name: fmt.Sprintf("checkout-%d-5d9f8c7b6d-%05d", rs, n), UID: types.UID(fmt.Sprintf("%s-%s-4%s-8%s-%s", hex(8), hex(4), hex(3), hex(3), hex(12))),
			CreationTimestamp: metav1.NewTime(time.Unix(int64(1.7e9+n), 0)),
			Labels:            map[string]string{"app": fmt.Sprint("checkout-", rs), "pod-template-hash": "5d9f8c7b6d"},
			OwnerReferences:   []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: fmt.Sprintf("checkout-%d-5d9f8c7b6d", rs), UID: types.UID(fmt.Sprint("rs-", rs)), Controller: &yes}},
		},
		Spec: corev1.PodSpec{
			NodeName: fmt.Sprintf("node-%04d", n%1000), RestartPolicy: corev1.RestartPolicyAlways, DNSPolicy: corev1.DNSClusterFirst, SchedulerName: "default-scheduler",
			Containers: []corev1.Container{{
				Name: "app", Image: "registry.example/checkout@sha256:" + hex(64), ImagePullPolicy: corev1.PullIfNotPresent,
				TerminationMessagePath: "/dev/termination-log", TerminationMessagePolicy: corev1.TerminationMessageReadFile,
				Ports: []corev1.ContainerPort{{Name: "grpc", ContainerPort: 8080, Protocol: corev1.ProtocolTCP}},
			}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: fmt.Sprintf("10.%d.%d.%d", n>>16, n>>8&255, n&255), PodIPs: []corev1.PodIP{{IP: fmt.Sprintf("10.%d.%d.%d", n>>16, n>>8&255, n&255)}},
			Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			ContainerStatuses: []corev1.ContainerStatus{{Name: "app", ImageID: "registry.example/checkout@sha256:" + hex(64), ContainerID: "containerd://" + hex(64)}},
		},
	}
	for i := range 24 {
		pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, corev1.EnvVar{Name: fmt.Sprintf("CHECKOUT_SETTING_%02d", i), Value: "https://settings.example/" + hex(48)})
	}
	fields := `{"f:metadata":{"f:labels":{".":{}`
	for len(fields) < 4800 {
		fields += fmt.Sprintf(`,"f:key-%s":{}`, hex(12))
	}
	var set metav1.FieldsV1
	set.SetRawString(fields + "}}}")
	pod.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1", FieldsV1: &set}}
	return pod
}

// meter counts what the API server sends, as it is on the wire within TLS, by
// resource. Without streams it refuses lists that are streamed, as old API servers
// do.
type meter struct {
	next    http.RoundTripper
	streams bool

	// mu guards what follows.
	mu    sync.Mutex
	bytes map[string]*atomic.Int64
	lists map[string]int // requests that want everything
	all   int            // requests
}

func (m *meter) RoundTrip(req *http.Request) (*http.Response, error) {
	resource, q := path.Base(req.URL.Path), req.URL.Query()
	streamed := q.Get("sendInitialEvents") == "true"
	m.mu.Lock()
	m.all++
	if m.bytes[resource] == nil {
		m.bytes[resource] = &atomic.Int64{}
	}
	n := m.bytes[resource]
	refuse := streamed && !m.streams
	if !refuse && (streamed || q.Get("watch") == "") {
		m.lists[resource]++
	}
	m.mu.Unlock()
	if refuse {
		body := `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422,"message":"sendInitialEvents is forbidden"}`
		return &http.Response{StatusCode: 422, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)), Request: req}, nil
	}
	req = req.Clone(req.Context())
	req.Header.Set("Accept-Encoding", "gzip") // else the transport unpacks before it is counted
	resp, err := m.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	body := io.ReadCloser(&counted{resp.Body, n})
	if resp.Header.Get("Content-Encoding") == "gzip" {
		resp.Header.Del("Content-Encoding")
		body = &unzipped{ReadCloser: body}
	}
	resp.Body = body
	return resp, nil
}

type counted struct {
	io.ReadCloser
	n *atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// unzipped unpacks from the first read on, which may wait.
type unzipped struct {
	io.ReadCloser
	zip *gzip.Reader
}

func (u *unzipped) Read(p []byte) (int, error) {
	if u.zip == nil {
		var err error
		if u.zip, err = gzip.NewReader(u.ReadCloser); err != nil {
			return 0, err
		}
	}
	return u.zip.Read(p)
}

// What one agent asks of the API server: each resource once, by a list or a
// streamed one, and then a watch. The figures are those of docs/scale.md.
func TestAgentListsEachResourceOnceAndThenWatches(t *testing.T) {
	pods, services := 10000, 1000
	if testing.Short() {
		pods, services = 500, 50
	}
	api := harness.StartAPIServer(t)
	ns := api.Namespace(t)
	err := api.WritePods(t.Context(), func(yield func(*corev1.Pod) bool) {
		for n := range pods {
			if !yield(loadPod(n, ns)) {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	var writing sync.WaitGroup
	for w := range 8 {
		writing.Go(func() {
			for n := w; n < services; n += 8 {
				if err := writeService(t, api, ns, n); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	writing.Wait()
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("streamed %v", streams), func(t *testing.T) {
			m := &meter{streams: streams, bytes: map[string]*atomic.Int64{}, lists: map[string]int{}}
			config := rest.CopyConfig(api.Config)
			config.Wrap(func(next http.RoundTripper) http.RoundTripper { m.next = next; return m })
			t.Cleanup(func() { harness.CloseIdleConnections(config) })
			store := kube.NewStore(nodecache.New(nodecache.Options{}), nil)
			source, err := kube.NewCluster(config, "test", store, nil)
			if err != nil {
				t.Fatal(err)
			}
			run(t, source)
			select {
			case <-source.Synced():
			case <-time.After(2 * time.Minute):
				t.Fatal("not synced: ", source.Status())
			}
			if store.Len() < pods {
				t.Fatalf("%d pods", store.Len())
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			for _, resource := range slices.Sorted(func(yield func(string) bool) {
				for r := range m.bytes {
					if !yield(r) {
						return
					}
				}
			}) {
				t.Logf("%s: %d bytes", resource, m.bytes[resource].Load())
			}
			for _, resource := range []string{"pods", "services", "endpointslices", "namespaces"} {
				if m.lists[resource] != 1 {
					t.Errorf("%s were listed %d times", resource, m.lists[resource])
				}
			}
			if most := 40; m.all > most {
				t.Errorf("%d requests, want %d at most", m.all, most)
			}
		})
	}
}

func writeService(t *testing.T, api *harness.APIServer, ns string, n int) error {
	name := fmt.Sprintf("checkout-%d", n)
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Name: "grpc", Port: 50051, TargetPort: intstr.FromString("grpc")}}},
	}
	made, err := api.Client.CoreV1().Services(ns).Create(t.Context(), svc, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	port, portName, yes := int32(8080), "grpc", true
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: name + "-x7k2p", Labels: map[string]string{discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: name, UID: made.UID, Controller: &yes}},
		},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &portName, Port: &port}},
	}
	for i := range 10 {
		pod := loadPod(n*10+i, ns)
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{pod.Status.PodIP}, Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes}, NodeName: &pod.Spec.NodeName,
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: ns, Name: pod.Name, UID: pod.UID},
		})
	}
	_, err = api.Client.DiscoveryV1().EndpointSlices(ns).Create(t.Context(), slice, metav1.CreateOptions{})
	return err
}
