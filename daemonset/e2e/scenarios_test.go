//go:build kind

package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// cleanup is a context for what ends after the test.
func cleanup(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), ripe)
	t.Cleanup(cancel)
	return ctx
}

func TestFirstCallOnAFreshCluster(t *testing.T) {
	install(t)
	t.Logf("kubectl apply -k until every agent is ready: %.1f s; kubectl apply -f testdata/shop.yaml until callers on every node are answered: %.1f s",
		installed.agents.Seconds(), installed.call.Seconds())
	check(t)
}

func TestRevisionThatAddsAService(t *testing.T) {
	install(t)
	extra := call(t, "extra", "shop.v1.Extra")
	old := names(t, "app=cart")
	w, x := watch(t, callers), watch(t, extra)
	kubectl(t, "-n", shop, "patch", "deployment", "cart", "--type=json", "-p",
		`[{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["serve", "-services", "shop.v1.Cart,shop.v1.Stock,shop.v1.Extra"]}]`)
	rolledOut(t, shop, "deployment/cart")
	done := time.Now()
	settled(t, "app=cart", 3)
	calling(t, extra)
	took := time.Since(w.start)
	r := x.end(t)
	last := time.Duration(0)
	for _, l := range r.failed {
		last = max(last, l.Time.Sub(done))
	}
	// Until the first pod of the revision has answered, nobody has the service.
	if last > 5*time.Second || r.calls == 0 {
		t.Errorf("calls of the new service failed until %v after the rollout, %d were answered:\n%s", last, r.calls, summary(r.failed, x.start))
	}
	verdict(t, "new revision adds a service", w.end(t), old, took, 0, "")
}

func TestRollingUpdates(t *testing.T) {
	install(t)
	const rounds = 20
	gone := map[string]bool{}
	w := watch(t, callers)
	for i := range rounds {
		maps.Copy(gone, names(t, "app=cart"))
		maps.Copy(gone, names(t, "app=solo")) // replicas 1
		kubectl(t, "-n", shop, "set", "env", "deployment/cart", "deployment/solo", fmt.Sprintf("ROUND=%d", i))
		rolledOut(t, shop, "deployment/cart")
		rolledOut(t, shop, "deployment/solo")
	}
	settled(t, "app=cart", 3)
	settled(t, "app=solo", 1)
	took := time.Since(w.start)
	verdict(t, fmt.Sprintf("rolling update of 3 replicas and of 1, %d times", rounds), w.end(t), gone, took, 0, "")
}

func TestScaleFromZeroAndBack(t *testing.T) {
	install(t)
	label := call(t, "spare-caller", "shop.v1.Spare")
	begin := time.Now()
	w := watch(t, label)
	for round := 1; round <= 2; round++ {
		kubectl(t, "-n", shop, "scale", "deployment/spare", "--replicas=5")
		settled(t, "app=spare", 5)
		ready := time.Now()
		for _, p := range pods(t, shop, "app=spare") {
			for _, c := range p.Status.Conditions {
				if c.Type == "Ready" && c.LastTransitionTime.Time.Before(ready) {
					ready = c.LastTransitionTime.Time
				}
			}
		}
		checked := check(t)
		calling(t, label)
		old := names(t, "app=spare")
		down := time.Now()
		r := w.end(t)
		// A Ready pod exists from ready to down. Kubernetes writes that time in
		// whole seconds.
		var late []line
		until := time.Duration(0)
		for _, l := range r.failed {
			if since := l.Time.Sub(ready); since > 0 {
				late, until = append(late, l), max(until, since)
			}
		}
		t.Logf("round %d: the first pod was Ready %.0f s after the start; calls failed until %.1f s later, %d of them; every agent right after %.1f s",
			round, ready.Sub(begin).Seconds(), until.Seconds(), len(late), checked.Seconds())
		if until > 3*time.Second {
			t.Errorf("calls fail although a pod is Ready:\n%s", summary(late, ready))
		}
		if r.calls == 0 {
			t.Error("no call was answered")
		}
		results = append(results, row{fmt.Sprintf("scale 0 to 5 to 0, round %d", round), &report{calls: r.calls, messages: r.messages, slowest: r.slowest, failed: late}, 0, checked, down.Sub(w.start),
			fmt.Sprintf("failed: after a pod was Ready, for %.1f s", until.Seconds())})
		w = watch(t, label)
		kubectl(t, "-n", shop, "scale", "deployment/spare", "--replicas=0")
		settled(t, "app=spare", 0)
		if cut := w.end(t).cutOf(old); len(cut) > 0 {
			// Streams that never had a server are calls to nobody.
			for _, l := range cut {
				if l.Server != "" {
					t.Errorf("a stream of a pod that lives on was cut: %+v", l)
				}
			}
		}
		check(t)
		w, begin = watch(t, label), time.Now()
	}
}

