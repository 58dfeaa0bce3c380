//go:build kind

package e2e_test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// callers is the label of the callers that no scenario touches.
const callers = "app=caller"

var installed struct {
	once sync.Once
	// from the command that installs the agents, and from the one that
	// brings the workload, to the first call that was answered
	agents, call time.Duration
	err          error
}

// install brings agents and workload, once, and waits until the callers call.
func install(t *testing.T) {
	t.Helper()
	installed.once.Do(func() {
		installed.err = fmt.Errorf("the agents or the workload did not come up")
		start := time.Now()
		kubectl(t, "apply", "-k", overlay())
		agentsReady(t)
		installed.agents = time.Since(start)
		start = time.Now()
		// Until the policies are active the API server refuses what is to be
		// injected.
		eventually(t, ripe, func() error { return apply(t, read(t, "shop.yaml")) })
		settled(t, "app=cart", 3)
		settled(t, "app=solo", 1)
		calling(t, callers)
		installed.call = time.Since(start)
		installed.err = nil
	})
	if installed.err != nil {
		t.Fatal(installed.err)
	}
}

func read(t testing.TB, file string) string {
	t.Helper()
	text, err := os.ReadFile("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// calling waits until every pod with the label has a sidecar, calls, has an
// open stream, and no call fails any more.
func calling(t testing.TB, label string) {
	t.Helper()
	eventually(t, ripe, func() error {
		list := pods(t, shop, label)
		if len(list) == 0 {
			return fmt.Errorf("there is no pod %s", label)
		}
		for _, p := range list {
			if !isReady(&p) {
				return fmt.Errorf("%s is not ready", p.Name)
			}
			if !injected(&p) {
				return fmt.Errorf("%s has no sidecar", p.Name)
			}
			lines, err := logs(t, p.Name, "client", time.Now().Add(-3*time.Second))
			if err != nil {
				return err
			}
			answered := false
			for _, l := range lines {
				if l.Kind != "tally" {
					return fmt.Errorf("%s still fails: %s %s", p.Name, l.Code, l.Message)
				}
				answered = answered || l.Tally.Unary > 0 && l.Tally.Open > 0
			}
			if !answered {
				return fmt.Errorf("%s has had no answer yet", p.Name)
			}
		}
		return nil
	})
}

func injected(p *corev1.Pod) bool {
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			return true
		}
	}
	return false
}

// call starts one more caller, which ends with the test, and returns its label.
func call(t *testing.T, name string, services ...string) (label string) {
	t.Helper()
	text := strings.NewReplacer("NAME", name, "SERVICES", strings.Join(services, ",")).Replace(read(t, "caller.yaml"))
	if err := apply(t, text); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// t's context has ended.
		if _, err := run(cleanup(t), "", "kubectl", "-n", shop, "delete", "deployment", name, "--wait=false"); err != nil {
			t.Error(err)
		}
	})
	rolledOut(t, shop, "deployment/"+name)
	return "app=" + name
}
