//go:build kind

package e2e_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/agent/kube"
)

// callTimeout is the callers' deadline, and notReady how long Kubernetes takes
// at most to find that a node is gone (node-monitor-grace-period is 50 s) and
// what follows to reach every agent.
const (
	callTimeout = 10 * time.Second
	notReady    = 60 * time.Second
)

// nodeReady waits until a node is Ready, or is not.
func nodeReady(t *testing.T, node string, want bool) time.Duration {
	t.Helper()
	return eventually(t, ripe, func() error {
		if got := nodes(t)[node]; got != want {
			return fmt.Errorf("%s: Ready is %v, want %v", node, got, want)
		}
		return nil
	})
}

// lost watches the callers of the other nodes while a worker is lost and comes
// back, and returns what they saw, and for how long after the loss calls failed.
func lost(t *testing.T, node string, lose, back []string) (r *report, gone map[string]bool, found, late time.Duration) {
	t.Helper()
	settled(t, "app=cart", 3)
	gone = map[string]bool{}
	for _, p := range pods(t, shop, "app=cart") {
		if p.Spec.NodeName == node {
			gone[p.Name] = true
		}
	}
	if len(gone) == 0 {
		t.Fatalf("no server runs on %s", node)
	}
	w := watch(t, callers)
	for _, p := range pods(t, shop, callers) {
		if p.Spec.NodeName == node {
			w.exclude[p.Name] = true
		}
	}
	t.Cleanup(func() { _, _ = run(cleanup(t), "", "docker", back...) })
	docker(t, lose...)
	found = nodeReady(t, node, false)
	t.Logf("%s is found NotReady after %.0f s; every agent right %.1f s later", node, found.Seconds(), check(t).Seconds())
	// From here on nobody may be sent to the lost node: a second look at the
	// calls that ended later than the deadline of those that began before.
	eventually(t, ripe, func() error {
		if left := found + callTimeout + 10*time.Second - time.Since(w.start); left > 0 {
			return fmt.Errorf("%v left", left)
		}
		return nil
	})
	docker(t, back...)
	nodeReady(t, node, true)
	agentsReady(t)
	settled(t, "app=cart", 3)
	calling(t, callers)
	r = w.end(t)
	for _, l := range r.failed {
		// When the call began.
		began := l.Time.Add(-time.Duration(l.Millis) * time.Millisecond)
		late = max(late, began.Sub(w.start))
	}
	return r, gone, found, late
}

func TestStoppedWorker(t *testing.T) {
	install(t)
	node := workers(t)[1]
	start := time.Now()
	r, gone, found, late := lost(t, node, []string{"stop", node}, []string{"start", node})
	// At most what was on its way to the node when it went: of each of the
	// two other nodes' callers two callers of its services.
	verdict(t, "docker stop and start of a worker", r, gone, time.Since(start), 4,
		fmt.Sprintf("NotReady after %.0f s; calls that failed began at most %.1f s after the stop", found.Seconds(), late.Seconds()))
}

func TestPausedWorker(t *testing.T) {
	install(t)
	node := workers(t)[1]
	start := time.Now()
	r, gone, found, late := lost(t, node, []string{"pause", node}, []string{"unpause", node})
	if late > found+5*time.Second {
		t.Errorf("calls that began %v after the node was paused failed: it was found NotReady after %v", late, found)
	}
	for _, l := range r.failed {
		if l.Code != "DeadlineExceeded" {
			t.Errorf("a call to a paused node ended with %s: %s", l.Code, l.Message)
			break
		}
	}
	// Nothing tells a paused node from a slow one before that: each caller has
	// at most one call on its way at a time.
	allowed := 4 * (1 + int(notReady/callTimeout))
	verdict(t, "docker pause of a worker", r, gone, time.Since(start), allowed,
		fmt.Sprintf("NotReady after %.0f s; calls that failed began at most %.1f s after the pause", found.Seconds(), late.Seconds()))
}

// The same with pings: nobody waits for a deadline, and a server that gave no
// answer is left out, but for one call each time that it is tried again.
func TestPausedWorkerIsFoundByPings(t *testing.T) {
	install(t)
	annotate := func(run func(args ...string), value string) {
		run("-n", shop, "patch", "deployment", "cart", "-p",
			`{"spec":{"template":{"metadata":{"annotations":{"`+kube.KeepaliveAnnotation+`":`+value+`}}}}}`)
	}
	annotate(func(args ...string) { kubectl(t, args...) }, `"2s"`)
	t.Cleanup(func() {
		annotate(func(args ...string) {
			if _, err := run(cleanup(t), "", "kubectl", args...); err != nil {
				t.Error(err)
			}
		}, "null")
	})
	rolledOut(t, shop, "deployment/cart")
	settled(t, "app=cart", 3)
	calling(t, callers)
	node := workers(t)[1]
	start := time.Now()
	r, gone, found, late := lost(t, node, []string{"pause", node}, []string{"unpause", node})
	for _, l := range r.failed {
		if l.Code != "Unavailable" {
			t.Errorf("a call to a paused node ended with %s after %d ms, as if nobody had pinged: %s", l.Code, l.Millis, l.Message)
			break
		}
	}
	// Of each of the two other nodes' callers two callers of its services: one
	// call each, and one more whenever a server is tried again, after 10, 20 and
	// 30 s.
	verdict(t, "docker pause of a worker, pings every 2 s", r, gone, time.Since(start), 4*4*len(gone),
		fmt.Sprintf("NotReady after %.0f s; calls that failed began at most %.1f s after the pause", found.Seconds(), late.Seconds()))
}
