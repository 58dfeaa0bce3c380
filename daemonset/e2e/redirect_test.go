//go:build kind

package e2e_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

// Two Services have the same gRPC service. Who dials one of them reaches its pods
// and no others, through the sidecar, over rollouts and restarts of the agents;
// and when redirection is removed from the nodes, everything is as it was.
func TestRedirectedCallsReachThePodsThatWereDialled(t *testing.T) {
	if !redirected() {
		t.Skip("make test-kind MODE=redirect runs it")
	}
	install(t)
	if err := apply(t, read(t, "canary.yaml")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = run(cleanup(t), "", "kubectl", "-n", shop, "delete", "deployment/canary", "service/canary")
	})
	settled(t, "app=canary", 1)
	const cart, canary = "shop.v1.Cart@cart.shop.svc.cluster.local:50051", "shop.v1.Cart@canary.shop.svc.cluster.local:50051"
	label := call(t, "dialler", cart, canary)
	calling(t, label)
	w := watch(t, label)
	gone := names(t, "app=canary")
	for round := range 3 {
		kubectl(t, "-n", shop, "set", "env", "deployment/canary", fmt.Sprintf("ROUND=%d", round))
		rolledOut(t, shop, "deployment/canary")
		settled(t, "app=canary", 1)
		check(t)
		maps.Copy(gone, names(t, "app=canary"))
	}
	// What is dialled while no agent runs goes to the sidecar all the same.
	kill(t, slices.Collect(maps.Keys(nodes(t))), "")
	agentsReady(t)
	check(t)
	took := time.Since(w.start)
	verdict(t, "two Services with one gRPC service, agents killed", w.end(t), gone, took, 0, "")
	answered := answers(t, label)
	for what, app := range map[string]string{cart: "cart-", canary: "canary-"} {
		if len(answered[what]) < 2 {
			t.Errorf("%s was answered by %v alone", what, answered[what])
		}
		for _, pod := range answered[what] {
			if !strings.HasPrefix(pod, app) {
				t.Errorf("%s was answered by %s", what, pod)
			}
		}
	}
}

// answers are the pods that answered the callers with a label, by what they dialled.
func answers(t *testing.T, label string) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, p := range pods(t, shop, label) {
		lines, err := logs(t, p.Name, "client", p.CreationTimestamp.Add(-time.Second))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range slices.Backward(lines) {
			if l.Kind == "tally" {
				for what, pods := range l.Tally.Answered {
					all[what] = append(all[what], pods...)
				}
				break
			}
		}
	}
	return all
}

func TestUninstallLeavesNothingOnTheNodes(t *testing.T) {
	if !redirected() {
		t.Skip("make test-kind MODE=redirect runs it")
	}
	install(t)
	calling(t, callers)
	for node := range nodes(t) {
		if pins := onNode(t, node, "find /sys/fs/bpf/fingerpost -mindepth 1"); pins == "" {
			t.Errorf("nothing is pinned on %s", node)
		}
	}
	kubectl(t, "-n", agents, "delete", "daemonset", agents)
	eventually(t, ripe, func() error {
		if list := pods(t, agents, "app.kubernetes.io/name=fingerpost"); len(list) > 0 {
			return fmt.Errorf("%d agents are still there", len(list))
		}
		return nil
	})
	for node := range nodes(t) {
		docker(t, "cp", "../../bin/fingerpost", node+":/usr/local/bin/fingerpost")
		t.Logf("%s:\n%s", node, onNode(t, node, "fingerpost uninstall"))
		if left := onNode(t, node, "find /sys/fs/bpf/fingerpost /var/lib/fingerpost 2>/dev/null; find /run/fingerpost /run/fingerpost-admin -type s 2>/dev/null; true"); left != "" {
			t.Errorf("on %s there is left:\n%s", node, left)
		}
		if again := onNode(t, node, "fingerpost uninstall"); strings.Contains(again, "/sys/fs/bpf") {
			t.Errorf("on %s a second time removes:\n%s", node, again)
		}
	}
	// Agents that come back find nothing, and begin anew. Connections that were
	// there before go on.
	kubectl(t, "apply", "-k", overlay())
	agentsReady(t)
	calling(t, callers)
	kubectl(t, "-n", shop, "rollout", "restart", "daemonset/caller")
	rolledOut(t, shop, "daemonset/caller")
	calling(t, callers)
	check(t)
}

// onNode runs a shell's command on a node.
func onNode(t *testing.T, node, command string) string {
	t.Helper()
	out, err := run(t.Context(), "", "docker", "exec", node, "sh", "-c", command)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}
