package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// EnvoyOptions are the options of [StartEnvoy]. The zero value works.
type EnvoyOptions struct {
	// Concurrency is the number of worker threads; 0 means 1.
	Concurrency int
	// LogLevel is Envoy's --log-level; empty means warning.
	LogLevel string
	// Args are added to the command line.
	Args []string
	// HotRestart lets Envoy be the parent or the child of another one. Args say
	// which: base ids are of the whole machine, so a first Envoy takes
	// --use-dynamic-base-id. The admin interface of a parent ends when its child
	// is ready, and the parent itself after --parent-shutdown-time-s.
	HotRestart bool
	// Network is the network namespace in which Envoy runs; nil: that of the test.
	// The admin interface is to be on a unix socket then.
	Network *Network
	// Cgroup is the directory of the cgroup in which Envoy runs; empty: that of
	// the test.
	Cgroup string
	// User is the uid and gid with which Envoy runs; 0: those of the test.
	User uint32
	// Refuses says that the test sends what Envoy is to refuse. Otherwise the
	// test fails if Envoy has refused an update when it is stopped.
	Refuses bool
}

// Envoy is a running Envoy. Its methods are safe for concurrent use.
type Envoy struct {
	p      *process
	client *http.Client
	ending func() // before it is stopped for the first time
}

// StartEnvoy runs Envoy on a bootstrap in YAML or JSON and returns when its
// admin interface answers, which is before any xDS resource is there; see
// [Envoy.WaitReady]. The admin interface is the bootstrap's own, on a port of
// loopback (0 works) or a unix socket; where it has none a port is added.
// Listeners must be the test's own: two Envoys on one port would share its
// connections silently. Envoy stops with the test.
func StartEnvoy(t testing.TB, bootstrap string, opts EnvoyOptions) *Envoy {
	t.Helper()
	bin := Tool(t, "envoy")
	dir, err := os.MkdirTemp("", "envoy-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })

	config, socket, err := withAdmin(bootstrap)
	if err != nil {
		t.Fatal(err)
	}
	file, address := filepath.Join(dir, "bootstrap.yaml"), filepath.Join(dir, "admin-address")
	if err := os.WriteFile(file, config, 0o644); err != nil {
		t.Fatal(err)
	}
	concurrency, level := max(1, opts.Concurrency), opts.LogLevel
	if level == "" {
		level = "warning"
	}
	args := append([]string{
		"-c", file, "--concurrency", strconv.Itoa(concurrency),
		"--log-level", level, "--admin-address-path", address,
	}, opts.Args...)
	if !opts.HotRestart {
		args = append(args, "--disable-hot-restart")
	}
	if opts.User != 0 {
		// The tools' directory may be closed to others.
		own := filepath.Join(dir, "envoy")
		err := os.Link(bin, own)
		if err == nil {
			err = os.Chown(dir, int(opts.User), int(opts.User))
		}
		if err != nil {
			t.Fatal(err)
		}
		bin = own
	}
	p, err := startAt(place{opts.Network, opts.Cgroup, opts.User}, dir, "envoy", bin, args...)
	if err != nil {
		t.Fatal(err)
	}
	e := &Envoy{p: p, client: &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				if socket != "" {
					return opts.Network.Dial(ctx, "unix", socket)
				}
				at, err := os.ReadFile(address)
				if err != nil {
					return nil, err
				}
				return opts.Network.Dial(ctx, "tcp", strings.TrimSpace(string(at)))
			},
		},
	}}
	e.ending = sync.OnceFunc(func() {
		if !opts.Refuses && p.exited() == nil {
			if err := e.refusals(); err != nil {
				t.Errorf("of Envoy at its end: %v", err)
			}
		}
	})
	t.Cleanup(func() {
		e.Stop()
		if t.Failed() {
			t.Logf("tail of Envoy's log:\n%s", p.tail())
		}
	})
	Eventually(t, 30*time.Second, func() error {
		if err := p.exited(); err != nil {
			return errors.Join(errGiveUp, err)
		}
		_, err := e.Get("/server_info")
		return err
	})
	return e
}

