package kube_test

import (
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

func newStore() (*nodecache.Directory, *kube.Store) {
	dir := nodecache.New(nodecache.Options{})
	return dir, kube.NewStore(dir, nil)
}

// A StatefulSet's pod comes back under its name: nobody may see the workload
// without it, or with it twice. (cilium#30409, antrea PR 6964)
func TestRecreatedPodReplacesTheOldInOneStep(t *testing.T) {
	dir, store := newStore()
	key := nodecache.OwnerKey{UID: "rs", Revision: "5d9"}
	store.Upsert(kube.Convert(readyPod("a", "u0", "192.0.2.1")))
	var done atomic.Bool
	var readers sync.WaitGroup
	readers.Go(func() {
		for !done.Load() {
			if o := dir.Owner(key); o == nil || len(o.Pods) != 1 {
				t.Errorf("owner %+v, want one pod", o)
				return
			}
		}
	})
	for i := range 2000 {
		store.Upsert(kube.Convert(readyPod("a", fmt.Sprintf("u%d", i%2+1), "192.0.2.1")))
	}
	done.Store(true)
	readers.Wait()
	if got := store.OfOwner(key); len(got) != 1 {
		t.Errorf("store has %d", len(got))
	}
}

func TestLateDeletionOfAPredecessorRemovesNothing(t *testing.T) {
	dir, store := newStore()
	store.Upsert(kube.Convert(readyPod("a", "u1", "192.0.2.1")))
	store.Upsert(kube.Convert(readyPod("a", "u2", "192.0.2.1")))
	store.Remove("prod", "a", "u1")
	if got := served(dir); len(got) != 1 || store.Pod("prod", "a").UID != "u2" {
		t.Errorf("directory %q", got)
	}
	store.Remove("prod", "b")
	store.Remove("prod", "a", "u1", "u2")
	if got := served(dir); len(got) != 0 || store.Len() != 0 {
		t.Errorf("directory %q", got)
	}
}

// A UID under another name, as a hand-written file may say.
func TestUIDThatChangesItsNameStays(t *testing.T) {
	dir, store := newStore()
	store.Upsert(kube.Convert(readyPod("a", "u1", "192.0.2.1")))
	store.Upsert(kube.Convert(readyPod("b", "u1", "192.0.2.1")))
	store.Remove("prod", "a")
	if got := served(dir); !slices.Equal(got, []string{"prod/b=192.0.2.1 serving"}) {
		t.Errorf("directory %q", got)
	}
}

// The controller of a live pod changes.
func TestAdoptedPodMovesToItsOwner(t *testing.T) {
	dir, store := newStore()
	pod := readyPod("a", "u1", "192.0.2.1")
	refs := pod.OwnerReferences
	pod.OwnerReferences = nil
	store.Upsert(kube.Convert(pod))
	pod.OwnerReferences = refs
	store.Upsert(kube.Convert(pod))
	if os := dir.Owners(); len(os) != 1 || os[0].Key.UID != "rs" {
		t.Errorf("owners %+v", os)
	}
	if store.OfOwner(nodecache.OwnerKey{UID: "u1", Revision: "5d9"}) != nil {
		t.Error("the old owner is indexed")
	}
}

// An eviction clears the address and sets Failed in one update. (istio#54997)
func TestFailedPodWithoutAddressLeaves(t *testing.T) {
	dir, store := newStore()
	pod := readyPod("a", "u1", "192.0.2.1")
	store.Upsert(kube.Convert(pod))
	pod.Status.Phase, pod.Status.PodIP, pod.Status.PodIPs = corev1.PodFailed, "", nil
	store.Upsert(kube.Convert(pod))
	addr := netip.MustParseAddr("192.0.2.1")
	if got := served(dir); len(got) != 0 || store.At(addr) != nil || dir.PodAt(addr) != nil {
		t.Errorf("directory %q, store %v", got, store.At(addr))
	}
	if r := store.Pod("prod", "a"); r == nil || r.Reason != kube.ReasonFailed {
		t.Errorf("the reason is lost: %+v", r)
	}
}

func TestLivePodHasTheAddressInEveryOrder(t *testing.T) {
	now := metav1.Now()
	addr := netip.MustParseAddr("192.0.2.1")
	claim := func(uid string, edit func(*corev1.Pod)) *kube.Record {
		pod := readyPod(uid, uid, "::ffff:192.0.2.1")
		pod.CreationTimestamp = metav1.NewTime(time.Unix(1000, 0))
		edit(pod)
		return kube.Convert(pod)
	}
	all := []*kube.Record{
		claim("live", func(*corev1.Pod) {}),
		claim("failed", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }),
		claim("terminating", func(p *corev1.Pod) { p.DeletionTimestamp = &now }),
		claim("unready", func(p *corev1.Pod) {
			p.Status.Conditions = nil
			p.CreationTimestamp = metav1.NewTime(time.Unix(2000, 0))
		}),
		claim("host", func(p *corev1.Pod) { p.Spec.HostNetwork = true }),
	}
	permute(len(all), func(order []int) {
		_, store := newStore()
		for _, i := range order {
			store.Upsert(all[i])
		}
		if r := store.At(addr); r == nil || r.UID != "live" {
			t.Fatalf("order %v: address belongs to %v", order, r)
		}
		store.Remove("prod", "live")
		store.Remove("prod", "unready")
		if r := store.At(addr); r != nil {
			t.Fatalf("order %v: address belongs to %v", order, r)
		}
	})
}

