//go:build kind

package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const peerAnnotation = "fingerpost.dev/peer"

// as returns a kubeconfig with a token and nothing else of who calls.
func as(t *testing.T, token string) string {
	t.Helper()
	var config map[string]any
	if err := json.Unmarshal([]byte(kubectl(t, "config", "view", "--raw", "--minify", "-o", "json")), &config); err != nil {
		t.Fatal(err)
	}
	for _, u := range config["users"].([]any) {
		u.(map[string]any)["user"] = map[string]string{"token": token}
	}
	text, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestAgentMayChangeItsOwnAnnotationAndNothingElse(t *testing.T) {
	install(t)
	// A pod of its own, with the agent's account: what is patched here must
	// not change what agents believe of each other.
	pod := func(name string) string {
		return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: %s, labels: {test: rights}}
spec:
  serviceAccountName: fingerpost
  nodeName: nowhere
  containers: [{name: none, image: none}]
`, name, agents)
	}
	if err := apply(t, pod("rights-own")+"---"+pod("rights-other")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = run(cleanup(t), "", "kubectl", "-n", agents, "delete", "pod", "-l", "test=rights", "--force", "--grace-period=0")
	})
	token := func(args ...string) string {
		return strings.TrimSpace(kubectl(t, append([]string{"-n", agents, "create", "token", "fingerpost"}, args...)...))
	}
	bound := as(t, token("--bound-object-kind=Pod", "--bound-object-name=rights-own"))
	loose := as(t, token())
	for _, c := range []struct {
		name, config string
		args         []string
		refused      string // a part of the reason; empty: accepted
	}{
		{"its own annotation", bound, []string{"-n", agents, "annotate", "pod", "rights-own", peerAnnotation + "=9642 " + strings.Repeat("0", 64)}, ""},
		{"another agent's annotation", bound, []string{"-n", agents, "annotate", "pod", "rights-other", peerAnnotation + "=forged"}, "own pod only"},
		{"a token of no pod", loose, []string{"-n", agents, "annotate", "pod", "rights-own", "--overwrite", peerAnnotation + "=forged"}, "not bound to a pod"},
		{"another annotation", bound, []string{"-n", agents, "annotate", "pod", "rights-own", "other=value"}, "other annotations"},
		{"a label", bound, []string{"-n", agents, "label", "pod", "rights-own", "other=value"}, "labels"},
		{"another namespace", bound, []string{"-n", shop, "annotate", "pod", "-l", "app=solo", peerAnnotation + "=forged"}, "forbidden"},
		{"a secret", bound, []string{"-n", agents, "get", "secrets"}, "forbidden"},
		{"a node", bound, []string{"get", "nodes"}, "forbidden"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := tryKubectl(t, append([]string{"--kubeconfig", c.config}, c.args...)...)
			switch {
			case c.refused == "" && err != nil:
				t.Error(err)
			case c.refused != "" && (err == nil || !strings.Contains(strings.ToLower(err.Error()), c.refused)):
				t.Errorf("%v, want a refusal that says %q", err, c.refused)
			}
		})
	}
	t.Logf("kubectl auth can-i --list, cluster-wide:\n%s", kubectl(t, "auth", "can-i", "--list", "--kubeconfig", bound))
	t.Logf("kubectl auth can-i --list -n %s:\n%s", agents, kubectl(t, "auth", "can-i", "--list", "-n", agents, "--kubeconfig", bound))
}

func TestForgedPeerIsRefusedAndCounted(t *testing.T) {
	install(t)
	node := controlPlane(t)
	var address string
	for _, p := range pods(t, agents, "app.kubernetes.io/name=fingerpost") {
		if p.Spec.NodeName == node {
			address = p.Status.PodIP
		}
	}
	refused := func() float64 {
		// The agent's own metrics, on the node's loopback.
		ctx, cancel := context.WithTimeout(t.Context(), ripe)
		defer cancel()
		text, err := run(ctx, "", "docker", "exec", node, "curl", "-s", "http://127.0.0.1:9641/metrics")
		if err != nil {
			t.Fatal(err)
		}
		for l := range strings.Lines(text) {
			if value, ok := strings.CutPrefix(l, `fingerpost_peer_rejected_total{reason="unknown-key"} `); ok {
				n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
		}
		return 0
	}
	before := refused()
	caller := pods(t, shop, callers)[0].Name
	out := kubectl(t, "-n", shop, "exec", caller, "-c", "client", "--", "/workload", "forge", "-target", address+":9642")
	t.Logf("an agent with a key that no pod has is told:\n%s", out)
	if after := refused(); after <= before {
		t.Errorf("the agent has counted %v refusals, before %v", after, before)
	}
}
