package peer

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// simRow is what one phase of the simulation cost.
type simRow struct {
	nodes    int
	phase    string
	owners   int     // that came
	collects int     // made
	lasted   float64 // minutes
	calls    simSpread
	sent     simSpread // bytes
	// known is how long it took until every agent knew everything, from the
	// beginning of the phase; of owners that came, the longest for one of them.
	known time.Duration
}

// simSpread is a figure of every agent.
type simSpread struct {
	mean, most float64
}

// The bounds that are asserted.
const (
	simColdStart = 30 * time.Second // until everything is known
	simCollects  = 1.05             // for each owner
	simCalls     = 50               // for each agent and minute in steady churn
)

// mark begins to count anew.
func (c *simCluster) mark() {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, a := range c.running {
		a.calls.Store(0)
		a.bytesIn.Store(0)
		a.bytesOut.Store(0)
	}
	for _, o := range c.list {
		o.collects.Store(0)
		o.spread.Store(0)
	}
}

// row is what happened since mark, when these owners came.
func (c *simCluster) row(phase string, came []*simOwner, since time.Time, known time.Duration) simRow {
	c.mu.RLock()
	defer c.mu.RUnlock()
	r := simRow{nodes: c.nodes, phase: phase, owners: len(came), known: known, lasted: time.Since(since).Minutes()}
	for _, o := range c.list {
		r.collects += int(o.collects.Load())
	}
	for _, o := range came {
		r.known = max(r.known, time.Duration(o.spread.Load()))
	}
	for _, a := range c.running {
		r.calls.add(float64(a.calls.Load()), len(c.running))
		r.sent.add(float64(a.bytesOut.Load()), len(c.running))
	}
	return r
}

func (s *simSpread) add(v float64, of int) {
	s.mean += v / float64(of)
	s.most = max(s.most, v)
}

// settle waits until every agent knows everything, and returns how long it took
// since the moment.
func (c *simCluster) settle(t *testing.T, since time.Time) time.Duration {
	t.Helper()
	for range 20 * 60 * 5 {
		if c.missing() == 0 {
			return time.Since(since)
		}
		time.Sleep(50 * time.Millisecond)
	}
	c.describe(t)
	t.Fatalf("after %v agents still lack what %d owners serve", time.Since(since), c.missing())
	return 0
}

// describe logs what keeps agents from knowing everything.
func (c *simCluster) describe(t *testing.T) {
	owners := c.current()
	c.mu.RLock()
	agents := slices.Clone(c.running)
	c.mu.RUnlock()
	shown := 0
	for _, a := range agents {
		var lacks []*simOwner
		for _, o := range owners {
			if a.info(o.n) == nil {
				lacks = append(lacks, o)
			}
		}
		if len(lacks) == 0 || shown == 5 {
			continue
		}
		shown++
		a.x.mu.Lock()
		t.Logf("%s lacks %d owners; ready %v, %d records, %d waiting, %d partial, %d quests, links %d", a.node, len(lacks), a.x.ready, len(a.x.records), len(a.x.waiting), len(a.x.partial), len(a.x.quests), len(a.x.links))
		for node, p := range a.x.peers {
			if p.reason != "" {
				t.Logf("  %s: %s until %v", node, p.reason, time.Until(p.until))
			}
		}
		o := lacks[0]
		hosts, _ := a.Hosts(o.key)
		t.Logf("  owner %d on %v: quest %+v", o.n, hosts, a.x.quests[o.key])
		a.x.mu.Unlock()
		for _, b := range agents {
			b.x.mu.Lock()
			if r := b.x.records[o.key]; r != nil && slices.Contains(hosts, b.node) {
				t.Logf("  %s has the record of %s: valid %v; knows %v", b.node, r.node, b.x.valid(r, hosts), b.info(o.n) != nil)
			}
			b.x.mu.Unlock()
		}
	}
}

// missing is how many owners some agent does not know.
func (c *simCluster) missing() int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	n, live := 0, int32(c.live.Load())
	for _, o := range c.owners {
		if o.knowing.Load() < live {
			n++
		}
	}
	return n
}

// current are the owners of now.
func (c *simCluster) current() []*simOwner {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var out []*simOwner
	for _, o := range c.list {
		if c.owners[o.key] != nil {
			out = append(out, o)
		}
	}
	return out
}

// coldStart starts an agent on every node within the spread. Its key is on its
// pod a second later.
func (c *simCluster) coldStart(t *testing.T, spread time.Duration) simRow {
	c.mark()
	begun := time.Now()
	publishing := c.publishing()
	for n := range c.nodes {
		time.AfterFunc(rand.N(spread), func() {
			a := c.start(n)
			time.AfterFunc(rand.N(time.Second), func() { c.seat(n, a.id.Fingerprint()) })
		})
	}
	time.Sleep(spread + time.Second)
	known := c.settle(t, begun)
	publishing()
	return c.row("cold start", c.current(), begun, known)
}

// publishing tells of members that changed until the function that it returns is
// called.
func (c *simCluster) publishing() func() {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				c.publish()
			case <-stop:
				c.publish()
				return
			}
		}
	}()
	return func() { close(stop); <-stopped; time.Sleep(2 * simWatch) }
}