func permute(n int, f func([]int)) {
	order := make([]int, 0, n)
	var step func()
	step = func() {
		if len(order) == n {
			f(order)
			return
		}
		for i := range n {
			if !slices.Contains(order, i) {
				order = append(order, i)
				step()
				order = order[:len(order)-1]
			}
		}
	}
	step()
}

// Pod X moves to another address and Y takes its old one. (istio#20676)
func TestAddressesThatMoveAreFound(t *testing.T) {
	_, store := newStore()
	store.Upsert(kube.Convert(readyPod("x", "ux", "192.0.2.1")))
	store.Upsert(kube.Convert(readyPod("y", "uy", "192.0.2.1")))
	x := readyPod("x", "ux", "192.0.2.2")
	x.Status.PodIPs = append(x.Status.PodIPs, corev1.PodIP{IP: "2001:db8::2"})
	store.Upsert(kube.Convert(x))
	for text, want := range map[string]string{"192.0.2.1": "uy", "192.0.2.2": "ux", "2001:db8::2": "ux", "::ffff:192.0.2.2": "ux"} {
		if r := store.At(netip.MustParseAddr(text)); r == nil || r.UID != want {
			t.Errorf("%s belongs to %v, want %s", text, r, want)
		}
	}
}

func TestStoreFindsByField(t *testing.T) {
	_, store := newStore()
	old := readyPod("old", "u1", "192.0.2.1")
	fresh := readyPod("new", "u2", "192.0.2.2")
	fresh.Labels["pod-template-hash"] = "66"
	fresh.OwnerReferences[0].Name, fresh.OwnerReferences[0].UID, fresh.Spec.NodeName = "a-66", "rs2", "n2"
	waits := readyPod("waits", "u3", "")
	waits.Spec.NodeName = ""
	for _, p := range []*corev1.Pod{old, fresh, waits} {
		store.Upsert(kube.Convert(p))
	}
	names := func(rs []*kube.Record) string {
		var s []string
		for _, r := range rs {
			s = append(s, r.Name)
		}
		return strings.Join(s, " ")
	}
	for got, want := range map[string]string{
		"workload " + names(store.OfWorkload(nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "a"})): "workload new old waits",
		"owner " + names(store.OfOwner(nodecache.OwnerKey{UID: "rs", Revision: "5d9"})):                             "owner old waits",
		"n1 " + names(store.OnNode("n1")):    "n1 old",
		"no node " + names(store.OnNode("")): "no node ",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if r := store.Pod("prod", "waits"); r == nil || r.Reason != kube.ReasonNoAddress {
		t.Errorf("%+v", r)
	}
}

