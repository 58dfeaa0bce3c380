package main

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
)

// server is one of those that are compared. All run behind the same gRPC
// options on a unix socket of their own.
type server struct {
	name string
	path string
	// change publishes CLA i with another content. It includes what a program
	// has to do with a changed proto message, and returns when the call does.
	change func(i, rev int) error
	// idle tells that every one of n clients waits for CLA i again.
	idle  func(i, n int) bool
	count *counter
	stop  func()
}

func serve(name, dir string, service discovery.AggregatedDiscoveryServiceServer) (*server, error) {
	s := &server{name: name, path: filepath.Join(dir, name+".sock"), count: &counter{}}
	l, err := net.Listen("unix", s.path)
	if err != nil {
		return nil, err
	}
	g := grpc.NewServer(append(ads.ServerOptions(), grpc.StatsHandler(s.count))...)
	discovery.RegisterAggregatedDiscoveryServiceServer(g, service)
	var served sync.WaitGroup
	served.Go(func() { _ = g.Serve(l) })
	s.stop = func() { g.Stop(); served.Wait() }
	return s, nil
}

// newOurs is the agent's server.
func newOurs(dir string, services int) (*server, error) {
	a := ads.New(ads.Options{})
	publish := func(i, rev int, all bool) error {
		var u xds.Update
		if all {
			c, err := xds.NewResource(xds.ID{Type: xds.Cluster, Name: serviceName(i)}, clusterOf(i))
			if err != nil {
				return err
			}
			u.Set = append(u.Set, c)
		}
		e, err := xds.NewResource(xds.ID{Type: xds.Endpoint, Name: serviceName(i)}, claOf(i, rev))
		if err != nil {
			return err
		}
		u.Set = append(u.Set, e)
		a.Publish(u)
		return nil
	}
	for i := range services {
		if err := publish(i, 0, true); err != nil {
			return nil, err
		}
	}
	a.OpenGate()
	s, err := serve("fingerpost", dir, a)
	if err != nil {
		return nil, err
	}
	s.change = func(i, rev int) error { return publish(i, rev, false) }
	s.idle = func(_, n int) bool {
		idle := 0
		for _, c := range a.Clients() {
			if e, ok := c.Types[xds.Endpoint.String()]; ok && e.Sent != "" && e.Sent == e.Acked {
				idle++
			}
		}
		return idle == n
	}
	return s, nil
}

// oneNode gives all clients one snapshot.
type oneNode struct{}

func (oneNode) ID(*corev3.Node) string { return "all" }

// newSnapshot is go-control-plane's SnapshotCache. ads is false: with true it
// leaves requests unanswered that do not name everything.
func newSnapshot(ctx context.Context, dir string, services int) (*server, error) {
	c := cachev3.NewSnapshotCache(false, oneNode{}, nil)
	clusters, endpoints := make([]types.Resource, services), make([]types.Resource, services)
	for i := range services {
		clusters[i], endpoints[i] = clusterOf(i), claOf(i, 0)
	}
	set := func(version string) error {
		snap, err := cachev3.NewSnapshot(version, map[resource.Type][]types.Resource{
			resource.ClusterType: clusters, resource.EndpointType: endpoints,
		})
		if err != nil {
			return err
		}
		return c.SetSnapshot(ctx, "all", snap)
	}
	if err := set("0"); err != nil {
		return nil, err
	}
	s, err := serve("snapshot-cache", dir, serverv3.NewServer(ctx, c, nil))
	if err != nil {
		return nil, err
	}
	s.change = func(i, rev int) error {
		endpoints[i] = claOf(i, rev)
		return set(strconv.Itoa(rev))
	}
	s.idle = func(_, n int) bool {
		info := c.GetStatusInfo("all")
		return info != nil && info.GetNumDeltaWatches() == 2*n
	}
	return s, nil
}

// newLinear is a MuxCache of [linearCaches].
func newLinear(ctx context.Context, dir string, services int) (*server, error) {
	clusters, endpoints := map[string]types.Resource{}, map[string]types.Resource{}
	for i := range services {
		clusters[serviceName(i)], endpoints[serviceName(i)] = clusterOf(i), claOf(i, 0)
	}
	eds, mux := linearCaches(clusters, endpoints)
	s, err := serve("linear-cache", dir, serverv3.NewServer(ctx, mux, nil))
	if err != nil {
		return nil, err
	}
	s.change = func(i, rev int) error {
		return eds.UpdateResources(map[string]types.Resource{serviceName(i): claOf(i, rev)}, nil)
	}
	s.idle = func(i, n int) bool { return eds.NumWatches(serviceName(i)) == n }
	return s, nil
}

// counter counts the EDS responses that a server has written.
type counter struct {
	// mu guards the count and who waits for it.
	mu   sync.Mutex
	left int
	done chan struct{}
}

// expect returns a channel that closes when n EDS responses were written.
func (c *counter) expect(n int) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left, c.done = n, make(chan struct{})
	return c.done
}

func (c *counter) HandleRPC(_ context.Context, s stats.RPCStats) {
	out, ok := s.(*stats.OutPayload)
	if !ok {
		return
	}
	r, ok := out.Payload.(interface{ GetTypeUrl() string })
	if !ok || r.GetTypeUrl() != resource.EndpointType {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left--; c.left == 0 {
		close(c.done)
	}
}

func (c *counter) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (c *counter) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (c *counter) HandleConn(context.Context, stats.ConnStats)                       {}

// clients is a set of delta streams, each with a connection of its own: CDS by
// wildcard, EDS by name. Each acknowledges whatever comes.
type clients struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
	failed chan error
}

// connect opens n streams and returns when each has everything.
func connect(ctx context.Context, path string, n, services int) (*clients, error) {
	ctx, cancel := context.WithCancel(ctx)
	c := &clients{cancel: cancel, failed: make(chan error, n)}
	synced := make(chan struct{}, n)
	names := make([]string, services)
	for i := range names {
		names[i] = serviceName(i)
	}
	for i := range n {
		c.wg.Go(func() {
			if err := follow(ctx, path, fmt.Sprintf("prod/client-%d", i), names, synced); err != nil && ctx.Err() == nil {
				c.failed <- err
			}
		})
	}
	for range n {
		select {
		case <-synced:
		case err := <-c.failed:
			c.close()
			return nil, err
		case <-ctx.Done():
			c.close()
			return nil, ctx.Err()
		}
	}
	return c, nil
}

func (c *clients) close() {
	c.cancel()
	c.wg.Wait()
}
