package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"go.uber.org/goleak"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads/socket"
	"github.com/fingerpost/fingerpost/xds/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// soon bounds every wait.
const soon = 60 * time.Second

// site is where agents run, one of this process and others that the tests play.
type site struct {
	t      *testing.T
	config agent.Config
}

func newSite(t *testing.T) *site {
	// Not t.TempDir: a socket's path is bounded.
	dir, err := os.MkdirTemp("", "fp-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	world := filepath.Join(dir, "pods.yaml")
	if err := os.WriteFile(world, []byte("apiVersion: v1\nkind: List\nitems: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := agent.Defaults()
	c.NodeName, c.Source, c.Takeover = "n1", "file:"+world, true
	c.ADSSocket, c.AdminSocket = filepath.Join(dir, "run", "ads.sock"), filepath.Join(dir, "own", "admin.sock")
	c.HTTPAddress, c.PeerAddress, c.StateDir = "", "", ""
	c.LogTo = io.Discard
	return &site{t: t, config: c}
}

// run starts the agent, which ends with the test or by stop.
func (s *site) run() (stop func()) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx, s.config) }()
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil {
			s.t.Errorf("the agent ended with %v", err)
		}
	}
	s.t.Cleanup(stop)
	return stop
}

func (s *site) lock(path string) string {
	s.t.Helper()
	found, err := filepath.Glob(filepath.Join(filepath.Dir(s.config.AdminSocket), filepath.Base(path)+".*.lock"))
	if err != nil || len(found) != 1 {
		s.t.Fatalf("locks of %s: %v, %v", path, found, err)
	}
	return found[0]
}

func (s *site) options(path string) socket.Options {
	return socket.Options{Path: path, Lock: s.lock(path)}
}

func (s *site) releasePath() string {
	s.t.Helper()
	return filepath.Join(filepath.Dir(s.config.AdminSocket), "release."+strings.Split(filepath.Base(s.lock(s.config.ADSSocket)), ".")[2])
}

// ask plays the successor that asks.
func (s *site) ask() (*socket.Predecessor, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), soon)
	defer cancel()
	return socket.Ask(ctx, s.releasePath(), socket.Request{Release: s.config.ADSSocket, Admin: s.config.AdminSocket})
}

// instance is the agent's own admin socket.
func (s *site) instance() string {
	found, _ := filepath.Glob(s.config.AdminSocket + ".*-*")
	if len(found) != 1 {
		return ""
	}
	return found[0]
}

func (s *site) status() (agent.Status, error) {
	var st agent.Status
	return st, get(s.instance(), "/status", &st)
}

func get(path, url string, v any) error {
	c := http.Client{Timeout: soon, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return socket.Dial(ctx, path)
	}}}
	resp, err := c.Get("http://agent" + url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}

func eventually(t *testing.T, f func() error) {
	t.Helper()
	deadline := time.Now().Add(soon)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-tick.C
	}
}

// part waits until status says so of the takeover.
func (s *site) part(want string) {
	s.t.Helper()
	eventually(s.t, func() error {
		st, err := s.status()
		if err == nil && !strings.HasPrefix(st.Parts["takeover"], want) {
			err = fmt.Errorf("takeover is %q, want %q", st.Parts["takeover"], want)
		}
		return err
	})
}

func (s *site) ready(want bool) {
	s.t.Helper()
	eventually(s.t, func() error {
		var r agent.Readiness
		if err := get(s.instance(), "/ready", &r); err != nil {
			return err
		}
		if r.Ready != want {
			return fmt.Errorf("ready is %v: %s", r.Ready, r.Reason)
		}
		return nil
	})
}

// connect opens a delta stream and waits for the listener that each client has.
func (s *site) connect(m client.Memory) *client.Stream {
	s.t.Helper()
	conn, err := client.Dial(s.config.ADSSocket)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	c, err := client.Open(s.t.Context(), conn, client.Options{Delta: true, Memory: m, Node: &corev3.Node{Id: "prod/client"}})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(c.Close)
	if err := c.Subscribe(xds.Listener); err != nil {
		s.t.Fatal(err)
	}
	return c
}

