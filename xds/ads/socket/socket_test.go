package socket_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fingerpost/fingerpost/xds/ads/socket"
)

// holdPath makes the test binary an agent that holds a socket until its
// standard input ends.
const holdPath = "SOCKET_TEST_HOLD"

func TestMain(m *testing.M) {
	if path := os.Getenv(holdPath); path != "" {
		s, err := socket.Listen(socket.Options{Path: path, Lock: os.Getenv("SOCKET_TEST_LOCK")})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		go serve(s)
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = s.Close()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// serve answers each connection with one byte.
func serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = c.Write([]byte("x"))
		_ = c.Close()
	}
}

// holder is another process that holds a socket.
type holder struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

func hold(t *testing.T, o socket.Options) *holder {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holdPath+"="+o.Path, "SOCKET_TEST_LOCK="+o.Lock)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h := &holder{cmd, stdin}
	t.Cleanup(h.kill)
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("holder says %q, %v", line, err)
	}
	return h
}

func (h *holder) kill() {
	if h.cmd.ProcessState == nil {
		_ = h.cmd.Process.Kill()
		_ = h.cmd.Wait()
	}
}

func place(t *testing.T) socket.Options {
	dir := t.TempDir()
	return socket.Options{Path: filepath.Join(dir, "run", "ads.sock"), Lock: filepath.Join(dir, "own", "ads.lock")}
}

