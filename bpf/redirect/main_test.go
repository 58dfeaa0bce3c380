package redirect_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/redirect"
	"github.com/fingerpost/fingerpost/test/harness"
)

// hostEnv is set in the process that runs the tests: a host of its own, as to
// its network and its mounts, which end with it.
const hostEnv = "REDIRECT_TEST_HOST"

// containerEnv is set in a process with a cgroup namespace of its own.
const containerEnv = "REDIRECT_TEST_CONTAINER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(containerEnv); dir != "" {
		container(dir)
		return
	}
	if os.Getenv(hostEnv) == "" {
		cmd := exec.Command(os.Args[0], os.Args[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.Env = append(os.Environ(), hostEnv+"=1")
		cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
		err := cmd.Run()
		var exit *exec.ExitError
		switch {
		case err == nil:
			return
		case errors.As(err, &exit):
			os.Exit(max(1, exit.ExitCode()))
		}
		fmt.Fprintln(os.Stderr, "these tests need root and the kernel's BPF:", err)
		os.Exit(1)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// soon bounds every wait.
const soon = 10 * time.Second

// cgroup2 is where the test's machine has its cgroups of the second version.
func cgroup2(t testing.TB) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if mount, fs, ok := strings.Cut(line, " - "); ok && strings.HasPrefix(fs, "cgroup2 ") {
			return strings.Fields(mount)[4]
		}
	}
	t.Fatal("there is no cgroup2 mount: these tests need one")
	return ""
}

// node is a host whose pods are in one cgroup of the test's, which stands for
// the root of all.
type node struct {
	t       testing.TB
	options redirect.Options
	home    string // the cgroup that this process came from
	bpffs   string
}

func newNode(t testing.TB) *node {
	t.Helper()
	root := cgroup2(t)
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	home := root
	for line := range strings.Lines(string(own)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			home = filepath.Join(root, path)
		}
	}
	cgroup, err := os.MkdirTemp(root, "fingerpost-test-")
	if err != nil {
		t.Fatalf("these tests need a cgroup of their own: %v", err)
	}
	n := &node{t: t, home: home, bpffs: t.TempDir()}
	if err := unix.Mount("bpf", n.bpffs, "bpf", 0, ""); err != nil {
		t.Fatalf("these tests need a bpf file system: %v", err)
	}
	n.options = redirect.Options{Cgroup: cgroup, Dir: filepath.Join(n.bpffs, "fingerpost")}
	n.enter(cgroup)
	t.Cleanup(func() {
		n.enter(home)
		if err := os.Remove(cgroup); err != nil {
			t.Error(err)
		}
		if err := unix.Unmount(n.bpffs, 0); err != nil {
			t.Error(err)
		}
	})
	return n
}

// enter puts this process into a cgroup: sockets are of the cgroup in which they
// are made.
func (n *node) enter(cgroup string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte("0"), 0); err != nil {
		n.t.Fatal(err)
	}
}

// open opens the redirector, which is closed with the test.
func (n *node) open() *redirect.Redirector {
	n.t.Helper()
	r, err := redirect.Open(n.options)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(r.Close)
	return r
}

// set says where connections are redirected.
func set(t testing.TB, r *redirect.Redirector, to ...string) {
	t.Helper()
	var list []netip.AddrPort
	for _, a := range to {
		list = append(list, netip.MustParseAddrPort(a))
	}
	done, err := r.SetDestinations(list)
	if err != nil || done.Redirected != len(to) || done.Left != 0 {
		t.Fatalf("%d destinations: %+v, %v", len(to), done, err)
	}
}

// pod is a network with a sidecar's listener.
type pod struct {
	*harness.Network
	t       testing.TB
	cookie  uint64
	sidecar net.Listener
}

// pod makes one in which the addresses can be reached.
func (n *node) pod(addrs ...string) *pod {
	n.t.Helper()
	p := &pod{Network: harness.NewNetwork(n.t), t: n.t}
	for _, a := range addrs {
		p.Claim(n.t, a)
	}
	for _, a := range addrs { // IPv6 takes a moment
		until(n.t, "the route to "+a, func() bool {
			routes, err := p.RouteGet(netip.MustParseAddr(a).AsSlice())
			return err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL
		})
	}
	p.do(func() error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		p.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return err
	})
	p.sidecar = p.listen("0.0.0.0:15002", "sidecar")
	return p
}