// churn has 100 owners come in a minute, and as many go.
func (c *simCluster) churn(d time.Duration) []*simOwner {
	var came []*simOwner
	old := c.current()
	for end, n := time.Now().Add(d), 0; time.Now().Before(end); n++ {
		o := c.newOwner(time.Now())
		c.mu.RLock()
		nodes := slices.DeleteFunc(slices.Clone(o.hosted.Load().nodes), func(node string) bool { return c.dead[simNumber(node)] })
		c.mu.RUnlock()
		if len(nodes) == 0 {
			nodes = []string{simNode(simZones*rand.IntN(c.nodes/simZones-1) + 1)}
		}
		// Its pods become Ready one after the other.
		o.host(nodes[:1])
		c.tell(o)
		for n := 2; n <= len(nodes); n++ {
			time.AfterFunc(time.Duration(n-1)*rand.N(400*time.Millisecond), func() {
				if len(o.hosted.Load().nodes) < n {
					o.host(nodes[:n])
					c.tell(o)
				}
			})
		}
		came = append(came, o)
		if n < len(old) {
			c.remove(old[n])
		}
		time.Sleep(time.Minute / 100)
	}
	return came
}

// rollout exchanges the agents of every tenth node, beginning with the given one:
// the new one runs beside the old one for some seconds.
func (c *simCluster) rollout(t *testing.T, from int) time.Duration {
	begun := time.Now()
	publishing := c.publishing()
	var old, fresh []*simAgent
	for n := from; n < c.nodes; n += 10 {
		c.mu.RLock()
		a := c.agents[n]
		c.mu.RUnlock()
		b := c.start(n)
		c.seat(n, a.id.Fingerprint(), b.id.Fingerprint())
		old, fresh = append(old, a), append(fresh, b)
	}
	known := c.settle(t, begun)
	time.Sleep(max(0, 15*time.Second-known))
	for i, a := range old {
		a.end(false, fresh[i])
		c.seat(a.n, fresh[i].id.Fingerprint())
	}
	c.settle(t, begun)
	publishing()
	return known
}

// loseZone takes every machine of a zone away, and after a while its pods.
func (c *simCluster) loseZone(zone int) {
	for n := zone; n < c.nodes; n += simZones {
		c.mu.RLock()
		a := c.agents[n]
		c.mu.RUnlock()
		a.end(true, nil)
	}
	time.AfterFunc(simNotReady, func() {
		for n := zone; n < c.nodes; n += simZones {
			c.seat(n)
		}
		c.publish()
		for _, o := range c.current() {
			nodes := o.hosted.Load().nodes
			left := slices.DeleteFunc(slices.Clone(nodes), func(node string) bool { return simNumber(node)%simZones == zone })
			switch {
			case len(left) == len(nodes):
			case len(left) == 0:
				c.remove(o)
			default:
				o.host(left)
				c.tell(o)
			}
		}
	})
}

func simNumber(node string) int {
	n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(node, "node-"), ".example"))
	if err != nil {
		panic(err)
	}
	return n
}

// simulate runs all phases of a cluster.
func simulate(t *testing.T, nodes, owners int) (rows []simRow) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(nodes, owners)
		began := time.Now()
		step := func(r simRow) {
			rows = append(rows, r)
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			t.Logf("%d nodes, %s: %d collects, %d owners came, calls %.1f (most %.0f), sent %.0f kB (most %.0f kB), all known after %v; at %v, heap %d MB",
				r.nodes, r.phase, r.collects, r.owners, r.calls.mean, r.calls.most, r.sent.mean/1e3, r.sent.most/1e3, r.known.Round(time.Millisecond), time.Since(began).Round(time.Second), m.HeapAlloc>>20)
		}
		step(c.coldStart(t, 5*time.Second))

		c.mark()
		begun := time.Now()
		time.Sleep(2 * time.Minute)
		step(c.row("nothing happens", nil, begun, 0))

		c.mark()
		begun = time.Now()
		came := c.churn(3 * time.Minute)
		took := time.Since(begun)
		c.settle(t, time.Now())
		r := c.row("100 owners a minute", came, begun, 0)
		r.lasted = took.Minutes()
		step(r)

		c.mark()
		begun = time.Now()
		known := c.rollout(t, 3)
		step(c.row("rollout of a tenth", nil, begun, known))

		c.mark()
		begun = time.Now()
		c.loseZone(0)
		came = c.churn(time.Minute)
		c.settle(t, begun)
		step(c.row("a zone is lost, 100 owners a minute", came, begun, 0))

		c.mu.RLock()
		agents := slices.Clone(c.running)
		c.mu.RUnlock()
		for _, a := range agents {
			a.end(false, nil)
		}
		time.Sleep(time.Minute) // timers
	})
	return rows
}

func checkSimulation(t *testing.T, rows []simRow) {
	t.Helper()
	if len(rows) != 5 {
		t.Fatalf("%d phases", len(rows))
	}
	owners := rows[0].owners // at the start
	for _, r := range rows {
		// What an agent has collected that is lost is collected once more at most.
		if most := float64(r.owners)*simCollects + float64(owners)*(simCollects-1); r.collects < r.owners || r.phase != "cold start" && float64(r.collects) > most {
			t.Errorf("%d nodes, %s: %d collects of %d owners", r.nodes, r.phase, r.collects, r.owners)
		}
		switch r.phase {
		case "cold start":
			if float64(r.collects) > float64(r.owners)*simCollects {
				t.Errorf("%d nodes, %s: %d collects of %d owners", r.nodes, r.phase, r.collects, r.owners)
			}
			if r.known > simColdStart {
				t.Errorf("%d nodes, %s: everything is known after %v, want %v at most", r.nodes, r.phase, r.known, simColdStart)
			}
		case "100 owners a minute":
			if most := r.calls.most / r.lasted; most > simCalls {
				t.Errorf("%d nodes, %s: an agent made %.0f calls a minute, want %d at most", r.nodes, r.phase, most, simCalls)
			}
		}
	}
}

func TestClusterOf100NodesCollectsEachOwnerOnce(t *testing.T) {
	checkSimulation(t, simulate(t, 100, 1000))
}

func TestClusterOf300NodesCollectsEachOwnerOnce(t *testing.T) {
	checkSimulation(t, simulate(t, 300, 300))
}