func TestPodThatEndsGetsNoNewCalls(t *testing.T) {
	install(t)
	args := func(more string) {
		kubectl(t, "-n", shop, "patch", "deployment", "spare", "--type=json", "-p",
			`[{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["serve", "-services", "shop.v1.Spare"`+more+`]}]`)
	}
	t.Cleanup(func() {
		_, _ = run(cleanup(t), "", "kubectl", "-n", shop, "scale", "deployment/spare", "--replicas=0")
	})
	// Told to stop, these go on for longer than it takes to look.
	args(`, "-linger", "20s"`)
	kubectl(t, "-n", shop, "scale", "deployment/spare", "--replicas=2")
	settled(t, "app=spare", 2)
	check(t)
	ending := pods(t, shop, "app=spare")[0].Name
	kubectl(t, "-n", shop, "delete", "pod", ending, "--wait=false")
	for node := range nodes(t) {
		eventually(t, 15*time.Second, func() error { return drains(t, node, ending) })
	}
	check(t)
	kubectl(t, "-n", shop, "scale", "deployment/spare", "--replicas=0")
	args("")
	settled(t, "app=spare", 0)
}

func TestDrainOfEachWorker(t *testing.T) {
	install(t)
	for _, node := range workers(t) {
		settled(t, "app=cart", 3)
		gone := map[string]bool{}
		for _, p := range pods(t, shop, "app=cart") {
			if p.Spec.NodeName == node {
				gone[p.Name] = true
			}
		}
		if len(gone) == 0 {
			t.Fatalf("no server runs on %s", node)
		}
		w := watch(t, callers)
		t.Cleanup(func() { _, _ = run(cleanup(t), "", "kubectl", "uncordon", node) })
		kubectl(t, "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout", ripe.String())
		settled(t, "app=cart", 3)
		took := time.Since(w.start)
		verdict(t, "drain of "+node, w.end(t), gone, took, 0, fmt.Sprintf("%d of 3 servers moved", len(gone)))
		kubectl(t, "uncordon", node)
		// Spread them again.
		kubectl(t, "-n", shop, "rollout", "restart", "deployment/cart")
		rolledOut(t, shop, "deployment/cart")
	}
}

func TestRollingUpdateOfTheAgents(t *testing.T) {
	install(t)
	settled(t, "app=cart", 3)
	w := watch(t, callers)
	kubectl(t, "-n", agents, "rollout", "restart", "daemonset/"+agents)
	rolledOut(t, agents, "daemonset/"+agents)
	agentsReady(t)
	took := time.Since(w.start)
	verdict(t, "rolling update of the agents", w.end(t), nil, took, 0, "")
}

func TestKilledAgents(t *testing.T) {
	install(t)
	settled(t, "app=cart", 3)
	w := watch(t, callers)
	kill(t, slices.Collect(maps.Keys(nodes(t))), "")
	// A change that only a living agent can tell.
	gone := names(t, "app=cart")
	kubectl(t, "-n", shop, "rollout", "restart", "deployment/cart")
	rolledOut(t, shop, "deployment/cart")
	settled(t, "app=cart", 3)
	agentsReady(t)
	took := time.Since(w.start)
	verdict(t, "every agent killed at once, rolling update meanwhile", w.end(t), gone, took, 0, "")
}

// kill kills the agents of nodes at once, without a chance to say goodbye, has
// the nodes' shells go on with then, and returns when each has been started
// again, once.
func kill(t *testing.T, nodes []string, then string) {
	t.Helper()
	restarts := func() map[string]int32 {
		by := map[string]int32{}
		for _, p := range pods(t, agents, "app.kubernetes.io/name=fingerpost") {
			for _, c := range p.Status.ContainerStatuses {
				by[p.Spec.NodeName] += c.RestartCount
			}
		}
		return by
	}
	before := restarts()
	var all sync.WaitGroup
	for _, node := range nodes {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), ripe)
			defer cancel()
			_, err := run(ctx, "", "docker", "exec", node, "sh", "-c",
				`kill -9 $(crictl inspect -o go-template --template '{{.info.pid}}' $(crictl ps -q --name '^agent$' --label io.kubernetes.pod.namespace=`+agents+`))`+then)
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	eventually(t, ripe, func() error {
		now := restarts()
		for _, node := range nodes {
			if now[node] != before[node]+1 {
				return fmt.Errorf("the agent of %s has been started %d times again, before %d times", node, now[node], before[node])
			}
		}
		return nil
	})
}

