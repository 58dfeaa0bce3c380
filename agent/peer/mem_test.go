package peer_test

import (
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/peer"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// world is a cluster in memory, for tests with testing/synctest: directory and
// exchange of its agents are real, its network calls functions, and a collect is
// a wait.
type world struct {
	agents []*member
	delay  time.Duration // of a message

	// mu guards what follows.
	mu       sync.Mutex
	collects map[nodecache.OwnerKey][]string // nodes that collected the owner
	fetches  map[string][]time.Time          // by node that asked
	dead     map[string]bool                 // nodes that answer nothing
}

// member is one agent of a world.
type member struct {
	w         *world
	node      string
	identity  *peer.Identity
	dir       *nodecache.Directory
	exchange  *peer.Exchange
	metrics   *prometheus.Registry
	stop      func()
	takes     time.Duration   // of a collect
	collected chan<- struct{} // told of each that begins; nil: nobody
}

func newWorld() *world {
	return &world{delay: time.Millisecond, collects: map[nodecache.OwnerKey][]string{}, fetches: map[string][]time.Time{}, dead: map[string]bool{}}
}

// add starts one more agent, which knows no members yet.
func (w *world) add(t *testing.T, node string) *member {
	t.Helper()
	id, err := peer.NewIdentity(node)
	if err != nil {
		t.Fatal(err)
	}
	m := &member{w: w, node: node, identity: id, dir: nodecache.New(nodecache.Options{}), metrics: prometheus.NewRegistry(), takes: 10 * time.Millisecond}
	m.start(t, peer.Options{})
	w.mu.Lock()
	w.agents = append(w.agents, m)
	w.mu.Unlock()
	return m
}

func (m *member) start(t *testing.T, o peer.Options) {
	sched := schedule.New(schedule.Options{})
	o.Node, o.Directory, o.Identity, o.Scheduler, o.Metrics = m.node, peer.Over(m.dir), m.identity, sched, m.metrics
	if o.Network == nil {
		o.Network = memory{m.w, m.node}
	}
	m.exchange = peer.New(o)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	c := &collector{m: m, ctx: ctx, running: &running}
	m.exchange.Attach(c)
	sub := m.dir.Subscribe()
	running.Go(func() {
		for {
			keys, err := sub.Next(ctx)
			if err != nil {
				return
			}
			c.Consider(keys...)
		}
	})
	running.Go(func() { sched.Run(ctx) })
	running.Go(func() { m.exchange.Run(ctx) })
	m.stop = sync.OnceFunc(func() { cancel(); running.Wait(); sub.Close() })
	t.Cleanup(m.stop)
}

func (m *member) is() peer.Member {
	return peer.Member{Node: m.node, Keys: []peer.Fingerprint{m.identity.Fingerprint()}}
}

// introduce tells every agent all members.
func (w *world) introduce() {
	var ms []peer.Member
	for _, a := range w.agents {
		ms = append(ms, a.is())
	}
	for _, a := range w.agents {
		a.exchange.SetMembers(ms)
	}
}

// see lets every agent's watch bring the pods.
func (w *world) see(pods ...*nodecache.Pod) {
	for _, a := range w.agents {
		a.dir.UpsertPods(pods)
	}
}

func (w *world) collectsOf(owner string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.collects[key(owner)]...)
}

func (w *world) kill(node string) {
	w.mu.Lock()
	w.dead[node] = true
	w.mu.Unlock()
}

func (w *world) fetchesOf(node string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.fetches[node])
}

