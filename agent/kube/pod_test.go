package kube_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
	"unsafe"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

func ref(kind, name string, uid types.UID, controller bool) metav1.OwnerReference {
	return metav1.OwnerReference{Kind: kind, Name: name, UID: uid, Controller: &controller}
}

func TestOwnerOfAPod(t *testing.T) {
	for _, c := range []struct {
		name                string
		labels              map[string]string
		refs                []metav1.OwnerReference
		key, display, works string
	}{
		{"ReplicaSet of a Deployment", map[string]string{"pod-template-hash": "5d9"}, []metav1.OwnerReference{ref("ReplicaSet", "a-5d9", "rs", true)}, "rs/5d9", "ReplicaSet/a-5d9", "ReplicaSet/a"},
		{"hash elsewhere in the name", map[string]string{"pod-template-hash": "5d9"}, []metav1.OwnerReference{ref("ReplicaSet", "a-5d9-b", "rs", true)}, "rs/5d9", "ReplicaSet/a-5d9-b", "ReplicaSet/a-5d9-b"},
		{"StatefulSet", map[string]string{"controller-revision-hash": "db-77"}, []metav1.OwnerReference{ref("StatefulSet", "db", "ss", true)}, "ss/db-77", "StatefulSet/db", "StatefulSet/db"},
		{"Argo Rollout", map[string]string{"rollouts-pod-template-hash": "66"}, []metav1.OwnerReference{ref("ReplicaSet", "r-66", "rs", true)}, "rs/", "ReplicaSet/r-66", "ReplicaSet/r"},
		{"custom kind", nil, []metav1.OwnerReference{ref("Widget", "w", "wd", true)}, "wd/", "Widget/w", "Widget/w"},
		{"bare", nil, nil, "ua/", "Pod/a", "Pod/a"},
		{"mirror of a static pod", nil, []metav1.OwnerReference{ref("Node", "n1", "node", true)}, "ua/", "Pod/a", "Pod/a"},
		{"several owners, no controller", nil, []metav1.OwnerReference{ref("A", "x", "x", false), ref("B", "y", "y", false)}, "ua/", "Pod/a", "Pod/a"},
		{"several owners, one controller", nil, []metav1.OwnerReference{ref("A", "x", "x", false), ref("B", "y", "y", true)}, "y/", "B/y", "B/y"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := readyPod("a", "ua", "192.0.2.1")
			pod.Labels, pod.OwnerReferences = c.labels, c.refs
			r := kube.Convert(pod)
			if r.Owner.String() != c.key || r.OwnerName != c.display || r.Workload.String() != c.works || r.Workload.Namespace != "prod" {
				t.Errorf("owner %s, %s, workload %s in %s", r.Owner, r.OwnerName, r.Workload, r.Workload.Namespace)
			}
		})
	}
}