// withAdmin returns the bootstrap as JSON with an admin interface, and the path
// of the admin's socket if it is on one.
func withAdmin(bootstrap string) (config []byte, socket string, err error) {
	var b map[string]any
	if err := yaml.Unmarshal([]byte(bootstrap), &b); err != nil {
		return nil, "", fmt.Errorf("bootstrap: %w", err)
	}
	var admin struct {
		Admin *struct {
			Address struct{ Pipe struct{ Path string } }
		}
	}
	if err := yaml.Unmarshal([]byte(bootstrap), &admin); err != nil {
		return nil, "", fmt.Errorf("bootstrap: %w", err)
	}
	if admin.Admin != nil {
		socket = admin.Admin.Address.Pipe.Path
	} else {
		b["admin"] = map[string]any{"address": map[string]any{
			"socket_address": map[string]any{"address": "127.0.0.1", "port_value": 0},
		}}
	}
	config, err = yaml.Marshal(b)
	return config, socket, err
}

// Get is a GET on the admin interface. An answer other than 200 is an error
// that carries the body.
func (e *Envoy) Get(path string) (string, error) { return e.ask(http.MethodGet, path) }

// Post is as Get with POST, which Envoy wants of what changes something.
func (e *Envoy) Post(path string) (string, error) { return e.ask(http.MethodPost, path) }

func (e *Envoy) ask(method, path string) (string, error) {
	req, err := http.NewRequest(method, "http://admin"+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, body)
	}
	return string(body), err
}

// Admin is Get that fails the test on an error.
func (e *Envoy) Admin(t testing.TB, path string) string {
	t.Helper()
	body, err := e.Get(path)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// Stat returns the value of the counter or gauge with exactly this name; false
// if Envoy has none or does not answer.
func (e *Envoy) Stat(name string) (uint64, bool) {
	body, err := e.Get("/stats?filter=" + url.QueryEscape("^"+regexp.QuoteMeta(name)+"$"))
	if err != nil {
		return 0, false
	}
	value, found := strings.CutPrefix(strings.TrimSpace(body), name+": ")
	n, err := strconv.ParseUint(value, 10, 64)
	return n, found && err == nil
}

// refusals is an error if Envoy has refused an update so far.
func (e *Envoy) refusals() error {
	stats, err := e.Get("/stats?filter=update_rejected$")
	if err != nil {
		return err
	}
	for line := range strings.Lines(stats) {
		if name, value, _ := strings.Cut(strings.TrimSpace(line), ": "); value != "0" {
			return fmt.Errorf("%s is %s", name, value)
		}
	}
	return nil
}

// WaitReady waits until Envoy is initialized: every first response that its
// bootstrap asks for has come and what it warmed is warm.
func (e *Envoy) WaitReady(t testing.TB, timeout time.Duration) {
	t.Helper()
	e.WaitFor(t, timeout, func() error {
		_, err := e.Get("/ready")
		return err
	})
}

// WaitFor calls cond until it returns nil; the test fails if that does not
// happen within the timeout, and at once if Envoy ends.
func (e *Envoy) WaitFor(t testing.TB, timeout time.Duration, cond func() error) {
	t.Helper()
	Eventually(t, timeout, func() error {
		if err := e.p.exited(); err != nil {
			return errors.Join(errGiveUp, err)
		}
		return cond()
	})
}

// Pid is Envoy's process id.
func (e *Envoy) Pid() int { return e.p.cmd.Process.Pid }

// Ended waits until Envoy has ended by itself.
func (e *Envoy) Ended(t testing.TB, timeout time.Duration) {
	t.Helper()
	select {
	case <-e.p.done:
		if e.p.err != nil {
			t.Errorf("Envoy ended: %v\n%s", e.p.err, e.p.tail())
		}
	case <-time.After(timeout):
		t.Fatalf("Envoy runs on after %v", timeout)
	}
}

// Log returns the end of Envoy's log.
func (e *Envoy) Log() string { return e.p.tail() }

// Stop ends Envoy and returns when it has gone. It may be called again.
func (e *Envoy) Stop() {
	e.ending()
	e.p.stop()
}
