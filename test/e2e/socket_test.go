package e2e_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Pods of any user connect; the admin socket is for the agent's own user.
func TestSocketsHaveTheirModesWhateverTheUmask(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	args := append([]string{"-c", `umask 077; exec "$0" "$@"`, program}, s.args("--source", w.write().source())...)
	s.launch(t, exec.Command("sh", args...)).ready()
	for path, want := range map[string]fs.FileMode{
		filepath.Dir(s.ads): fs.ModeDir | 0o755,
		s.ads:               fs.ModeSocket | 0o666,
		filepath.Join(filepath.Dir(s.ads), "unknown.sock"): fs.ModeSocket | 0o666,
		s.admin: fs.ModeSocket | 0o600,
	} {
		info, err := os.Lstat(path)
		if err != nil {
			t.Error(err)
		} else if info.Mode() != want {
			t.Errorf("%s has the mode %v, want %v", filepath.Base(path), info.Mode(), want)
		}
	}
}