func TestStateOfAPod(t *testing.T) {
	now := metav1.Now()
	phase := func(p corev1.PodPhase) func(*corev1.Pod) { return func(o *corev1.Pod) { o.Status.Phase = p } }
	deleted := func(o *corev1.Pod) { o.DeletionTimestamp = &now }
	unready := func(o *corev1.Pod) { o.Status.Conditions[0].Status = corev1.ConditionFalse }
	noIP := func(o *corev1.Pod) { o.Status.PodIP, o.Status.PodIPs = "", nil }
	for _, c := range []struct {
		name   string
		edits  []func(*corev1.Pod)
		state  nodecache.PodState
		reason string
	}{
		{"ready", nil, nodecache.Serving, ""},
		{"deleted and ready", []func(*corev1.Pod){deleted}, nodecache.Draining, ""},
		{"deleted and not ready", []func(*corev1.Pod){deleted, unready}, nodecache.Absent, kube.ReasonTerminating},
		{"not ready", []func(*corev1.Pod){unready}, nodecache.Absent, kube.ReasonNotReady},
		{"no conditions", []func(*corev1.Pod){func(o *corev1.Pod) { o.Status.Conditions = nil }}, nodecache.Absent, kube.ReasonNotReady},
		{"no address", []func(*corev1.Pod){noIP}, nodecache.Absent, kube.ReasonNoAddress},
		{"address that is none", []func(*corev1.Pod){func(o *corev1.Pod) { o.Status.PodIPs[0].IP = "nope" }}, nodecache.Absent, kube.ReasonNoAddress},
		{"succeeded and ready", []func(*corev1.Pod){phase(corev1.PodSucceeded)}, nodecache.Absent, kube.ReasonSucceeded},
		{"failed and ready", []func(*corev1.Pod){phase(corev1.PodFailed)}, nodecache.Absent, kube.ReasonFailed},
		{"failed, deleted, no address", []func(*corev1.Pod){phase(corev1.PodFailed), deleted, noIP}, nodecache.Absent, kube.ReasonFailed},
		{"unknown phase", []func(*corev1.Pod){phase(corev1.PodUnknown)}, nodecache.Serving, ""},
		{"no phase", []func(*corev1.Pod){phase("")}, nodecache.Serving, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := readyPod("a", "ua", "192.0.2.1")
			for _, edit := range c.edits {
				edit(pod)
			}
			if r := kube.Convert(pod); r.State != c.state || r.Reason != c.reason {
				t.Errorf("%s %q, want %s %q", r.State, r.Reason, c.state, c.reason)
			}
		})
	}
}

func TestAddressesOfAPod(t *testing.T) {
	for _, c := range []struct {
		ip   string
		ips  []string
		want string
	}{
		{"192.0.2.1", []string{"192.0.2.1"}, "192.0.2.1 []"},
		{"192.0.2.1", nil, "192.0.2.1 []"},
		{"192.0.2.1", []string{"192.0.2.1", "2001:db8::1"}, "192.0.2.1 [2001:db8::1]"},
		{"2001:db8::1", []string{"2001:db8::1", "::ffff:192.0.2.1"}, "2001:db8::1 [192.0.2.1]"},
		{"", []string{"::ffff:192.0.2.1", "192.0.2.1", "x"}, "192.0.2.1 []"},
		{"0.0.0.0", nil, "invalid IP []"},
		{"", nil, "invalid IP []"},
	} {
		pod := readyPod("a", "ua", c.ip)
		pod.Status.PodIPs = nil
		for _, ip := range c.ips {
			pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: ip})
		}
		if r := kube.Convert(pod); fmt.Sprint(r.Addr, r.More) != c.want {
			t.Errorf("%q %q: %v %v, want %s", c.ip, c.ips, r.Addr, r.More, c.want)
		}
	}
}

func TestPlaceAndAgeOfAPod(t *testing.T) {
	pod := readyPod("a", "ua", "192.0.2.1")
	created := time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("x", 3600))
	pod.CreationTimestamp = metav1.NewTime(created)
	pod.Labels["topology.kubernetes.io/zone"] = "z1"
	pod.Spec.HostNetwork = true
	r := kube.Convert(pod)
	if r.Node != "n1" || r.Zone != "z1" || !r.Created.Equal(created) || !r.HostNetwork || r.State != nodecache.Serving || r.String() != "prod/a" {
		t.Errorf("%+v", r.Pod)
	}
	if !kube.Convert(readyPod("a", "ua", "192.0.2.1")).Created.IsZero() {
		t.Error("an unknown age is not zero")
	}
}

