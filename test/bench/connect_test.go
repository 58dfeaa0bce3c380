package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
)

// TestMain makes this program a crowd where a benchmark starts it as one.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "crowd" {
		if err := part(context.Background(), os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// serveCrowd serves the ADS server in this process to a crowd in another one.
func serveCrowd(b *testing.B, a *ads.Server, w *world, opts ...grpc.ServerOption) (path string) {
	path = filepath.Join(b.TempDir(), "ads.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	g := ads.NewGRPCServer(a, opts...)
	var served sync.WaitGroup
	served.Go(func() { _ = g.Serve(l) })
	b.Cleanup(func() { g.Stop(); served.Wait() })
	if w.crowd, err = startCrowd(context.Background()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(w.crowd.stop)
	return path
}

// BenchmarkConnect lets 110 clients, in a process of their own, connect at once
// to the ADS server of this one, with 1,000 services of ten pods. The processor
// time and the bytes allocated are those of the server alone, and hold on a busy
// machine.
func BenchmarkConnect(b *testing.B) {
	const clients = 110
	defer debug.SetGCPercent(debug.SetGCPercent(40)) // the agent's
	w := &world{services: 1000, each: 10}
	a := ads.New(ads.Options{})
	size := 0
	for i := range w.services {
		var addrs []netip.AddrPort
		for e := range w.each {
			addrs = append(addrs, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(e), byte(i >> 8), byte(i)}), 8080))
		}
		c, err := xds.NewResource(xds.ID{Type: xds.Cluster, Name: declaredName(i)}, clusterNamed(declaredName(i)))
		if err != nil {
			b.Fatal(err)
		}
		e, err := xds.NewResource(xds.ID{Type: xds.Endpoint, Name: declaredName(i)}, claOfAddrs(declaredName(i), addrs))
		if err != nil {
			b.Fatal(err)
		}
		size += len(c.Delta) + len(e.Delta)
		a.Publish(xds.Update{Set: []*xds.Resource{c, e}})
	}
	a.OpenGate()
	path := serveCrowd(b, a, w)
	var spent, allocated, objects, took float64
	for range b.N {
		runtime.GC()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		was := ownTime()
		d, err := w.crowd.connect(path, clients, w)
		if err != nil {
			b.Fatal(err)
		}
		spent += ownTime() - was
		runtime.ReadMemStats(&after)
		allocated += float64(after.TotalAlloc - before.TotalAlloc)
		objects += float64(after.Mallocs - before.Mallocs)
		took += d.Seconds()
		if err := w.crowd.leave(); err != nil {
			b.Fatal(err)
		}
	}
	n := float64(b.N)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(1000*spent/n, "cpu-ms")
	b.ReportMetric(1000*took/n, "wall-ms")
	b.ReportMetric(allocated/n/1e6, "MB-allocated")
	b.ReportMetric(objects/n/clients, "objects/client")
	b.ReportMetric(float64(size)/1e6, "MB/client")
}

// ownTime is the processor time of this process in seconds.
func ownTime() float64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
