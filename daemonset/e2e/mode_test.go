//go:build kind

package e2e_test

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"
)

// overlay is what MODE installs; without MODE, what the README says.
func overlay() string {
	if mode := os.Getenv("MODE"); mode != "" {
		return "modes/" + mode
	}
	return "../overlays/kind"
}

// proxy is one row of `fingerpost proxies -o json`, as far as it matters.
type proxy struct {
	ID       string `json:"id"`
	Clusters string `json:"clusters"`
	Identity struct {
		Pod    string `json:"pod"`
		Method string `json:"method"`
		Reason string `json:"reason"`
	} `json:"identity"`
}

// proved says which sidecar of the pods that call is not what MODE wants it to
// be, to its agent; with no MODE it has nothing to say.
func proved(t testing.TB) error {
	if os.Getenv("MODE") == "" {
		return nil
	}
	known := map[string]proxy{}
	for node, ready := range nodes(t) {
		if !ready {
			continue
		}
		text, err := fingerpost(t, node, "proxies", "-o", "json")
		if err != nil {
			return err
		}
		var list []proxy
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			return err
		}
		for _, p := range list {
			known[p.ID] = p
		}
	}
	for _, p := range pods(t, shop, callers) {
		if !injected(&p) || !isReady(&p) {
			continue
		}
		id := shop + "/" + p.Name
		switch got, ok := known[id]; {
		case !ok:
			return fmt.Errorf("no agent has the sidecar of %s", id)
		case got.Clusters != "on-demand":
			return fmt.Errorf("the sidecar of %s has its clusters %s", id, got.Clusters)
		case got.Identity.Method != "netns" || got.Identity.Pod != id:
			return fmt.Errorf("the sidecar of %s is %+v to its agent", id, got.Identity)
		}
	}
	return nil
}
