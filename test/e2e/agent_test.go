package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// soon bounds every wait of these tests; what they wait for comes much sooner
// on a machine that is not overloaded.
const soon = 30 * time.Second

// site is where an agent runs: the directories of its sockets, which outlive
// it.
type site struct {
	ads, admin string
	egress     int
}

func newSite(t *testing.T) *site {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: no agent is started")
	}
	// Not t.TempDir: its path grows with the test's name, and a socket's is
	// bounded.
	dir, err := os.MkdirTemp("", "fp-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return &site{
		ads:    filepath.Join(dir, "run", "ads.sock"),
		admin:  filepath.Join(dir, "admin", "admin.sock"),
		egress: harness.FreePort(t),
	}
}

// agentProcess is a running agent.
type agentProcess struct {
	*site
	t    *testing.T
	cmd  *exec.Cmd
	log  *output
	done chan struct{} // closed when it has ended; err is set then
	err  error
}

// output is what a process wrote so far.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// start starts an agent at the site, which ends with the test.
func (s *site) start(t *testing.T, args ...string) *agentProcess {
	t.Helper()
	return s.launch(t, exec.Command(program, s.args(args...)...))
}

// args are those of an agent at the site, which those given may override.
func (s *site) args(args ...string) []string {
	return append([]string{"agent", "--node-name", "n1",
		"--ads-socket", s.ads, "--admin-socket", s.admin, "--egress-port", fmt.Sprint(s.egress),
		"--http-address", "", "--peer-address", "", "--state-dir", ""}, args...)
}

// launch runs a command that becomes an agent at the site.
func (s *site) launch(t *testing.T, cmd *exec.Cmd) *agentProcess {
	t.Helper()
	a := &agentProcess{site: s, t: t, cmd: cmd, log: &output{}, done: make(chan struct{})}
	a.cmd.Stderr = a.log
	if a.cmd.SysProcAttr == nil {
		a.cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	a.cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { a.err = a.cmd.Wait(); close(a.done) }()
	t.Cleanup(func() {
		a.stop()
		if t.Failed() {
			t.Logf("log of agent %d:\n%s", a.cmd.Process.Pid, a.log)
		}
	})
	return a
}

// ready waits until the agent is.
func (a *agentProcess) ready() *agentProcess {
	a.t.Helper()
	return a.says200("/ready")
}

// live waits until the agent answers, ready or not.
func (a *agentProcess) live() *agentProcess {
	a.t.Helper()
	return a.says200("/live")
}

func (a *agentProcess) says200(path string) *agentProcess {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		select {
		case <-a.done:
			a.t.Fatalf("the agent ended: %v\n%s", a.err, a.log)
		default:
		}
		code, body, err := a.get(path)
		if err == nil && code != http.StatusOK {
			err = errors.New(body)
		}
		return err
	})
	return a
}

// stop ends the agent as Kubernetes does, and waits for it.
func (a *agentProcess) stop() {
	_ = a.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-a.done:
	case <-time.After(soon):
		a.t.Errorf("the agent did not end %v after SIGTERM", soon)
		a.kill()
	}
}

// kill ends the agent as kill -9 does, and waits for it.
func (a *agentProcess) kill() {
	_ = a.cmd.Process.Kill()
	<-a.done
}

func (a *agentProcess) get(path string) (int, string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", a.admin)
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	_, err = b.ReadFrom(resp.Body)
	return resp.StatusCode, b.String(), err
}

// ask reads one of the agent's answers.
func ask[T any](t testing.TB, a *agentProcess, command string) T {
	t.Helper()
	var v T
	out := a.must("-o", "json", command)
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		t.Fatalf("fingerpost %s: %v in %s", command, err, out)
	}
	return v
}

func (a *agentProcess) status() agent.Status { return ask[agent.Status](a.t, a, "status") }
func (a *agentProcess) owners() []agent.OwnerView {
	return ask[[]agent.OwnerView](a.t, a, "owners")
}
func (a *agentProcess) proxies() []ads.Client { return ask[[]ads.Client](a.t, a, "proxies") }
func (a *agentProcess) services() []resources.ServiceView {
	return ask[[]resources.ServiceView](a.t, a, "services")
}

// must runs a command that asks the agent, and returns what it printed.
func (a *agentProcess) must(args ...string) string {
	a.t.Helper()
	out, errs, code := run(a.t, append(args, "--admin-socket", a.admin)...)
	if code != 0 || errs != "" {
		a.t.Fatalf("fingerpost %s: exit %d, %s", strings.Join(args, " "), code, errs)
	}
	return out
}

// run runs a command to its end.
func run(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*soon)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("fingerpost %s: %v", strings.Join(args, " "), err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
