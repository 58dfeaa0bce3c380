package kube_test

import (
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

func TestPodSaysWhoCallsItFirst(t *testing.T) {
	for value, want := range map[string]nodecache.Locality{
		"even": nodecache.LocalityEven, "zone": nodecache.LocalityZone, " node ": nodecache.LocalityNode, "rack": 0, "Zone": 0, "": 0,
	} {
		pod := readyPod("a", "ua", "192.0.2.1")
		pod.Annotations = map[string]string{kube.LocalityAnnotation: value}
		r := kube.Convert(pod)
		notes := strings.Join(r.Notes(), " ")
		if r.Locality != want || (want == 0) != strings.Contains(notes, `is none of "even", "zone" and "node"`) {
			t.Errorf("%q: %v, notes %q", value, r.Locality, notes)
		}
	}
	if r := kube.Convert(readyPod("a", "ua", "192.0.2.1")); r.Locality != nodecache.LocalityUnsaid || len(r.Notes()) > 0 {
		t.Errorf("without a word: %v, %q", r.Locality, r.Notes())
	}
}

// A Service says it of places that are no pods, and of them alone.
func TestServiceSaysWhoCallsItsAddressesFirst(t *testing.T) {
	for _, c := range []struct {
		services, locality string
		want               nodecache.Locality
		ignored            string
	}{
		{"bank.A", "zone", nodecache.LocalityZone, ""},
		{"bank.A", "rack", 0, "is none of"},
		{"", "zone", 0, "write it on them"},
	} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kube.LocalityAnnotation: c.locality}}}
		if c.services != "" {
			s.Annotations[kube.ServicesAnnotation] = c.services
		}
		if f := kube.ConvertService(s); f.Locality != c.want || !strings.Contains(f.Ignored, c.ignored) || (c.ignored == "") != (f.Ignored == "") {
			t.Errorf("%+v: %v, ignored %q", c, f.Locality, f.Ignored)
		}
	}
}

// labelled is a pod of a node, with its labels as zone/region.
func labelled(name, node, at string) *kube.Record {
	pod := readyPod(name, "u"+name, "192.0.2.1")
	pod.Spec.NodeName = node
	zone, region, _ := strings.Cut(at, "/")
	if zone != "" {
		pod.Labels["topology.kubernetes.io/zone"] = zone
	}
	if region != "" {
		pod.Labels["topology.kubernetes.io/region"] = region
	}
	return kube.Convert(pod)
}

func TestNodeIsWhereMostOfItsPodsSay(t *testing.T) {
	dir := nodecache.New(nodecache.Options{})
	s := kube.NewStore(dir, nil)
	s.Local("n1")
	want := func(want string) {
		t.Helper()
		for range 20 { // each time in another order
			if p := s.Place(); at(p) != want {
				t.Fatalf("the node is in %v, want %v", p, want)
			}
		}
	}
	want("/ []")
	s.Upsert(labelled("far", "n2", "z2/r1"))
	s.Upsert(labelled("silent", "n1", ""))
	want("/ []")
	// A slice knows of a pod without labels, whether or not it is ready.
	slice := &nodecache.Slice{UID: "s", Namespace: "prod", Name: "s", Service: "web", Endpoints: []nodecache.Endpoint{{Pod: "usilent", Zone: "z1"}}}
	dir.UpsertFront(&nodecache.Front{UID: "f", Namespace: "prod", Name: "web", Selects: true})
	dir.UpsertSlice(slice)
	want("z1/ []")
	s.Upsert(labelled("liar", "n1", "z0/r0"))
	s.Upsert(labelled("a", "n1", "z1/r1"))
	want("z1/r1 [z1 z2]")
	dir.RemoveSlice(slice.Key())
	want("z0/r0 [z0]") // of as many, the first by name
	s.Upsert(labelled("b", "n1", "z1/r9"))
	want("z1/r1 [z1 z2]")
	s.Upsert(labelled("c", "n1", "z1/r1"))
	want("z1/r1 [z1 z2]")
	s.Upsert(labelled("c", "n1", "z1/r9"))
	want("z1/r9 [z1]")
	for _, name := range []string{"a", "b", "c", "liar", "far", "silent"} {
		s.Remove("prod", name)
	}
	want("/ []")
	if n := s.Words(); n != 0 {
		t.Errorf("%d words are left", n)
	}
	s.UpsertAll([]*kube.Record{labelled("a", "n1", "z1/r1"), labelled("b", "n3", "z3/r1")})
	want("z1/r1 [z1 z3]")
	s.Upsert(labelled("a", "n2", "z1/r1"))
	want("/ []")
}

// at is zone/region and the zones of the region.
func at(p nodecache.Place) string { return fmt.Sprintf("%s/%s %v", p.Zone, p.Region, p.Near) }

// A file may have the Nodes: what they say counts where pods say nothing.
func TestNodesOfAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "world.yaml")
	node := func(name, zone, region string) string {
		return fmt.Sprintf("- {apiVersion: v1, kind: Node, metadata: {name: %s, labels: {topology.kubernetes.io/zone: %q, topology.kubernetes.io/region: %q}}}\n", name, zone, region)
	}
	pod := func(name, node, zone string) string {
		return fmt.Sprintf("- {apiVersion: v1, kind: Pod, metadata: {name: %s, namespace: prod, uid: u%s, labels: {%s}}, spec: {nodeName: %q}, status: {podIP: 192.0.2.1, phase: Running, conditions: [{type: Ready, status: 'True'}]}}\n", name, name, zone, node)
	}
	list := "apiVersion: v1\nkind: List\nitems:\n"
	write(t, file, list+pod("a", "n2", "")+pod("b", "n2", "topology.kubernetes.io/zone: z9")+pod("c", "n3", "")+pod("d", "''", "")+
		pod("e", "n4", "topology.kubernetes.io/zone: z4")+node("n1", "z1", "r1")+node("n2", "z2", "r1")+node("n4", "z4", "r1"))
	x := newFile(file)
	x.store.Local("n1")
	run(t, x.src)
	waitSynced(t, x.src)
	zones := map[string]string{}
	for _, name := range []string{"a", "b", "c", "d"} {
		zones[name] = x.store.Pod("prod", name).Zone
	}
	if !maps.Equal(zones, map[string]string{"a": "z2", "b": "z9", "c": "", "d": ""}) {
		t.Errorf("zones %v", zones)
	}
	if p := x.store.Place(); at(p) != "z1/r1 [z2 z4]" {
		t.Errorf("places %+v", p)
	}
	write(t, file, list+pod("a", "n2", "")+node("n1", "", ""))
	eventually(t, func() string {
		if p := x.store.Place(); at(p) != "/ []" || x.store.Pod("prod", "a").Zone != "" {
			return fmt.Sprintf("places %+v", p)
		}
		return ""
	})
}
