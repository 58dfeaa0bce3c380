package kube

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/fingerpost/fingerpost/nodecache"
)

// bench is a cluster source without an API server: the test is the reflector
// and the worker.
type bench struct {
	*sink
	c   *Cluster
	dir *nodecache.Directory
}

func newBench() *bench {
	log := slog.New(slog.DiscardHandler)
	dir := nodecache.New(nodecache.Options{})
	c := &Cluster{
		store: NewStore(dir, log), log: log, queue: newQueue(), podsSynced: make(chan struct{}), podsCurrent: make(chan struct{}),
		pods: &health{log: log}, namespaces: &health{log: log}, namespacesTried: func() {},
	}
	return &bench{sink: c.sink(c.pods, nil), c: c, dir: dir}
}

// apply applies up to n changes.
func (b *bench) apply(t *testing.T, n int) {
	for range n {
		if b.c.queue.len() == 0 {
			return
		}
		key, ch, _ := b.c.queue.take(t.Context())
		b.c.applyChange(key, ch)
		b.c.queue.finish()
	}
}

func (b *bench) uids() []string {
	uids := []string{}
	for _, o := range b.dir.Owners() {
		for _, p := range o.Pods {
			uids = append(uids, p.UID)
		}
	}
	slices.Sort(uids)
	return uids
}

func readyPod(pod, uid, ip string) *slimPod {
	return slimOf(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: pod, UID: types.UID(uid)},
		Status: corev1.PodStatus{
			PodIP:      ip,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}).(*slimPod)
}

// Every interleaving of two pods' events, with the worker running at every set
// of moments between them, ends the same.
func TestEventsOfTwoPodsEndTheSameInEveryOrder(t *testing.T) {
	const ip = "192.0.2.1"
	add := func(pod, uid, ip string) func(*bench) error {
		return func(b *bench) error { return b.Add(readyPod(pod, uid, ip)) }
	}
	update := func(pod, uid, ip string) func(*bench) error {
		return func(b *bench) error { return b.Update(readyPod(pod, uid, ip)) }
	}
	del := func(pod, uid string) func(*bench) error {
		return func(b *bench) error { return b.Delete(readyPod(pod, uid, ip)) }
	}
	tomb := func(o any) func(*bench) error {
		return func(b *bench) error { return b.Delete(o) }
	}
	for _, c := range []struct {
		name string
		a, b []func(*bench) error
		want []string
	}{
		{
			"both go, one by a tombstone",
			[]func(*bench) error{add("a", "a1", ""), update("a", "a1", ip), del("a", "a1")},
			[]func(*bench) error{add("b", "b1", ip), tomb(cache.DeletedFinalStateUnknown{Key: "prod/b", Obj: readyPod("b", "b1", ip)})},
			[]string{},
		},
		{
			"the address changes hands",
			[]func(*bench) error{add("a", "a1", ""), update("a", "a1", ip), del("a", "a1")},
			[]func(*bench) error{add("b", "b1", ip)},
			[]string{"b1"},
		},
		{
			"created again without a deletion, then gone",
			[]func(*bench) error{add("a", "a1", ip), update("a", "a2", ip), del("a", "a2")},
			[]func(*bench) error{add("b", "b1", ip), update("b", "b2", ip)},
			[]string{"b2"},
		},
		{
			"the predecessor's end comes late",
			[]func(*bench) error{add("a", "a1", ip), add("a", "a2", ip), del("a", "a1")},
			[]func(*bench) error{add("b", "b1", ip), tomb(&cache.DeletedFinalStateUnknown{Key: "prod/b"})},
			[]string{"a2"},
		},
		{
			"two ends",
			[]func(*bench) error{add("a", "a1", ip), del("a", "a1"), del("a", "a0")},
			[]func(*bench) error{add("b", "b1", ip), tomb(cache.DeletedFinalStateUnknown{Key: "prod/b"}), del("b", "b1"), add("b", "b2", ip)},
			[]string{"b2"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := len(c.a) + len(c.b)
			for order := range 1 << n { // a set bit takes from a
				steps, a, b := make([]func(*bench) error, 0, n), c.a, c.b
				for i := range n {
					if order>>i&1 == 1 && len(a) > 0 {
						steps, a = append(steps, a[0]), a[1:]
					} else if order>>i&1 == 0 && len(b) > 0 {
						steps, b = append(steps, b[0]), b[1:]
					}
				}
				if len(steps) < n {
					continue
				}
				for moments := range 1 << n {
					x := newBench()
					for i, step := range steps {
						if err := step(x); err != nil {
							t.Fatal(err)
						}
						if moments>>i&1 == 1 {
							x.apply(t, n)
						}
					}
					x.apply(t, n)
					if got := x.uids(); !slices.Equal(got, c.want) || x.c.store.Len() != len(c.want) {
						t.Fatalf("order %b, worker %b: directory %q, store %d, want %q", order, moments, got, x.c.store.Len(), c.want)
					}
				}
			}
		})
	}
}

