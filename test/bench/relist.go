package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

// relist is many sources that hold a version of which one API server knows
// nothing any more, in the same moment: how many of them list at once.
var relist = benchmark{names: []string{relistName}, run: runRelist}

const relistName = "relist/200-agents"

// burst is the time within which lists count as at once.
const burst = 100 * time.Millisecond

func runRelist(ctx context.Context, r *run) ([]result, error) {
	agents, pods := 200, 1000
	if r.short {
		agents = 20
	}
	api, err := harness.NewAPIServer()
	if err != nil {
		return nil, fmt.Errorf("%w (make test brings it)", err)
	}
	defer api.Close()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}
	if _, err := api.Client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if err := api.WritePods(ctx, clusterPods(0, pods, 10)); err != nil {
		return nil, err
	}
	if err := awaitPods(ctx, api.Config, pods); err != nil {
		return nil, err
	}
	if err := api.Again(); err != nil {
		return nil, err
	}
	if err := awaitPods(ctx, api.Config, pods); err != nil {
		return nil, err
	}
	first := &lister{}
	end, err := first.start(ctx, api.Config, nodecache.Unit{})
	if err != nil {
		return nil, err
	}
	stale, err := first.checkpoint(ctx)
	end()
	if err != nil {
		return nil, err
	}
	stale.Version = 1

	listers := make([]*lister, agents)
	for i := range listers {
		listers[i] = &lister{}
		end, err := listers[i].start(ctx, api.Config, stale)
		if err != nil {
			return nil, err
		}
		defer end()
	}
	var begun, done []time.Time
	for _, l := range listers {
		if err := l.synced(ctx); err != nil {
			return nil, err
		}
		b, d := l.times()
		if len(b) != 1 {
			return nil, fmt.Errorf("a source has listed %d times", len(b))
		}
		begun, done = append(begun, b[0]), append(done, d)
	}
	slices.SortFunc(begun, time.Time.Compare)
	slices.SortFunc(done, time.Time.Compare)
	most := 0
	for i := range begun {
		end, _ := slices.BinarySearchFunc(begun, begun[i].Add(burst), time.Time.Compare)
		most = max(most, end-i)
	}
	open, peak := 0, 0
	for i, j := 0, 0; i < len(begun); {
		if begun[i].Before(done[j]) {
			i, open = i+1, open+1
			peak = max(peak, open)
		} else {
			j, open = j+1, open-1
		}
	}
	r.progress("%d stale sources of %d pods: lists begin over %v, at most %d within %v, %d open at most, all synced %v after the first list",
		agents, pods, begun[len(begun)-1].Sub(begun[0]).Round(time.Millisecond), most, burst, peak, done[len(done)-1].Sub(begun[0]).Round(time.Millisecond))
	return []result{{Name: relistName, Value: float64(most), Unit: "in 100 ms", Baseline: float64(agents), Ratio: float64(agents) / float64(most)}}, nil
}

// lister is a source whose lists of pods are watched on their way out.
type lister struct {
	source *kube.Cluster

	// mu guards the times.
	mu    sync.Mutex
	begun []time.Time
	done  time.Time
}

// start runs the source on a connection of its own until the function that it
// returns is called.
func (l *lister) start(ctx context.Context, config *rest.Config, from nodecache.Unit) (func(), error) {
	config = rest.CopyConfig(config)
	config.Dial = (&net.Dialer{}).DialContext // not shared
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &listWatcher{l, next} })
	log := slog.New(slog.DiscardHandler)
	var err error
	if l.source, err = kube.NewCluster(config, "bench", kube.NewStore(nodecache.New(nodecache.Options{}), log), log); err != nil {
		return nil, err
	}
	l.source.Resume(from)
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = l.source.Run(ctx) })
	running.Go(func() {
		select {
		case <-l.source.Synced():
			l.mu.Lock()
			l.done = time.Now()
			l.mu.Unlock()
		case <-ctx.Done():
		}
	})
	return func() {
		cancel()
		running.Wait()
		harness.CloseIdleConnections(config)
	}, nil
}

func (l *lister) synced(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, done := l.times(); !done.IsZero() {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.New("a source does not sync")
		}
	}
}

func (l *lister) checkpoint(ctx context.Context) (nodecache.Unit, error) {
	if err := l.synced(ctx); err != nil {
		return nodecache.Unit{}, err
	}
	return l.source.Checkpoint(ctx)
}

func (l *lister) times() ([]time.Time, time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.begun), l.done
}

// listWatcher notes when a list of pods is asked for.
type listWatcher struct {
	l    *lister
	next http.RoundTripper
}

func (w *listWatcher) RoundTrip(req *http.Request) (*http.Response, error) {
	q := req.URL.Query()
	lists := q.Get("watch") == "" || q.Get("sendInitialEvents") == "true"
	if lists && q.Get("fieldSelector") == "" && strings.HasSuffix(req.URL.Path, "/v1/pods") {
		w.l.mu.Lock()
		w.l.begun = append(w.l.begun, time.Now())
		w.l.mu.Unlock()
	}
	return w.next.RoundTrip(req)
}