func TestHintsOfAPod(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	port := func(name string, p int32, proto corev1.Protocol) corev1.ContainerPort {
		return corev1.ContainerPort{Name: name, ContainerPort: p, Protocol: proto}
	}
	grpcProbe := func(p int32) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: p}}}
	}
	for _, c := range []struct {
		name        string
		annotation  string
		containers  []corev1.Container
		init        []corev1.Container
		want, notes string
	}{
		{name: "none", containers: []corev1.Container{{Ports: []corev1.ContainerPort{port("http", 80, ""), port("", 50051, ""), port("grpcx", 81, "")}}}, want: "[]"},
		{name: "port names", containers: []corev1.Container{{Ports: []corev1.ContainerPort{port("grpc-b", 2, "TCP"), port("grpc", 1, ""), port("grpc", 3, "UDP")}}}, want: "[{1 port name} {2 port name}]"},
		{name: "probes", containers: []corev1.Container{{LivenessProbe: grpcProbe(3), ReadinessProbe: grpcProbe(2), StartupProbe: grpcProbe(1)}, {LivenessProbe: &corev1.Probe{}}}, want: "[{1 grpc probe} {2 grpc probe} {3 grpc probe}]"},
		{name: "one per port", annotation: "1", containers: []corev1.Container{{Ports: []corev1.ContainerPort{port("grpc", 1, ""), port("grpc-a", 2, "")}, LivenessProbe: grpcProbe(2)}}, want: "[{1 annotation} {2 port name}]"},
		{name: "several ports", annotation: "9091, 9090", want: "[{9090 annotation} {9091 annotation}]"},
		{name: "bad part", annotation: "9090,x,70000,0,", want: "[{9090 annotation}]", notes: `"x" is not a port`},
		{name: "init containers", init: []corev1.Container{{Ports: []corev1.ContainerPort{port("grpc", 1, "")}}, {RestartPolicy: &always, Ports: []corev1.ContainerPort{port("grpc", 2, "")}, StartupProbe: grpcProbe(4)}}, want: "[{2 port name} {4 grpc probe}]"},
		{name: "nonsense from a file", containers: []corev1.Container{{Ports: []corev1.ContainerPort{port("grpc", 0, ""), port("grpc", -1, ""), port("grpc", 1<<16+1, "")}}}, want: "[]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := readyPod("a", "ua", "192.0.2.1")
			pod.Spec.Containers, pod.Spec.InitContainers = c.containers, c.init
			if c.annotation != "" {
				pod.Annotations = map[string]string{kube.GRPCPortAnnotation: c.annotation}
			}
			r := kube.Convert(pod)
			if fmt.Sprint(r.Hints) != c.want {
				t.Errorf("hints %v, want %s", r.Hints, c.want)
			}
			if notes := strings.Join(r.Notes(), "\n"); !strings.Contains(notes, c.notes) || (c.notes == "") != (notes == "") {
				t.Errorf("notes %q, want %q", notes, c.notes)
			}
		})
	}
}

