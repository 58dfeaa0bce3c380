package kube

import (
	"fmt"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// savedRecord is a record that sets whatever a pod can say.
func savedRecord(i int) *Record {
	pod := servingPod(fmt.Sprintf("p%05d", i), fmt.Sprintf("uid-of-pod-%05d", i), "192.0.2.1")
	pod.CreationTimestamp = metav1.NewTime(time.Unix(int64(1e9+i), 0))
	pod.Labels = map[string]string{templateHashLabel: "5d9", zoneLabel: "zone-1", regionLabel: "region-1"}
	pod.Spec.NodeName = fmt.Sprintf("node-%d", i%100)
	pod.Spec.HostNetwork = true
	pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: "2001:db8::1"})
	pod.Annotations = map[string]string{
		GRPCPortAnnotation: "50051,x", ServicesAnnotation: "50052=pkg.A,pkg.B", CollectAnnotation: "true", ExportAnnotation: "b,a,B", LocalityAnnotation: "zone",
		PeerAnnotation:    "9642 sha256:" + strings.Repeat("5d", 32),
		RetryOnAnnotation: "unavailable", OutlierAnnotation: "off", KeepaliveAnnotation: "x",
	}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", ImageID: "registry/app@sha256:" + pod.Name}}
	return Convert(pod)
}

func TestPodsSectionKeepsEveryField(t *testing.T) {
	off := servingPod("off", "u-off", "192.0.2.9")
	off.Annotations = map[string]string{CollectAnnotation: "false"}
	off.Status.Conditions = nil
	in := []*Record{savedRecord(1), savedRecord(2), Convert(off)}
	out, err := decodePods(encodePods(in))
	if err != nil {
		t.Fatal(err)
	}
	if len(out) != len(in) {
		t.Fatalf("%d records", len(out))
	}
	for i := range in {
		if !out[i].equal(in[i]) || out[i].of != in[i].of || out[i].at != in[i].at {
			t.Errorf("loaded %+v\n%+v, want %+v\n%+v", out[i], out[i].Pod, in[i], in[i].Pod)
		}
	}
	// A field that is added must be saved too: extend encodePods, or templateKey,
	// and this list.
	var fields []string
	for _, typ := range []reflect.Type{reflect.TypeFor[Record](), reflect.TypeFor[nodecache.Pod]()} {
		for i := range typ.NumField() {
			fields = append(fields, typ.Field(i).Name)
		}
	}
	if want := []string{
		"Pod", "of", "at",
		"UID", "Name", "Common", "Node", "Zone", "Created", "Reason", "Addr", "More", "State", "HostNetwork", "CollectOff", "CollectOn", "Unready",
	}; !slices.Equal(fields, want) {
		t.Errorf("a record has %v, saved are %v", fields, want)
	}
}

func TestTemplatesThatNobodyHasAreForgotten(t *testing.T) {
	held := func() int {
		templates.mu.Lock()
		defer templates.mu.Unlock()
		return len(templates.held)
	}
	before := held()
	func() {
		var records []*Record
		for i := range 100 {
			records = append(records, Convert(servingPod(fmt.Sprint("forgotten-", i), fmt.Sprint("uid-of-forgotten-", i), "192.0.2.1")))
		}
		if held() < 100 {
			t.Fatalf("%d are held", held())
		}
		runtime.KeepAlive(records)
	}()
	for deadline := time.Now().Add(10 * time.Second); held() > before; runtime.GC() {
		if time.Now().After(deadline) {
			t.Fatalf("%d are held, there were %d", held(), before)
		}
	}
}

func TestNamespaceThatOptedOutIsNotSavedWithItsPods(t *testing.T) {
	s := NewStore(nodecache.New(nodecache.Options{}), nil)
	s.SetNamespace("prod", true)
	s.Upsert(Convert(servingPod("a", "ua", "192.0.2.1")))
	out, err := decodePods(encodePods(s.records()))
	if err != nil || len(out) != 1 || out[0].CollectOff {
		t.Errorf("%v, %v", out, err)
	}
}

func TestDamagedPodsSectionIsAnError(t *testing.T) {
	good := encodePods([]*Record{savedRecord(1), savedRecord(2)})
	for end := range len(good) {
		if _, err := decodePods(good[:end]); err == nil {
			t.Errorf("%d of %d bytes were decoded", end, len(good))
		}
	}
	if _, err := decodePods(append(good, 0)); err == nil {
		t.Error("a byte too many was decoded")
	}
	for name, edit := range map[string]func(*Record){
		"no uid":    func(r *Record) { r.UID = "" },
		"no name":   func(r *Record) { r.Name = "" },
		"namespace": func(r *Record) { r.of = newTemplate(string(new(seen).templateKey(nil))) },
		"address":   func(r *Record) { r.Addr = netip.Addr{} },
		"state":     func(r *Record) { r.State = 77 },
	} {
		r := savedRecord(1)
		edit(r)
		if out, err := decodePods(encodePods([]*Record{r})); err == nil {
			t.Errorf("%s: decoded %+v", name, out[0])
		}
	}
	if _, err := decodePods([]byte("x")); err == nil {
		t.Error("text was decoded")
	}
}

func FuzzPodsSection(f *testing.F) {
	data := encodePods([]*Record{savedRecord(1), Convert(servingPod("a", "ua", "192.0.2.1"))})
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
		if _, err := decodePods(encodePods(s.records())); err != nil {
			t.Fatal(err)
		}
	})
}

func BenchmarkPodsSection(b *testing.B) {
	in := make([]*Record, 50_000)
	for i := range in {
		in[i] = Convert(typicalPod(i))
	}
	data := encodePods(in)
	b.Run("encode", func(b *testing.B) {
		b.ReportMetric(float64(len(data))/float64(len(in)), "B/pod")
		for b.Loop() {
			encodePods(in)
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
