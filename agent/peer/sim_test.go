package peer

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unique"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/agent/collect"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// This file is a cluster for the simulation: its nodes and owners, and an agent on
// each node, which is the real exchange over a network, a directory and a
// collector that are simulated. Time is that of testing/synctest.

const (
	simZones    = 3
	simPrograms = 500 // distinct programs: owners share their descriptors

	// Until an agent hears by its watch of what happened.
	simWatch = 250 * time.Millisecond
	// A connection and its handshake, and one way of a message.
	simConnect, simWay = 10 * time.Millisecond, time.Millisecond
	// How long a collect takes.
	simCollectLeast, simCollectMost = 20 * time.Millisecond, 500 * time.Millisecond
	// Until a connection to a machine that is gone ends: by keepalive, see
	// transport.go.
	simDead = pingAfter + pingWait
	// A node is NotReady, and its pods leave every directory, as long after it
	// was lost.
	simNotReady = 40 * time.Second
)

// simOwner is one owner. Its fields are read-only, but for what says otherwise.
type simOwner struct {
	n       int
	key     nodecache.OwnerKey
	program int
	at      time.Time // it came; zero: it was there at the start
	hosted  atomic.Pointer[simHosts]
	learned atomic.Pointer[nodecache.Info] // what was learned last, shared by all agents

	collects atomic.Int32
	knowing  atomic.Int32 // live agents that know it
	spread   atomic.Int64 // ns from its coming to the last agent's knowing
}

// simHosts is where an owner has pods, at one moment.
type simHosts struct {
	nodes []string
	view  *nodecache.Owner
	at    time.Time // since when
	prev  *simHosts
}

// simCluster is the truth.
type simCluster struct {
	nodes   int
	infos   []*nodecache.Info
	rosters atomic.Pointer[roster]

	decoded sync.Map // *peerv1.Record -> *Record

	// mu guards what follows.
	mu      sync.RWMutex
	owners  map[nodecache.OwnerKey]*simOwner
	list    []*simOwner // all that ever were, by number
	agents  []*simAgent // by node: who has its port
	dead    []bool      // machines, by node
	running []*simAgent
	seats   map[string]Member

	live atomic.Int64 // agents
}

func newSimCluster(nodes, owners int) *simCluster {
	c := &simCluster{nodes: nodes, owners: map[nodecache.OwnerKey]*simOwner{}, agents: make([]*simAgent, nodes), dead: make([]bool, nodes), seats: map[string]Member{}}
	common := unique.Make(string(simText(0, 1200)))
	for n := range simPrograms {
		own := unique.Make(string(simText(1+n, 2400)))
		port := nodecache.PortInfo{Port: 50051, State: nodecache.PortServes, Linkable: true, Files: []unique.Handle[string]{common, own}, Hash: fmt.Sprintf("%032x", n)}
		for s := range 2 {
			service := nodecache.Service{Name: fmt.Sprintf("example.team%03d.v1.Service%d", n, s)}
			for m := range 6 {
				service.Methods = append(service.Methods, fmt.Sprintf("Method%d", m))
			}
			port.Services = append(port.Services, service)
		}
		slices.SortFunc(port.Files, func(a, b unique.Handle[string]) int { return cmp.Compare(a.Value(), b.Value()) })
		c.infos = append(c.infos, &nodecache.Info{Ports: []nodecache.PortInfo{port}, Images: []string{fmt.Sprintf("sha256:%064x", n)}})
	}
	for range owners {
		c.newOwner(time.Time{})
	}
	return c
}

// simText is text that n alone has.
func simText(n, size int) []byte {
	b := fmt.Appendf(nil, "%d:", n)
	r := rand.New(rand.NewPCG(uint64(n), 2))
	for len(b) < size {
		b = append(b, byte('a'+r.IntN(26)))
	}
	return b
}

// newOwner makes an owner with pods on one to seven nodes.
func (c *simCluster) newOwner(at time.Time) *simOwner {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(c.list)
	o := &simOwner{n: n, key: nodecache.OwnerKey{UID: fmt.Sprintf("%08x-5d9c-4f1e-8a7b-%012x", n, n), Revision: fmt.Sprintf("%010x", n)}, program: n % simPrograms, at: at}
	r := rand.New(rand.NewPCG(uint64(n), 1))
	var nodes []string
	for range 1 + r.IntN(7) {
		if node := simNode(r.IntN(c.nodes)); !slices.Contains(nodes, node) {
			nodes = append(nodes, node)
		}
	}
	o.host(nodes)
	c.list = append(c.list, o)
	c.owners[o.key] = o
	return o
}

