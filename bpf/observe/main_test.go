package observe_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/observe"
	"github.com/fingerpost/fingerpost/test/harness"
)

// roleEnv makes the test binary a process of a pod, or an agent that only says
// whether it can observe.
const roleEnv = "OBSERVE_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleEnv) {
	case "":
		goleak.VerifyTestMain(m)
	case "pod":
		serve(os.Stdin, os.Stdout)
	case "agent":
		agent()
	}
	os.Exit(0)
}

// soon bounds every wait: the slowest is for a neighbour that does not answer.
const soon = 30 * time.Second

// serve does what the lines say, each answered by one line:
//
//	dial NAME ADDR [MS]     connects, for so long; "ok", or why not
//	mapped NAME ADDR        the same by a socket of IPv6 (as Java does)
//	again NAME ADDR         the same by the socket NAME, which is disconnected first
//	many N PARALLEL ADDR... connects to each N times in all, and closes
//	listen NAME ADDR        accepts one connection, as NAME
//	write NAME BYTES        without waiting for room
func serve(in io.Reader, out io.Writer) {
	var mu sync.Mutex
	conns := map[string]net.Conn{}
	sockets := map[string]int{}
	keep := func(name string, c net.Conn) {
		mu.Lock()
		defer mu.Unlock()
		conns[name] = c
	}
	do := func(f []string) error {
		switch f[0] {
		case "dial":
			d := net.Dialer{}
			if len(f) > 3 {
				ms, err := time.ParseDuration(f[3] + "ms")
				if err != nil {
					return err
				}
				d.Timeout = ms
			}
			c, err := d.Dial("tcp", f[2])
			if err == nil {
				keep(f[1], c)
			}
			return err
		case "mapped", "again":
			to := netip.MustParseAddrPort(f[2])
			fd, ok := sockets[f[1]]
			if !ok {
				var err error
				if fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
					return err
				}
				sockets[f[1]] = fd
			}
			if f[0] == "again" {
				if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(nowhere()), unix.SizeofSockaddrInet6); errno != 0 {
					return fmt.Errorf("disconnect: %w", errno)
				}
			}
			return unix.Connect(fd, &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
		case "many":
			var n, parallel int
			if _, err := fmt.Sscan(f[1]+" "+f[2], &n, &parallel); err != nil {
				return err
			}
			var wg sync.WaitGroup
			failed := make(chan error, parallel)
			for i := range parallel {
				wg.Go(func() {
					for k := i; k < n; k += parallel {
						c, err := net.Dial("tcp", f[3+k%len(f[3:])])
						if err != nil {
							failed <- err
							return
						}
						// No port is to wait for late segments.
						_ = c.(*net.TCPConn).SetLinger(0)
						c.Close()
					}
				})
			}
			wg.Wait()
			close(failed)
			return <-failed
		case "listen":
			l, err := net.Listen("tcp", f[2])
			if err != nil {
				return err
			}
			go func() {
				defer l.Close()
				if c, err := l.Accept(); err == nil {
					keep(f[1], c)
				}
			}()
			return nil
		case "write":
			var n int
			if _, err := fmt.Sscan(f[2], &n); err != nil {
				return err
			}
			mu.Lock()
			c := conns[f[1]]
			mu.Unlock()
			if c == nil {
				return errors.New("not accepted yet")
			}
			_, err := c.Write(make([]byte, n))
			return err
		}
		return fmt.Errorf("no such thing as %q", f[0])
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		if err := do(strings.Fields(lines.Text())); err != nil {
			fmt.Fprintln(out, strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			fmt.Fprintln(out, "ok")
		}
	}
}

// agent says whether it can observe the cgroup of its argument, or the one that
// it finds.
func agent() {
	for _, dir := range strings.Fields(os.Getenv("UNMOUNT")) {
		// Whatever is mounted over one another there.
		for unix.Unmount(dir, unix.MNT_DETACH) == nil {
		}
	}
	if dir := os.Getenv("MOUNT"); dir != "" {
		if err := unix.Mount("none", dir, "cgroup2", 0, ""); err != nil {
			fmt.Println(err)
			return
		}
	}
	o, err := observe.Open(observe.Options{Cgroup: os.Getenv("CGROUP")})
	if err != nil {
		fmt.Println("off:", err)
		return
	}
	fmt.Println("on")
	o.Close()
}