func TestNamespaceThatOptsOutChangesItsPods(t *testing.T) {
	dir, store := newStore()
	off := func(uid string) bool { return dir.Pod(uid).CollectOff }
	own := readyPod("own", "u1", "192.0.2.1")
	own.Annotations = map[string]string{kube.CollectAnnotation: "false"}
	store.Upsert(kube.Convert(own))
	store.Upsert(kube.Convert(readyPod("a", "u2", "192.0.2.2")))
	other := readyPod("b", "u3", "192.0.2.3")
	other.Namespace = "test"
	store.Upsert(kube.Convert(other))
	store.SetNamespace("prod", true)
	store.Upsert(kube.Convert(readyPod("c", "u4", "192.0.2.4")))
	if !off("u1") || !off("u2") || off("u3") || !off("u4") {
		t.Errorf("off: %t %t %t %t", off("u1"), off("u2"), off("u3"), off("u4"))
	}
	store.SetNamespace("prod", false)
	if !off("u1") || off("u2") || off("u3") || off("u4") {
		t.Errorf("on again: %t %t %t %t", off("u1"), off("u2"), off("u3"), off("u4"))
	}
}

func TestBadAnnotationIsLoggedOnce(t *testing.T) {
	log := &lines{}
	store := kube.NewStore(nodecache.New(nodecache.Options{}), slog.New(log))
	for i := range 3 {
		pod := readyPod(fmt.Sprintf("a-%d", i), fmt.Sprintf("u%d", i), "192.0.2.1")
		pod.Annotations = map[string]string{kube.ServicesAnnotation: "pkg/A"}
		store.Upsert(kube.Convert(pod))
	}
	if got := log.get(); len(got) != 1 || !strings.Contains(got[0], "pkg/A") || !strings.Contains(got[0], "pod=prod/a-0") {
		t.Errorf("logged %q", got)
	}
	if r := store.Pod("prod", "a-2"); len(r.Notes()) != 1 {
		t.Errorf("notes %q", r.Notes())
	}
}

func TestFiftyThousandPodsAreSmall(t *testing.T) {
	const pods = 50_000
	const most = 56 << 20 // bytes, for the store and the directory together
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	dir, store := newStore()
	var freed atomic.Int64
	for i := range pods {
		pod := bigPod(i)
		runtime.AddCleanup(pod, func(int) { freed.Add(1) }, 0)
		store.Upsert(kube.Convert(pod))
	}
	after := heap()
	eventually(t, func() string {
		runtime.GC()
		if n := freed.Load(); n != pods {
			return fmt.Sprintf("%d of %d pods are free", n, pods)
		}
		return ""
	})
	t.Logf("%d bytes a pod", (after-before)/pods)
	if used := after - before; used > most {
		t.Errorf("%d bytes for %d pods, want at most %d", used, pods, most)
	}
	if store.Len() != pods || len(dir.Owners()) != pods/5 {
		t.Errorf("%d pods, %d owners", store.Len(), len(dir.Owners()))
	}
}

// bigPod is the i-th pod of a large cluster, five to an owner.
func bigPod(i int) *corev1.Pod {
	owner := i / 5
	pod := readyPod(fmt.Sprintf("service-%d-5d9c7b6f4-%05x", owner, i), fmt.Sprintf("00000000-0000-0000-0000-%012d", i), fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255))
	pod.Namespace = fmt.Sprintf("namespace-%d", owner%200)
	pod.Labels = map[string]string{"pod-template-hash": "5d9c7b6f4", "topology.kubernetes.io/zone": fmt.Sprintf("zone-%d", i%3)}
	pod.OwnerReferences[0].Name = fmt.Sprintf("service-%d-5d9c7b6f4", owner)
	pod.OwnerReferences[0].UID = types.UID(fmt.Sprintf("11111111-0000-0000-0000-%012d", owner))
	pod.Spec.NodeName = fmt.Sprintf("node-%d.example.internal", i%1000)
	pod.CreationTimestamp = metav1.NewTime(time.Unix(int64(i), 0))
	return pod
}