func simNode(n int) string { return fmt.Sprintf("node-%05d.example", n) }
func simZone(n int) string { return fmt.Sprintf("zone-%d", n%simZones) }

// host puts the owner's pods on the nodes, one on each.
func (o *simOwner) host(nodes []string) {
	nodes = slices.Sorted(slices.Values(nodes))
	dir := nodecache.New(nodecache.Options{})
	common := &nodecache.Common{
		Namespace: "prod", Owner: o.key, OwnerName: "ReplicaSet/app", Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: fmt.Sprint("app-", o.n)},
		Images: fmt.Sprintf("sha256:%064x", o.program), Hints: []nodecache.Hint{{Port: 50051, Why: "port name"}},
	}
	for i, node := range nodes {
		dir.UpsertPod(&nodecache.Pod{
			UID: fmt.Sprintf("%d-%s", o.n, node), Name: fmt.Sprintf("app-%d-%d", o.n, i), Common: common, Node: node, State: nodecache.Serving,
			Addr: netip.AddrFrom4([4]byte{10, byte(o.n >> 10), byte(o.n >> 2), byte(o.n<<6 | i)}),
		})
	}
	view := dir.Owner(o.key)
	if view == nil {
		view = &nodecache.Owner{Key: o.key}
	}
	o.hosted.Store(&simHosts{nodes, view, time.Now(), o.hosted.Load()})
}

// lag is how much later than it happened the agent of a node hears of something.
func simLag(node int, what uint64) time.Duration {
	return time.Duration(mix(uint64(node)<<32^what) % uint64(simWatch))
}

// simAgent is the agent of one node: a [Directory], a [Network] and a [Collector].
type simAgent struct {
	c    *simCluster
	n    int
	node string
	x    *Exchange
	id   *Identity
	ctx  context.Context
	stop context.CancelFunc
	done chan struct{}
	// lost is closed where the machine is gone with it: nobody hears of it.
	lost chan struct{}

	calls, bytesIn, bytesOut atomic.Int64
	// mu guards what follows.
	mu      sync.Mutex
	infos   []*nodecache.Info // by owner
	flights map[int]bool
	changed []nodecache.OwnerKey
	feed    chan struct{} // capacity 1
}

// start runs an agent on the node, which knows nothing. Where one is there, that
// one keeps the port until it ends.
func (c *simCluster) start(n int) *simAgent {
	node := simNode(n)
	id, err := NewIdentity(node)
	if err != nil {
		panic(err)
	}
	a := &simAgent{
		c: c, n: n, node: node, id: id, done: make(chan struct{}), lost: make(chan struct{}), feed: make(chan struct{}, 1),
		flights: map[int]bool{},
	}
	a.ctx, a.stop = context.WithCancel(context.Background())
	scheduler := schedule.New(schedule.Options{Limits: schedule.Limits{}})
	a.x = New(Options{
		Node: node, Directory: a, Identity: id, Network: a, Scheduler: scheduler, Remote: true, decode: c.decode,
	})
	a.x.Attach(a)
	c.mu.Lock()
	a.infos = make([]*nodecache.Info, len(c.list))
	for _, o := range c.list {
		if c.owners[o.key] != nil {
			a.changed = append(a.changed, o.key)
		}
	}
	if c.agents[n] == nil {
		c.agents[n] = a
	}
	c.running = append(c.running, a)
	c.mu.Unlock()
	a.feed <- struct{}{}
	c.live.Add(1)
	go func() {
		defer close(a.done)
		var running sync.WaitGroup
		running.Go(func() { scheduler.Run(a.ctx) })
		running.Go(func() { a.x.Run(a.ctx) })
		running.Wait()
	}()
	if r := c.rosters.Load(); r != nil {
		a.x.setRoster(r)
	}
	return a
}