// Random watches, with relists after lost events, against what the server has.
func TestRandomHistoriesEndAsTheServerIs(t *testing.T) {
	for seed := range uint64(5000) {
		r := rand.New(rand.NewPCG(seed, 1))
		x := newBench()
		server := map[string]*slimPod{}
		lost := false // the watch is cut until the next relist
		for step := range 40 {
			pod := fmt.Sprintf("p%d", r.IntN(4))
			old := server[pod]
			var err error
			switch n := r.IntN(10); {
			case n < 3 || n < 6 && old == nil: // new, or again under the name
				server[pod] = readyPod(pod, fmt.Sprintf("u%d", step), fmt.Sprintf("192.0.2.%d", r.IntN(3)))
				if !lost {
					err = x.Add(server[pod])
				}
			case n < 6:
				delete(server, pod)
				if !lost {
					err = x.Delete(old)
				}
			case n == 6:
				lost = true
			case n == 7:
				lost = false
				var list []any
				for _, p := range server {
					list = append(list, p)
				}
				err = x.Replace(list, "")
			default:
				// A change is in flight while the next ones come.
				if x.c.queue.len() > 0 {
					key, ch, _ := x.c.queue.take(t.Context())
					if r.IntN(2) == 0 && !lost {
						list := []any{}
						for _, p := range server {
							list = append(list, p)
						}
						err = x.Replace(list, "")
					}
					x.c.applyChange(key, ch)
					x.c.queue.finish()
				}
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		list := []any{}
		for _, p := range server {
			list = append(list, p)
		}
		if lost {
			if err := x.Replace(list, ""); err != nil {
				t.Fatal(err)
			}
		}
		x.apply(t, 1000)
		want := []string{}
		for _, p := range server {
			want = append(want, string(p.UID))
		}
		slices.Sort(want)
		if got := x.uids(); !slices.Equal(got, want) {
			t.Fatalf("seed %d: directory %q, server %q", seed, got, want)
		}
		if x.c.store.Len() != len(server) {
			t.Fatalf("seed %d: store %q, server %q", seed, x.c.store.names(), slices.Collect(maps.Keys(server)))
		}
	}
}

// A relist that drops a pod whose first event is just being applied.
func TestRelistEndsWhatIsInFlight(t *testing.T) {
	x := newBench()
	_ = x.Add(readyPod("a", "a1", "192.0.2.1"))
	key, ch, _ := x.c.queue.take(t.Context())
	if err := x.Replace(nil, ""); err != nil {
		t.Fatal(err)
	}
	x.c.applyChange(key, ch)
	x.c.queue.finish()
	x.apply(t, 10)
	if got := x.uids(); len(got) != 0 {
		t.Errorf("directory %q", got)
	}
}

func TestOddDeletionsDoNotPanic(t *testing.T) {
	x := newBench()
	_ = x.Add(readyPod("a", "a1", "192.0.2.1"))
	var noPod *slimPod
	var noTomb *cache.DeletedFinalStateUnknown
	for _, o := range []any{
		nil, "text", noPod, noTomb, &corev1.Service{}, cache.DeletedFinalStateUnknown{},
		cache.DeletedFinalStateUnknown{Key: "a/b/c", Obj: noPod},
		cache.DeletedFinalStateUnknown{Key: "prod/other", Obj: &corev1.Service{}},
	} {
		_ = x.Delete(o)
		_ = x.Add(o)
	}
	_ = x.Replace([]any{nil}, "")
	x.apply(t, 100)
	if got := x.uids(); !slices.Equal(got, []string{"a1"}) {
		t.Errorf("directory %q", got)
	}
}

// The watch is never held up: a name that changes a million times waits once.
func TestQueueIsBoundedByNames(t *testing.T) {
	x := newBench()
	for i := range 100_000 {
		_ = x.Update(readyPod(fmt.Sprintf("p%d", i%10), "u", "192.0.2.1"))
	}
	if n := x.c.queue.len(); n != 10 {
		t.Errorf("%d changes wait, want 10", n)
	}
}

func BenchmarkHandler(b *testing.B) {
	x := newBench()
	pod := readyPod("a", "u", "192.0.2.1")
	b.ReportAllocs()
	for b.Loop() {
		_ = x.Update(pod)
	}
}

// A handler of the watch waits for no worker, however long that takes for one
// change, and what waits meanwhile is one change for each name.
func TestHandlersWaitForNoWorker(t *testing.T) {
	x := newBench()
	_ = x.Add(readyPod("stuck", "u", "192.0.2.1"))
	x.c.store.writing.Lock()
	applied := make(chan struct{})
	go func() { defer close(applied); x.apply(t, 1) }()
	list := []any{readyPod("stuck", "u", "192.0.2.1")}
	for i := range 1000 {
		list = append(list, readyPod(fmt.Sprint("p", i), fmt.Sprint("u", i), "192.0.2.2"))
	}
	for round := range 100 {
		for _, o := range list {
			_ = x.Add(o)
			_ = x.Update(o)
		}
		_ = x.Delete(list[1+round])
		_ = x.Replace(slices.Clone(list), "")
		_ = x.Bookmark("")
	}
	if n := x.c.queue.len(); n < len(list)-1 || n > len(list)+1 {
		t.Errorf("%d changes wait, want one for each name", n)
	}
	x.c.store.writing.Unlock()
	<-applied
	x.apply(t, 10*len(list))
	if n := x.c.queue.len(); n != 0 || x.c.store.Len() != len(list) {
		t.Errorf("%d changes wait, %d pods are stored", n, x.c.store.Len())
	}
}
