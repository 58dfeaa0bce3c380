package harness

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Cgroup is a cgroup of version 2 that a test has made.
type Cgroup struct {
	Dir string
	fd  *os.File
}

var cgroups int

// NewCgroup makes a cgroup below the root of what this machine has of cgroup2, or
// of what it mounts for the test; it ends with the test. Where none can be made
// the test skips, or fails where [RequireEnv] is 1.
func NewCgroup(t testing.TB) *Cgroup {
	t.Helper()
	c, err := newCgroup(t)
	if err != nil {
		missing(t, "no cgroup can be made here", err)
	}
	return c
}

// missing skips the test, or fails it where nothing may be missing.
func missing(t testing.TB, what string, err error) {
	t.Helper()
	if os.Getenv(RequireEnv) == "1" {
		t.Fatalf("%s: %v", what, err)
	}
	t.Skipf("%s: %v", what, err)
}

func newCgroup(t testing.TB) (*Cgroup, error) {
	root, err := cgroup2(t)
	if err != nil {
		return nil, err
	}
	cgroups++
	return makeCgroup(t, filepath.Join(root, fmt.Sprintf("fingerpost-test-%d-%d", os.Getpid(), cgroups)))
}

// Below makes a cgroup in this one.
func (c *Cgroup) Below(t testing.TB, name string) *Cgroup {
	t.Helper()
	below, err := makeCgroup(t, filepath.Join(c.Dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return below
}

func makeCgroup(t testing.TB, dir string) (*Cgroup, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		// A process that has ended may be counted for a moment yet.
		Eventually(t, 10*time.Second, func() error {
			if err := os.Remove(dir); !errors.Is(err, os.ErrNotExist) {
				return err
			}
			return nil
		})
	})
	fd, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { fd.Close() })
	return &Cgroup{Dir: dir, fd: fd}, nil
}

// Hold lets a command be in the cgroup from its start.
func (c *Cgroup) Hold(attr *syscall.SysProcAttr) {
	attr.UseCgroupFD, attr.CgroupFD = true, int(c.fd.Fd())
}

// cgroup2 is where it is mounted, now if nobody has.
func cgroup2(t testing.TB) (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if mount, fs, _ := strings.Cut(lines.Text(), " - "); strings.HasPrefix(fs, "cgroup2 ") {
			if fields := strings.Fields(mount); len(fields) > 4 {
				return fields[4], nil
			}
		}
	}
	if err := lines.Err(); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "cgroup2-")
	if err != nil {
		return "", err
	}
	if err := unix.Mount("none", dir, "cgroup2", 0, ""); err != nil {
		_ = os.Remove(dir)
		return "", fmt.Errorf("cgroup2 cannot be mounted: %w", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(dir, 0), os.Remove(dir)); err != nil {
			t.Error(err)
		}
	})
	return dir, nil
}
