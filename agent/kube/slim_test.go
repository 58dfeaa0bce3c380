package kube

import (
	"bytes"
	"fmt"
	"math/rand"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/randfill"

	"github.com/fingerpost/fingerpost/nodecache"
)

// anyPod has noise in every field, and in those that are read mostly what
// means something.
func anyPod(seed int64) *corev1.Pod {
	rnd := rand.New(rand.NewSource(seed))
	pod := &corev1.Pod{}
	// A quantity has no exported fields and would not survive the wire.
	randfill.NewWithSeed(seed).NilChance(.3).NumElements(0, 3).MaxDepth(12).Funcs(
		func(t *metav1.Time, c randfill.Continue) { t.Time = time.Unix(c.Int63n(1<<33)-c.Int63n(2)<<32, 0) },
		func(t *metav1.MicroTime, c randfill.Continue) { t.Time = time.Unix(c.Int63n(1<<33), 0) },
		func(r *corev1.ResourceList, _ randfill.Continue) { *r = nil },
	).Fill(pod)
	pod.TypeMeta = metav1.TypeMeta{}
	maybe := func(values ...string) string { return values[rnd.Intn(len(values))] }
	tags := func(m map[string]string, values []string, keys ...string) map[string]string {
		for _, key := range keys {
			if rnd.Intn(2) == 0 {
				if m == nil {
					m = map[string]string{}
				}
				m[key] = maybe(values...)
			}
		}
		return m
	}
	pod.Labels = tags(pod.Labels, []string{"", "5d9", "z1"}, templateHashLabel, revisionHashLabel, rolloutsHashLabel, zoneLabel, regionLabel)
	pod.Annotations = tags(pod.Annotations, []string{"", "true", "false", "8080, x,9090", "50051=a.A,b.B;1=c", "a.A", "0"},
		GRPCPortAnnotation, ServicesAnnotation, CollectAnnotation, metav1.InitialEventsAnnotationKey)
	pod.Annotations = tags(pod.Annotations, []string{"", "*", "a, *", "b,a,b", "b", "A,b", ",", "-"}, ExportAnnotation, UpstreamsAnnotation)
	pod.Annotations = tags(pod.Annotations, []string{"", "1", "2s", "off", "50%", "reset,unavailable", "x"},
		RetryOnAnnotation, NumRetriesAnnotation, RetryBudgetAnnotation,
		MaxRequestsAnnotation, ConnectTimeoutAnnotation, KeepaliveAnnotation, OutlierAnnotation)
	pod.Annotations = tags(pod.Annotations, []string{"", "even", "zone", " node", "rack"}, LocalityAnnotation)
	for i := range pod.OwnerReferences {
		ref := &pod.OwnerReferences[i]
		ref.Kind, ref.Name = maybe("Node", "ReplicaSet", "", ref.Kind), maybe("a-5d9", ref.Name)
	}
	pod.Status.Phase = corev1.PodPhase(maybe("", "Running", "Failed", "Succeeded"))
	pod.Status.PodIP = maybe("", "192.0.2.1", "2001:db8::1", "x")
	for i := range pod.Status.PodIPs {
		pod.Status.PodIPs[i].IP = maybe("192.0.2.1", "2001:db8::1", "::ffff:192.0.2.9", "0.0.0.0", "x", "")
	}
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		c.Type = corev1.PodConditionType(maybe("Ready", string(c.Type)))
		c.Status = corev1.ConditionStatus(maybe("True", "False", "Unknown"))
	}
	for i := range pod.Status.ContainerStatuses {
		c := &pod.Status.ContainerStatuses[i]
		c.ImageID = maybe("", "docker.io/app@sha256:2", "sha256:1", "containerd://registry/app@sha256:3", c.ImageID)
	}
	always := corev1.ContainerRestartPolicyAlways
	for _, cs := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range cs {
			if rnd.Intn(2) == 0 {
				cs[i].RestartPolicy = &always
			}
			for j := range cs[i].Ports {
				p := &cs[i].Ports[j]
				p.Name, p.Protocol = maybe("grpc", "grpc-a", "http", ""), corev1.Protocol(maybe("", "TCP", "UDP"))
				p.ContainerPort = int32(rnd.Intn(1<<18) - 1<<17)
			}
			for _, p := range []*corev1.Probe{cs[i].LivenessProbe, cs[i].ReadinessProbe, cs[i].StartupProbe} {
				if p != nil && p.GRPC != nil {
					p.GRPC.Port = int32(rnd.Intn(1<<18) - 1<<17)
				}
			}
		}
	}
	return pod
}