func listen(t *testing.T, o socket.Options) *socket.Socket {
	t.Helper()
	s, err := socket.Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	go serve(s)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func answers(t *testing.T, path string) {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if b, err := io.ReadAll(c); string(b) != "x" {
		t.Fatalf("read %q, %v", b, err)
	}
}

func TestSocketAndItsDirectoriesAreOpenToAllWhateverTheUmask(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	o := place(t)
	o.Path = filepath.Join(filepath.Dir(o.Path), "deep", "ads.sock")
	s := listen(t, o)
	answers(t, o.Path)
	for path, want := range map[string]fs.FileMode{
		o.Path: fs.ModeSocket | 0o666, filepath.Dir(o.Path): fs.ModeDir | 0o755, filepath.Dir(filepath.Dir(o.Path)): fs.ModeDir | 0o755,
	} {
		if fi, err := os.Lstat(path); err != nil || fi.Mode() != want {
			t.Fatalf("%s: %v, %v; want %v", path, fi.Mode(), err, want)
		}
	}
	pid, err := os.ReadFile(o.Lock)
	if err != nil || string(pid) != fmt.Sprintln(os.Getpid()) {
		t.Fatalf("lock holds %q, %v", pid, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatalf("second close: %v", err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(o.Path)); len(entries) != 0 {
		t.Fatalf("left behind: %v", entries)
	}
	o.Mode = 0o600
	listen(t, o)
	if fi, err := os.Lstat(o.Path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", fi.Mode(), err)
	}
}

func TestWhatCannotBeASocketIsOneClearLine(t *testing.T) {
	file := func(t *testing.T, path string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("keep"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for name, row := range map[string]struct {
		prepare func(*testing.T, *socket.Options)
		want    string
	}{
		"path of 108 bytes": {func(t *testing.T, o *socket.Options) {
			o.Path = "/" + strings.Repeat("x", 107)
		}, "has 108 bytes, a unix socket can have 107"},
		"no path":             {func(t *testing.T, o *socket.Options) { o.Path = "" }, "path is empty"},
		"directory is a file": {func(t *testing.T, o *socket.Options) { file(t, filepath.Dir(o.Path)) }, "run is a file, not a directory"},
		"parent is a file": {func(t *testing.T, o *socket.Options) {
			file(t, filepath.Dir(o.Path))
			o.Path = filepath.Join(filepath.Dir(o.Path), "deep", "deeper", "ads.sock")
		}, "run is a file, not a directory"},
		"lock directory is a file": {func(t *testing.T, o *socket.Options) { file(t, filepath.Dir(o.Lock)) }, "own is a file, not a directory"},
		"path is a file":           {func(t *testing.T, o *socket.Options) { file(t, o.Path) }, "is a file; remove it or choose another path"},
		"path is a directory": {func(t *testing.T, o *socket.Options) {
			if err := os.MkdirAll(o.Path, 0o755); err != nil {
				t.Fatal(err)
			}
		}, "is a directory; remove it or choose another path"},
		"path is a link": {func(t *testing.T, o *socket.Options) {
			file(t, o.Path+".target")
			if err := os.Symlink(o.Path+".target", o.Path); err != nil {
				t.Fatal(err)
			}
		}, "is a symbolic link; remove it or choose another path"},
	} {
		t.Run(name, func(t *testing.T) {
			o := place(t)
			row.prepare(t, &o)
			before, _ := os.Lstat(o.Path)
			_, err := socket.Listen(o)
			if err == nil || !strings.Contains(err.Error(), row.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got %v, want %q", err, row.want)
			}
			if after, _ := os.Lstat(o.Path); before != nil && !os.SameFile(before, after) {
				t.Fatal("what stood there was touched")
			}
		})
	}
}

func TestPathOfFullLengthWorks(t *testing.T) {
	dir, err := os.MkdirTemp("", "s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := dir + "/" + strings.Repeat("d", 90-len(dir)) + "/"
	path += strings.Repeat("n", socket.MaxPath-len(path))
	listen(t, socket.Options{Path: path, Lock: filepath.Join(dir, "lock")})
	answers(t, path)
}

func TestSecondAgentIsRefused(t *testing.T) {
	for name, other := range map[string]func(*socket.Options){
		"same lock":          func(*socket.Options) {},
		"another lock":       func(o *socket.Options) { o.Lock += ".other" },
		"no lock":            func(o *socket.Options) { o.Lock = "" },
		"same lock, no name": func(o *socket.Options) { _ = os.Remove(o.Path) },
	} {
		t.Run(name, func(t *testing.T) {
			o := place(t)
			h := hold(t, o)
			second := o
			other(&second)
			_, err := socket.Listen(second)
			var held *socket.HeldError
			if !errors.As(err, &held) || held.PID != h.cmd.Process.Pid || held.Path != o.Path {
				t.Fatalf("got %v", err)
			}
			want := fmt.Sprintf("%s is served by another agent (pid %d); stop it first", o.Path, h.cmd.Process.Pid)
			if err.Error() != want {
				t.Fatalf("got %q, want %q", err, want)
			}
			if name != "same lock, no name" {
				answers(t, o.Path)
			}
		})
	}
}

func TestRestartAfterKillNeedsNoCleaning(t *testing.T) {
	o := place(t)
	for range 3 {
		h := hold(t, o)
		answers(t, o.Path)
		h.kill()
		if _, err := os.Lstat(o.Path); err != nil {
			t.Fatalf("a killed agent should leave its socket: %v", err)
		}
	}
	// Killed between bind and rename.
	if err := os.Rename(o.Path, filepath.Join(filepath.Dir(o.Path), ".ads.sock.new")); err != nil {
		t.Fatal(err)
	}
	listen(t, o)
	answers(t, o.Path)
}

func TestOrderlyEndFreesNameAndLock(t *testing.T) {
	o := place(t)
	h := hold(t, o)
	_ = h.stdin.Close()
	if err := h.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(o.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("name after the end: %v", err)
	}
	listen(t, o)
}

func TestGarbageInTheLockFileIsNoHolder(t *testing.T) {
	o := place(t)
	if err := errors.Join(os.MkdirAll(filepath.Dir(o.Lock), 0o755), os.WriteFile(o.Lock, []byte("1\nnot a pid\x00"), 0o644)); err != nil {
		t.Fatal(err)
	}
	listen(t, o)
}

func TestCloseLeavesTheSuccessorsNameAlone(t *testing.T) {
	o := place(t)
	old := listen(t, o)
	if err := errors.Join(old.Unlock(), old.Unlock()); err != nil {
		t.Fatal(err)
	}
	// The successor has the lock and moves its socket over the name.
	next := o
	next.Path += ".next"
	successor := listen(t, next)
	if !old.Ours() || !successor.Ours() {
		t.Fatal("a socket does not know its own name")
	}
	if err := os.Rename(next.Path, o.Path); err != nil {
		t.Fatal(err)
	}
	if old.Ours() {
		t.Fatal("the name is another socket's")
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	answers(t, o.Path)
}
