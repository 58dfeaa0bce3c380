package peer

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

func nodes(n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprint("node-", i))
	}
	return out
}

func owner(i int) nodecache.OwnerKey {
	return nodecache.OwnerKey{UID: fmt.Sprintf("3f1c-%d", i), Revision: "5d9"}
}

func any1(string) bool { return true }

// Two versions of the agent run side by side in a rollout, so that the ranking
// is for ever.
func TestRankingStaysWhatItIs(t *testing.T) {
	got := nodes(5)
	rank(owner(0), got)
	if want := []string{"node-0", "node-2", "node-1", "node-3", "node-4"}; !slices.Equal(got, want) {
		t.Errorf("ranking %v, want %v", got, want)
	}
	var heads []string
	for i := range 6 {
		heads = append(heads, first(owner(i), nodes(5), any1))
	}
	if want := []string{"node-0", "node-3", "node-3", "node-2", "node-4", "node-4"}; !slices.Equal(heads, want) {
		t.Errorf("heads %v, want %v", heads, want)
	}
}

func TestHeadDoesNotDependOnTheOrderOfNodesAndLeadsTheRanking(t *testing.T) {
	for i := range 100 {
		ns := nodes(7)
		ranked := slices.Clone(ns)
		rank(owner(i), ranked)
		slices.Reverse(ns)
		if h := first(owner(i), ns, any1); h != ranked[0] {
			t.Errorf("owner %d: head %s of %v", i, h, ranked)
		}
		gone := ranked[0]
		if h := first(owner(i), ns, func(n string) bool { return n != gone }); h != ranked[1] {
			t.Errorf("owner %d without %s: head %s of %v", i, gone, h, ranked)
		}
	}
	if h := first(owner(0), nodes(3), func(string) bool { return false }); h != "" {
		t.Errorf("head %q of nobody", h)
	}
}

func TestOwnersAreSharedOutEvenlyAndMoveOnlyWithTheirNode(t *testing.T) {
	const owners, n = 10000, 50
	load := map[string]int{}
	moved := 0
	for i := range owners {
		h := first(owner(i), nodes(n), any1)
		load[h]++
		if g := first(owner(i), nodes(n-1), any1); g != h {
			moved++
			if h != nodes(n)[n-1] {
				t.Fatalf("owner %d moved from %s to %s", i, h, g)
			}
		}
	}
	for node, l := range load {
		if mean := owners / n; math.Abs(float64(l-mean)) > 5*math.Sqrt(float64(mean)) {
			t.Errorf("%s has %d owners, the mean is %d", node, l, mean)
		}
	}
	if moved == 0 {
		t.Error("none moved")
	}
}

func TestHeadAllocatesNothing(t *testing.T) {
	ns, key := nodes(100), owner(1)
	if n := testing.AllocsPerRun(100, func() { first(key, ns, any1) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// rosterOf has n members in three zones.
func rosterOf(n int) *roster {
	var ms []Member
	for i, node := range nodes(n) {
		ms = append(ms, Member{Node: node, Zone: fmt.Sprint("z", i%3)})
	}
	return newRoster(ms)
}

// What one says reaches everybody by a short way, also where some are avoided by
// all, and nobody has more than four to listen to.
func TestEveryMemberReachesEveryOtherByAShortWay(t *testing.T) {
	for _, n := range []int{2, 3, 5, 50, 1000} {
		for _, lost := range []int{0, n / 10} {
			r := rosterOf(n)
			avoid := func(node string) bool { return r.byNode[node].hash%10 == 0 && lost > 0 }
			listeners := map[string][]string{}
			var there []string
			for _, s := range r.ring {
				if avoid(s.Node) {
					continue
				}
				there = append(there, s.Node)
				ns := r.neighbours(s.Node, "", avoid)
				if len(ns) > 4 || slices.Contains(ns, s.Node) || len(slices.Compact(slices.Sorted(slices.Values(ns)))) != len(ns) {
					t.Fatalf("neighbours %v of %s", ns, s.Node)
				}
				near := 0
				for _, m := range ns {
					listeners[m] = append(listeners[m], s.Node)
					if r.byNode[m].Zone == s.Zone {
						near++
					}
				}
				if n >= 50 && near < 2 {
					t.Errorf("%s in zone %s listens to %v", s.Node, s.Zone, ns)
				}
			}
			for _, from := range there[:min(len(there), 20)] {
				reached, wave, hops := map[string]bool{from: true}, []string{from}, 0
				for ; len(wave) > 0; hops++ {
					var next []string
					for _, node := range wave {
						for _, l := range listeners[node] {
							if !reached[l] {
								reached[l] = true
								next = append(next, l)
							}
						}
					}
					wave = next
				}
				if len(reached) != len(there) || hops > 14 {
					t.Errorf("%d of %d: %s reaches %d in %d hops", n, len(there), from, len(reached), hops)
				}
			}
		}
	}
}

// A node that comes or goes changes the neighbours of few.
func TestNeighboursAreStable(t *testing.T) {
	const n = 300
	was, is := rosterOf(n), rosterOf(n-1)
	never := func(string) bool { return false }
	changed := 0
	for _, s := range is.ring {
		for _, m := range was.neighbours(s.Node, "", never) {
			if !slices.Contains(is.neighbours(s.Node, "", never), m) {
				changed++
			}
		}
	}
	if changed > 20 {
		t.Errorf("%d of %d streams change", changed, 4*n)
	}
}
