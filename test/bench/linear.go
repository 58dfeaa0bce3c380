package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/fingerpost/fingerpost/xds/ads"
)

// beLinear is the rival: a server as one writes it with go-control-plane. An
// informer keeps of each pod what is needed, a pod that changes makes one CLA
// anew, at once, and LinearCaches serve it.
func beLinear(ctx context.Context, kubeconfig, socket string) error {
	client, err := protobufClient(kubeconfig)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	if err := pods.SetTransform(slimmed); err != nil {
		return err
	}
	l := &linear{services: map[string]map[string]netip.AddrPort{}}
	registered, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { l.see(o.(*corev1.Pod)) },
		UpdateFunc: func(_, o any) { l.see(o.(*corev1.Pod)) },
		DeleteFunc: func(o any) {
			if pod, ok := o.(*corev1.Pod); ok {
				pod.Status = corev1.PodStatus{}
				l.see(pod)
			}
		},
	})
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	if !cache.WaitForCacheSync(ctx.Done(), registered.HasSynced) {
		return ctx.Err()
	}
	lis, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	g := grpc.NewServer(ads.ServerOptions()...)
	discovery.RegisterAggregatedDiscoveryServiceServer(g, serverv3.NewServer(ctx, l.serve(), nil))
	defer context.AfterFunc(ctx, g.Stop)()
	fmt.Println("synced")
	return g.Serve(lis)
}

// slimmed drops of a pod what the server does not read.
func slimmed(o any) (any, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	small := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion, Annotations: pod.Annotations}}
	small.Status.PodIP, small.Status.Conditions = pod.Status.PodIP, slices.Clone(pod.Status.Conditions)
	return small, nil
}

// linear turns pods into CLAs.
type linear struct {
	// mu guards what is known; eds is nil until everything was listed.
	mu       sync.Mutex
	services map[string]map[string]netip.AddrPort // by cluster name, by pod
	eds      *cachev3.LinearCache
}

func (l *linear) see(pod *corev1.Pod) {
	var port uint16
	var service string
	if _, err := fmt.Sscanf(pod.Annotations[declaredAnnotation], "%d=%s", &port, &service); err != nil {
		return
	}
	name := pod.Namespace + "/" + service
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.services[name]
	if s == nil {
		s = map[string]netip.AddrPort{}
		l.services[name] = s
	}
	had, is := s[pod.Name], netip.AddrPort{}
	if addr, err := netip.ParseAddr(pod.Status.PodIP); err == nil && isReady(pod) {
		is = netip.AddrPortFrom(addr, port)
	}
	if had == is {
		return
	}
	if s[pod.Name] = is; !is.IsValid() {
		delete(s, pod.Name)
	}
	if l.eds != nil {
		_ = l.eds.UpdateResource(name, l.cla(name))
	}
}

// cla needs mu.
func (l *linear) cla(name string) *endpointv3.ClusterLoadAssignment {
	var addrs []netip.AddrPort
	for _, a := range l.services[name] {
		addrs = append(addrs, a)
	}
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	return claOfAddrs(name, addrs)
}

// serve makes the caches, which from then on follow the pods.
func (l *linear) serve() cachev3.Cache {
	l.mu.Lock()
	defer l.mu.Unlock()
	clusters, endpoints := map[string]types.Resource{}, map[string]types.Resource{}
	for name := range l.services {
		clusters[name], endpoints[name] = clusterNamed(name), l.cla(name)
	}
	var mux *cachev3.MuxCache
	l.eds, mux = linearCaches(clusters, endpoints)
	return mux
}

// linearCaches is a MuxCache over two of go-control-plane's LinearCaches.
func linearCaches(clusters, endpoints map[string]types.Resource) (eds *cachev3.LinearCache, mux *cachev3.MuxCache) {
	cds := cachev3.NewLinearCache(resource.ClusterType, cachev3.WithInitialResources(clusters))
	eds = cachev3.NewLinearCache(resource.EndpointType, cachev3.WithInitialResources(endpoints))
	return eds, &cachev3.MuxCache{
		Classify:      func(r *cachev3.Request) string { return r.GetTypeUrl() },
		ClassifyDelta: func(r *cachev3.DeltaRequest) string { return r.GetTypeUrl() },
		Caches:        map[string]cachev3.Cache{resource.ClusterType: cds, resource.EndpointType: eds},
	}
}