func TestDeclaredServicesOfAPod(t *testing.T) {
	for _, c := range []struct{ value, ports, want, note string }{
		{"50051=pkg.A,pkg.B", "", "[{50051 [pkg.A pkg.B]}]", ""},
		{" 50051 = pkg.B , pkg.A , pkg.A ", "", "[{50051 [pkg.A pkg.B]}]", ""},
		{"pkg.A", "9090", "[{9090 [pkg.A]}]", ""},
		{"Greeter", "9090", "[{9090 [Greeter]}]", ""},
		{"50051=pkg.A,pkg.B;50052=pkg.C", "", "[{50051 [pkg.A pkg.B]} {50052 [pkg.C]}]", ""},
		{"50052=pkg.A,50051=pkg.C,pkg.D", "", "[{50051 [pkg.C pkg.D]} {50052 [pkg.A]}]", ""},
		{"50051=pkg.A;pkg.C", "9090", "[{9090 [pkg.C]} {50051 [pkg.A]}]", ""},
		{"50051=pkg.A,grpc.health.v1.Health", "", "[{50051 [pkg.A]}]", ""},
		{"pkg.A", "", "[]", "has no port, and there are 0 that it could be on"},
		{"pkg.A", "1,2", "[]", "there are 2 that it could be on"},
		{"", "9090", "[]", `"" is not the full name`},
		{"50051=", "", "[]", `"" is not the full name`},
		{"50051=pkg.A,", "", "[]", `"" is not the full name`},
		{"x=pkg.A", "", "[]", `"x" is not a port`},
		{"65536=pkg.A", "", "[]", `"65536" is not a port`},
		{"50051=/pkg.A", "", "[]", "is not the full name"},
		{"50051=pkg..A", "", "[]", "is not the full name"},
		{"50051=pkg.1A", "", "[]", "is not the full name"},
		{"50051=pkg.Å", "", "[]", "is not the full name"},
		{"50051=grpc.health.v1.Health", "", "[]", "no service that could be routed"},
		{"50051=" + strings.Repeat("å", 500), "", "[]", "..."},
	} {
		pod := readyPod("a", "ua", "192.0.2.1")
		pod.Spec.Containers = nil
		pod.Annotations = map[string]string{kube.ServicesAnnotation: c.value}
		if c.ports != "" {
			pod.Annotations[kube.GRPCPortAnnotation] = c.ports
		}
		r := kube.Convert(pod)
		if fmt.Sprint(r.Declared) != c.want {
			t.Errorf("%q: %v, want %s", c.value, r.Declared, c.want)
		}
		if notes := strings.Join(r.Notes(), "\n"); !strings.Contains(notes, c.note) || (c.note == "") != (notes == "") {
			t.Errorf("%q: notes %q, want %q", c.value, notes, c.note)
		}
		if r.State != nodecache.Serving {
			t.Errorf("%q: the pod is %s", c.value, r.State)
		}
	}
}

func TestCollectAnnotationOfAPod(t *testing.T) {
	for value, want := range map[string]string{"true": "false true 0", "false": "true false 0", "no": "false false 1", "": "false false 1"} {
		pod := readyPod("a", "ua", "192.0.2.1")
		pod.Annotations = map[string]string{kube.CollectAnnotation: value}
		if r := kube.Convert(pod); fmt.Sprint(r.CollectOff, r.CollectOn, len(r.Notes())) != want {
			t.Errorf("%q: off %t, on %t, notes %q", value, r.CollectOff, r.CollectOn, r.Notes())
		}
	}
}

// A record outlives its pod by far: whatever of the pod it refers to would
// stay, too.
func TestRecordDoesNotReferToThePod(t *testing.T) {
	big := strings.Repeat("x", 100) + "a-5d9" + strings.Repeat("y", 100)
	pod := readyPod("a", "ua", "192.0.2.1")
	pod.OwnerReferences[0].Name = big[100:105]
	pod.Name = big[100:101]
	r := kube.Convert(pod)
	start := uintptr(unsafe.Pointer(unsafe.StringData(big)))
	inBig := func(s string) bool {
		p := uintptr(unsafe.Pointer(unsafe.StringData(s)))
		return p >= start && p < start+uintptr(len(big))
	}
	for _, s := range []string{r.UID, r.Namespace, r.Name, r.Node, r.Owner.UID, r.OwnerName, r.Workload.Name, r.Workload.Kind} {
		if inBig(s) {
			t.Errorf("%q is part of the pod's text", s)
		}
	}
	if r.Addr != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("%+v", r)
	}
}

func TestImagesAreTheDigestsOfAllContainers(t *testing.T) {
	status := func(ids ...string) *corev1.Pod {
		p := &corev1.Pod{}
		for _, id := range ids {
			p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, corev1.ContainerStatus{ImageID: id})
		}
		return p
	}
	for _, test := range []struct {
		pod  *corev1.Pod
		want string
	}{
		{status(), ""},
		{status("registry.example/app@sha256:b", "docker-pullable://registry.example/proxy@sha256:a"), "sha256:a sha256:b"},
		{status("sha256:c"), "sha256:c"},
		{status("registry.example/app@sha256:b", ""), ""},
	} {
		if got := kube.Convert(test.pod).Images; got != test.want {
			t.Errorf("images %q, want %q", got, test.want)
		}
	}
}
