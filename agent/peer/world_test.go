package peer_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/agent/peer"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/nodecache"
)

var address = netip.MustParseAddrPort("192.0.2.1:50051")

// Sixty agents start together. Each has streams from four, and yet all know all
// soon, of owners that one of them collected, and without one Fetch.
func TestAllAgentsLearnFromAFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		const nodes, owners = 60, 100
		for n := range nodes {
			w.add(t, fmt.Sprint("n", n))
		}
		for o := range owners {
			for p := range 3 {
				w.see(memPod(fmt.Sprint("o", o), fmt.Sprint("n", (o*7+p*13)%nodes)))
			}
		}
		w.introduce()
		time.Sleep(8 * time.Second)
		for o := range owners {
			name := fmt.Sprint("o", o)
			if err := know(w.agents, name); err != nil {
				t.Fatal(err)
			}
			if c := w.collectsOf(name); len(c) != 1 {
				t.Errorf("%s was collected by %v", name, c)
			}
		}
		fetches := 0
		for _, a := range w.agents {
			fetches += w.fetchesOf(a.node)
			connected := 0
			for _, p := range a.exchange.Status() {
				if p.State == peer.StateConnected {
					connected++
				}
			}
			if connected > 4 {
				t.Errorf("the agent of %s has %d streams", a.node, connected)
			}
		}
		if fetches > 0 {
			t.Errorf("%d fetches", fetches)
		}
		// Churn: what comes later arrives by the open streams.
		begun := time.Now()
		for o := range owners {
			w.see(memPod(fmt.Sprint("later", o), fmt.Sprint("n", o%nodes)), memPod(fmt.Sprint("later", o), fmt.Sprint("n", (o+11)%nodes)))
			time.Sleep(600 * time.Millisecond)
		}
		time.Sleep(5 * time.Second)
		for o := range owners {
			name := fmt.Sprint("later", o)
			if err := know(w.agents, name); err != nil {
				t.Fatal(err)
			}
			if c := w.collectsOf(name); len(c) != 1 {
				t.Errorf("%s was collected by %v", name, c)
			}
		}
		for _, a := range w.agents {
			requests := counter(t, a, "fingerpost_peer_requests_total") + float64(w.fetchesOf(a.node))
			if perMinute := requests / time.Since(begun).Minutes(); perMinute > 50 {
				t.Errorf("the agent of %s made %.0f requests in a minute", a.node, perMinute)
			}
		}
		w.end()
	})
}

func (w *world) end() {
	for _, a := range w.agents {
		a.stop()
	}
}

func counter(t *testing.T, a *member, name string) float64 {
	t.Helper()
	return (&agent{metrics: a.metrics}).metric(t, name, "")
}

// Check 46: a peer that does not answer costs a second, whoever waits, and is
// not asked again for a while.
func TestPeerThatDoesNotAnswerCostsASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for n := range 3 {
			w.add(t, fmt.Sprint("n", n))
		}
		w.introduce()
		time.Sleep(5 * time.Second) // streams are open
		// Owners of which the agent of n1 would be the first, n2's the second.
		var owners []string
		for i := range 100 {
			if len(owners) == 3 {
				break
			}
			name := fmt.Sprint("o", i)
			if peer.Head(key(name), "n1", "n2") == "n1" {
				w.agents[0].dir.UpsertPods([]*nodecache.Pod{memPod(name, "n1"), memPod(name, "n2")})
				owners = append(owners, name)
			}
		}
		w.kill("n1")
		for _, name := range owners {
			w.agents[2].dir.UpsertPods([]*nodecache.Pod{memPod(name, "n1"), memPod(name, "n2")})
		}
		begun := time.Now()
		a := w.agents[0]
		for _, name := range owners {
			a.exchange.Want(key(name))
		}
		for know(w.agents[:1], owners[0]) != nil || know(w.agents[:1], owners[2]) != nil {
			time.Sleep(10 * time.Millisecond)
			if time.Since(begun) > 10*time.Second {
				t.Fatal("not known after 10 seconds")
			}
		}
		// A second for n1, one for the agent of n2 to find that too, and the ways.
		if took := time.Since(begun); took > 4*time.Second {
			t.Errorf("it took %s", took)
		}
		if got := w.collectsOf(owners[0]); !slices.Equal(got, []string{"n2"}) {
			t.Errorf("collected by %v", got)
		}
		w.end()
	})
}