// same compares what was decoded with what v1.Pod says.
func same(t *testing.T, got *slimPod, pod *corev1.Pod) {
	t.Helper()
	want := slimOf(pod).(*slimPod)
	if !reflect.DeepEqual(got.record, want.record) {
		t.Errorf("pod %+v\nnotes %q\nwant %+v\nnotes %q", got.record.Pod, got.record.Notes(), want.record.Pod, want.record.Notes())
	}
	if !reflect.DeepEqual(got.ObjectMeta, want.ObjectMeta) {
		t.Errorf("metadata %+v, want %+v", got.ObjectMeta, want.ObjectMeta)
	}
}

func TestDecodedPodIsTheConvertedPod(t *testing.T) {
	n := 2000
	if testing.Short() {
		n = 200
	}
	hinted, serving, owned, run, starting, exported := 0, 0, 0, 0, 0, 0
	for seed := range int64(n) {
		want := anyPod(seed)
		raw, err := want.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodePod(raw)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		// What is kept must not lie in the buffer, which is used again.
		for i := range raw {
			raw[i] = 0xff
		}
		same(t, got, want)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
		if len(got.record.Hints) > 0 {
			hinted++
		}
		if got.record.State != 0 {
			serving++
		}
		if got.record.Workload.Kind != "Pod" {
			owned++
		}
		switch {
		case len(want.Status.ContainerStatuses) == 0:
		case got.record.Images == "":
			starting++
		default:
			run++
		}
		if got.record.Export != "" && got.record.Export != nodecache.ExportNone {
			exported++
		}
	}
	if min(hinted, serving, owned, run, starting, exported) < n/50 {
		t.Errorf("of %d pods %d hinted, %d in the directory, %d owned, %d run, %d start, %d are exported: too few to tell", n, hinted, serving, owned, run, starting, exported)
	}
}

// decoders returns what client-go makes of the media type: for lists, and for
// the events of a watch.
func decoders(t *testing.T, mediaType string, gv schema.GroupVersion) (objects runtime.Decoder, events runtime.Decoder, encoder runtime.Encoder) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	plain := serializer.NewCodecFactory(scheme).WithoutConversion()
	info, ok := runtime.SerializerInfoForMediaType(plain.SupportedMediaTypes(), mediaType)
	if !ok {
		t.Fatal(mediaType)
	}
	objects, events, _, err := runtime.NewClientNegotiator(slimCodecs{plain}, gv).StreamDecoder(mediaType, nil)
	if err != nil {
		t.Fatal(err)
	}
	return objects, events, plain.EncoderForVersion(info.Serializer, gv)
}