// end stops an agent, and gives its port to the next; where the machine is gone,
// nobody hears of it.
func (a *simAgent) end(machine bool, next *simAgent) {
	c := a.c
	c.mu.Lock()
	c.agents[a.n], c.dead[a.n] = next, machine
	c.running = slices.DeleteFunc(c.running, func(b *simAgent) bool { return a == b })
	c.mu.Unlock()
	if machine {
		close(a.lost)
	}
	a.stop()
	<-a.done
	c.live.Add(-1)
	a.mu.Lock()
	infos := a.infos
	a.infos = nil
	a.mu.Unlock()
	c.mu.RLock()
	defer c.mu.RUnlock()
	for n, info := range infos {
		if o := c.list[n]; info != nil && c.owners[o.key] != nil {
			o.knowing.Add(-1)
		}
	}
}

// decode decodes each record once, and so each signature is checked once.
func (c *simCluster) decode(raw *peerv1.Record) (*Record, error) {
	if r, ok := c.decoded.Load(raw); ok {
		return r.(*Record), nil
	}
	r, err := decode(raw)
	if err != nil {
		return nil, err
	}
	was, _ := c.decoded.LoadOrStore(raw, r)
	return was.(*Record), nil
}

// seat says which keys speak for a node; none: it has no agent.
func (c *simCluster) seat(n int, keys ...Fingerprint) {
	c.mu.Lock()
	defer c.mu.Unlock()
	node := simNode(n)
	if len(keys) == 0 {
		delete(c.seats, node)
		return
	}
	c.seats[node] = Member{Node: node, Zone: simZone(n), Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, byte(n >> 8), byte(n)}), 9642), Keys: keys}
}

// publish tells every agent of the members of now.
func (c *simCluster) publish() {
	c.mu.RLock()
	ms := make([]Member, 0, len(c.seats))
	for _, m := range c.seats {
		ms = append(ms, m)
	}
	agents := slices.Clone(c.running)
	c.mu.RUnlock()
	r := newRoster(ms)
	at := uint64(time.Now().UnixNano())
	c.rosters.Store(r)
	for _, a := range agents {
		time.AfterFunc(simLag(a.n, at), func() {
			if a.ctx.Err() == nil {
				a.x.setRoster(r)
			}
		})
	}
}

// tell makes every agent hear of a change of the owner.
func (c *simCluster) tell(o *simOwner) {
	c.mu.RLock()
	agents := slices.Clone(c.running)
	c.mu.RUnlock()
	for _, a := range agents {
		time.AfterFunc(simLag(a.n, uint64(o.n)), func() {
			if a.ctx.Err() == nil {
				a.change(o.key)
				a.Consider(o.key)
			}
		})
	}
}

// remove takes an owner away.
func (c *simCluster) remove(o *simOwner) {
	c.mu.Lock()
	delete(c.owners, o.key)
	c.mu.Unlock()
	o.hosted.Store(&simHosts{view: &nodecache.Owner{Key: o.key}})
	c.tell(o)
}

func (c *simCluster) owner(key nodecache.OwnerKey) *simOwner {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.owners[key]
}

// change wakes who reads the feed.
func (a *simAgent) change(key nodecache.OwnerKey) {
	a.mu.Lock()
	a.changed = append(a.changed, key)
	a.mu.Unlock()
	select {
	case a.feed <- struct{}{}:
	default:
	}
}

// Changes implements [Directory].
func (a *simAgent) Changes() Feed { return (*simFeed)(a) }

type simFeed simAgent