func TestAgentVersionThatNeverBecomesReady(t *testing.T) {
	install(t)
	settled(t, "app=cart", 3)
	before := map[string]string{}
	for _, p := range pods(t, agents, "app.kubernetes.io/name=fingerpost") {
		before[p.Spec.NodeName] = p.Name
	}
	w := watch(t, callers)
	// The new version never reaches the API server, and so never knows enough.
	t.Cleanup(func() {
		_, _ = run(cleanup(t), "", "kubectl", "-n", agents, "set", "env", "daemonset/"+agents, "-c", "agent", "KUBERNETES_SERVICE_PORT-")
	})
	kubectl(t, "-n", agents, "set", "env", "daemonset/"+agents, "-c", "agent", "KUBERNETES_SERVICE_PORT=1")
	var surge string
	eventually(t, ripe, func() error {
		for _, p := range pods(t, agents, "app.kubernetes.io/name=fingerpost") {
			if before[p.Spec.NodeName] != p.Name && len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].State.Running != nil {
				surge = p.Name
				return nil
			}
		}
		return fmt.Errorf("the new version does not run yet")
	})
	// It must still be so once the new one has had the time of its probes.
	gone := names(t, "app=cart")
	for range 4 {
		kubectl(t, "-n", shop, "rollout", "restart", "deployment/cart")
		rolledOut(t, shop, "deployment/cart")
		settled(t, "app=cart", 3)
		maps.Copy(gone, names(t, "app=cart"))
		check(t)
	}
	for node, name := range before {
		if now, err := agentOn(t, node); err != nil || now != name {
			t.Errorf("the agent of %s is %q (%v), want the old one, %s", node, now, err, name)
		}
	}
	log, err := tryKubectl(t, "-n", agents, "logs", surge, "--tail", "3")
	t.Logf("the new version, %s, says: %s (%v)", surge, strings.TrimSpace(log), err)
	kubectl(t, "-n", agents, "set", "env", "daemonset/"+agents, "-c", "agent", "KUBERNETES_SERVICE_PORT-")
	agentsReady(t)
	took := time.Since(w.start)
	verdict(t, "a version of the agent that never becomes ready", w.end(t), gone, took, 0, "")
}

func TestAPIServerDownForTwoMinutes(t *testing.T) {
	install(t)
	settled(t, "app=cart", 3)
	const manifest, aside = "/etc/kubernetes/manifests/kube-apiserver.yaml", "/etc/kubernetes/kube-apiserver.yaml"
	node := controlPlane(t)
	w := watch(t, callers)
	back := []string{"exec", node, "sh", "-c", "if [ -e " + aside + " ]; then mv " + aside + " " + manifest + "; fi"}
	t.Cleanup(func() { _, _ = run(cleanup(t), "", "docker", back...) })
	docker(t, "exec", node, "mv", manifest, aside)
	reachable := func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := run(ctx, "", "kubectl", "get", "--raw", "/readyz")
		return err == nil
	}
	eventually(t, ripe, func() error {
		if reachable() {
			return fmt.Errorf("the API server still answers")
		}
		return nil
	})
	down := time.Now()
	eventually(t, ripe, func() error {
		if left := 2*time.Minute - time.Since(down); left > 0 {
			return fmt.Errorf("%v left", left)
		}
		return nil
	})
	docker(t, back...)
	eventually(t, ripe, func() error {
		if !reachable() {
			return fmt.Errorf("the API server does not answer yet")
		}
		return nil
	})
	lasted := time.Since(down)
	// What happens now must arrive.
	gone := names(t, "app=cart")
	kubectl(t, "-n", shop, "rollout", "restart", "deployment/cart")
	rolledOut(t, shop, "deployment/cart")
	settled(t, "app=cart", 3)
	agentsReady(t)
	took := time.Since(w.start)
	verdict(t, "API server down", w.end(t), gone, took, 0, fmt.Sprintf("down for %.0f s; a rolling update after it", lasted.Seconds()))
}
