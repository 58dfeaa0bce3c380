package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
)

// redirectNode is a node whose agent redirects connections: its host is a network
// of its own, its pods have cgroups in one of its own, in which this process is as
// well. So these tests run alone.
type redirectNode struct {
	*site
	*world
	t      *testing.T
	cgroup string
	pins   string
	hold   *reflectionHold // of all servers
}

func newRedirectNode(t *testing.T) *redirectNode {
	t.Helper()
	n := &redirectNode{site: newSite(t), world: newWorld(t), t: t, hold: newReflectionHold()}
	n.network = harness.NewNetwork(t)
	n.network.Claim(t, podGateway)
	if err := os.Chmod(filepath.Dir(filepath.Dir(n.ads)), 0o755); err != nil { // sidecars are not root
		t.Fatal(err)
	}
	root, own := "", ""
	for file, f := range map[string]func(string){
		"/proc/self/mountinfo": func(line string) {
			if mount, fs, ok := strings.Cut(line, " - "); ok && strings.HasPrefix(fs, "cgroup2 ") {
				root = strings.Fields(mount)[4]
			}
		},
		"/proc/self/cgroup": func(line string) {
			if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
				own = path
			}
		},
	} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			f(line)
		}
	}
	if root == "" {
		t.Fatal("there is no cgroup2 mount: redirection cannot be tested")
	}
	var err error
	if n.cgroup, err = os.MkdirTemp(root, "fingerpost-test-"); err != nil {
		t.Fatalf("redirection is tested by root, with a cgroup of its own: %v", err)
	}
	enter := func(dir string) error { return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0) }
	t.Cleanup(func() {
		if err := errors.Join(enter(filepath.Join(root, own)), os.Remove(n.cgroup)); err != nil {
			t.Error(err)
		}
	})
	if err := enter(n.cgroup); err != nil {
		t.Fatal(err)
	}
	bpffs := t.TempDir()
	if err := unix.Mount("bpf", bpffs, "bpf", 0, ""); err != nil {
		t.Fatalf("redirection is tested by root, with a bpf file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpffs, 0); err != nil {
			t.Error(err)
		}
	})
	n.pins = filepath.Join(bpffs, "fingerpost")
	return n
}

// agent starts one, and waits until it redirects.
func (n *redirectNode) agent(more ...string) *agentProcess {
	n.t.Helper()
	a := n.start(n.t, append([]string{"--source", n.write().source(), "--redirect", "--redirect-cgroup", n.cgroup, "--redirect-dir", n.pins}, more...)...).ready()
	n.redirects(a)
	return a
}

func (n *redirectNode) redirects(a *agentProcess) {
	n.t.Helper()
	harness.Eventually(n.t, soon, func() error {
		if state := a.status().Parts["redirect"]; state != "on" {
			return fmt.Errorf("redirect is %s", state)
		}
		return nil
	})
}

// listens starts a server of the node at an address, in place of a pod.
func (n *redirectNode) listens(name, addr string, services ...string) *demo.Sample {
	n.t.Helper()
	n.network.Claim(n.t, netip.MustParseAddrPort(addr).Addr().String())
	var s *demo.Sample
	if err := n.network.Do(func() (err error) { s, err = demo.StartSample(name, addr, services, n.hold.option()); return err }); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(s.Stop)
	return s
}

// server is a pod that serves.
func (n *redirectNode) server(id, addr string, services ...string) *corev1.Pod {
	n.t.Helper()
	n.listens(id, addr+":50051", services...)
	return n.add(newPod(id, addr, 50051))
}

// service puts a Service in front of pods, with the addresses.
func (n *redirectNode) service(name string, ips []string, pods ...*corev1.Pod) {
	n.t.Helper()
	objects := service(name, 0, "grpc", pods...)
	svc := objects[0].(*corev1.Service)
	svc.Spec.ClusterIP, svc.Spec.ClusterIPs = ips[0], ips
	n.more = append(n.more, objects...)
}

// caller is a pod with a sidecar of its own user, as injection makes it.
type caller struct {
	*redirectNode
	id      string
	network *harness.Network
	cgroup  string
	envoy   *harness.Envoy
	ready   string // the address at which a kubelet asks; empty: nobody does
}

const (
	sidecarUser = 15001
	podGateway  = "169.254.1.1" // of the host, in every pod
)

func (n *redirectNode) caller(id, addr string) *caller {
	n.t.Helper()
	_, network := n.wiredPod(n.world, "prod", id, addr, "shop.Caller")
	network.Default(n.t, podGateway)
	c := &caller{redirectNode: n, id: id, network: network, cgroup: filepath.Join(n.cgroup, id)}
	if err := os.Mkdir(c.cgroup, 0o755); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := os.Remove(c.cgroup); err != nil {
			n.t.Error(err)
		}
	})
	return c
}