func (f *simFeed) Next(ctx context.Context) ([]nodecache.OwnerKey, error) {
	select {
	case <-f.feed:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	keys := f.changed
	f.changed = nil
	return keys, nil
}

func (f *simFeed) Close() {}

// seen returns the owner, if the agent has heard of it, and where it has pods.
func (a *simAgent) seen(key nodecache.OwnerKey) (*simOwner, *simHosts) {
	o := a.c.owner(key)
	if o == nil || !o.at.IsZero() && time.Since(o.at) < simLag(a.n, uint64(o.n)) {
		return nil, nil
	}
	h, lag := o.hosted.Load(), simLag(a.n, uint64(o.n))
	for h.prev != nil && time.Since(h.at) < lag {
		h = h.prev
	}
	if len(h.nodes) == 0 {
		return nil, nil
	}
	return o, h
}

// Hosts implements [Directory].
func (a *simAgent) Hosts(key nodecache.OwnerKey) ([]string, bool) {
	o, h := a.seen(key)
	if o == nil {
		return nil, false
	}
	return h.nodes, true
}

// Learned implements [Directory].
func (a *simAgent) Learned(key nodecache.OwnerKey) nodecache.Learned {
	o, _ := a.seen(key)
	if o == nil {
		return nodecache.Learned{}
	}
	l := nodecache.Learned{Generation: 1, Namespace: "prod", Info: a.info(o.n)}
	if l.Info != nil {
		l.Knowledge = nodecache.Known
	}
	return l
}

func (a *simAgent) info(n int) *nodecache.Info {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n >= len(a.infos) {
		return nil
	}
	return a.infos[n]
}

// learn keeps what is known of an owner.
func (a *simAgent) learn(o *simOwner, info *nodecache.Info) {
	a.mu.Lock()
	if a.ctx.Err() != nil {
		a.mu.Unlock()
		return
	}
	for len(a.infos) <= o.n {
		a.infos = append(a.infos, nil)
	}
	first := a.infos[o.n] == nil
	a.infos[o.n] = info
	a.mu.Unlock()
	if first && int64(o.knowing.Add(1)) == a.c.live.Load() && !o.at.IsZero() {
		o.spread.Store(int64(time.Since(o.at)))
	}
	a.change(o.key)
}

// Learn implements [Directory], as nodecache does.
func (a *simAgent) Learn(key nodecache.OwnerKey, node string, info *nodecache.Info) error {
	o, h := a.seen(key)
	if o == nil {
		return nodecache.ErrStale
	}
	if !slices.Contains(h.nodes, node) {
		return nodecache.ErrNotHosted
	}
	if was := a.info(o.n); was != nil && !info.Collected.After(was.Collected) {
		return nodecache.ErrOlder
	}
	if len(info.Ports) != 1 || info.Ports[0].Hash != a.c.infos[o.program].Ports[0].Hash {
		panic("learned something else than what was collected")
	}
	if c := o.learned.Load(); c != nil && c.Collected.Equal(info.Collected) && c.Pod == info.Pod {
		info = c
	} else {
		o.learned.Store(info)
	}
	a.learn(o, info)
	return nil
}

// LearnFailure implements [Directory]. No collect fails here.
func (a *simAgent) LearnFailure(nodecache.OwnerKey, string, nodecache.Failure) error {
	panic("a collect failed")
}

// Consider implements [Collector]: as the real one it asks a pod of an owner
// that is this agent's, and of which nothing is known.
func (a *simAgent) Consider(keys ...nodecache.OwnerKey) {
	for _, key := range keys {
		o, h := a.seen(key)
		if o == nil || !slices.Contains(h.nodes, a.node) || a.info(o.n) != nil {
			continue
		}
		if a.x.Place(h.view) != collect.OwnNode {
			continue
		}
		a.mu.Lock()
		busy := a.flights[o.n]
		a.flights[o.n] = true
		a.mu.Unlock()
		if busy {
			continue
		}
		o.collects.Add(1)
		time.AfterFunc(simCollectLeast+rand.N(simCollectMost-simCollectLeast), func() {
			a.mu.Lock()
			delete(a.flights, o.n)
			a.mu.Unlock()
			info := *a.c.infos[o.program]
			info.Origin, info.Collected, info.Pod = nodecache.OriginSelf, time.Now(), "prod/"+o.hosted.Load().view.Name
			a.learn(o, &info)
		})
	}
}

// Retain implements [Network]; connections cost nothing here.
func (a *simAgent) Retain([]Member) {}

// reach returns the agent that answers for the member, as the real transport does
// with its connections: refused at once where the machine has no agent, by a
// deadline where there is no machine.
func (a *simAgent) reach(ctx context.Context, to Member) (*simAgent, error) {
	a.calls.Add(1)
	if err := simSleep(ctx, simConnect); err != nil {
		return nil, err
	}
	var n int
	if _, err := fmt.Sscanf(to.Node, "node-%05d.example", &n); err != nil {
		panic(err)
	}
	a.c.mu.RLock()
	b := a.c.agents[n]
	gone := a.c.dead[n]
	a.c.mu.RUnlock()
	switch {
	case gone:
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	case b == nil:
		return nil, status.Error(codes.Unavailable, "connection refused")
	case !slices.Contains(to.Keys, b.id.Fingerprint()):
		return nil, errStranger
	}
	b.x.mu.Lock()
	known := b.x.roster != nil && b.x.roster.byKey[a.id.Fingerprint()] == a.node
	b.x.mu.Unlock()
	if !known {
		return nil, status.Error(codes.Unavailable, "the key is not that of an agent")
	}
	return b, nil
}

func simSleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// sent counts a message on its way.
func (a *simAgent) sent(to *simAgent, m proto.Message) {
	n := int64(proto.Size(m))
	a.bytesOut.Add(n)
	to.bytesIn.Add(n)
}

// Fetch implements [Network].
func (a *simAgent) Fetch(ctx context.Context, to Member, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	b, err := a.reach(ctx, to)
	if err != nil {
		return nil, err
	}
	a.sent(b, req)
	if err := simSleep(ctx, simWay); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(b.ctx, cancel)()
	resp, err := b.x.ServeFetch(ctx, a.node, req)
	if err != nil {
		return nil, err
	}
	b.sent(a, resp)
	return resp, simSleep(ctx, simWay)
}

// simStream is a Sync between two agents.
type simStream struct {
	from, to         *simAgent
	calling, serving context.Context // of either end
	requests         chan simMessage[*peerv1.SyncRequest]
	responses        chan simMessage[*peerv1.SyncResponse]
	served           chan struct{} // closed when the server has ended it, with err
	err              error
}

type simMessage[T any] struct {
	m  T
	at time.Time // it is there
}

// Sync implements [Network].
func (a *simAgent) Sync(ctx context.Context, to Member) (ClientStream, error) {
	b, err := a.reach(ctx, to)
	if err != nil {
		return nil, err
	}
	calling, broken := context.WithCancel(ctx)
	serving, cancel := context.WithCancel(calling)
	s := &simStream{
		from: a, to: b, calling: calling, serving: serving, served: make(chan struct{}),
		requests: make(chan simMessage[*peerv1.SyncRequest], 4), responses: make(chan simMessage[*peerv1.SyncResponse], 4),
	}
	stop := context.AfterFunc(b.ctx, cancel)
	go func() {
		defer stop()
		defer cancel()
		s.err = b.x.ServeSync(a.node, (*simServer)(s))
		select {
		case <-b.lost: // nobody says so: the keepalive finds it
			time.AfterFunc(simDead, broken)
		default:
			close(s.served)
			time.AfterFunc(time.Second, broken) // what is on its way still comes
		}
	}()
	return (*simClient)(s), nil
}

// simPass puts a message on its way.
func simPass[T proto.Message](ctx context.Context, from, to *simAgent, ch chan simMessage[T], m T) error {
	from.sent(to, m)
	select {
	case ch <- simMessage[T]{m, time.Now().Add(simWay)}:
		return nil
	case <-ctx.Done():
		return status.Error(codes.Unavailable, "the connection has ended")
	}
}

// simTake waits for a message.
func simTake[T proto.Message](ctx context.Context, ch chan simMessage[T], ended <-chan struct{}) (m T, err error) {
	select {
	case msg := <-ch:
		if err := simSleep(ctx, time.Until(msg.at)); err != nil {
			return m, err
		}
		return msg.m, nil
	case <-ended:
		select {
		case msg := <-ch:
			return msg.m, nil
		default:
			return m, io.EOF
		}
	case <-ctx.Done():
		return m, status.Error(codes.Unavailable, "the connection has ended")
	}
}

type simClient simStream

func (s *simClient) Send(m *peerv1.SyncRequest) error {
	return simPass(s.calling, s.from, s.to, s.requests, m)
}

func (s *simClient) Recv() (*peerv1.SyncResponse, error) {
	m, err := simTake(s.calling, s.responses, s.served)
	if err == io.EOF && s.err != nil {
		err = s.err
	}
	return m, err
}

type simServer simStream

func (s *simServer) Context() context.Context { return s.serving }

func (s *simServer) Send(m *peerv1.SyncResponse) error {
	return simPass(s.serving, s.to, s.from, s.responses, m)
}

func (s *simServer) Recv() (*peerv1.SyncRequest, error) { return simTake(s.serving, s.requests, nil) }
