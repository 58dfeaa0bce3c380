package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/agent"
)

// A socket whose name was removed serves nobody new, and the agent must not
// say that all is well.
func TestRemovedSocketIsNoticed(t *testing.T) {
	for _, name := range []string{"ads.sock", "unknown.sock"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s := newWorld(t), newSite(t)
			a := s.start(t, "--source", w.write().source()).ready()
			path := filepath.Join(filepath.Dir(s.ads), name)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if part := ask[agent.Status](t, a, "status").Parts["sockets"]; !strings.Contains(part, path) || !strings.HasPrefix(part, "off: ") {
				t.Errorf("status says %q of its sockets", part)
			}
			for _, flag := range []string{"--check", "--ready"} {
				_, errs, code := run(t, "status", flag, "--admin-socket", s.admin)
				if code != 1 || !strings.Contains(errs, name) || strings.Count(errs, "\n") != 1 {
					t.Errorf("status %s: exit %d, %q", flag, code, errs)
				}
			}
		})
	}
}