// sidecar starts its Envoy, and waits until it listens for redirected connections.
func (c *caller) sidecar() {
	c.t.Helper()
	dir, err := os.MkdirTemp("", "fp-")
	if err == nil {
		err = os.Chown(dir, sidecarUser, sidecarUser)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { os.RemoveAll(dir) })
	admin := filepath.Join(dir, "admin.sock")
	conf, errs, code := run(c.t, "bootstrap", "--format", "envoy", "--ads-socket", c.ads, "--node-id", "prod/"+c.id, "--redirect", "--admin-socket-envoy", admin)
	if code != 0 || errs != "" {
		c.t.Fatalf("fingerpost bootstrap: exit %d, %s", code, errs)
	}
	if c.ready != "" {
		// As injection does it, where a kubelet asks at the same port.
		text, err := bootstrap.Envoy(bootstrap.Options{NodeID: "prod/" + c.id, ADSSocket: c.ads, AdminSocket: admin, Redirect: true, ReadyAddress: c.ready, ReadyPort: 15002})
		if err != nil {
			c.t.Fatal(err)
		}
		conf = string(text)
	}
	c.envoy = harness.StartEnvoy(c.t, conf, harness.EnvoyOptions{Network: c.network, Cgroup: c.cgroup, User: sidecarUser, Concurrency: 2})
	c.envoy.WaitFor(c.t, soon, func() error {
		if body, err := c.envoy.Get("/listeners"); err != nil || !strings.Contains(body, "capture::0.0.0.0:15002") {
			return fmt.Errorf("listeners: %v, %s", err, body)
		}
		return nil
	})
}

// dial is a connection as an application makes it that knows nothing of a proxy.
func (c *caller) dial(addr, authority string) *grpc.ClientConn {
	c.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(authority),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (conn net.Conn, err error) {
			err = c.network.Do(func() (err error) {
				conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", addr)
				return err
			})
			return conn, err
		}))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { conn.Close() })
	return conn
}

// answers are who answers new calls on new connections.
func (c *caller) answers(addr, service string) (string, error) {
	by := map[string]bool{}
	for range 12 {
		conn := c.dial(addr, "users.prod.svc:80")
		who, err := say(c.t, conn, service)
		conn.Close()
		if err != nil {
			return "", err
		}
		by[who] = true
	}
	return strings.Join(slices.Sorted(maps.Keys(by)), " "), nil
}

func (c *caller) reach(addr, service, want string) {
	c.t.Helper()
	harness.Eventually(c.t, soon, func() error {
		got, err := c.answers(addr, service)
		if err != nil || got != want {
			return fmt.Errorf("calls of %s to %s from %s are answered by %q, want %q: %w", service, addr, c.id, got, want, errors.Join(err))
		}
		return nil
	})
}

// redirectedShop is a node with two callers, and two Services of which each pod has its own.
func redirectedShop(t *testing.T) (n *redirectNode, one, two *caller) {
	n = newRedirectNode(t)
	a, b := n.server("users-1-a", "10.77.5.1", "shop.Users"), n.server("users-1-b", "10.77.5.2", "shop.Users")
	other := n.server("odd-1-a", "10.77.5.3", "shop.Other")
	canary := n.server("canary-1-a", "10.77.5.4", "shop.Users", "shop.Other")
	n.service("users", []string{"10.96.0.10", "fd00:96::10"}, a, b, other)
	n.service("users-canary", []string{"10.96.0.11"}, canary)
	// What a caller finds that is not redirected: with kube-proxy it would be a pod.
	n.listens("directly", "10.96.0.10:80", "shop.Users")
	return n, n.caller("one-1-a", "10.77.6.1"), n.caller("two-1-a", "10.77.6.2")
}

