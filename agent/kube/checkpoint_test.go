package kube

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// savedRecord is a record that sets whatever a pod can say.
func savedRecord(i int) *Record {
	pod := servingPod(fmt.Sprintf("p%05d", i), fmt.Sprintf("uid-of-pod-%05d", i), "192.0.2.1")
	pod.CreationTimestamp = metav1.NewTime(time.Unix(int64(1e9+i), 0))
	pod.Labels = map[string]string{templateHashLabel: "5d9", zoneLabel: "zone-1"}
	pod.Spec.NodeName = fmt.Sprintf("node-%d", i%100)
	pod.Spec.HostNetwork = true
	pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: "2001:db8::1"})
	pod.Annotations = map[string]string{
		GRPCPortAnnotation: "50051,x", ServicesAnnotation: "50052=pkg.A,pkg.B", CollectAnnotation: "true", ExportAnnotation: "b,a,B",
	}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", ImageID: "registry/app@sha256:" + pod.Name}}
	return Convert(pod)
}

func TestPodsSectionKeepsEveryField(t *testing.T) {
	off := servingPod("off", "u-off", "192.0.2.9")
	off.Annotations = map[string]string{CollectAnnotation: "false"}
	off.Status.Conditions = nil
	in := []*Record{savedRecord(1), savedRecord(2), Convert(off)}
	data, err := encodePods(in)
	if err != nil {
		t.Fatal(err)
	}
	out, err := decodePods(data)
	if err != nil {
		t.Fatal(err)
	}
	if len(out) != len(in) {
		t.Fatalf("%d records", len(out))
	}
	for i := range in {
		if !out[i].equal(in[i]) || out[i].optedOut != in[i].optedOut || out[i].of != in[i].of || out[i].at != in[i].at || out[i].run != in[i].run {
			t.Errorf("loaded %+v\n%+v, want %+v\n%+v", out[i], out[i].Pod, in[i], in[i].Pod)
		}
	}
	// A field that is added must be saved too: extend savedPod and this list.
	var fields []string
	for i := range reflect.TypeFor[Record]().NumField() {
		fields = append(fields, reflect.TypeFor[Record]().Field(i).Name)
	}
	if want := []string{"Pod", "Notes", "optedOut", "of", "at", "run"}; !slices.Equal(fields, want) {
		t.Errorf("a record has %v, saved are %v", fields, want)
	}
}

func TestNamespaceThatOptedOutIsNotSavedWithItsPods(t *testing.T) {
	s := NewStore(nodecache.New(nodecache.Options{}), nil)
	s.SetNamespace("prod", true)
	s.Upsert(Convert(servingPod("a", "ua", "192.0.2.1")))
	data, err := encodePods(s.records())
	if err != nil {
		t.Fatal(err)
	}
	out, err := decodePods(data)
	if err != nil || len(out) != 1 || out[0].CollectOff {
		t.Errorf("%v, %v", out, err)
	}
}

func TestDamagedPodsSectionIsAnError(t *testing.T) {
	for name, s := range map[string]savedPods{
		"owner":     {Places: []savedPlace{{}}, Runs: []string{""}, Pods: []savedPod{{Pod: nodecache.Pod{UID: "u", Name: "a"}}}},
		"run":       {Origins: []savedOrigin{{Namespace: "n"}}, Places: []savedPlace{{}}, Pods: []savedPod{{Pod: nodecache.Pod{UID: "u", Name: "a"}}}},
		"place":     {Origins: []savedOrigin{{}}, Pods: []savedPod{{Pod: nodecache.Pod{UID: "u", Name: "a"}}}},
		"negative":  {Origins: []savedOrigin{{}}, Places: []savedPlace{{}}, Runs: []string{""}, Pods: []savedPod{{Of: -1, Pod: nodecache.Pod{UID: "u", Name: "a"}}}},
		"no uid":    {Origins: []savedOrigin{{Namespace: "n"}}, Places: []savedPlace{{}}, Runs: []string{""}, Pods: []savedPod{{Pod: nodecache.Pod{Name: "a"}}}},
		"namespace": {Origins: []savedOrigin{{}}, Places: []savedPlace{{}}, Runs: []string{""}, Pods: []savedPod{{Pod: nodecache.Pod{UID: "u", Name: "a"}}}},
		"address":   {Origins: []savedOrigin{{Namespace: "n"}}, Places: []savedPlace{{}}, Runs: []string{""}, Pods: []savedPod{{Pod: nodecache.Pod{UID: "u", Name: "a", State: nodecache.Serving}}}},
		"state":     {Origins: []savedOrigin{{Namespace: "n"}}, Places: []savedPlace{{}}, Runs: []string{""}, Pods: []savedPod{{Pod: nodecache.Pod{UID: "u", Name: "a", State: 77}}}},
	} {
		data, err := encodeSaved(&s)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := decodePods(data); err == nil {
			t.Errorf("%s: decoded %+v", name, out[0])
		}
	}
	if _, err := decodePods([]byte("x")); err == nil {
		t.Error("text was decoded")
	}
}

func FuzzPodsSection(f *testing.F) {
	data, err := encodePods([]*Record{savedRecord(1), Convert(servingPod("a", "ua", "192.0.2.1"))})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add(data[:len(data)/2])
	f.Fuzz(func(t *testing.T, data []byte) {
		records, err := decodePods(data)
		if err != nil {
			return
		}
		s := NewStore(nodecache.New(nodecache.Options{}), nil)
		for _, r := range records {
			s.Upsert(r)
		}
		if _, err := encodePods(s.records()); err != nil {
			t.Fatal(err)
		}
	})
}

func BenchmarkPodsSection(b *testing.B) {
	var in []*Record
	for i := range 50_000 {
		r := savedRecord(i)
		r.of = unique.Make(origin{"prod", fmt.Sprint("uid-of-owner-", i/5), "5d9", "ReplicaSet/a-5d9", "ReplicaSet", "a"})
		in = append(in, r)
	}
	data, err := encodePods(in)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("encode", func(b *testing.B) {
		b.ReportMetric(float64(len(data))/float64(len(in)), "B/pod")
		for b.Loop() {
			if _, err := encodePods(in); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("decode", func(b *testing.B) {
		for b.Loop() {
			if _, err := decodePods(data); err != nil {
				b.Fatal(err)
			}
		}
	})
}
