package peer_test

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/peer"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

// patience is how long a test waits for what has to come.
const patience = 40 * time.Second

// agent is the part of an agent that shares and collects, on real sockets.
type agent struct {
	node      string
	dir       *nodecache.Directory
	collector *collect.Collector
	exchange  *peer.Exchange
	transport *peer.Transport
	identity  *peer.Identity
	address   netip.AddrPort
	metrics   *prometheus.Registry
	stop      func() // ends it as a kill does: nobody is told
}

// start starts the agent of a node. It collects nothing before it is told its
// members.
func start(t *testing.T, node string, change ...func(*peer.Options)) *agent {
	t.Helper()
	id, err := peer.NewIdentity(node)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{node: node, dir: nodecache.New(nodecache.Options{}), identity: id, metrics: prometheus.NewRegistry()}
	a.address = l.Addr().(*net.TCPAddr).AddrPort()
	a.transport = peer.NewTransport(id, nil)
	sched := schedule.New(schedule.Options{})
	o := peer.Options{
		Node: node, Directory: peer.Over(a.dir), Identity: id, Network: a.transport, Scheduler: sched, Metrics: a.metrics,
	}
	for _, c := range change {
		c(&o)
	}
	a.exchange = peer.New(o)
	a.collector = collect.New(collect.Options{
		Directory: a.dir, Scheduler: sched, Node: node, Scope: collect.ScopeNode, Placement: a.exchange, Metrics: a.metrics,
		Budget: collect.Budget{Wall: patience},
	})
	a.exchange.Attach(a.collector)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { sched.Run(ctx) })
	running.Go(func() { a.collector.Run(ctx) })
	running.Go(func() { a.exchange.Run(ctx) })
	running.Go(func() { _ = a.transport.Serve(ctx, l, a.exchange) })
	a.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(a.stop)
	return a
}

func (a *agent) member() peer.Member {
	return peer.Member{Node: a.node, Address: a.address, Keys: []peer.Fingerprint{a.identity.Fingerprint()}}
}

func (a *agent) public() []byte {
	return a.identity.Certificate().PrivateKey.(ed25519.PrivateKey).Public().(ed25519.PublicKey)
}

func members(as []*agent) []peer.Member {
	var ms []peer.Member
	for _, a := range as {
		ms = append(ms, a.member())
	}
	return ms
}

// cluster starts agents on nodes n0, n1, … that know one another.
func cluster(t *testing.T, n int) []*agent {
	t.Helper()
	var as []*agent
	for i := range n {
		as = append(as, start(t, fmt.Sprint("n", i)))
	}
	for _, a := range as {
		a.exchange.SetMembers(members(as))
	}
	return as
}

// rejected returns the count of a reason.
func (a *agent) rejected(t *testing.T, reason string) float64 {
	t.Helper()
	return a.metric(t, "fingerpost_peer_rejected_total", reason)
}

// metric is the sum over the series that have the label value, or all.
func (a *agent) metric(t *testing.T, name, label string) (sum float64) {
	t.Helper()
	mfs, err := a.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, mf := range mfs {
		for _, m := range mf.GetMetric() {
			if mf.GetName() == name && (label == "" || m.GetLabel()[0].GetValue() == label) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// workload is a program that serves gRPC with reflection and counts how often
// it is asked.
type workload struct {
	asked   atomic.Int32
	entered chan struct{}
	open    chan struct{} // answers wait until it is closed
	addr    netip.AddrPort
}

// serve starts one that serves the services, and PeerService, of which it has
// the descriptor.
func serve(t *testing.T, services ...string) *workload {
	t.Helper()
	w := &workload{entered: make(chan struct{}, 100), open: make(chan struct{})}
	close(w.open)
	return w.serve(t, services...)
}

// serveShut is serve, but answers wait until open is closed.
func serveShut(t *testing.T, services ...string) *workload {
	t.Helper()
	w := &workload{entered: make(chan struct{}, 100), open: make(chan struct{})}
	return w.serve(t, services...)
}

func (w *workload) serve(t *testing.T, services ...string) *workload {
	s := grpc.NewServer(grpc.StreamInterceptor(func(srv any, st grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if strings.HasPrefix(info.FullMethod, "/grpc.reflection.v1.") {
			w.asked.Add(1)
			w.entered <- struct{}{}
			select {
			case <-w.open:
			case <-st.Context().Done():
				return st.Context().Err()
			}
		}
		return next(srv, st)
	}))
	for _, name := range services {
		s.RegisterService(&grpc.ServiceDesc{ServiceName: name, HandlerType: (*any)(nil)}, struct{}{})
	}
	peerv1.RegisterPeerServiceServer(s, peerv1.UnimplementedPeerServiceServer{})
	reflection.RegisterV1(s)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.addr = l.Addr().(*net.TCPAddr).AddrPort()
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() { s.Stop(); serving.Wait() })
	return w
}

func key(owner string) nodecache.OwnerKey { return nodecache.OwnerKey{UID: owner, Revision: "1"} }

// pod is a serving pod of an owner on a node. All pods of these tests have an
// address of the loopback, so that they are of the host's network.
func pod(owner, node string, w *workload) *nodecache.Pod {
	return &nodecache.Pod{
		UID: owner + "-" + node, Name: owner + "-" + node, Node: node, State: nodecache.Serving, Addr: w.addr.Addr(),
		HostNetwork: true, CollectOn: true,
		Common: &nodecache.Common{
			Namespace: "prod", Owner: key(owner), OwnerName: "ReplicaSet/" + owner,
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: owner},
			Hints:    []nodecache.Hint{{Port: w.addr.Port(), Why: "port name"}},
		},
	}
}

// see lets the agents' watches bring pods.
func see(as []*agent, pods ...*nodecache.Pod) {
	for _, a := range as {
		a.dir.UpsertPods(pods)
	}
}

// await waits until the agent's view of the owner is as wanted.
func (a *agent) await(t *testing.T, owner string, ok func(*nodecache.Owner) bool) *nodecache.Owner {
	t.Helper()
	sub := a.dir.Subscribe()
	defer sub.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		o := a.dir.Owner(key(owner))
		if o != nil && ok(o) {
			return o
		}
		if _, err := sub.Next(ctx); err != nil {
			t.Fatalf("agent of %s: owner %s is %+v", a.node, owner, o)
		}
	}
}

