//go:build kind

package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// redirected tells whether callers dial Services and know of no sidecar.
func redirected() bool { return os.Getenv("MODE") == "redirect" }

// shopping is what is called, and who calls it.
func shopping(t testing.TB) string {
	text := read(t, "shop.yaml")
	if !redirected() {
		return text
	}
	by := strings.NewReplacer("call, -services, \"shop.v1.Cart,shop.v1.Stock,shop.v1.Solo\"",
		"call, -services, \"shop.v1.Cart@cart.shop.svc.cluster.local:50051,shop.v1.Stock@cart.shop.svc.cluster.local:50051,shop.v1.Solo@solo.shop.svc.cluster.local:50051\"")
	return by.Replace(text) + "---\n" + read(t, "services.yaml")
}

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
	if redirected() {
		return redirects(t)
	}
	return nil
}

// redirects says on which node connections of the caller do not go to its sidecar:
// one to each of two Services, at least.
func redirects(t testing.TB) error {
	for node, ready := range nodes(t) {
		if !ready {
			continue
		}
		text, err := fingerpost(t, node, "status", "-o", "json")
		if err != nil {
			return err
		}
		var status struct {
			Parts map[string]string `json:"parts"`
		}
		if err := json.Unmarshal([]byte(text), &status); err != nil {
			return err
		}
		for _, part := range []string{"identity", "path", "observe", "redirect"} {
			if state, _, _ := strings.Cut(status.Parts[part], ":"); state != "on" {
				return fmt.Errorf("part %s of the agent of %s is %q", part, node, status.Parts[part])
			}
		}
		n, err := metric(t, node, `fingerpost_redirect_connections_total{outcome="redirected4"}`)
		if err != nil {
			return err
		}
		if n < 2 {
			return fmt.Errorf("on %s %v connections went to a sidecar", node, n)
		}
	}
	return nil
}

// metric reads one series of a node's agent, from the node.
func metric(t testing.TB, node, series string) (float64, error) {
	ctx, cancel := context.WithTimeout(t.Context(), ripe)
	defer cancel()
	text, err := run(ctx, "", "docker", "exec", node, "bash", "-c",
		`exec 3<>/dev/tcp/127.0.0.1/9641; printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3; cat <&3`)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("the agent of %s has no %s", node, series)
}
