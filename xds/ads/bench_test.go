package ads_test

import (
	"context"
	"fmt"
	"io"
	"sync"
	"syscall"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/xds/ads"
)

// wire is a delta stream without a connection: it acknowledges whatever is sent.
type wire struct {
	grpc.ServerStream
	ctx      context.Context
	requests chan *discovery.DeltaDiscoveryRequest
	sent     *sync.WaitGroup
}

func (f *wire) Context() context.Context                     { return f.ctx }
func (f *wire) Send(*discovery.DeltaDiscoveryResponse) error { panic("the codec is passed by") }

func (f *wire) Recv() (*discovery.DeltaDiscoveryRequest, error) {
	select {
	case r := <-f.requests:
		return r, nil
	case <-f.ctx.Done():
		return nil, io.EOF
	}
}

func (f *wire) SendMsg(m any) error {
	data, err := ads.Encode(m)
	if err != nil {
		return err
	}
	var r discovery.DeltaDiscoveryResponse
	if err := proto.Unmarshal(data, &r); err != nil {
		return err
	}
	f.requests <- &discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()}
	for range r.GetResources() {
		f.sent.Done()
	}
	return nil
}

func cpu() int64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return u.Utime.Nano() + u.Stime.Nano()
}

func BenchmarkOneChange(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			const streams = 110
			s := ads.New(ads.Options{})
			s.OpenGate()
			names := numbered(n)
			w := &world{server: s}
			for _, name := range names {
				w.set(cluster(name, 1), cla(name, 1), listener("l"+name, 1))
			}
			ctx, cancel := context.WithCancel(context.Background())
			var sent, ended sync.WaitGroup
			sent.Add(2 * n * streams)
			for range streams {
				f := &wire{ctx: ctx, requests: make(chan *discovery.DeltaDiscoveryRequest, 16), sent: &sent}
				f.requests <- &discovery.DeltaDiscoveryRequest{TypeUrl: cds.URL(), Node: &corev3.Node{Id: "prod/a-1"}}
				f.requests <- &discovery.DeltaDiscoveryRequest{TypeUrl: eds.URL(), ResourceNamesSubscribe: names}
				ended.Go(func() { _ = s.DeltaAggregatedResources(f) })
			}
			sent.Wait()
			b.ReportAllocs()
			b.ResetTimer()
			before := cpu()
			for i := range b.N {
				sent.Add(streams)
				w.set(cla(names[i*7919%n], i+2))
				sent.Wait()
			}
			b.ReportMetric(float64(cpu()-before)/float64(b.N)/streams, "cpu-ns/stream")
			cancel()
			ended.Wait()
		})
	}
}