// world is a pod and a server, each with a network of its own and a link between.
type world struct {
	t          testing.TB
	pod, other *harness.Network
	cgroup     *harness.Cgroup
	*observe.Observer
}

const (
	podIP, otherIP   = "10.9.0.1", "10.9.0.2"
	podIP6, otherIP6 = "2001:db8:9::1", "2001:db8:9::2"
)

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, pod: harness.NewNetwork(t), other: harness.NewNetwork(t), cgroup: harness.NewCgroup(t)}
	w.pod.Wire(t, "eth9", w.other, otherIP, otherIP6)
	w.ip(w.pod, "addr add "+podIP+"/24 dev eth9\naddr add "+podIP6+"/64 dev eth9 nodad\n")
	w.ip(w.other, "route add "+podIP+" dev eth0\nroute add "+podIP6+" dev eth0\n")
	return w
}

// observe begins to observe the world's cgroup.
func (w *world) observe() *world {
	w.t.Helper()
	o, err := observe.Open(observe.Options{Cgroup: w.cgroup.Dir})
	if err != nil {
		w.t.Fatalf("nothing can be observed here: %v", err)
	}
	w.t.Cleanup(o.Close)
	w.Observer = o
	return w
}

// ip gives lines to iproute2.
func (w *world) ip(n *harness.Network, lines string) {
	w.t.Helper()
	if out := w.run(n, strings.NewReader(lines), "ip", "-batch", "-"); out != "" {
		w.t.Logf("ip: %s", out)
	}
}

func (w *world) run(n *harness.Network, in io.Reader, name string, args ...string) string {
	w.t.Helper()
	cmd := exec.Command(name, args...)
	var said strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, &said, &said
	err := n.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		w.t.Fatalf("%s: %v\n%s", name, err, said.String())
	}
	return said.String()
}

// process is one of the pod, or of the server.
type process struct {
	*harness.Child
	t testing.TB
}

// start starts a process in a network, and in a cgroup.
func (w *world) start(n *harness.Network, in *harness.Cgroup) *process {
	w.t.Helper()
	p := &process{harness.NewChild(w.t, roleEnv+"=pod"), w.t}
	in.Hold(p.SysProcAttr)
	if err := n.Start(p.Cmd); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(p.End)
	return p
}

// do wants it to succeed, or to fail with such words.
func (p *process) do(want, format string, args ...any) {
	p.t.Helper()
	p.Tell(format, args...)
	if got := p.Answer(); !strings.Contains(got, want) {
		p.t.Fatalf("%s: %s, want %s", fmt.Sprintf(format, args...), got, want)
	}
}

// listen lets the server have connections at an address, which it does not take.
func (w *world) listen(addr string) {
	w.t.Helper()
	if err := w.other.Do(func() error {
		l, err := net.Listen("tcp", addr)
		if err == nil {
			w.t.Cleanup(func() { l.Close() })
		}
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
}

// at is what was seen of a destination by now, zero if nothing.
func (w *world) at(addr string) observe.Stat {
	w.t.Helper()
	if err := w.Read(); err != nil {
		w.t.Fatal(err)
	}
	to := netip.MustParseAddrPort(addr)
	for _, s := range w.At(to.Addr()) {
		if s.Destination == to {
			return s
		}
	}
	return observe.Stat{}
}

// becomes waits until what was seen of a destination is as wanted.
func (w *world) becomes(addr string, want observe.Counts) {
	w.t.Helper()
	harness.Eventually(w.t, soon, func() error {
		if got := w.at(addr).Counts; got != want {
			return fmt.Errorf("%s: %+v, want %+v", addr, got, want)
		}
		return nil
	})
}
