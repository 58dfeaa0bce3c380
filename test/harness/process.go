package harness

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/tools"
)

// RequireEnv is the environment variable that, set to 1, makes a missing tool a
// failure instead of a skip.
const RequireEnv = "FINGERPOST_REQUIRE_TOOLS"

// Tool returns the path of a tool's binary. It skips the test under -short and
// where the binary is missing, and fails it where [RequireEnv] is 1.
func Tool(t testing.TB, name string) string {
	t.Helper()
	if testing.Short() {
		t.Skipf("-short: %s is not started", name)
	}
	path, err := tools.Path(name)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err == nil {
		return path
	}
	if os.Getenv(RequireEnv) == "1" {
		t.Fatalf("%s is needed: %v (run make test, which brings it)", name, err)
	}
	t.Skipf("%s is missing: %v (make test brings it)", name, err)
	return ""
}

// process is one running program. Its log goes to a file.
type process struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // how it ended; read after done
}

// start runs a program with its output in dir/<name>.log.
func start(dir, name, path string, args ...string) (*process, error) {
	return startAt(place{}, dir, name, path, args...)
}

// place is where a program runs; what is zero is as in the test itself.
type place struct {
	network *Network
	cgroup  string // its directory
	user    uint32
}

func startAt(at place, dir, name, path string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.cmd = exec.Command(path, args...)
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if at.user != 0 {
		p.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: at.user, Gid: at.user}
	}
	if at.cgroup != "" {
		cgroup, err := os.Open(at.cgroup)
		if err != nil {
			return nil, err
		}
		defer cgroup.Close()
		p.cmd.SysProcAttr.UseCgroupFD, p.cmd.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
	}
	started := make(chan error)
	go func() {
		// Pdeathsig is sent when the thread ends that started the process, so
		// this one must stay until the process has gone. It goes on afterwards,
		// since others may have been started by it.
		runtime.LockOSThread()
		run := p.cmd.Start
		if at.network != nil {
			run = at.network.in(run)
		}
		home, err := andBack(run)
		if home {
			defer runtime.UnlockOSThread()
		}
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// exited is an error with the log's tail if the process has ended, else nil.
func (p *process) exited() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended: %v\n%s", p.name, p.err, p.tail())
	default:
		return nil
	}
}

// stop ends the process: SIGTERM, after 10 s SIGKILL. It returns when the
// process has gone, and may be called again.
func (p *process) stop() {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		p.kill()
	}
}

// kill ends the process with SIGKILL and returns when it has gone.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// tail is the end of the process's log.
func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

// FreePort returns a TCP port of 127.0.0.1 that was free a moment ago. Another
// program may take it before it is used: who can listen on port 0 should.
func FreePort(t testing.TB) int {
	t.Helper()
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

// Eventually calls f until it returns nil, and fails the test with f's last
// error if that does not happen within the timeout.
func Eventually(t testing.TB, timeout time.Duration, f func() error) {
	t.Helper()
	if err := poll(timeout, f); err != nil {
		t.Fatalf("not within %v: %v", timeout, err)
	}
}

// errGiveUp, wrapped by the polled function's error, ends the polling.
var errGiveUp = errors.New("given up")

// poll calls f every 20 ms until it returns nil, the timeout is over or the
// error says that waiting is of no use.
func poll(timeout time.Duration, f func() error) error {
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil || errors.Is(err, errGiveUp) {
			return err
		}
		select {
		case <-deadline.C:
			return err
		case <-tick.C:
		}
	}
}