func TestRedirectedCallsReachThePodsOfWhatWasDialled(t *testing.T) {
	n, one, two := redirectedShop(t)
	a := n.agent()
	one.reach("10.96.0.10:80", "shop.Users", "directly") // nobody listens yet
	two.ready = "10.77.6.2"
	one.sidecar()
	two.sidecar()
	for _, c := range []*caller{one, two} {
		c.reach("10.96.0.10:80", "shop.Users", "users-1-a users-1-b")
		c.reach("10.96.0.11:80", "shop.Users", "canary-1-a")
		c.reach("[fd00:96::10]:80", "shop.Users", "users-1-a users-1-b")
		c.reach("10.96.0.10:80", "shop.Other", "odd-1-a")
		c.reach("10.77.5.2:50051", "shop.Users", "users-1-b")
		conn := c.dial("10.96.0.11:80", "users-canary.prod.svc:80")
		stream, err := demo.Chat(deadline(t), conn, "shop.Users")
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if who, err := stream.Ask("hello"); err != nil || who != "canary-1-a: hello" {
				t.Errorf("the stream says %q, %v", who, err)
			}
		}
	}
	clusters := one.envoy.Admin(t, "/clusters?format=json")
	if !strings.Contains(clusters, `"to/127.`) || strings.Contains(clusters, `"at/`) {
		t.Errorf("the sidecar's clusters are %s", clusters)
	}
	for name, least := range map[string]float64{`fingerpost_redirect_connections_total{outcome="redirected4"}`: 50, `fingerpost_redirect_connections_total{outcome="redirected6"}`: 10,
		`fingerpost_redirect_connections_total{outcome="exempt"}`: 4, "fingerpost_redirect_pods": 2, `fingerpost_bpf_available{part="redirect",reason=""}`: 1} {
		var v float64
		if _, err := fmt.Sscan(a.metric(name), &v); err != nil || v < least {
			t.Errorf("%s is %v, want %v at least", name, v, least)
		}
	}
	// The kubelet's probe has the port of the pod's own address.
	var probe net.Conn
	if err := n.network.Do(func() (err error) { probe, err = net.Dial("tcp", "10.77.6.2:15002"); return err }); err != nil {
		t.Fatal(err)
	}
	defer probe.Close()
	if _, err := fmt.Fprintf(probe, "GET /ready HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(probe); err != nil || !strings.HasPrefix(string(text), "HTTP/1.1 200 ") {
		t.Errorf("the probe is answered %q, %v", text, err)
	}
	// A connection from outside finds nobody behind the port.
	var raw net.Conn
	if err := n.network.Do(func() (err error) { raw, err = net.Dial("tcp", "10.77.6.1:15002"); return err }); err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if k, err := raw.Read(make([]byte, 1)); err == nil {
		t.Errorf("from outside %d bytes are answered", k)
	}
	// Without its sidecar a pod's connections go where they are dialled.
	one.envoy.Stop()
	one.reach("10.96.0.10:80", "shop.Users", "directly")
	two.reach("10.96.0.10:80", "shop.Users", "users-1-a users-1-b")
}