func (s *site) answered(c *client.Stream) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), soon)
	defer cancel()
	if r, err := c.Next(ctx); err != nil {
		s.t.Fatalf("no answer: %v, %v", r, err)
	}
}

// ends waits for the end of a stream.
func ends(t *testing.T, c *client.Stream) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	for {
		if _, err := c.Next(ctx); err != nil {
			if ctx.Err() != nil {
				t.Fatal("the stream goes on")
			}
			return
		}
	}
}

func TestSuccessorThatDiesBeforeItTakesTheNameCostsNoStream(t *testing.T) {
	s := newSite(t)
	s.run()
	s.ready(true)
	c := s.connect(client.Memory{})
	s.answered(c)
	for _, locked := range []bool{false, true} {
		p, err := s.ask()
		if err != nil {
			t.Fatal(err)
		}
		s.part("off: released to pid ")
		s.ready(true) // the name leads there still
		if locked {
			// It has the lock, and a name that nobody knows.
			o := s.options(s.config.ADSSocket)
			o.Path += ".other"
			l, err := socket.Listen(o)
			if err != nil {
				t.Fatal(err)
			}
			_ = l.Close()
		}
		_ = p.Close()
		s.part("on")
		s.ready(true)
		if _, err := socket.Listen(s.options(s.config.ADSSocket)); err == nil || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
			t.Errorf("the lock is not taken back: %v", err)
		}
	}
	if err := c.Err(); err != nil {
		t.Errorf("the stream ended: %v", err)
	}
}

func TestSuccessorThatDiesRightAfterTheRenameIsSucceededByItsPredecessor(t *testing.T) {
	s := newSite(t)
	s.run()
	s.ready(true)
	for _, says := range []bool{true, false} {
		c := s.connect(client.Memory{})
		s.answered(c)
		p, err := s.ask()
		if err != nil {
			t.Fatal(err)
		}
		o := s.options(s.config.ADSSocket)
		o.Replace = true
		l, err := socket.Listen(o)
		if err != nil {
			t.Fatal(err)
		}
		if says {
			// The clients are sent away while the name leads to a live socket.
			if err := p.Taken(); err != nil {
				t.Fatal(err)
			}
			ends(t, c)
			s.ready(false)
		}
		// What the kernel does for a process that is killed: the name stays.
		_ = l.UnixListener.Close()
		_ = l.Unlock()
		_ = p.Close()
		s.part("on")
		s.ready(true)
		ends(t, c)
		again := s.connect(c.Memory())
		eventually(t, func() error {
			if st, err := s.status(); err != nil || st.Proxies != 1 {
				return fmt.Errorf("%d clients, %v", st.Proxies, err)
			}
			return nil
		})
		if err := again.Err(); err != nil {
			t.Errorf("the new stream ended: %v", err)
		}
		again.Close()
		eventually(t, func() error {
			if st, err := s.status(); err != nil || st.Proxies != 0 {
				return fmt.Errorf("%d clients, %v", st.Proxies, err)
			}
			return nil
		})
	}
}

func TestPredecessorLeavesTheNamesToALivingSuccessor(t *testing.T) {
	s := newSite(t)
	stop := s.run()
	s.ready(true)
	p, err := s.ask()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	o := s.options(s.config.ADSSocket)
	o.Replace = true
	l, err := socket.Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_ = p.Taken()
	s.ready(false)
	// Nothing that it did in the meantime has cost the name: it looked often.
	stop()
	if !l.Ours() {
		t.Error("the name was taken from the successor")
	}
}

func TestHolderRefusesWhoAsksForAnotherSocketAndHearsTheNext(t *testing.T) {
	s := newSite(t)
	s.run()
	s.ready(true)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if _, err := socket.Ask(ctx, s.releasePath(), socket.Request{Release: "/other.sock"}); err == nil || !strings.Contains(err.Error(), s.config.ADSSocket) {
		t.Errorf("got %v, want a refusal that names the socket", err)
	}
	// One that says nothing of use is not waited for.
	c, err := socket.Dial(ctx, s.releasePath())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("hello\n")); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p, err := s.ask()
	if err != nil {
		t.Fatal(err)
	}
	_ = p.Close()
	s.part("on")
}