// watched returns what client-go makes of the object in an event of a watch.
func watched(t *testing.T, mediaType string, gv schema.GroupVersion, o runtime.Object) runtime.Object {
	t.Helper()
	objects, events, encoder := decoders(t, mediaType, gv)
	var raw, frame bytes.Buffer
	if err := encoder.Encode(o, &raw); err != nil {
		t.Fatal(err)
	}
	event := &metav1.WatchEvent{Type: "ADDED", Object: runtime.RawExtension{Raw: raw.Bytes()}}
	if mediaType == runtime.ContentTypeProtobuf {
		b, err := event.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		frame.Write(b)
	} else if err := encoder.Encode(event, &frame); err != nil {
		t.Fatal(err)
	}
	var got metav1.WatchEvent
	if _, _, err := events.Decode(frame.Bytes(), nil, &got); err != nil || got.Type != "ADDED" {
		t.Fatalf("event %q, %v", got.Type, err)
	}
	out, _, err := objects.Decode(got.Object.Raw, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	// The buffer of events is used again.
	for i := range frame.Bytes() {
		frame.Bytes()[i] = 0xff
	}
	return out
}

func TestCodecsLeaveOtherObjectsAsTheyAre(t *testing.T) {
	port, name := int32(50051), "grpc"
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "checkout", UID: "us", ResourceVersion: "7"},
		Spec:       corev1.ServiceSpec{ClusterIP: "192.0.2.1", Ports: []corev1.ServicePort{{Name: name, Port: port}}},
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "prod", Name: "checkout-1", UID: "ue", ResourceVersion: "8", Labels: map[string]string{discoveryv1.LabelServiceName: "checkout"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.2"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", UID: "ua"}}},
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod", UID: "un", Annotations: map[string]string{CollectAnnotation: "false"}}}
	for _, mediaType := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		t.Run(mediaType, func(t *testing.T) {
			if got := shrink(watched(t, mediaType, corev1.SchemeGroupVersion, service)); !reflect.DeepEqual(got, shrink(service)) {
				t.Errorf("Service %+v", got)
			}
			if got := shrink(watched(t, mediaType, discovery, slice)); !reflect.DeepEqual(got, shrink(slice)) {
				t.Errorf("EndpointSlice %+v", got)
			}
			if got := shrink(watched(t, mediaType, corev1.SchemeGroupVersion, ns)); !reflect.DeepEqual(got, shrink(ns)) {
				t.Errorf("Namespace %+v", got)
			}
			list := &discoveryv1.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: "9"}, Items: []discoveryv1.EndpointSlice{*slice}}
			if got := watched(t, mediaType, discovery, list).(*discoveryv1.EndpointSliceList); len(got.Items) != 1 || got.ResourceVersion != "9" {
				t.Errorf("list %+v", got)
			}
		})
	}
}

// Go's encoder writes an empty image ID; others leave it out.
func TestContainerStatusWithoutAnImageID(t *testing.T) {
	field := func(number byte, value string) string { return string([]byte{number<<3 | 2, byte(len(value))}) + value }
	id := func(s string) string { return field(8, field(1, "app")+field(7, s)) }
	for _, status := range []string{
		"", field(8, ""), field(8, field(1, "app")), id("a@sha256:1"), id(""), id("a@sha256:2") + id("sha256:1"),
		id("a@sha256:2") + field(8, field(1, "b")), field(8, "") + id("a@sha256:2"), field(8, field(7, "x")+field(7, "y")),
		field(8, "\x38\x01") /* a number */, field(10, field(7, "init")), field(13, field(7, "debug")),
	} {
		raw := []byte(field(3, status))
		pod := &corev1.Pod{}
		wrong := pod.Unmarshal(raw) != nil
		got, err := decodePod(raw)
		if err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		if !wrong {
			same(t, got, pod)
		} else if got.record.Images != "" {
			t.Errorf("%q: images %q", raw, got.record.Images)
		}
	}
}

func TestCodecsDecodeWhatAWatchHas(t *testing.T) {
	pod := typicalPod(3)
	pod.ResourceVersion = "77"
	bookmark := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "78", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}
	gone := &metav1.Status{Status: "Failure", Reason: metav1.StatusReasonExpired, Code: 410}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}
	list := &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "9", Continue: "more"}, Items: []corev1.Pod{*pod, *bookmark}}
	for _, mediaType := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		t.Run(mediaType, func(t *testing.T) {
			objects, _, _ := decoders(t, mediaType, corev1.SchemeGroupVersion)
			through := func(o runtime.Object) runtime.Object {
				t.Helper()
				return watched(t, mediaType, corev1.SchemeGroupVersion, o)
			}
			same(t, through(pod).(*slimPod), pod)
			if p := through(bookmark).(*slimPod); p.GetResourceVersion() != "78" || p.GetAnnotations()[metav1.InitialEventsAnnotationKey] != "true" {
				t.Errorf("bookmark %+v", p.ObjectMeta)
			}
			if st := through(gone).(*metav1.Status); st.Reason != metav1.StatusReasonExpired || st.Code != 410 {
				t.Errorf("status %+v", st)
			}
			if n := through(ns).(*corev1.Namespace); n.Name != "prod" {
				t.Errorf("namespace %+v", n)
			}
			l := through(list).(*slimPodList)
			if len(l.Items) != 2 || l.ResourceVersion != "9" || l.Continue != "more" {
				t.Fatalf("list %+v of %d", l.ListMeta, len(l.Items))
			}
			same(t, l.Items[0], pod)
			if c := l.DeepCopyObject().(*slimPodList); !reflect.DeepEqual(c, l) {
				t.Errorf("copy %+v", c)
			}
			for _, raw := range []string{"", "k8s\x00", "k8s\x00\xff", "{", `{"kind":"Pod","apiVersion":"v1","spec":1}`, "k8s\x00\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x01\xff"} {
				if o, _, err := objects.Decode([]byte(raw), nil, nil); err == nil {
					t.Errorf("%q: no error, %T", raw, o)
				}
			}
		})
	}
}

