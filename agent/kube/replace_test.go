package kube

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fingerpost/fingerpost/nodecache"
)

// manyRecords returns records as a watch makes them: typicalPod, decoded.
func manyRecords(tb testing.TB, n int) []object {
	tb.Helper()
	objects := make([]object, n)
	for i := range objects {
		raw, err := typicalPod(i).Marshal()
		if err != nil {
			tb.Fatal(err)
		}
		p, err := decodePod(raw)
		if err != nil {
			tb.Fatal(err)
		}
		objects[i] = p.record
	}
	return objects
}

func TestUpdateThatChangesNothingCostsNothing(t *testing.T) {
	dir := nodecache.New(nodecache.Options{})
	store := NewStore(dir, nil)
	objects := manyRecords(t, 100)
	for _, o := range objects {
		store.Upsert(o.(*Record))
	}
	sub := dir.Subscribe()
	defer sub.Close()
	sub.Poll() // everything, at first
	again := manyRecords(t, 100)
	i := 0
	if n := testing.AllocsPerRun(100, func() { store.Upsert(again[i%100].(*Record)); i++ }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if keys := sub.Poll(); len(keys) != 0 {
		t.Errorf("told of %v", keys)
	}
}

func TestQueueKeepsNoRoomForAList(t *testing.T) {
	x := newBench()
	var list []any
	for i := range 100 {
		list = append(list, slimOf(typicalPod(i)))
	}
	if err := x.Replace(list, ""); err != nil {
		t.Fatal(err)
	}
	x.apply(t, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, _ = x.c.queue.take(ctx)
	if n := x.c.queue.len(); n != 0 || len(x.uids()) != 100 {
		t.Errorf("%d wait, %d in the directory", n, len(x.uids()))
	}
}

// BenchmarkReplace50k relists 50,000 pods, half of them changed, beside a
// reader that never rests: its longest wait is that of the lock, the scheduler
// and the collector together. "busy" is the same reader beside one who computes
// without any lock, "indexer" beside the store of a stock informer. What does not
// depend on who else runs is the longest hold, of "store-hold", "first-hold" (the
// first list, which is put in in portions) and "indexer": the
// most processor time that the writer, alone, spent on what it does under one
// hold of its locks, or somewhat more.
func BenchmarkReplace50k(b *testing.B) {
	const n = 50_000
	store := func(b *testing.B, read bool) {
		x := newBench()
		objects := manyRecords(b, n)
		var holds []time.Duration
		relist := func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			x.c.queue.replace(objects, x.c.store.names, func(name) bool { return true })
			for x.c.queue.len() > 0 {
				key, ch, _ := x.c.queue.take(b.Context())
				began := threadTime(b)
				x.c.applyChange(key, ch)
				holds = append(holds, threadTime(b)-began)
				x.c.queue.finish()
			}
		}
		relist()
		owner, addr := objects[n/2].(*Record).Owner, objects[n/2].(*Record).Addr
		state := nodecache.Draining
		prepare := func() {
			objects = manyRecords(b, n)
			for i := 0; i < n; i += 2 {
				objects[i].(*Record).State = state
			}
			state ^= nodecache.Draining ^ nodecache.Serving
		}
		if read {
			longestRead(b, prepare, relist, func() { x.dir.Owner(owner); x.dir.PodAt(addr); x.c.store.Pod("prod", "a") })
			return
		}
		for b.Loop() {
			prepare()
			relist()
		}
		reportHolds(b, holds)
	}
	b.Run("store", func(b *testing.B) { store(b, true) })
	b.Run("store-hold", func(b *testing.B) { store(b, false) })
	b.Run("first-hold", func(b *testing.B) {
		var holds []time.Duration
		for b.Loop() {
			records := make([]*Record, n)
			for i, o := range manyRecords(b, n) {
				records[i] = o.(*Record)
			}
			store := newBench().c.store
			store.expect(n)
			runtime.LockOSThread()
			for some := range slices.Chunk(records, bulk) {
				began := threadTime(b)
				store.upsertSome(some)
				holds = append(holds, threadTime(b)-began)
			}
			runtime.UnlockOSThread()
		}
		reportHolds(b, holds)
	})
	b.Run("busy", func(b *testing.B) {
		longestRead(b, func() {}, func() {
			for began := time.Now(); time.Since(began) < time.Second/2; {
				runtime.Gosched()
			}
		}, func() {})
	})
	b.Run("indexer", func(b *testing.B) {
		store := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
		var pods []any
		var holds []time.Duration
		longestRead(b, func() {
			pods = pods[:0]
			for i := range n {
				pods = append(pods, servingPod(fmt.Sprintf("a-%d", i), "u", "192.0.2.1"))
			}
		}, func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			began := threadTime(b)
			if err := store.Replace(pods, ""); err != nil {
				b.Error(err)
			}
			holds = append(holds, threadTime(b)-began)
		}, func() { _, _, _ = store.GetByKey("prod/a-7") })
		reportHolds(b, holds)
	})
}

