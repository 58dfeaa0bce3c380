package e2e_test

import (
	"os/exec"
	"strings"
	"testing"
)

// Two files may name the same UIDs and mean other programs: without being told
// to, an agent keeps nothing of one that it could believe of the other.
func TestFileSourceKeepsNoStateUnlessTold(t *testing.T) {
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	var args []string
	given := s.args("--source", w.write().source())
	for i := 0; i < len(given); i++ {
		if given[i] == "--state-dir" {
			i++ // and its value
			continue
		}
		args = append(args, given[i])
	}
	a := s.launch(t, exec.Command(program, args...)).ready()
	if p := a.part("checkpoint"); !strings.HasPrefix(p, "off: no --state-dir") {
		t.Errorf("status says %q of the checkpoint", p)
	}
}