// Agents come and go while calls are made: none fails, no stream is cut, and none
// goes elsewhere.
func TestRedirectedCallsOutliveTheirAgents(t *testing.T) {
	n, one, _ := redirectedShop(t)
	a := n.agent()
	one.sidecar()
	one.reach("10.96.0.10:80", "shop.Users", "users-1-a users-1-b")
	var streams []*demo.Stream
	for range 25 {
		stream, err := demo.Chat(t.Context(), one.dial("10.96.0.11:80", "users-canary.prod.svc:80"), "shop.Users")
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, stream)
	}
	speak := func(some []*demo.Stream) {
		t.Helper()
		for i, s := range some {
			if who, err := s.Ask("hello"); err != nil || who != "canary-1-a: hello" {
				t.Fatalf("stream %d says %q, %v", i, who, err)
			}
		}
	}
	lives := func() {
		t.Helper()
		speak(streams[:1])
		if got, err := one.answers("10.96.0.10:80", "shop.Users"); err != nil || got != "users-1-a users-1-b" {
			t.Fatalf("calls are answered by %q, %v", got, err)
		}
	}
	lives()
	const (
		calls  = 10_000 // besides those that lives makes
		phases = 7
	)
	var answered []func() int64
	var stops []func()
	for _, to := range []string{"10.96.0.10:80", "10.96.0.11:80", "[fd00:96::10]:80", "10.77.5.2:50051"} {
		n, stop := load(t, one.dial(to, "users.prod.svc:80"), "shop.Users")
		answered, stops = append(answered, n), append(stops, stop)
	}
	made := func() (sum int64) {
		for _, n := range answered {
			sum += n()
		}
		return sum
	}
	phase := 0
	fresh := func() {
		t.Helper()
		for range 20 {
			lives()
		}
		phase++
		speak(streams)
		for proceeds(t, made); made() < int64(calls*phase/phases); {
			proceeds(t, made)
		}
	}
	fresh()
	a.kill()
	fresh()
	a = n.agent()
	fresh()
	a.stop()
	fresh()
	// One that has not learned yet what the one before it knew takes nothing back.
	n.hold.hold()
	a = n.start(t, "--source", n.source(), "--redirect", "--redirect-cgroup", n.cgroup, "--redirect-dir", n.pins).live()
	n.hold.waitAsked(t)
	n.redirects(a)
	for range 5 {
		lives() // some time passes for that
	}
	if gate := a.status().Gate; gate != "closed" {
		t.Errorf("the gate is %s", gate)
	}
	n.hold.release()
	a.ready()
	fresh()
	a.stop()
	// As a version would leave it that has other maps.
	n.shrink("destinations", "numbers", "pods")
	a = n.agent()
	if !strings.Contains(a.log.String(), "has another layout") {
		t.Errorf("no map was replaced:\n%s", a.log)
	}
	fresh()
	next := n.start(t, "--takeover", "--source", n.source(), "--redirect", "--redirect-cgroup", n.cgroup, "--redirect-dir", n.pins).ready()
	n.redirects(next)
	a.stop()
	a = next
	fresh()
	for _, stop := range stops {
		stop() // tells of a call that failed
	}
	if phase != phases || made() < calls {
		t.Errorf("%d calls in %d phases", made(), phase)
	}
	clusters := one.envoy.Admin(t, "/clusters?format=json")
	if n := strings.Count(clusters, `"unknown.sock"`) + strings.Count(clusters, "/unknown.sock\""); n != 1 {
		t.Errorf("%d clusters lead to unknown.sock, besides the bootstrap's: %s", n, clusters)
	}
	// It takes all with it, once no agent runs, and new connections go their way.
	uninstall := func() (string, string, int) {
		return run(t, "uninstall", "--ads-socket", n.ads, "--admin-socket", n.admin, "--state-dir", "", "--redirect-dir", n.pins)
	}
	if out, errs, code := uninstall(); code != 1 || out != "" || !strings.Contains(errs, "another agent") {
		t.Errorf("while an agent runs: exit %d, %s%s", code, out, errs)
	}
	lives()
	a.stop()
	if out, errs, code := uninstall(); code != 0 || errs != "" || !strings.Contains(out, filepath.Join(n.pins, "connect4")+"\n") {
		t.Errorf("exit %d, %s%s", code, out, errs)
	}
	if _, err := os.Stat(n.pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pins are there: %v", err)
	}
	dir, err := os.Open(n.cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for _, at := range []ebpf.AttachType{ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect, ebpf.AttachCgroupInet4GetPeername, ebpf.AttachCgroupInet6GetPeername} {
		if res, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: at}); err != nil || len(res.Programs) != 0 {
			t.Errorf("%s: %+v, %v", at, res, err)
		}
	}
	speak(streams)
	one.reach("10.96.0.10:80", "shop.Users", "directly")
}

// shrink puts smaller maps in the place of pinned ones, with what they hold.
func (n *redirectNode) shrink(names ...string) {
	n.t.Helper()
	for _, name := range names {
		path := filepath.Join(n.pins, name)
		old, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			n.t.Fatal(err)
		}
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: old.Type(), KeySize: old.KeySize(), ValueSize: old.ValueSize(), MaxEntries: 1000})
		if err != nil {
			n.t.Fatal(err)
		}
		var key, value []byte
		for it := old.Iterate(); it.Next(&key, &value); {
			if err := m.Put(key, value); err != nil {
				n.t.Fatal(err)
			}
		}
		if err := errors.Join(os.Remove(path), m.Pin(path), m.Close(), old.Close()); err != nil {
			n.t.Fatal(err)
		}
	}
}

// Where nothing can be redirected the agent says why, and serves as ever.
func TestAgentThatCannotRedirectSaysWhy(t *testing.T) {
	n, one, _ := redirectedShop(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "off: not asked for"},
		{[]string{"--redirect", "--redirect-cgroup", n.cgroup, "--redirect-dir", filepath.Join(t.TempDir(), "pins")}, "off: no-bpffs: "},
		{[]string{"--redirect", "--redirect-cgroup", t.TempDir(), "--redirect-dir", n.pins}, "off: no-cgroup2: "},
	} {
		a := n.start(t, append([]string{"--source", n.write().source()}, c.args...)...).ready()
		harness.Eventually(t, soon, func() error {
			if state := a.status().Parts["redirect"]; !strings.HasPrefix(state, c.want) {
				return fmt.Errorf("redirect is %q, want %q", state, c.want)
			}
			return nil
		})
		if state := a.status().Parts["identity"]; state != "on" || a.status().Gate != "open" {
			t.Errorf("the agent is not as ever: identity %s", state)
		}
		one.reach("10.96.0.10:80", "shop.Users", "directly")
		a.stop()
	}
}