// Owners that somebody waits for at the same time are one Fetch to each agent
// in charge, up to its bound.
func TestWishesOfOneMomentAreOneFetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for n := range 3 {
			w.add(t, fmt.Sprint("n", n))
		}
		w.agents[1].takes, w.agents[2].takes = time.Hour, time.Hour // so that no record comes by itself
		w.introduce()
		time.Sleep(5 * time.Second)
		before := w.fetchesOf("n0")
		for o := range 200 {
			w.see(memPod(fmt.Sprint("o", o), "n1"), memPod(fmt.Sprint("p", o), "n2"))
		}
		for o := range 200 {
			w.agents[0].exchange.Want(key(fmt.Sprint("o", o)))
			w.agents[0].exchange.Want(key(fmt.Sprint("p", o)))
		}
		time.Sleep(400 * time.Millisecond)
		if n := w.fetchesOf("n0") - before; n != 2 {
			t.Errorf("%d fetches for 400 owners on two nodes", n)
		}
		w.end()
	})
}

// An agent that waits for much and gets nothing asks no more than its budget
// allows.
func TestFetchesStayWithinTheirBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		const nodes = 40
		for n := range nodes {
			w.add(t, fmt.Sprint("n", n)).takes = 10 * time.Hour
		}
		w.introduce()
		for o := range nodes * 5 {
			w.see(memPod(fmt.Sprint("o", o), fmt.Sprint("n", o%nodes)))
		}
		time.Sleep(2 * time.Minute)
		before := w.fetchesOf("n0")
		time.Sleep(3 * time.Minute)
		if n := w.fetchesOf("n0") - before; n == 0 || n > 3*11 {
			t.Errorf("%d fetches in 3 minutes, of which nobody waits for one", n)
		}
		w.end()
	})
}

// The gate waits for owners that are collected elsewhere, and not for one whose
// agent cannot be asked.
func TestFirstAttemptOfAnOwnerElsewhereIsAnAttemptToLearnIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for n := range 3 {
			w.add(t, fmt.Sprint("n", n))
		}
		w.agents[1].takes = 1500 * time.Millisecond
		w.kill("n2")
		w.see(memPod("slow", "n1"), memPod("lost", "n2"), memPod("alone", "n9"))
		w.introduce()
		begun := time.Now()
		for _, owner := range []string{"slow", "alone", "lost"} { // the one first that waits for nothing else
			known := owner == "slow"
			if err := w.agents[0].exchange.Wait(t.Context(), key(owner)); err != nil {
				t.Fatal(err)
			}
			if got := know(w.agents[:1], owner) == nil; got != known {
				t.Errorf("after the wait for %s it is known: %v", owner, got)
			}
		}
		if took := time.Since(begun); took > 15*time.Second || took < time.Second {
			t.Errorf("it took %s", took)
		}
		w.end()
	})
}

// When the pods on the collector's node are gone, the agent that is in charge
// now vouches for what it knows: one that comes new learns it without a collect.
func TestNewcomerLearnsWhatWasCollectedOnANodeThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for n := range 4 {
			w.add(t, fmt.Sprint("n", n))
		}
		var pods []*nodecache.Pod
		for n := range 4 {
			pods = append(pods, memPod("a", fmt.Sprint("n", n)))
		}
		w.see(pods...)
		w.introduce()
		time.Sleep(7 * time.Second)
		by := w.collectsOf("a")
		if len(by) != 1 {
			t.Fatalf("collected by %v", by)
		}
		for _, a := range w.agents {
			a.dir.RemovePod("a-" + by[0])
		}
		time.Sleep(time.Second)
		late := w.add(t, "n4")
		for _, p := range pods {
			if p.Node != by[0] {
				late.dir.UpsertPod(p)
			}
		}
		late.dir.UpsertPod(memPod("a", "n4"))
		w.introduce()
		time.Sleep(8 * time.Second)
		if err := know(w.agents, "a"); err != nil {
			t.Error(err)
		}
		if got := w.collectsOf("a"); len(got) != 1 {
			t.Errorf("collected by %v", got)
		}
		w.end()
	})
}

// An agent that starts again has another key. It signs anew what its checkpoint
// says, so that nobody has to ask again.
func TestRestartedAgentSignsAnewWhatItKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for n := range 3 {
			w.add(t, fmt.Sprint("n", n))
		}
		w.see(memPod("a", "n0"))
		w.introduce()
		time.Sleep(6 * time.Second)
		old := w.agents[0]
		old.stop()
		again := w.add(t, "n0")
		w.mu.Lock()
		w.agents = w.agents[1:]
		w.mu.Unlock()
		again.dir.Restore(old.dir.Snapshot(), time.Now())
		again.dir.UpsertPod(memPod("a", "n0"))
		w.introduce()
		time.Sleep(7 * time.Second)
		late := w.add(t, "n3")
		late.dir.UpsertPod(memPod("a", "n0"))
		w.introduce()
		time.Sleep(7 * time.Second)
		if err := know(w.agents, "a"); err != nil {
			t.Error(err)
		}
		if got := w.collectsOf("a"); len(got) != 1 {
			t.Errorf("collected by %v", got)
		}
		w.end()
	})
}