func (p *pod) do(f func() error) {
	p.t.Helper()
	if err := p.Do(f); err != nil {
		p.t.Fatal(err)
	}
}

// allow chooses the pod, with the uid 15001 exempt.
func (p *pod) allow(r *redirect.Redirector) {
	p.t.Helper()
	if err := r.Allow(p.cookie, 15001); err != nil {
		p.t.Fatal(err)
	}
}

// listen serves in the pod: each connection hears the name and the address that
// it came to, and then all that it says.
func (p *pod) listen(addr, name string) net.Listener {
	p.t.Helper()
	var lis net.Listener
	p.do(func() (err error) {
		network := "tcp6"
		if netip.MustParseAddrPort(addr).Addr().Is4() {
			network = "tcp4" // else all of IPv4 is all of IPv6 too
		}
		lis, err = net.Listen(network, addr)
		return err
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				if _, err := fmt.Fprintf(c, "%s %s\n", name, c.LocalAddr()); err == nil {
					_, _ = io.Copy(c, c)
				}
			}()
		}
	}()
	p.t.Cleanup(func() { lis.Close(); <-done })
	return lis
}

// sock is a socket made as a program makes one.
type sock struct {
	t  testing.TB
	fd int
}

// socket makes one in the pod's network; what prepare does is done before it is
// connected.
func (p *pod) socket(family int, prepare ...func(fd int) error) *sock {
	p.t.Helper()
	s := &sock{t: p.t}
	p.do(func() (err error) {
		if s.fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		for _, f := range prepare {
			err = errors.Join(err, f(s.fd))
		}
		return errors.Join(err, unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}))
	})
	p.t.Cleanup(s.close)
	return s
}

func (s *sock) close() {
	if s.fd >= 0 {
		unix.Close(s.fd)
	}
	s.fd = -1
}

// address is one as a socket of the family has it.
func address(family int, to string) unix.Sockaddr {
	a := netip.MustParseAddrPort(to)
	if family == unix.AF_INET {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}

func (s *sock) peer() netip.AddrPort {
	s.t.Helper()
	a, err := unix.Getpeername(s.fd)
	if err != nil {
		s.t.Fatal(err)
	}
	return addrPort(a)
}

// line is what the other end says first.
func (s *sock) line() string {
	s.t.Helper()
	var line []byte
	for b := make([]byte, 1); ; {
		switch n, err := unix.Read(s.fd, b); {
		case err == unix.EINTR:
		case err != nil || n == 0:
			s.t.Fatalf("after %q: %d, %v", line, n, err)
		case b[0] == '\n':
			return string(line)
		default:
			line = append(line, b[0])
		}
	}
}

// arrives connects a socket and tells where it came out. The peer is to be what
// was dialled.
func (s *sock) arrives(family int, to string) string {
	s.t.Helper()
	if err := unix.Connect(s.fd, address(family, to)); err != nil {
		s.t.Fatalf("connect to %s: %v", to, err)
	}
	if peer := s.peer(); peer != netip.MustParseAddrPort(to) {
		s.t.Errorf("the peer of a connection to %s is %s", to, peer)
	}
	return s.line()
}

// dial connects a new socket and tells where it came out.
func (p *pod) dial(to string, prepare ...func(fd int) error) string {
	p.t.Helper()
	family := unix.AF_INET
	if !netip.MustParseAddrPort(to).Addr().Is4() {
		family = unix.AF_INET6
	}
	s := p.socket(family, prepare...)
	defer s.close()
	return s.arrives(family, to)
}

// by is what the sidecar says of a connection to a destination that has a number.
func by(t testing.TB, r *redirect.Redirector, to string) string {
	t.Helper()
	n, ok := r.Number(netip.MustParseAddrPort(to))
	if !ok {
		t.Fatalf("%s has no number", to)
	}
	return fmt.Sprintf("sidecar %s:15002", n)
}

// same compares where a connection came out.
func same(t testing.TB, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("arrived at %q, want %q", got, want)
	}
}

// onThread runs f on a thread that has lost something, and ends it.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // ends with the goroutine
		done <- f()
	}()
	return <-done
}

// until waits for a condition.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(soon); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", soon, what)
		}
	}
}
