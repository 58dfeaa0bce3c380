package identity_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/identity"
	"github.com/fingerpost/fingerpost/test/harness"
)

// roleEnv makes the test binary something else: the host on which the tests run
// (a process whose network namespace is that of a host), a server or a client.
const roleEnv = "IDENTITY_TEST_ROLE"

func TestMain(m *testing.M) {
	switch role, arg, _ := strings.Cut(os.Getenv(roleEnv), " "); role {
	case "":
		// All threads of the process are in the namespace that a command has from
		// its start.
		cmd := exec.Command(os.Args[0], os.Args[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.Env = append(os.Environ(), roleEnv+"=host")
		cmd.SysProcAttr = harness.OwnNetwork()
		cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
		err := cmd.Run()
		var exit *exec.ExitError
		switch {
		case err == nil:
		case errors.As(err, &exit):
			os.Exit(max(1, exit.ExitCode()))
		default:
			fmt.Fprintln(os.Stderr, "no network namespace can be made here, the tests of the kernel's part are skipped:", err)
			os.Exit(m.Run())
		}
	case "host":
		goleak.VerifyTestMain(m)
	case "server":
		end(serve(arg))
	case "client":
		end(call(arg, ""))
	case "claimant":
		path, addr, _ := strings.Cut(arg, " ")
		end(call(path, addr))
	}
}

func end(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// call connects when a line comes, after it has claimed an address, and stays
// until its input ends.
func call(path, addr string) error {
	in := bufio.NewReader(os.Stdin)
	if _, err := in.ReadString('\n'); err != nil {
		return err
	}
	if addr != "" {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err == nil {
			err = netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: netip.MustParseAddr(addr).AsSlice(), Mask: net.CIDRMask(32, 32)}})
		}
		if err != nil {
			return fmt.Errorf("claim %s: %w", addr, err)
		}
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = io.Copy(io.Discard, in)
	return err
}

// serve proves who connects and writes each proof as a line of JSON.
// The first of a pid namespace sees what a container's does, in /proc and, with
// NOBODY set, of capabilities.
func serve(path string) error {
	if os.Getpid() == 1 {
		if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("proc", "/proc", "proc", 0, "")); err != nil {
			return err
		}
	}
	if os.Getenv("NOBODY") != "" {
		if err := syscall.Setuid(65534); err != nil {
			return err
		}
	}
	lis, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	pods := newPods()
	if err := json.Unmarshal([]byte(os.Getenv("PODS")), &pods.at); err != nil {
		return err
	}
	p, err := identity.Open(identity.Options{Pods: pods})
	if err != nil {
		fmt.Println("off:", err)
		return nil
	}
	fmt.Println(p.Methods())
	for {
		c, err := lis.Accept()
		if err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(p.Prove(c.(*net.UnixConn))); err != nil {
			return err
		}
		c.Close()
	}
}

// pods is what the agent knows of the pods of its node.
type pods struct {
	mu  sync.Mutex
	at  map[netip.Addr][]identity.Pod
	uid map[string]identity.Pod
}

func newPods() *pods {
	return &pods{at: map[netip.Addr][]identity.Pod{}, uid: map[string]identity.Pod{}}
}

func (p *pods) At(addr netip.Addr) []identity.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at[addr]
}

func (p *pods) WithUID(uid string) (identity.Pod, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod, ok := p.uid[uid]
	return pod, ok
}

// add makes the pod prod/name known.
func (p *pods) add(name, uid string, addrs ...string) identity.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := identity.Pod{Namespace: "prod", Name: name, UID: uid, HostNetwork: len(addrs) == 0}
	p.uid[uid] = pod
	for _, a := range addrs {
		addr := netip.MustParseAddr(a)
		p.at[addr] = append(p.at[addr], pod)
	}
	return pod
}

// soon bounds every wait.
const soon = 10 * time.Second

// node is a host with a server.
type node struct {
	*harness.Network
	t    testing.TB
	path string
	lis  *net.UnixListener
	pods *pods
	*identity.Prover
}

func newNode(t testing.TB) *node {
	t.Helper()
	if os.Getenv(roleEnv) != "host" {
		t.Skip("no network namespace can be made here")
	}
	n := &node{Network: harness.ThisNetwork(t), t: t, pods: newPods()}
	dir, err := os.MkdirTemp("", "id-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	n.path = filepath.Join(dir, "s")
	if n.lis, err = net.ListenUnix("unix", &net.UnixAddr{Name: n.path, Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.lis.Close() })
	if err := os.Chmod(n.path, 0o777); err != nil {
		t.Fatal(err)
	}
	if n.Prover, err = identity.Open(identity.Options{Pods: n.pods}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

var links, cgroups int

// pod makes a pod's network, wired to the host, and makes it known.
func (n *node) pod(name string, addrs ...string) *harness.Network {
	n.t.Helper()
	pod := harness.NewNetwork(n.t)
	links++
	n.Wire(n.t, fmt.Sprintf("veth%d", links), pod, addrs...)
	n.pods.add(name, "uid-"+name, addrs...)
	return pod
}

// accept is the next connection.
func (n *node) accept() *net.UnixConn {
	n.t.Helper()
	if err := n.lis.SetDeadline(time.Now().Add(soon)); err != nil {
		n.t.Fatal(err)
	}
	c, err := n.lis.AcceptUnix()
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { c.Close() })
	return c
}

// from is an accepted connection of a socket of a network.
func (n *node) from(network *harness.Network) *net.UnixConn {
	n.t.Helper()
	if err := network.Do(func() error {
		c, err := net.Dial("unix", n.path)
		if err == nil {
			n.t.Cleanup(func() { c.Close() })
		}
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	return n.accept()
}

// want checks what is proved: a pod by a method, or a reason.
func (n *node) want(c *net.UnixConn, pod string, method identity.Method, reason string) {
	n.t.Helper()
	is(n.t, n.Prove(c), pod, method, reason)
}

func is(t testing.TB, p identity.Proof, pod string, method identity.Method, reason string) {
	t.Helper()
	got := ""
	if p.Method != identity.None {
		got = p.Pod.String()
	}
	if got != pod || p.Method != method || !strings.Contains(p.Reason, reason) || (p.Reason == "") != (pod != "") {
		t.Errorf("proved %q by %s (%s), want %q by %s (%s)", got, p.Method, p.Reason, pod, method, reason)
	}
}

// child is this program in another role.
type child struct {
	*harness.Child
	t testing.TB
}

// command makes a child, whose start is the caller's.
func command(t testing.TB, role string) *child {
	t.Helper()
	return &child{harness.NewChild(t, roleEnv+"="+role), t}
}

// run starts the child.
func (c *child) run(start func(*exec.Cmd) error) *child {
	c.t.Helper()
	if err := start(c.Cmd); err != nil {
		c.t.Skipf("a child cannot be started here: %v", err)
	}
	c.t.Cleanup(c.End)
	return c
}

// do lets it do what it does on a line.
func (c *child) do() {
	c.t.Helper()
	c.Tell("")
}

func started(c *exec.Cmd) error { return c.Start() }
