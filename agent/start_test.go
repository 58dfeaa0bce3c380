package agent_test

import (
	"fmt"
	"testing"

	"github.com/fingerpost/fingerpost/agent"
)

const (
	startOwners   = 60
	startReplicas = 3
)

// newStart is an agent that begins with 180 pods of 60 owners.
func newStart(t *testing.T) *wired {
	w := newWired(t)
	for n := range startOwners {
		for i := range startReplicas {
			w.api.put(w.pod(n, i))
		}
	}
	return w
}

// visible waits until all pods are in the directory and so many owners known.
func (w *wired) visible(known int) {
	w.t.Helper()
	eventually(w.t, func() error {
		st, err := w.status()
		if err == nil && (st.Pods != startOwners*startReplicas || st.Owners["known"] != known) {
			err = fmt.Errorf("%d pods, owners %v, want %d known", st.Pods, st.Owners, known)
		}
		return err
	})
	for n := range startOwners {
		for i := range startReplicas {
			if p := w.dir.PodAt(addrOf(podIP(n, i))); p == nil || p.Owner != ownerOf(n) {
				w.t.Fatalf("at %s is %v, want a pod of %v", podIP(n, i), p, ownerOf(n))
			}
		}
	}
}

// collects fails if not every owner was asked once.
func (w *wired) collects() {
	w.t.Helper()
	for n := range startOwners {
		if err := w.once(n); err != nil {
			w.t.Errorf("owner %d: %v", n, err)
		}
	}
}

// readyNow is what /ready says at this moment.
func (w *wired) readyNow() bool {
	w.t.Helper()
	var r agent.Readiness
	if err := get(w.instance(), "/ready", &r); err != nil {
		w.t.Fatal(err)
	}
	return r.Ready
}

// One of the sixty servers is slow: readiness comes once it has answered the
// one question that it got, and addresses do not wait for that.
func TestReadinessWaitsForASlowServerOnce(t *testing.T) {
	w := newStart(t)
	release := w.pods.hold(7)
	defer release()
	w.run()
	if err := w.pods.asked(7); err != nil {
		t.Fatal(err)
	}
	w.visible(startOwners - 1)
	if w.readyNow() {
		t.Error("ready before the slow server has answered")
	}
	w.collects()
	release()
	w.ready(true)
	w.collects()
}

// All are slow: as many rounds as the limit makes of them.
func TestReadinessTakesAsManyRoundsAsTheLimitAsks(t *testing.T) {
	const limit = 16
	w := newStart(t)
	w.config.Limits.Collect = fmt.Sprint(limit)
	var release []func()
	for n := range startOwners {
		release = append(release, w.pods.hold(n))
		defer release[n]()
	}
	w.run()
	rounds := 0
	for done := 0; done < startOwners; rounds++ {
		now := min(limit, startOwners-done)
		// All that may be asked at once are, and no more.
		var asked []int
		eventually(t, func() error {
			if asked = w.pods.waiting(); len(asked) != now {
				return fmt.Errorf("%d servers are asked in round %d, want %d", len(asked), rounds+1, now)
			}
			return nil
		})
		w.visible(done)
		if w.readyNow() {
			t.Fatalf("ready in round %d", rounds+1)
		}
		for _, n := range asked {
			release[n]()
		}
		done += now
		w.visible(done)
	}
	w.ready(true)
	if want := (startOwners + limit - 1) / limit; rounds != want {
		t.Errorf("%d rounds, want %d", rounds, want)
	}
	w.collects()
}

// istio#50057: a start that took long was taken for a dead process. While 20,000
// pods come slowly the agent is alive and not ready, and says why; it stops at no
// point of the list, and all of them are there at its end.
func TestSlowListOfManyPodsIsALivingAgentThatIsNotReady(t *testing.T) {
	pods := 20_000
	if testing.Short() {
		pods = 2_000
	}
	w := newWired(t)
	const each = 100
	for i := range pods {
		p := w.pod(i/each, i%each)
		p.Annotations = map[string]string{"fingerpost.dev/services": "50051=" + serviceOf(i/each)}
		w.api.put(p)
	}
	stops := map[int]chan struct{}{0: nil, pods / 3: nil, pods - 1: nil, pods: nil} // the last is before the bookmark
	reached := make(chan int, len(stops))
	for i := range stops {
		stops[i] = make(chan struct{})
	}
	w.api.before = func(i int) {
		if stop := stops[i]; stop != nil {
			reached <- i
			<-stop
		}
	}
	w.run()
	for range len(stops) {
		at := <-reached
		var live struct{ Live bool }
		if err := get(w.instance(), "/live", &live); err != nil || !live.Live {
			t.Errorf("after %d pods: alive: %v, %v", at, live.Live, err)
		}
		var ready agent.Readiness
		if err := get(w.instance(), "/ready", &ready); err != nil || ready.Ready || ready.Reason == "" {
			t.Errorf("after %d pods: %+v, %v", at, ready, err)
		}
		if st, err := w.status(); err != nil || st.Source.Synced || st.Gate != "closed" {
			t.Errorf("after %d pods: %+v, %v", at, st, err)
		}
		close(stops[at])
	}
	eventually(t, func() error {
		st, err := w.status()
		if err == nil && (st.Pods != pods || st.Gate != "open") {
			err = fmt.Errorf("%d pods, gate %s", st.Pods, st.Gate)
		}
		return err
	})
	w.ready(true)
}
