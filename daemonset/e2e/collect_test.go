//go:build kind

package e2e_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
)

// collects counts how often the servers with a label were asked what they
// serve, by the servers themselves.
func collects(t *testing.T, label string) int {
	t.Helper()
	n := 0
	for _, p := range pods(t, shop, label) {
		lines, err := logs(t, p.Name, "server", p.CreationTimestamp.Add(-time.Second))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lines {
			if l.Kind == "collected" {
				n++
			}
		}
	}
	return n
}

// owner is one row of `fingerpost owners -o json`, as far as it matters.
type owner struct {
	Name      string   `json:"name"`
	Namespace string   `json:"namespace"`
	Knowledge string   `json:"knowledge"`
	Origin    string   `json:"origin"`
	Pods      []string `json:"pods"`
}

// knownTo says how each node's agent knows what the pods of an owner serve.
func knownTo(t *testing.T, pod string) (map[string]string, error) {
	by := map[string]string{}
	for node := range nodes(t) {
		text, err := fingerpost(t, node, "owners", "-o", "json")
		if err != nil {
			return nil, err
		}
		var list []owner
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			return nil, err
		}
		for _, o := range list {
			for _, p := range o.Pods {
				if p == shop+"/"+pod {
					if o.Knowledge != "known" {
						return nil, fmt.Errorf("to the agent of %s %s is %s", node, pod, o.Knowledge)
					}
					by[node] = o.Origin
				}
			}
		}
		if by[node] == "" {
			return nil, fmt.Errorf("the agent of %s has no owner of %s", node, pod)
		}
	}
	return by, nil
}

func TestRevisionIsAskedOnceInTheCluster(t *testing.T) {
	install(t)
	const rounds = 3
	for round := range rounds {
		kubectl(t, "-n", shop, "set", "env", "deployment/cart", fmt.Sprintf("ASKED=%d", round))
		rolledOut(t, shop, "deployment/cart")
		settled(t, "app=cart", 3)
		check(t)
		pod := pods(t, shop, "app=cart")[0].Name
		var by map[string]string
		eventually(t, ripe, func() (err error) { by, err = knownTo(t, pod); return err })
		if n := collects(t, "app=cart"); n != 1 {
			t.Errorf("round %d: the three servers of a revision were asked %d times, want once in the whole cluster; known by %v", round, n, by)
		}
		if round < rounds-1 {
			continue
		}
		lostOne(t, pod, by)
		lostAll(t, pod)
	}
}

// forget removes what an agent has written, on its node.
const forget = "; rm -rf /var/lib/fingerpost/*"

// lostOne kills the agent that asked, with all that it knew. The others know it
// too.
func lostOne(t *testing.T, pod string, by map[string]string) {
	for node, origin := range by {
		if origin == "self" {
			kill(t, []string{node}, forget)
		}
	}
	agentsReady(t)
	check(t)
	eventually(t, ripe, func() (err error) { by, err = knownTo(t, pod); return err })
	n := collects(t, "app=cart")
	t.Logf("after the agent that had asked was lost, the revision was asked %d times in all; known by %v", n, by)
	if n > 2 {
		t.Errorf("the revision was asked %d times, want once more at most", n)
	}
}

// lostAll kills all agents, with all that they knew: one asks again.
func lostAll(t *testing.T, pod string) {
	before := collects(t, "app=cart")
	kill(t, slices.Collect(maps.Keys(nodes(t))), forget)
	agentsReady(t)
	check(t)
	var by map[string]string
	eventually(t, ripe, func() (err error) { by, err = knownTo(t, pod); return err })
	n := collects(t, "app=cart") - before
	t.Logf("after all agents were lost at once, the revision was asked %d times; known by %v", n, by)
	if n > 1 {
		t.Errorf("the revision was asked %d times after all agents were lost, want once", n)
	}
}
