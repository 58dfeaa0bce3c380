package collect_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// agent is a collector with all that it needs.
type agent struct {
	*collect.Collector
	dir     *nodecache.Directory
	metrics *prometheus.Registry
	stop    func() // ends the collector and waits for it
}

func start(t *testing.T, o collect.Options) *agent {
	t.Helper()
	a := &agent{dir: nodecache.New(nodecache.Options{}), metrics: prometheus.NewRegistry()}
	sched := schedule.New(schedule.Options{})
	o.Directory, o.Scheduler, o.Metrics = a.dir, sched, a.metrics
	if o.Node == "" {
		o.Node = "n1"
	}
	if o.Budget.Wall == 0 {
		o.Budget.Wall = patience
	}
	a.Collector = collect.New(o)
	ctx, cancel := context.WithCancel(context.Background())
	var scheduling, collecting sync.WaitGroup
	scheduling.Go(func() { sched.Run(ctx) })
	collectCtx, stop := context.WithCancel(ctx)
	collecting.Go(func() { a.Run(collectCtx) })
	a.stop = func() { stop(); collecting.Wait() }
	t.Cleanup(func() { a.stop(); cancel(); scheduling.Wait() })
	return a
}

func key(owner string) nodecache.OwnerKey { return nodecache.OwnerKey{UID: owner, Revision: "1"} }

// pod is a serving pod of an owner, with a hint for every port.
func pod(uid, owner string, addr netip.Addr, ports ...uint16) *nodecache.Pod {
	p := &nodecache.Pod{
		UID: uid, Name: uid, Node: "n1", State: nodecache.Serving, Addr: addr,
		Common: &nodecache.Common{
			Namespace: "prod", Owner: key(owner), OwnerName: "ReplicaSet/" + owner,
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: owner},
		},
	}
	for _, port := range ports {
		p.Hints = append(p.Hints, nodecache.Hint{Port: port, Why: "port name"})
	}
	return p
}

func podAt(uid, owner string, l *counter) *nodecache.Pod {
	return pod(uid, owner, l.addr().Addr(), l.addr().Port())
}

// await returns the first view of the owner that is as wanted.
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
			t.Fatalf("owner %s is %+v", owner, o)
		}
	}
}

func knows(k nodecache.Knowledge) func(*nodecache.Owner) bool {
	return func(o *nodecache.Owner) bool { return o.Knowledge == k }
}

