package peer_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/agent/peer"
	"github.com/fingerpost/fingerpost/nodecache"
)

// asked is a network that notes who is asked for a stream.
type asked struct {
	memory
	mu    sync.Mutex
	nodes []string
}

func (a *asked) Sync(ctx context.Context, to peer.Member) (peer.ClientStream, error) {
	a.mu.Lock()
	a.nodes = append(a.nodes, to.Node)
	a.mu.Unlock()
	return a.memory.Sync(ctx, to)
}

// An agent that starts asks the nearest of those whose word it wants, for
// everything, and then the others for the rest.
func TestNearestPeerIsAskedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		const nodes = 12
		for n := range nodes {
			w.add(t, fmt.Sprint("n", n))
		}
		cost := func(m peer.Member) time.Duration {
			var n int
			if _, err := fmt.Sscanf(m.Node, "n%d", &n); err != nil {
				return time.Hour
			}
			return time.Duration((n*7)%nodes) * time.Microsecond
		}
		for i := range 4 {
			node := fmt.Sprint("late", i)
			id, err := peer.NewIdentity(node)
			if err != nil {
				t.Fatal(err)
			}
			m := &member{w: w, node: node, identity: id, dir: nodecache.New(nodecache.Options{}), metrics: prometheus.NewRegistry(), takes: 10 * time.Millisecond}
			to := &asked{memory: memory{w, node}}
			m.start(t, peer.Options{Network: to, Cost: cost})
			w.mu.Lock()
			w.agents = append(w.agents, m)
			w.mu.Unlock()
			w.introduce()
			time.Sleep(20 * time.Second)
			to.mu.Lock()
			got := slices.Clone(to.nodes)
			to.mu.Unlock()
			if len(got) < 3 {
				t.Fatalf("%s has asked %v", node, got)
			}
			price := func(node string) time.Duration { return cost(peer.Member{Node: node}) }
			if first := slices.MinFunc(got, func(a, b string) int { return cmp.Compare(price(a), price(b)) }); got[0] != first {
				t.Errorf("%s has asked %v, in this order, though %s is the nearest", node, got, first)
			}
		}
		w.end()
	})
}