func knows(k nodecache.Knowledge) func(*nodecache.Owner) bool {
	return func(o *nodecache.Owner) bool { return o.Knowledge == k }
}

// eventually polls for what no channel tells.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	harness.Eventually(t, patience, func() error {
		if !ok() {
			return errors.New(what)
		}
		return nil
	})
}

// Check 44: an owner with pods on five nodes is collected once in the cluster,
// however many owners there are, and every agent knows all of it.
func TestOwnerWithPodsOnFiveNodesIsCollectedOnce(t *testing.T) {
	as := cluster(t, 5)
	const owners = 40
	var all [owners][5]*workload
	for o := range owners {
		name := fmt.Sprint("o", o)
		var pods []*nodecache.Pod
		for n := range all[o] {
			all[o][n] = serve(t, "pkg."+strings.ToUpper(name))
			p := pod(name, fmt.Sprint("n", n), all[o][n])
			pods = append(pods, p)
		}
		// One Common for all, as the port would be: each pod has its own here.
		see(as, pods...)
	}
	collectors := map[string]int{}
	for o := range owners {
		name := fmt.Sprint("o", o)
		var hashes []string
		for _, a := range as {
			view := a.await(t, name, knows(nodecache.Known))
			if got := view.Services(); len(got) != 2 || got[1] != "pkg."+strings.ToUpper(name) {
				t.Fatalf("agent of %s: services of %s are %v", a.node, name, got)
			}
			if view.Origin == nodecache.OriginSelf {
				collectors[a.node]++
			}
			port := view.Info.Ports[0]
			hashes = append(hashes, port.Hash)
			if len(port.Files) != 1 || !port.Linkable {
				t.Errorf("agent of %s has %d files of %s", a.node, len(port.Files), name)
			}
		}
		for _, h := range hashes {
			if h != hashes[0] {
				t.Errorf("owner %s has hashes %v", name, hashes)
			}
		}
	}
	for o := range owners {
		asked := int32(0)
		for _, w := range all[o] {
			asked += w.asked.Load()
		}
		if asked != 1 {
			t.Errorf("owner o%d was asked %d times", o, asked)
		}
	}
	if len(collectors) < 3 {
		t.Errorf("collectors %v: the owners are not shared out", collectors)
	}
}

// Check 44, second half: if the agent that collects dies meanwhile, one more
// asks.
func TestCollectorLostDuringItsFlightCostsOneMore(t *testing.T) {
	as := cluster(t, 5)
	var pods []*nodecache.Pod
	var ws []*workload
	for n := range as {
		w := serveShut(t, "pkg.A")
		ws = append(ws, w)
		pods = append(pods, pod("a", fmt.Sprint("n", n), w))
	}
	see(as, pods...)
	var lost *agent
	eventually(t, "a collect", func() bool {
		for n, w := range ws {
			if w.asked.Load() > 0 {
				lost = as[n]
			}
		}
		return lost != nil
	})
	lost.stop()
	for _, w := range ws {
		close(w.open)
	}
	asked := func() (sum int32) {
		for _, w := range ws {
			sum += w.asked.Load()
		}
		return sum
	}
	for _, a := range as {
		if a != lost {
			a.await(t, "a", knows(nodecache.Known))
		}
	}
	if n := asked(); n != 2 {
		t.Errorf("asked %d times, want once by the lost agent and once more", n)
	}
}