func (a *agent) metric(t *testing.T, name, label string) float64 {
	t.Helper()
	mfs, err := a.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, mf := range mfs {
		for _, m := range mf.GetMetric() {
			if mf.GetName() == name && (label == "" || m.GetLabel()[0].GetValue() == label) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

// gate is a reflection handler that says when it is called and answers when
// it may.
type gate struct {
	script
	entered chan struct{}
	open    chan struct{}
}

func newGate(services ...string) *gate {
	return &gate{script: script{services: services}, entered: make(chan struct{}, 1000), open: make(chan struct{})}
}

func (g *gate) handle(st stream) error {
	g.entered <- struct{}{}
	select {
	case <-g.open:
	case <-st.Context().Done():
		return st.Context().Err()
	}
	return g.script.handle(st)
}

func (g *gate) serve(t *testing.T) *counter {
	return serve(t, func(s *grpc.Server) { registerReflection(s, v1, g.handle) })
}

// Pods of one owner that arrive at the same time cost one collect, and nobody
// waits for it to see their addresses.
func TestManyPodsOfOneOwnerAreOneCollectAndVisibleBefore(t *testing.T) {
	const n = 20
	a, g := start(t, collect.Options{}), newGate("a.B")
	port := g.serve(t)
	other := port.addr().Port()
	listeners := []*counter{port}
	for i := range n - 1 {
		l := listen(t, fmt.Sprintf("127.0.0.%d:%d", i+2, other))
		serveOn(t, l, func(s *grpc.Server) { registerReflection(s, v1, g.handle) })
		listeners = append(listeners, l)
	}
	var arrivals sync.WaitGroup
	for i, l := range listeners {
		arrivals.Go(func() { a.dir.UpsertPod(podAt(fmt.Sprint("p", i), "a", l)) })
	}
	arrivals.Wait()
	<-g.entered
	o := a.dir.Owner(key("a"))
	if o.Knowledge != nodecache.Collecting || len(o.Pods) != n {
		t.Errorf("during the collect: %s with %d pods, want collecting with %d", o.Knowledge, len(o.Pods), n)
	}
	close(g.open)
	o = a.await(t, "a", knows(nodecache.Known))
	if got := len(o.Targets("a.B")); got != n {
		t.Errorf("%d targets, want %d", got, n)
	}
	a.stop()
	total := int32(0)
	for _, l := range listeners {
		total += l.accepted.Load()
	}
	if total != 1 || g.opened.Load() != 1 {
		t.Errorf("%d connections and %d streams, want one of each", total, g.opened.Load())
	}
	if got := a.metric(t, "fingerpost_collects_total", "known"); got != 1 {
		t.Errorf("%v collects counted, want 1", got)
	}
}

func TestThousandWaitersAreOneConnectionAndOneStream(t *testing.T) {
	a, g := start(t, collect.Options{}), newGate("a.B")
	l := g.serve(t)
	a.dir.UpsertPod(podAt("p", "a", l))
	var waiters sync.WaitGroup
	for range 1000 {
		waiters.Go(func() {
			if err := a.Wait(context.Background(), key("a")); err != nil {
				t.Error(err)
			}
			if k := a.dir.Owner(key("a")).Knowledge; k != nodecache.Known {
				t.Errorf("after Wait the owner is %s", k)
			}
		})
	}
	<-g.entered
	close(g.open)
	waiters.Wait()
	if l.accepted.Load() != 1 || g.opened.Load() != 1 {
		t.Errorf("%d connections and %d streams, want one of each", l.accepted.Load(), g.opened.Load())
	}
}

// octo-sts#1629: a single flight on the first caller's context fails for all
// when that caller leaves.
func TestFirstWaiterThatLeavesHarmsNobody(t *testing.T) {
	a, g := start(t, collect.Options{}), newGate("a.B")
	l := g.serve(t)
	a.dir.UpsertPod(podAt("p", "a", l))
	ctx, leave := context.WithCancel(context.Background())
	first := make(chan error, 1)
	go func() { first <- a.Wait(ctx, key("a")) }()
	<-g.entered
	rest := make(chan error, 9)
	for range 9 {
		go func() { rest <- a.Wait(context.Background(), key("a")) }()
	}
	leave()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the one that left got %v", err)
	}
	close(g.open)
	for range 9 {
		if err := <-rest; err != nil {
			t.Error(err)
		}
	}
	if k := a.dir.Owner(key("a")).Knowledge; k != nodecache.Known || l.accepted.Load() != 1 {
		t.Errorf("the owner is %s after %d connections", k, l.accepted.Load())
	}
}

func TestWaitReturnsWhereNothingIsToCome(t *testing.T) {
	a := start(t, collect.Options{})
	l := serve(t, app(v1))
	a.dir.UpsertPod(podAt("p", "a", l))
	for _, owner := range []string{"a", "a", "nobody"} {
		if err := a.Wait(context.Background(), key(owner)); err != nil {
			t.Error(err)
		}
	}
	a.stop()
	if err := a.Wait(context.Background(), key("a")); !errors.Is(err, collect.ErrStopped) {
		t.Errorf("after the stop: %v", err)
	}
}

// No dial without a hint, nor to a pod that must not be asked.
func TestWhatIsNotToBeDialledIsNot(t *testing.T) {
	a := start(t, collect.Options{Scope: collect.ScopeNode})
	var never []*counter
	hangUp := func(c net.Conn) { c.Close() }
	forbid := func(f func(p *nodecache.Pod)) {
		// Each has an address of its own, or they would be rivals for one.
		name := fmt.Sprint("x", len(never))
		l := acceptEachOn(t, fmt.Sprintf("127.0.0.%d:0", 100+len(never)), hangUp)
		never = append(never, l)
		p := podAt(name, name, l)
		f(p)
		a.dir.UpsertPod(p)
	}
	forbid(func(p *nodecache.Pod) { p.Hints = nil })
	forbid(func(p *nodecache.Pod) {
		p.Declared = []nodecache.Declared{{Port: p.Hints[0].Port, Services: []string{"d.D"}}}
	})
	forbid(func(p *nodecache.Pod) { p.CollectOff = true })
	forbid(func(p *nodecache.Pod) { p.Node = "n2" })
	forbid(func(p *nodecache.Pod) { p.State = nodecache.Draining })
	forbid(func(p *nodecache.Pod) { p.HostNetwork = true })

	// One pod with a hinted and an unhinted port, and one declared.
	unhinted, declared := acceptEach(t, hangUp), acceptEach(t, hangUp)
	never = append(never, unhinted, declared)
	l := serve(t, app(v1))
	p := podAt("p", "a", l)
	p.Hints = append(p.Hints, nodecache.Hint{Port: declared.addr().Port()})
	p.Declared = []nodecache.Declared{{Port: declared.addr().Port(), Services: []string{"d.D"}}}
	a.dir.UpsertPod(p)
	a.await(t, "a", knows(nodecache.Known))
	if err := a.FirstAttempts(context.Background()); err != nil {
		t.Error(err)
	}
	a.stop()
	for i, l := range never {
		if n := l.accepted.Load(); n != 0 {
			t.Errorf("listener %d got %d connections", i, n)
		}
	}
	if got := a.metric(t, "fingerpost_collect_connections_total", ""); got != 1 {
		t.Errorf("%v connections, want 1", got)
	}
}

func TestFailureOfOnePodGoesToTheNext(t *testing.T) {
	a := start(t, collect.Options{})
	l := serve(t, app(v1))
	// Nobody listens on this port of the other pod's address.
	a.dir.UpsertPod(pod("a-dead", "a", netip.MustParseAddr("127.0.0.9"), l.addr().Port()))
	a.dir.UpsertPod(podAt("b-alive", "a", l))
	o := a.await(t, "a", func(o *nodecache.Owner) bool {
		return o.Knowledge != nodecache.Unknown && o.Knowledge != nodecache.Collecting
	})
	if o.Knowledge != nodecache.Known || o.Info.Pod != "prod/b-alive" || o.Info.Origin != nodecache.OriginSelf {
		t.Errorf("the owner is %s by %+v", o.Knowledge, o.Info)
	}
}

// All ports are asked; one that does not answer takes nothing from the others.
func TestPortsAreAskedTogether(t *testing.T) {
	a := start(t, collect.Options{})
	first, second := newGate("a.B"), newGate("a.C")
	close(first.open)
	close(second.open)
	l, m := first.serve(t), second.serve(t)
	dead := listen(t, "127.0.0.1:0")
	dead.Close()
	ports := []uint16{l.addr().Port(), m.addr().Port(), dead.addr().Port()}
	a.dir.UpsertPod(pod("p", "a", l.addr().Addr(), ports...))
	o := a.await(t, "a", knows(nodecache.Known))
	if len(o.Info.Ports) != 2 || len(o.Services()) != 2 {
		t.Errorf("info %+v", o.Info)
	}
}

func TestAnswersWithoutServicesAreKnowledge(t *testing.T) {
	a := start(t, collect.Options{})
	l := serve(t, func(s *grpc.Server) {
		registerReflection(s, v1, func(stream) error { return status.Error(codes.PermissionDenied, "no") })
	})
	a.dir.UpsertPod(podAt("p", "a", l))
	o := a.await(t, "a", knows(nodecache.None))
	if o.Info.Ports[0].State != nodecache.PortDenied || o.Reason == "" {
		t.Errorf("info %+v, reason %q", o.Info, o.Reason)
	}
}

func TestFailureIsRecordedWithReasonAndNextTry(t *testing.T) {
	a := start(t, collect.Options{})
	dead := listen(t, "127.0.0.1:0")
	dead.Close()
	a.dir.UpsertPod(podAt("p", "a", dead))
	o := a.await(t, "a", knows(nodecache.Failed))
	if want := fmt.Sprintf("port %d: refused: nobody listens", dead.addr().Port()); o.Reason != want || !o.NextTry.After(time.Now().Add(-patience)) {
		t.Errorf("reason %q, next %s, want %q", o.Reason, o.NextTry, want)
	}
}

// The pod moves while its first port is asked: the second must not be dialled
// at an address that may be another pod's by now.
func TestPodThatMovedIsNotDialledAtItsOldAddress(t *testing.T) {
	a, g := start(t, collect.Options{}), newGate("a.B")
	l := g.serve(t)
	old := listen(t, "127.0.0.1:0")
	// The second port answers at the new address only.
	fresh := newGate("a.C")
	close(fresh.open)
	newFirst := listen(t, fmt.Sprintf("127.0.0.3:%d", l.addr().Port()))
	newSecond := listen(t, fmt.Sprintf("127.0.0.3:%d", old.addr().Port()))
	for _, l := range []*counter{newFirst, newSecond} {
		serveOn(t, l, func(s *grpc.Server) { registerReflection(s, v1, fresh.handle) })
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := old.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	ports := []uint16{l.addr().Port(), old.addr().Port()}
	a.dir.UpsertPod(pod("p", "a", l.addr().Addr(), ports...))
	<-g.entered
	a.dir.UpsertPod(pod("p", "a", newFirst.addr().Addr(), ports...))
	close(g.open)
	o := a.await(t, "a", knows(nodecache.Known))
	if got := o.Services(); len(got) != 1 || got[0] != "a.C" {
		t.Errorf("services %q, want those at the new address", got)
	}
	old.Close()
	<-done
	if n := old.accepted.Load(); n != 0 {
		t.Errorf("%d connections to the old address", n)
	}
	a.stop()
	if a.metric(t, "fingerpost_collect_stale_targets_total", "") != 1 || a.metric(t, "fingerpost_collects_total", "stale-target") != 1 {
		t.Error("the stale target was not counted")
	}
}

// The owner ends and comes again during its collect: the result of the old
// generation is thrown away, the new one is collected.
func TestResultForAnOwnerThatEndedIsThrownAway(t *testing.T) {
	a, g := start(t, collect.Options{}), newGate("a.Old")
	l := g.serve(t)
	a.dir.UpsertPod(podAt("p", "a", l))
	<-g.entered
	a.dir.RemovePod("p")
	fresh := newGate("a.New")
	close(fresh.open)
	a.dir.UpsertPod(podAt("q", "a", fresh.serve(t)))
	close(g.open)
	o := a.await(t, "a", knows(nodecache.Known))
	if got := o.Services(); len(got) != 1 || got[0] != "a.New" {
		t.Errorf("services %q, want those of the new generation", got)
	}
	a.stop()
	if got := a.metric(t, "fingerpost_collect_stale_commits_total", ""); got != 1 {
		t.Errorf("%v stale commits counted, want 1", got)
	}
}

func TestStopDuringFiftyCollectsLeavesNothing(t *testing.T) {
	a, g := start(t, collect.Options{}), newGate()
	left := make(chan struct{}, 50)
	l := serve(t, func(s *grpc.Server) {
		registerReflection(s, v1, func(st stream) error {
			g.entered <- struct{}{}
			<-st.Context().Done()
			left <- struct{}{}
			return nil
		})
	})
	for i := range 50 {
		p := podAt(fmt.Sprint("p", i), fmt.Sprint("o", i), l)
		p.HostNetwork, p.CollectOn = true, true // all share one address
		a.dir.UpsertPod(p)
	}
	for range 50 {
		<-g.entered
	}
	if got := a.metric(t, "fingerpost_collects_in_flight", ""); got != 50 {
		t.Errorf("%v collects in flight, want 50", got)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- a.Wait(context.Background(), key("o0")) }()
	a.stop()
	for range 50 {
		<-left
	}
	if err := <-waiting; !errors.Is(err, collect.ErrStopped) {
		t.Errorf("a waiter got %v", err)
	}
	for _, o := range a.dir.Owners() {
		if o.Knowledge != nodecache.Unknown {
			t.Errorf("%s is %s: the stop was recorded as a result", o.Name, o.Knowledge)
		}
	}
	if got := a.metric(t, "fingerpost_collects_in_flight", ""); got != 0 {
		t.Errorf("%v collects in flight after the stop", got)
	}
}

func TestFirstAttemptsWaitsForEveryOwner(t *testing.T) {
	a, g := start(t, collect.Options{}), newGate("a.B")
	dead := listen(t, "127.0.0.1:0")
	dead.Close()
	deadPod := podAt("dead", "dead", dead)
	deadPod.Addr = netip.MustParseAddr("127.0.0.2")
	unhinted := podAt("unhinted", "unhinted", dead)
	unhinted.Addr, unhinted.Hints = netip.MustParseAddr("127.0.0.3"), nil
	a.dir.UpsertPod(deadPod)
	a.dir.UpsertPod(unhinted)
	a.dir.UpsertPod(podAt("slow", "slow", g.serve(t)))
	all := make(chan error, 1)
	go func() { all <- a.FirstAttempts(context.Background()) }()
	<-g.entered
	short, cancel := context.WithCancel(context.Background())
	cancel()
	if err := a.FirstAttempts(short); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	select {
	case err := <-all:
		t.Errorf("FirstAttempts returned %v before the slow owner had answered", err)
	default:
	}
	close(g.open)
	if err := <-all; err != nil {
		t.Error(err)
	}
	for owner, want := range map[string]nodecache.Knowledge{"dead": nodecache.Failed, "unhinted": nodecache.None, "slow": nodecache.Known} {
		if k := a.dir.Owner(key(owner)).Knowledge; k != want {
			t.Errorf("%s is %s, want %s", owner, k, want)
		}
	}
}