// holder plays an agent that holds the ADS socket.
func (s *site) holder() (names, release *socket.Socket) {
	s.t.Helper()
	// A first run makes the locks, whose names are the agent's.
	stop := s.run()
	s.ready(true)
	lock, path := s.options(s.config.ADSSocket), s.releasePath()
	stop()
	names, err := socket.Listen(lock)
	if err != nil {
		s.t.Fatal(err)
	}
	release, err = socket.Listen(socket.Options{Path: path})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = errors.Join(names.Close(), release.Close()) })
	return names, release
}

func TestSuccessorOfAHolderThatDiesDuringTheHandOverServes(t *testing.T) {
	for name, die := range map[string]func(*site, *socket.Successor, *socket.Socket){
		"without an answer": func(_ *site, a *socket.Successor, l *socket.Socket) {
			_ = l.UnixListener.Close()
			_ = l.Unlock()
			a.Close()
		},
		"after its answer": func(s *site, a *socket.Successor, l *socket.Socket) {
			_ = l.Unlock()
			if err := a.Grant(); err != nil {
				s.t.Error(err)
			}
			_ = l.UnixListener.Close()
			a.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			names, release := s.holder()
			s.run()
			a, err := socket.Accept(release.UnixListener)
			if err != nil {
				t.Fatal(err)
			}
			s.ready(false)
			_ = release.UnixListener.Close()
			die(s, a, names)
			s.ready(true)
			s.part("on")
			s.answered(s.connect(client.Memory{}))
		})
	}
}

// An agent of another build may hold the socket and not know of releases.
func TestSuccessorOfAHolderThatReleasesNothingWaitsForItsEnd(t *testing.T) {
	s := newSite(t)
	names, release := s.holder()
	_ = release.Close()
	s.run()
	s.part("off: " + s.config.ADSSocket + " is served by another agent")
	s.ready(false)
	if !names.Ours() {
		t.Fatal("the name was taken from its holder")
	}
	_ = names.Close()
	s.ready(true)
	s.part("on")
}

func TestWithoutTakeoverTheSecondAgentIsRefused(t *testing.T) {
	s := newSite(t)
	s.holder()
	s.config.Takeover = false
	var held *socket.HeldError
	if err := agent.Run(t.Context(), s.config); !errors.As(err, &held) || held.Path != s.config.ADSSocket {
		t.Errorf("got %v, want that the socket is held", err)
	}
}

func TestInstanceSocketIsThereFromTheStartAndGoesWithTheAgent(t *testing.T) {
	s := newSite(t)
	if err := os.MkdirAll(filepath.Dir(s.config.AdminSocket), 0o755); err != nil {
		t.Fatal(err)
	}
	// What a killed agent leaves, and what only looks like it.
	dead, err := socket.Listen(socket.Options{Path: s.config.AdminSocket + ".7-9"})
	if err != nil {
		t.Fatal(err)
	}
	_ = dead.UnixListener.Close()
	file := s.config.AdminSocket + ".7-8"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	stop := s.run()
	own := fmt.Sprintf("-%d", os.Getpid())
	eventually(t, func() error {
		found, _ := filepath.Glob(s.config.AdminSocket + ".*" + own)
		if len(found) != 1 {
			return fmt.Errorf("instance sockets: %v", found)
		}
		var st agent.Status
		return get(found[0], "/status", &st)
	})
	if _, err := os.Lstat(dead.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the dead instance's socket: %v", err)
	}
	if _, err := os.Lstat(file); err != nil {
		t.Errorf("a file that is no socket: %v", err)
	}
	stop()
	if found, _ := filepath.Glob(s.config.AdminSocket + ".*" + own); len(found) != 0 {
		t.Errorf("left behind: %v", found)
	}
	// This process is no container's first, and no agent by its command line.
	if got := agent.OwnAdminSocket(s.config.AdminSocket); got != s.config.AdminSocket {
		t.Errorf("asks at %s", got)
	}
}
