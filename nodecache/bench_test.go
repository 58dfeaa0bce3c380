package nodecache_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

// fleet returns n pods, four to an owner, with strings as a source makes them:
// own UIDs and names, all others shared.
func fleet(n int) []*nodecache.Pod {
	pods := make([]*nodecache.Pod, n)
	var owner *nodecache.Pod
	for i := range pods {
		if i%4 == 0 {
			owner = pod("", "192.0.2.1", owned(ownerKey(fmt.Sprintf("9d1f6c1e-0000-4000-8000-%012d", i/4))))
			owner.OwnerName = fmt.Sprintf("ReplicaSet/checkout-%08d", i/4)
			owner.Workload.Name = fmt.Sprintf("checkout-%08d", i/4)
		}
		p := *owner
		p.UID = fmt.Sprintf("3b241101-0000-4000-8000-%012d", i)
		p.Name = fmt.Sprintf("checkout-%08d-%05d", i/4, i)
		p.Addr = pod("", addr(i)).Addr
		created(i % 60)(&p)
		pods[i] = &p
	}
	return pods
}

func filled(n int) (*nodecache.Directory, []*nodecache.Pod) {
	d, pods := nodecache.New(nodecache.Options{}), fleet(n)
	for _, p := range pods {
		d.UpsertPod(p)
	}
	return d, pods
}

func BenchmarkUpsert(b *testing.B) {
	d, pods := filled(50_000)
	s := d.Subscribe()
	defer s.Close()
	b.Run("change", func(b *testing.B) {
		b.ReportAllocs()
		for i := range b.N {
			p := *pods[i%len(pods)]
			p.State = nodecache.Serving + nodecache.PodState(i/len(pods)%2)
			d.UpsertPod(&p)
			if i%64 == 0 {
				_, _ = s.Next(ended)
			}
		}
	})
	b.Run("same", func(b *testing.B) {
		for _, p := range pods {
			d.UpsertPod(p)
		}
		copies := make([]nodecache.Pod, len(pods))
		for i, p := range pods {
			copies[i] = *p
		}
		b.ReportAllocs()
		b.ResetTimer()
		for i := range b.N {
			d.UpsertPod(&copies[i%len(copies)])
		}
	})
}

func BenchmarkRead50k(b *testing.B) {
	d, pods := filled(50_000)
	b.Run("Owner", func(b *testing.B) {
		for b.Loop() {
			d.Owner(pods[0].Owner)
		}
	})
	b.Run("Owners", func(b *testing.B) {
		for b.Loop() {
			d.Owners()
		}
	})
	b.Run("Counts", func(b *testing.B) {
		for b.Loop() {
			d.Counts()
		}
	})
}

// heapOf returns the bytes of heap that what build returns holds.
func heapOf(build func() any) uint64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	v := build()
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(v)
	return after.HeapAlloc - before.HeapAlloc
}

// own gives the pods strings of their own, as they come off the wire.
func own(pods []*nodecache.Pod) []*nodecache.Pod {
	for _, p := range pods {
		p.UID, p.Name = strings.Clone(p.UID), strings.Clone(p.Name)
	}
	return pods
}

func BenchmarkMemory50k(b *testing.B) {
	const n = 50_000
	var total, records uint64
	for b.Loop() {
		records = heapOf(func() any { return own(fleet(n)) })
		total = heapOf(func() any {
			d := nodecache.New(nodecache.Options{})
			for _, p := range own(fleet(n)) {
				d.UpsertPod(p)
			}
			return d
		})
	}
	b.ReportMetric(float64(total)/n, "B/pod")
	b.ReportMetric(float64(total-records)/n, "index-B/pod")
	b.ReportMetric(0, "ns/op")
}
