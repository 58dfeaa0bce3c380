package collect_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// dials counts what runs at one time, of all and of each pod.
type dials struct {
	mu      sync.Mutex
	order   []netip.Addr
	open    map[netip.Addr]int
	all     int
	most    int
	mostPod int
}

func (d *dials) begin(a netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.order = append(d.order, a)
	d.open[a]++
	d.all++
	d.most, d.mostPod = max(d.most, d.all), max(d.mostPod, d.open[a])
}

func (d *dials) end(a netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open[a]--
	d.all--
}

// counted tells of its end once.
type counted struct {
	net.Conn
	end func()
}

func (c *counted) Close() error { c.end(); return c.Conn.Close() }

// Of 200 owners that wait, one namespace has 190: the other ten are not behind
// them. No more are dialled at a time than may be, and of no pod more than one
// port.
func TestNamespaceWithManyOwnersHoldsUpNobody(t *testing.T) {
	const limit, crowd, few = 4, 190, 10
	l := bufconn.Listen(1 << 16)
	s := grpc.NewServer()
	registerReflection(s, v1, (&script{services: []string{"a.B"}}).handle)
	served := make(chan struct{})
	go func() { defer close(served); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-served })

	d := &dials{open: map[netip.Addr]int{}}
	dir := nodecache.New(nodecache.Options{})
	sched := schedule.New(schedule.Options{Limits: schedule.Limits{Collect: limit}})
	c := collect.New(collect.Options{
		Directory: dir, Scheduler: sched, Node: "n1", Budget: collect.Budget{Wall: patience, Connect: patience},
		Dial: func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
			d.begin(addr.Addr())
			conn, err := l.DialContext(ctx)
			if err != nil {
				d.end(addr.Addr())
				return nil, err
			}
			return &counted{conn, sync.OnceFunc(func() { d.end(addr.Addr()) })}, nil
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })

	// All wait before the scheduler lets the first go.
	small := map[netip.Addr]bool{}
	for i := range crowd + few {
		addr := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
		p := pod(fmt.Sprint("p", i), fmt.Sprint("o", i), addr, 50051, 50052)
		p.Namespace = "crowd"
		if i >= crowd {
			p.Namespace, small[addr] = "small", true
		}
		p.Workload.Namespace = p.Namespace
		dir.UpsertPod(p)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- c.FirstAttempts(ctx) }()
	deadline, stop := context.WithTimeout(ctx, patience)
	defer stop()
	for ; sched.Stats()[0].Waiting < crowd+few; runtime.Gosched() {
		if deadline.Err() != nil {
			t.Fatalf("only %d owners wait", sched.Stats()[0].Waiting)
		}
	}
	running.Go(func() { sched.Run(ctx) })
	select {
	case err := <-waiting:
		if err != nil {
			t.Fatal(err)
		}
	case <-deadline.Done():
		t.Fatal("not all were collected")
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	if d.most > limit || d.mostPod > 1 {
		t.Errorf("%d dials at a time, %d of one pod; want at most %d and 1", d.most, d.mostPod, limit)
	}
	if len(d.order) != 2*(crowd+few) {
		t.Errorf("%d dials, want one for each port", len(d.order))
	}
	last := 0
	for i, a := range d.order {
		if small[a] {
			last = i
		}
	}
	// Turn by turn, ten of the crowd go with them; each has two ports, and what
	// runs beside them may be ahead.
	if most := 2*2*few + 2*limit; last > most {
		t.Errorf("the last of the ten was dialled as number %d, want under %d", last, most)
	}
}