func TestEventWithoutObjectIsAnError(t *testing.T) {
	_, events, _ := decoders(t, runtime.ContentTypeProtobuf, corev1.SchemeGroupVersion)
	for _, raw := range []string{"", "\x0a\x05ADDED", "\x0a\xff"} {
		if _, _, err := events.Decode([]byte(raw), nil, &metav1.WatchEvent{}); err == nil {
			t.Errorf("%q: no error", raw)
		}
	}
}

func FuzzDecodePod(f *testing.F) {
	for seed := range int64(4) {
		raw, err := anyPod(seed).Marshal()
		if err != nil {
			f.Fatal(err)
		}
		if len(raw) < 4096 {
			f.Add(raw)
		}
	}
	for _, pod := range []*corev1.Pod{{}, typicalPod(1), servingPod("a", "a1", "192.0.2.1")} {
		raw, err := pod.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, _, _ = decodeSlim(raw)
		_, _ = decodePodList(raw)
		_, _, _ = slimEvents{}.Decode(raw, nil, &metav1.WatchEvent{})
		_, _, _ = decodeSlim(append([]byte("k8s\x00\x0a\x09\x0a\x02v1\x12\x03Pod"), raw...))
		got, err := decodePod(raw)
		want := &corev1.Pod{}
		// Each of the two refuses some broken bytes that the other steps over.
		if err != nil || want.Unmarshal(raw) != nil {
			return
		}
		same(t, got, want)
	})
}

// typicalPod is one of a Deployment as an API server sends it, with some
// kilobytes that nobody here needs.
func typicalPod(i int) *corev1.Pod {
	pod := servingPod(fmt.Sprintf("checkout-%08d-%05d", i/10, i), fmt.Sprintf("3b241101-0000-4000-8000-%012d", i), fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255))
	yes := true
	pod.Labels = map[string]string{"app": "checkout", templateHashLabel: "5d9f8c7b6d"}
	pod.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: "apps/v1", Kind: "ReplicaSet", Name: fmt.Sprintf("checkout-%08d-5d9f8c7b6d", i/10),
		UID: types.UID(fmt.Sprintf("9d1f6c1e-0000-4000-8000-%012d", i/10)), Controller: &yes,
	}}
	pod.Spec.NodeName = fmt.Sprintf("node-%d", i%1500)
	for j := range 30 {
		pod.Spec.Containers[0].Env = append(pod.Spec.Containers[0].Env, corev1.EnvVar{Name: fmt.Sprintf("VARIABLE_%d", j), Value: "a value of an ordinary length"})
	}
	for j := range 3 {
		pod.ManagedFields = append(pod.ManagedFields, metav1.ManagedFieldsEntry{
			Manager: "kubelet", Operation: "Update", FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1("{" + strings.Repeat(`"f:x":{},`, 100+j) + `"f:y":{}}`),
		})
	}
	return pod
}

func BenchmarkDecodePod(b *testing.B) {
	pod := typicalPod(1)
	raw, err := pod.Marshal()
	if err != nil {
		b.Fatal(err)
	}
	b.Run("read", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var s seen
			var m objectMeta
			if err := s.see(raw, &m); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(len(raw)), "B/pod")
	})
	b.Run("record", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := decodePod(raw); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("v1.Pod", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p := &corev1.Pod{}
			if err := p.Unmarshal(raw); err != nil {
				b.Fatal(err)
			}
			Convert(p)
		}
	})
}

// servingPod is Ready, with a container.
func servingPod(pod, uid, ip string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: pod, UID: types.UID(uid), CreationTimestamp: metav1.NewTime(time.Unix(1.7e9, 0))},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Ports: []corev1.ContainerPort{{Name: "grpc", ContainerPort: 50051}}}}},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
}