// reach returns the agent of a node, and waits for a dead one until ctx ends.
func (w *world) reach(ctx context.Context, node string) (*member, error) {
	w.mu.Lock()
	dead := w.dead[node]
	w.mu.Unlock()
	if dead {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	time.Sleep(w.delay)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range w.agents {
		if a.node == node {
			return a, nil
		}
	}
	return nil, status.Error(codes.Unavailable, "nobody is there")
}

// collector collects what is placed on its node, each owner once.
type collector struct {
	m       *member
	ctx     context.Context
	running *sync.WaitGroup
}

func (c *collector) Consider(keys ...nodecache.OwnerKey) {
	for _, key := range keys {
		o := c.m.dir.Owner(key)
		if o == nil || o.Knowledge != nodecache.Unknown || c.m.exchange.Place(o) != collect.OwnNode {
			continue
		}
		r, err := c.m.dir.Begin(key)
		if err != nil {
			continue
		}
		c.m.w.mu.Lock()
		c.m.w.collects[key] = append(c.m.w.collects[key], c.m.node)
		c.m.w.mu.Unlock()
		c.running.Go(func() {
			if c.m.collected != nil {
				c.m.collected <- struct{}{}
			}
			select {
			case <-time.After(c.m.takes):
				_ = c.m.dir.Commit(r, serves("pkg."+key.UID))
			case <-c.ctx.Done():
			}
		})
	}
}

func serves(service string) *nodecache.Info {
	return &nodecache.Info{
		Origin: nodecache.OriginSelf, Collected: time.Now(), Pod: "prod/x",
		Ports: []nodecache.PortInfo{{Port: 50051, State: nodecache.PortServes, Services: []nodecache.Service{{Name: service, Undescribed: true}}}},
	}
}

// memPod is a pod without a program.
func memPod(owner, node string) *nodecache.Pod {
	return pod(owner, node, &workload{addr: address})
}

// memory is the network as one node has it.
type memory struct {
	w    *world
	from string
}

func (n memory) Retain([]peer.Member) {}

func (n memory) Fetch(ctx context.Context, to peer.Member, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	n.w.mu.Lock()
	n.w.fetches[n.from] = append(n.w.fetches[n.from], time.Now())
	n.w.mu.Unlock()
	a, err := n.w.reach(ctx, to.Node)
	if err != nil {
		return nil, err
	}
	return a.exchange.ServeFetch(ctx, n.from, req)
}

func (n memory) Sync(ctx context.Context, to peer.Member) (peer.ClientStream, error) {
	a, err := n.w.reach(ctx, to.Node)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	p := &pipe{ctx: ctx, delay: n.w.delay, up: make(chan *peerv1.SyncRequest, 16), down: make(chan *peerv1.SyncResponse, 16), ended: make(chan struct{})}
	go func() {
		p.err = a.exchange.ServeSync(n.from, pipeServer{p})
		close(p.ended)
		cancel()
	}()
	return p, nil
}

// pipe is a stream in memory, and its client's end.
type pipe struct {
	ctx   context.Context
	delay time.Duration
	up    chan *peerv1.SyncRequest
	down  chan *peerv1.SyncResponse
	ended chan struct{}
	err   error // once ended is closed
}

func (p *pipe) Send(m *peerv1.SyncRequest) error {
	select {
	case p.up <- m:
		return nil
	case <-p.ctx.Done():
		return io.EOF
	}
}

func (p *pipe) Recv() (*peerv1.SyncResponse, error) {
	select {
	case m := <-p.down:
		time.Sleep(p.delay)
		return m, nil
	case <-p.ended:
		if p.err == nil {
			return nil, io.EOF
		}
		return nil, p.err
	}
}

type pipeServer struct{ *pipe }

func (p pipeServer) Context() context.Context { return p.ctx }

func (p pipeServer) Send(m *peerv1.SyncResponse) error {
	select {
	case p.down <- m:
		return nil
	case <-p.ctx.Done():
		return p.ctx.Err()
	}
}

func (p pipeServer) Recv() (*peerv1.SyncRequest, error) {
	select {
	case m := <-p.up:
		return m, nil
	case <-p.ctx.Done():
		return nil, p.ctx.Err()
	}
}

// know tells whether the agents know the owner.
func know(as []*member, owner string) error {
	for _, a := range as {
		if o := a.dir.Owner(key(owner)); o == nil || o.Knowledge != nodecache.Known {
			return fmt.Errorf("the agent of %s knows of %s: %+v", a.node, owner, o)
		}
	}
	return nil
}
