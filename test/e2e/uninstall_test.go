package e2e_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/fingerpost/fingerpost/test/harness"
)

// left are all files below directories.
func left(t *testing.T, dirs ...string) (files []string) {
	t.Helper()
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				files = append(files, path)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

func TestUninstallRemovesWhatAgentsLeave(t *testing.T) {
	t.Parallel()
	s, w := newSite(t), newWorld(t)
	w.serve("web-1-a", []string{"shop.Web"})
	state := filepath.Join(t.TempDir(), "state")
	uninstall := func(more ...string) (out, errs string, code int) {
		return run(t, append([]string{"uninstall", "--ads-socket", s.ads, "--admin-socket", s.admin, "--state-dir", state,
			"--redirect-dir", filepath.Join(t.TempDir(), "none")}, more...)...)
	}
	start := func() *agentProcess {
		return s.start(t, "--source", w.write().source(), "--state-dir", state).ready()
	}
	if out, errs, code := uninstall(); code != 0 || errs != "" || out != "there is nothing to remove\n" {
		t.Errorf("before anything is there: exit %d, %q, %q", code, out, errs)
	}
	a := start()
	var before, after syscall.Stat_t
	if err := syscall.Stat(filepath.Dir(s.ads), &before); err != nil {
		t.Fatal(err)
	}
	if out, errs, code := uninstall(); code != 1 || out != "" || !strings.Contains(errs, "served by another agent") || !strings.Contains(errs, "--force") || strings.Count(errs, "\n") != 1 {
		t.Errorf("while an agent runs: exit %d, %q, %q", code, out, errs)
	}
	harness.Eventually(t, soon, func() error { _, err := os.Stat(filepath.Join(state, "checkpoint")); return err })
	// Nor with the ADS socket of another, or none.
	for ads, want := range map[string]int{filepath.Join(t.TempDir(), "other.sock"): 1, "": 2} {
		files := left(t, filepath.Dir(s.ads), filepath.Dir(s.admin), state)
		out, errs, code := uninstall("--ads-socket", ads)
		if code != want || out != "" || strings.Count(errs, "\n") != 1 {
			t.Errorf("with --ads-socket %q: exit %d, %q, %q", ads, code, out, errs)
		}
		for _, f := range files {
			if _, err := os.Lstat(f); err != nil {
				t.Errorf("with --ads-socket %q: %v", ads, err)
			}
		}
	}
	if a.status().Gate != "open" {
		t.Error("the agent was harmed")
	}
	a.kill()
	if files := left(t, filepath.Dir(s.ads), filepath.Dir(s.admin), state); len(files) < 6 {
		t.Fatalf("the test is to find something: %q", files)
	}
	out, errs, code := uninstall()
	if code != 0 || errs != "" {
		t.Fatalf("exit %d, %s", code, errs)
	}
	for _, path := range []string{s.ads, s.admin, filepath.Join(state, "checkpoint"), state, filepath.Dir(s.admin)} {
		if !slices.Contains(strings.Split(out, "\n"), path) {
			t.Errorf("%s is not said to be removed: %q", path, out)
		}
	}
	if files := left(t, filepath.Dir(filepath.Dir(s.ads)), filepath.Dir(state)); len(files) != 0 {
		t.Errorf("left: %q", files)
	}
	if err := syscall.Stat(filepath.Dir(s.ads), &after); err != nil || after.Ino != before.Ino {
		t.Errorf("the directory that pods mount is another: %v, inode %d and %d", err, before.Ino, after.Ino)
	}
	if out, errs, code := uninstall(); code != 0 || errs != "" || out != "there is nothing to remove\n" {
		t.Errorf("the second time: exit %d, %q, %q", code, out, errs)
	}
	// Also where the directory of the admin socket stays, as a mount.
	if err := os.Mkdir(filepath.Dir(s.admin), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(s.admin), "mine"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, errs, code := uninstall(); code != 0 || errs != "" || out != "there is nothing to remove\n" {
		t.Errorf("the third time: exit %d, %q, %q", code, out, errs)
	}
	// An agent that comes later works, and can be forced.
	start()
	if out, errs, code := uninstall("--force"); code != 0 || errs != "" || !strings.Contains(out, s.ads+"\n") {
		t.Errorf("with --force: exit %d, %q, %q", code, out, errs)
	}
	// What is not ours stays.
	for _, path := range []string{s.ads, filepath.Join(state, "mine")} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if out, errs, code := uninstall("--force"); code != 1 || !strings.Contains(errs, "is a file") {
		t.Errorf("a file for a socket: exit %d, %q, %q", code, out, errs)
	}
	if files := left(t, state, filepath.Dir(s.ads)); !slices.Contains(files, s.ads) || !slices.Contains(files, filepath.Join(state, "mine")) {
		t.Errorf("left: %q", files)
	}
}
