//go:build kind

package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

const (
	agents = "fingerpost" // the namespace, and the name of the DaemonSet
	shop   = "shop"       // the namespace of the workload
	// ripe is how long anything may take that has to happen.
	ripe = 3 * time.Minute
)

// run runs a program and returns what it printed. The error has its last line
// on standard error.
func run(ctx context.Context, stdin string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		said := strings.TrimSpace(errs.String())
		return out.String(), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, said)
	}
	return out.String(), nil
}

// kubectl runs kubectl, for as long as something ripe may take.
func kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := tryKubectl(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func tryKubectl(t testing.TB, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), ripe)
	defer cancel()
	return run(ctx, "", "kubectl", args...)
}

// apply applies manifests.
func apply(t testing.TB, manifests string) error {
	ctx, cancel := context.WithTimeout(t.Context(), ripe)
	defer cancel()
	_, err := run(ctx, manifests, "kubectl", "apply", "-f", "-")
	return err
}

// docker runs docker, which reaches the nodes.
func docker(t testing.TB, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), ripe)
	defer cancel()
	if _, err := run(ctx, "", "docker", args...); err != nil {
		t.Fatal(err)
	}
}

// get reads objects from the API server; out is a pointer to a list or object.
func get(t testing.TB, out any, args ...string) error {
	text, err := tryKubectl(t, append(append([]string{"get"}, args...), "-o", "json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(text), out)
}

// pods lists the pods of a namespace with a label (as app=cart).
func pods(t testing.TB, namespace, label string) []corev1.Pod {
	t.Helper()
	var list corev1.PodList
	if err := get(t, &list, "-n", namespace, "pods", "-l", label); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

func isReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue && p.DeletionTimestamp == nil
		}
	}
	return false
}

// nodes lists the nodes by name; those that are Ready are true.
func nodes(t testing.TB) map[string]bool {
	t.Helper()
	var list corev1.NodeList
	if err := get(t, &list, "nodes"); err != nil {
		t.Fatal(err)
	}
	ready := map[string]bool{}
	for _, n := range list.Items {
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady {
				ready[n.Name] = c.Status == corev1.ConditionTrue
			}
		}
	}
	return ready
}

// workers are the names of the two workers.
func workers(t testing.TB) []string {
	t.Helper()
	var list corev1.NodeList
	if err := get(t, &list, "nodes", "-l", "!node-role.kubernetes.io/control-plane"); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, n := range list.Items {
		names = append(names, n.Name)
	}
	if len(names) != 2 {
		t.Fatalf("the cluster has workers %v, want two", names)
	}
	return names
}

// controlPlane is the name of the node with the API server.
func controlPlane(t testing.TB) string {
	t.Helper()
	name := kubectl(t, "get", "nodes", "-l", "node-role.kubernetes.io/control-plane", "-o", "name")
	return strings.TrimPrefix(strings.TrimSpace(name), "node/")
}

// eventually polls until f returns nil, and returns how long that took.
func eventually(t testing.TB, within time.Duration, f func() error) time.Duration {
	t.Helper()
	start := time.Now()
	deadline := time.After(within)
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return time.Since(start)
		}
		select {
		case <-deadline:
			t.Fatalf("not within %v: %v", within, err)
		case <-t.Context().Done():
			t.Fatal(errors.Join(t.Context().Err(), err))
		case <-tick.C:
		}
	}
}

// rolledOut waits until a workload has what was asked for, and nothing else.
func rolledOut(t testing.TB, namespace, workload string) {
	t.Helper()
	kubectl(t, "-n", namespace, "rollout", "status", workload, "--timeout", ripe.String())
}

// settled waits until the pods with the label are those that are wanted: that
// many, all Ready and none ending.
func settled(t testing.TB, label string, want int) {
	t.Helper()
	eventually(t, ripe, func() error {
		list := pods(t, shop, label)
		n := 0
		for i := range list {
			if isReady(&list[i]) {
				n++
			}
		}
		if n != want || len(list) != want {
			return fmt.Errorf("%d of %d pods %s are Ready, want %d", n, len(list), label, want)
		}
		return nil
	})
}

// agentOn returns the name of the Ready agent of a node, the youngest of two.
func agentOn(t testing.TB, node string) (string, error) {
	var list corev1.PodList
	if err := get(t, &list, "-n", agents, "pods", "-l", "app.kubernetes.io/name=fingerpost", "--field-selector", "spec.nodeName="+node); err != nil {
		return "", err
	}
	found := -1
	for i := range list.Items {
		if isReady(&list.Items[i]) && (found < 0 || list.Items[found].CreationTimestamp.Before(&list.Items[i].CreationTimestamp)) {
			found = i
		}
	}
	if found < 0 {
		return "", fmt.Errorf("no agent is Ready on %s", node)
	}
	return list.Items[found].Name, nil
}

// fingerpost runs the program beside a node's agent.
func fingerpost(t testing.TB, node string, args ...string) (string, error) {
	pod, err := agentOn(t, node)
	if err != nil {
		return "", err
	}
	return tryKubectl(t, append([]string{"-n", agents, "exec", pod, "--", "/fingerpost"}, args...)...)
}

// agentsReady waits until there is one agent on each node, and it is Ready.
func agentsReady(t testing.TB) {
	t.Helper()
	eventually(t, ripe, func() error {
		var set appsv1.DaemonSet
		if err := get(t, &set, "-n", agents, "daemonset", agents); err != nil {
			return err
		}
		s := set.Status
		if s.ObservedGeneration != set.Generation || s.UpdatedNumberScheduled != s.DesiredNumberScheduled || s.NumberReady != s.DesiredNumberScheduled || s.DesiredNumberScheduled == 0 {
			return fmt.Errorf("%d of %d agents are Ready, %d of the last version", s.NumberReady, s.DesiredNumberScheduled, s.UpdatedNumberScheduled)
		}
		list := pods(t, agents, "app.kubernetes.io/name=fingerpost")
		if len(list) != int(s.DesiredNumberScheduled) {
			return fmt.Errorf("%d agents, want %d", len(list), s.DesiredNumberScheduled)
		}
		return nil
	})
}