// A watch that is behind does not lose what others say meanwhile.
func TestRecordThatComesBeforeThePodIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for n := range 3 {
			w.add(t, fmt.Sprint("n", n))
		}
		w.introduce()
		time.Sleep(5 * time.Second)
		for _, a := range w.agents[1:] {
			a.dir.UpsertPod(memPod("a", "n1"))
		}
		time.Sleep(2 * time.Second)
		w.agents[0].dir.UpsertPod(memPod("a", "n1"))
		synctest.Wait()
		if err := know(w.agents[:1], "a"); err != nil {
			t.Error(err)
		}
		if n := w.fetchesOf("n0"); n > 0 {
			t.Errorf("%d fetches", n)
		}
		w.end()
	})
}

// Failures are told as well: nobody else asks, and everybody can say why.
func TestFailureOfTheCollectorIsKnownToAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for n := range 3 {
			w.add(t, fmt.Sprint("n", n)).takes = time.Hour
		}
		w.see(memPod("a", "n0"), memPod("a", "n1"))
		w.introduce()
		time.Sleep(5 * time.Second)
		by := w.collectsOf("a")
		next := time.Now().Add(time.Hour)
		for _, a := range w.agents {
			if len(by) == 1 && a.node == by[0] {
				o := a.dir.Owner(key("a"))
				if err := a.dir.Hang(nodecache.Reservation{Key: o.Key, Generation: o.Generation}, "it does not answer", next); err != nil {
					t.Fatal(err)
				}
			}
		}
		time.Sleep(time.Minute)
		for _, a := range w.agents {
			o := a.dir.Owner(key("a"))
			if o.Knowledge != nodecache.Failed || o.Reason != "it does not answer" || !o.Hung || o.NextTry.UnixMilli() != next.UnixMilli() {
				t.Errorf("the agent of %s has %+v", a.node, o)
			}
		}
		if got := w.collectsOf("a"); len(got) != 1 {
			t.Errorf("collected by %v", got)
		}
		w.end()
	})
}

// Pods whose images nobody has asked are the business of the first of the nodes
// that have such a pod, whoever is in charge of the owner.
func TestPodsOfOtherImagesAreAskedOnTheirNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		for n := range 4 {
			w.add(t, fmt.Sprint("n", n))
		}
		w.introduce()
		running := func(images, node string) *nodecache.Pod {
			p := memPod("a", node)
			c := *p.Common
			c.Images = images
			p.Common = &c
			return p
		}
		for n := range 4 {
			w.see(running("", fmt.Sprint("n", n)))
		}
		time.Sleep(8 * time.Second)
		inCharge := func() (nodes []string) {
			for _, a := range w.agents {
				if a.exchange.Place(a.dir.Owner(key("a"))) == collect.OwnNode {
					nodes = append(nodes, a.node)
				}
			}
			return nodes
		}
		before := inCharge()
		if len(before) != 1 {
			t.Fatalf("in charge: %v", before)
		}
		images := map[string]string{before[0]: "x"}
		for n := range 4 {
			node := fmt.Sprint("n", n)
			if images[node] == "" {
				images[node] = "y"
			}
			w.see(running(images[node], node))
		}
		learn := func(images ...string) {
			info := serves("pkg.a")
			info.Images, info.Collected = images, time.Now().Add(time.Second)
			for _, a := range w.agents {
				if err := a.dir.Learn(key("a"), "n0", info); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(2 * time.Second)
		}
		learn("x")
		odd := 0
		for _, node := range inCharge() {
			if images[node] == "y" {
				odd++
			}
		}
		if odd != 1 || len(inCharge()) != 2 {
			t.Errorf("in charge while nobody has asked y: %v", inCharge())
		}
		learn("x", "y")
		if got := inCharge(); !slices.Equal(got, before) {
			t.Errorf("in charge: %v, want %v", got, before)
		}
		w.end()
	})
}

// istio#57809: thousands of peers that come back at the same time. What they ask
// costs no more than the budget, and each gets its share of it.
func TestPeersThatAskTooOftenAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		x := w.add(t, "n0").exchange
		w.introduce()
		answered := map[string]int{}
		for range 60 { // a minute
			for p := range 2500 {
				from := fmt.Sprint("p", p)
				if _, err := x.ServeFetch(t.Context(), from, &peerv1.FetchRequest{}); err == nil {
					answered[from]++
				}
			}
			time.Sleep(time.Second)
		}
		sum := 0
		for _, n := range answered {
			sum += n
		}
		if most := 400 + 100*60; sum > most || sum < most/2 {
			t.Errorf("%d answers in a minute, the budget is %d", sum, most)
		}
		one := 0
		for range 1000 {
			if _, err := x.ServeFetch(t.Context(), "greedy", &peerv1.FetchRequest{}); err == nil {
				one++
			}
		}
		if one > 21 {
			t.Errorf("one peer got %d answers at once", one)
		}
		w.end()
	})
}