// threadTime is the processor time of the calling thread.
func threadTime(tb testing.TB) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		tb.Error(err)
	}
	return time.Duration(ts.Nano())
}

func reportHolds(b *testing.B, holds []time.Duration) {
	slices.Sort(holds)
	b.ReportMetric(float64(holds[len(holds)-1].Nanoseconds())/1e6, "ms-cpu-longest-hold")
	b.ReportMetric(float64(holds[len(holds)*9999/10000].Nanoseconds())/1e6, "ms-cpu-p99.99-hold")
}

func longestRead(b *testing.B, prepare, write, read func()) {
	var waits []time.Duration
	for b.Loop() {
		b.StopTimer()
		prepare()
		runtime.GC()
		b.StartTimer()
		done := make(chan struct{})
		go func() { defer close(done); write() }()
		for reading := true; reading; {
			select {
			case <-done:
				reading = false
			default:
				began := time.Now()
				read()
				waits = append(waits, time.Since(began))
			}
		}
	}
	slices.Sort(waits)
	b.ReportMetric(float64(waits[len(waits)-1].Microseconds())/1000, "ms-longest-read")
	b.ReportMetric(float64(waits[len(waits)*9999/10000].Microseconds())/1000, "ms-p99.99-read")
}

func heapInUse() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// fill makes a store with n pods as a watch makes them.
func fill(tb testing.TB, n int) *Store {
	tb.Helper()
	store := NewStore(nodecache.New(nodecache.Options{}), nil)
	for i := range n {
		raw, err := typicalPod(i).Marshal()
		if err != nil {
			tb.Fatal(err)
		}
		p, err := decodePod(raw)
		if err != nil {
			tb.Fatal(err)
		}
		store.Upsert(p.record)
	}
	return store
}

// 50,000 pods of 5,000 owners with all indexes: 24 MiB where this was written.
func TestHeapOfManyPods(t *testing.T) {
	const n, most = 50_000, 36 << 20 // bytes
	before := heapInUse()
	store := fill(t, n)
	took := heapInUse() - before
	if took > most {
		t.Errorf("%d pods take %.1f MiB", n, float64(took)/(1<<20))
	}
	if got := store.Len(); got != n {
		t.Errorf("%d pods", got)
	}
	t.Logf("%.1f MiB, %d bytes a pod", float64(took)/(1<<20), took/n)
}

// BenchmarkMemory50k is what the store, the directory and their indexes hold,
// beside what an informer would hold of the same pods.
func BenchmarkMemory50k(b *testing.B) {
	const n = 50_000
	for b.Loop() {
		before := heapInUse()
		store := fill(b, n)
		after := heapInUse()
		b.ReportMetric(float64(after-before)/(1<<20), "MiB")
		b.ReportMetric(float64(after-before)/n, "B/pod")
		runtime.KeepAlive(store)

		before = heapInUse()
		full := map[string]*corev1.Pod{}
		for i := range n / 10 {
			raw, err := typicalPod(i).Marshal()
			if err != nil {
				b.Fatal(err)
			}
			p := &corev1.Pod{}
			if err := p.Unmarshal(raw); err != nil {
				b.Fatal(err)
			}
			full[fmt.Sprintf("prod/%s", p.Name)] = p
		}
		b.ReportMetric(float64(heapInUse()-before)/(n/10), "informer-B/pod")
		runtime.KeepAlive(full)
	}
	b.ReportMetric(0, "ns/op")
}

// counter notes how many pods readers saw at each line of the log.
type counter struct {
	slog.Handler
	store *Store
	seen  []int
}

func (c *counter) Handle(context.Context, slog.Record) error {
	c.seen = append(c.seen, c.store.Len(), c.store.dir.Counts().Pods[nodecache.Serving])
	return nil
}

// The first pods are put in together, but not so many that readers wait: each
// of these has a note of its own, which is logged before it is put in.
func TestFirstListIsPutInInPortions(t *testing.T) {
	const n = 1000
	c := &counter{Handler: slog.NewTextHandler(io.Discard, nil)}
	c.store = NewStore(nodecache.New(nodecache.Options{}), slog.New(c))
	records := make([]*Record, n)
	for i := range records {
		p := servingPod(fmt.Sprintf("a-%d", i), fmt.Sprintf("u-%d", i), fmt.Sprintf("10.0.%d.%d", i>>8, i&255))
		p.Annotations = map[string]string{"fingerpost.dev/grpc-port": fmt.Sprintf("no-%d", i)}
		records[i] = Convert(p)
	}
	c.store.UpsertAll(records)
	if len(c.seen) != 2*n || c.store.Len() != n || c.store.dir.Counts().Pods[nodecache.Serving] != n {
		t.Fatalf("%d notes, %d and %d pods", len(c.seen)/2, c.store.Len(), c.store.dir.Counts().Pods[nodecache.Serving])
	}
	for i := 2; i < len(c.seen); i++ {
		if step := c.seen[i] - c.seen[i-2]; step < 0 || step > bulk {
			t.Errorf("%d pods in one step", step)
		}
	}
}
