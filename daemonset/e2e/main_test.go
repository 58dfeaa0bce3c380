//go:build kind

// Package e2e_test runs Fingerpost on a kind cluster of three nodes, with
// clients that call all the time, and takes away one thing after the other.
// `make test-kind` makes the cluster; see kind/cluster.sh.
package e2e_test

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

func TestMain(m *testing.M) {
	// Without it kubectl would take the cluster that the user works with.
	if os.Getenv("KIND_NAME") == "" || os.Getenv("KUBECONFIG") == "" {
		fmt.Fprintln(os.Stderr, `no cluster: run make test-kind, or eval "$(daemonset/e2e/kind/cluster.sh env)" for one that is up`)
		os.Exit(1)
	}
	for _, program := range []string{"kubectl", "docker"} {
		if _, err := exec.LookPath(program); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	code := m.Run()
	printResults()
	os.Exit(code)
}
