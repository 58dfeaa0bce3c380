package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/fingerpost/fingerpost/test/harness"
)

// Two demos run beside each other: nothing in them is fixed that the other
// could hold.
func TestDemoEndsWellBesideAnother(t *testing.T) {
	envoy := harness.Tool(t, "envoy")
	t.Setenv("TMPDIR", t.TempDir())
	var demos sync.WaitGroup
	for range 2 {
		demos.Go(func() {
			out, errs, code := run(t, "demo", "--envoy", envoy)
			if code != 0 || errs != "" {
				t.Errorf("exit %d: %s\n%s", code, errs, out)
			}
			for _, want := range []string{
				"answered by cart-7d9c5-a (6), cart-7d9c5-b (6)", "xds:///shop.v1.Payments: answered by pay-7d9c5-a (12)",
				"to 127.0.0.1:", "Unimplemented: unknown service shop.v1.Nobody",
			} {
				if !strings.Contains(out, want) {
					t.Errorf("the demo does not print %q:\n%s", want, out)
				}
			}
		})
	}
	demos.Wait()
	left, err := filepath.Glob(filepath.Join(os.Getenv("TMPDIR"), "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func TestDemoWithoutEnvoySaysSo(t *testing.T) {
	t.Setenv("ENVOY", "")
	t.Setenv("PATH", t.TempDir())
	out, errs, code := run(t, "demo")
	if code != 0 || errs != "" || !strings.Contains(out, "No Envoy was found") {
		t.Errorf("exit %d: %s\n%s", code, errs, out)
	}
}

func TestDemoWithAnEnvoyThatIsNotThere(t *testing.T) {
	_, errs, code := run(t, "demo", "--envoy", "/nowhere/envoy")
	if code != 2 || strings.Count(errs, "\n") != 1 {
		t.Errorf("exit %d: %q, want one line and 2", code, errs)
	}
}
