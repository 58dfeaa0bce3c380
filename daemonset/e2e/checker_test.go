//go:build kind

package e2e_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// service is one row of `fingerpost services -o json`, as far as it matters.
type service struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	Endpoints []struct {
		Address string `json:"address"`
		Pod     string `json:"pod"`
		Node    string `json:"node"`
		State   string `json:"state"`
	} `json:"endpoints"`
}

// truth is what the API server says of the workload's namespace.
type truth struct {
	serving  map[string]bool // "service address pod node"
	draining map[string]bool // the same, of pods that are ending
}

// serves are the gRPC services of a pod of the workload: it says so in its
// arguments, of which the agent knows nothing.
func serves(p *corev1.Pod) []string {
	for _, c := range p.Spec.Containers {
		if i := slices.Index(c.Args, "-services"); i >= 0 && slices.Contains(c.Args, "serve") {
			return strings.Split(c.Args[i+1], ",")
		}
	}
	return nil
}

func readTruth(t testing.TB) (truth, error) {
	w := truth{map[string]bool{}, map[string]bool{}}
	var list corev1.PodList
	if err := get(t, &list, "-n", shop, "pods"); err != nil {
		return w, err
	}
	for i := range list.Items {
		p := &list.Items[i]
		for _, s := range serves(p) {
			row := fmt.Sprintf("%s %s:50051 %s/%s %s", s, p.Status.PodIP, p.Namespace, p.Name, p.Spec.NodeName)
			switch {
			case isReady(p):
				w.serving[row] = true
			case p.DeletionTimestamp != nil:
				w.draining[row] = true
			}
		}
	}
	return w, nil
}

// drains says how the view of a node's agent of a pod differs from one that is
// ending and still serves.
func drains(t testing.TB, node, pod string) error {
	text, err := fingerpost(t, node, "services", "-o", "json")
	if err != nil {
		return err
	}
	var list []service
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return err
	}
	for _, s := range list {
		for _, e := range s.Endpoints {
			if e.Pod == shop+"/"+pod {
				if e.State != "draining" {
					return fmt.Errorf("to the agent of %s %s is %s", node, pod, e.State)
				}
				return nil
			}
		}
	}
	return fmt.Errorf("the agent of %s does not have %s", node, pod)
}

// compare says how the view of a node's agent differs from the truth.
func compare(t testing.TB, node string) error {
	want, err := readTruth(t)
	if err != nil {
		return err
	}
	text, err := fingerpost(t, node, "services", "-o", "json")
	if err != nil {
		return err
	}
	var list []service
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return err
	}
	missing, extra := maps.Clone(want.serving), []string{}
	for _, s := range list {
		if s.Namespace != shop {
			continue
		}
		for _, e := range s.Endpoints {
			row := fmt.Sprintf("%s %s %s %s", s.Name, e.Address, e.Pod, e.Node)
			switch {
			case want.serving[row] && e.State != "draining":
				delete(missing, row)
			case want.draining[row] && e.State == "draining":
			default:
				extra = append(extra, row+" "+e.State)
			}
		}
	}
	if len(missing) > 0 || len(extra) > 0 {
		return fmt.Errorf("the agent of %s lacks %q and has %q beside what the API server says", node, slices.Sorted(maps.Keys(missing)), extra)
	}
	return nil
}

// check waits until the agent of every node that is Ready says of the workload
// what the API server says, and of the callers what MODE wants, and returns how
// long that took.
func check(t testing.TB) time.Duration {
	t.Helper()
	var last error
	tries := 0
	took := eventually(t, time.Minute, func() (err error) {
		tries++
		defer func() { last = cmp.Or(err, last) }()
		for node, ready := range nodes(t) {
			if !ready {
				continue
			}
			if err := compare(t, node); err != nil {
				return err
			}
		}
		return proved(t)
	})
	if last != nil {
		t.Logf("every agent is right after %d tries in %.1f s; before that %v", tries, took.Seconds(), last)
	}
	return took
}
