package main

import (
	"context"
	"fmt"
	"net/netip"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// BenchmarkPodChange counts what one pod's change costs the directory, the
// compiler and the ADS server together, in processor time of this process, with
// 110 delta clients in another one, among 1,000 services of five pods and among
// 10,000: from the record of the pod to the last acknowledgement. Whoever else
// is busy lengthens no processor time, but for what it takes of the caches.
func BenchmarkPodChange(b *testing.B) {
	for _, services := range []int{1_000, 10_000} {
		b.Run(fmt.Sprintf("%d-services", services), func(b *testing.B) {
			const clients = 110
			defer debug.SetGCPercent(debug.SetGCPercent(40)) // the agent's
			w := &world{services: services, each: 5}
			f, err := newFlow()
			if err != nil {
				b.Fatal(err)
			}
			for i := range services {
				for e := range w.each {
					f.dir.UpsertPod(flowPod(i, e, w.each))
				}
			}
			f.publish()
			f.server.OpenGate()
			acks := &ackCounter{}
			path := serveCrowd(b, f.server, w, grpc.StatsHandler(acks))
			if _, err := w.crowd.connect(path, clients, w); err != nil {
				b.Fatal(err)
			}
			change := func(i int) {
				want := acks.n.Load() + clients
				service := i / 2 * 7919 % services
				if pod := flowPod(service, 0, w.each); i%2 == 0 {
					f.dir.RemovePod(pod.UID) // as the source does with one that is not Ready
				} else {
					f.dir.UpsertPod(pod)
				}
				f.publish()
				for deadline := time.Now().Add(limit); acks.n.Load() < want; {
					if time.Now().After(deadline) {
						b.Fatalf("change %d reached %d of %d clients", i, clients-(want-acks.n.Load()), clients)
					}
					time.Sleep(100 * time.Microsecond)
				}
			}
			for i := range 50 { // what comes first meets cold caches
				change(i)
			}
			b.ResetTimer()
			was := ownTime()
			for i := range b.N {
				change(50 + i)
			}
			spent := ownTime() - was
			b.StopTimer()
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(1e6*spent/float64(b.N), "cpu-us/change")
			if err := w.crowd.leave(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// flow is the way of a change behind the source.
type flow struct {
	dir      *nodecache.Directory
	sub      *nodecache.Subscription
	compiler *resources.Compiler
	server   *ads.Server
}

func newFlow() (*flow, error) {
	f := &flow{dir: nodecache.New(nodecache.Options{})}
	var err error
	if f.compiler, err = resources.New(resources.Options{}); err != nil {
		return nil, err
	}
	f.sub = f.dir.Subscribe()
	f.server = ads.New(ads.Options{View: func(in ads.Introduction) (ads.View, error) {
		n := in.Node
		scopes, err := resources.Scopes(n)
		return ads.View{Scopes: scopes}, err
	}})
	f.server.Publish(f.compiler.Initial())
	u, err := f.compiler.Namespace(benchNamespace, resources.AllClusters)
	f.server.Publish(u)
	return f, err
}

func (f *flow) publish() { f.server.Publish(f.compiler.Apply(f.dir, f.sub.Poll())) }

// flowPod is a pod of service i, at the address from which the clients know it.
func flowPod(i, e, each int) *nodecache.Pod {
	n := i*each + e
	name := podName(n, each)
	return &nodecache.Pod{
		UID: "uid-" + name, Name: name, Node: "node-1", State: nodecache.Serving,
		Addr: netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), Created: time.Unix(1_700_000_000, 0),
		Common: &nodecache.Common{
			Namespace: benchNamespace,
			Owner:     nodecache.OwnerKey{UID: fmt.Sprintf("owner-%d", i), Revision: "1"},
			Workload:  nodecache.Workload{Namespace: benchNamespace, Kind: "ReplicaSet", Name: fmt.Sprintf("checkout-%d", i)},
			Declared:  []nodecache.Declared{{Port: 8080, Services: []string{fmt.Sprintf("shop.Service%05d", i)}}},
		},
	}
}

// ackCounter counts the requests for EDS that came.
type ackCounter struct{ n atomic.Int64 }

func (c *ackCounter) HandleRPC(_ context.Context, s stats.RPCStats) {
	if in, ok := s.(*stats.InPayload); ok {
		if r, ok := in.Payload.(*discovery.DeltaDiscoveryRequest); ok && r.GetTypeUrl() == xds.Endpoint.URL() {
			c.n.Add(1)
		}
	}
}

func (c *ackCounter) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (c *ackCounter) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (c *ackCounter) HandleConn(context.Context, stats.ConnStats)                       {}
