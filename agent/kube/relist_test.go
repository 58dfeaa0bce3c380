package kube

import (
	"errors"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// deadServer fails every request, and notes when it came.
type deadServer struct {
	// mu guards asked.
	mu    sync.Mutex
	asked []time.Time
}

func (s *deadServer) RoundTrip(*http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, time.Now())
	return nil, errors.New("dead")
}

// 200 agents with 50,000 pods whose version is forgotten in one moment: on the
// average two of their lists begin in 100 ms. Those that have nothing to serve
// do not wait, nor do those that have waited and failed, but for the backoff.
func TestListsOfManySourcesAreSpread(t *testing.T) {
	const agents, window, most = 200, 100 * time.Millisecond, 16
	store := fill(t, 50_000)
	synctest.Test(t, func(t *testing.T) {
		server := &deadServer{}
		c, err := NewCluster(&rest.Config{Host: "http://192.0.2.1", Transport: server}, "test", store, nil)
		if err != nil {
			t.Fatal(err)
		}
		yes := true
		var healths []*health
		var lists []func()
		for range agents {
			h := &health{what: "pods", log: c.log}
			lw := cache.ToListerWatcherWithContext(c.listWatch(c.client, "pods", h, func(error) {}, nil))
			healths = append(healths, h)
			lists = append(lists, func() {
				if w, err := lw.WatchWithContext(t.Context(), metav1.ListOptions{SendInitialEvents: &yes}); err == nil {
					w.Stop()
					t.Error("a dead server lists")
				}
			})
		}
		round := func() []time.Duration {
			server.asked = nil
			began := time.Now()
			var running sync.WaitGroup
			for _, list := range lists {
				running.Go(list)
			}
			running.Wait()
			after := make([]time.Duration, len(server.asked))
			for i, at := range server.asked {
				after[i] = at.Sub(began)
			}
			slices.Sort(after)
			if len(after) != agents {
				t.Fatalf("%d lists", len(after))
			}
			return after
		}
		if after := round(); after[agents-1] != 0 {
			t.Errorf("the first list waits %v", after[agents-1])
		}
		for _, h := range healths {
			h.current(true)
		}
		after := round()
		busiest := 0
		for i, at := range after {
			end, _ := slices.BinarySearch(after, at+window)
			busiest = max(busiest, end-i)
		}
		if last := after[agents-1]; busiest > most || last > 10*time.Second || last < 5*time.Second {
			t.Errorf("%d lists within %v, the last after %v", busiest, window, last)
		}
		t.Logf("%d lists within %v at most, the last after %v", busiest, window, after[agents-1])
		if after := round(); after[agents-1] != 0 {
			t.Errorf("after a failure a list waits %v", after[agents-1])
		}

		// One that has resumed and whose version is refused late.
		h := &health{what: "pods", log: c.log}
		h.current(true)
		lw := cache.ToListerWatcherWithContext(c.listWatch(c.client, "pods", h, func(error) {}, &resumption{c: c, state: resumeAccepted}))
		began := time.Now()
		_, _ = lw.WatchWithContext(t.Context(), metav1.ListOptions{SendInitialEvents: &yes})
		if d := time.Since(began); d != 0 {
			t.Errorf("one that holds the pods of a checkpoint waits %v", d)
		}
	})
}

func TestTurnsOfFewPodsComeSoon(t *testing.T) {
	for pods, want := range map[int]time.Duration{0: time.Second, 5000: time.Second, 50_000: 10 * time.Second, 1_000_000: 30 * time.Second} {
		if got := relistSpread(pods); got != want {
			t.Errorf("%d pods: %v, want %v", pods, got, want)
		}
	}
}
