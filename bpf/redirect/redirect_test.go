package redirect_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/redirect"
)

const (
	users   = "10.96.0.10:50051"
	canary  = "10.96.0.11:50051"
	direct  = "10.96.0.12:50051"
	mapped  = "[::ffff:10.96.0.10]:50051"
	users6  = "[fd00:96::10]:50051"
	direct6 = "[fd00:96::12]:50051"

	direct6mapped = "[::ffff:10.96.0.12]:50051"
)

// services is a pod in which all of them listen themselves, so that it can be
// told which connections were left alone.
func (n *node) services() *pod {
	n.t.Helper()
	p := n.pod("10.96.0.10", "10.96.0.11", "10.96.0.12", "fd00:96::10", "fd00:96::12")
	p.listen("0.0.0.0:50051", "direct")
	p.listen("0.0.0.0:50052", "other")
	for _, a := range []string{users6, direct6} {
		p.listen(a, "direct")
	}
	return p
}

func TestConnectionComesToTheSidecarWithItsNumber(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users, canary, users6)
	same(t, p.dial(users), by(t, r, users))
	same(t, p.dial(canary), by(t, r, canary))
	same(t, p.dial(mapped), by(t, r, users))
	same(t, p.dial(users6), by(t, r, users6))
	if by(t, r, users) == by(t, r, canary) {
		t.Error("two destinations have one number")
	}
	for _, to := range []string{users, users6} {
		number, _ := r.Number(netip.MustParseAddrPort(to))
		if got, ok := r.Destination(number); !ok || got.String() != to {
			t.Errorf("the number of %s is that of %s", to, got)
		}
	}
	// What is not a destination is not touched: another address, another port.
	same(t, p.dial(direct), "direct "+direct)
	same(t, p.dial(direct6), "direct "+direct6)
	same(t, p.dial("10.96.0.10:50052"), "other 10.96.0.10:50052")
	same(t, p.dial(direct6mapped), "direct "+direct)

	// Clients that wait for a connection otherwise than in connect.
	var c net.Conn
	p.do(func() (err error) { c, err = net.Dial("tcp", users); return err })
	defer c.Close()
	if got := c.RemoteAddr().String(); got != users {
		t.Errorf("the peer of a non-blocking connection is %s", got)
	}
	s := p.socket(unix.AF_INET)
	if err := unix.Sendto(s.fd, nil, unix.MSG_FASTOPEN, address(unix.AF_INET, users)); err != nil {
		t.Fatal(err)
	}
	same(t, s.line(), by(t, r, users))
	same(t, p.dial(users, func(fd int) error {
		return unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 12}})
	}), by(t, r, users))
	counted(t, r, map[string]uint64{"redirected4": 5, "redirected6": 2})
}

func counted(t testing.TB, r *redirect.Redirector, want map[string]uint64) {
	t.Helper()
	got, err := r.Counters()
	if err != nil {
		t.Fatal(err)
	}
	for name, n := range got {
		if n != want[name] {
			t.Errorf("%s: %d, want %d", name, n, want[name])
		}
	}
}

func TestMPTCP(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users)
	s := &sock{t: t}
	p.do(func() (err error) {
		s.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
		if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ENOPROTOOPT) {
			s.fd, err = -1, nil // nothing that could be redirected
		}
		return err
	})
	if s.fd < 0 {
		t.Log("this kernel has no MPTCP")
		return
	}
	defer s.close()
	same(t, s.arrives(unix.AF_INET, users), by(t, r, users))
}

func TestPodThatIsNotChosenIsLeftAlone(t *testing.T) {
	n := newNode(t)
	r := n.open()
	set(t, r, users)
	a, b := n.services(), n.services()
	a.allow(r)
	same(t, a.dial(users), by(t, r, users))
	same(t, b.dial(users), "direct "+users)
	b.allow(r)
	same(t, b.dial(users), by(t, r, users))
	if err := r.Forget(a.cookie); err != nil {
		t.Fatal(err)
	}
	same(t, a.dial(users), "direct "+users)
	if err := r.Forget(a.cookie); err != nil {
		t.Errorf("forgotten twice: %v", err)
	}
	allowed, err := r.Allowed()
	if err != nil || len(allowed) != 1 || allowed[b.cookie] != 15001 {
		t.Errorf("chosen: %v, %v", allowed, err)
	}
}

func TestSidecarItselfIsLeftAlone(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users, users6)
	for _, to := range []string{users, mapped, users6} {
		var got string
		p.do(func() error {
			// The uid of this thread alone.
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 15001, 0, 0); errno != 0 {
				return errno
			}
			defer func() { _, _, _ = unix.RawSyscall(unix.SYS_SETRESUID, 0, 0, 0) }()
			family := unix.AF_INET
			if to != users {
				family = unix.AF_INET6
			}
			fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			s := &sock{t: t, fd: fd}
			defer s.close()
			got = s.arrives(family, to)
			return nil
		})
		want := "direct " + users
		if to == users6 {
			want = "direct " + users6
		}
		same(t, got, want)
	}
	counted(t, r, map[string]uint64{"exempt": 3})
}

func TestHostsNetworkIsRefused(t *testing.T) {
	n := newNode(t)
	r := n.open()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Allow(cookie, 15001); !errors.Is(err, redirect.ErrHost) {
		t.Errorf("the host's own network: %v", err)
	}
	if allowed, err := r.Allowed(); err != nil || len(allowed) != 0 {
		t.Errorf("chosen: %v, %v", allowed, err)
	}
}

func TestWithoutASidecarConnectionsGoTheirWay(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users, users6)
	same(t, p.dial(users), by(t, r, users))
	p.sidecar.Close()
	same(t, p.dial(users), "direct "+users)
	same(t, p.dial(mapped), "direct "+users)
	same(t, p.dial(users6), "direct "+users6)
	counted(t, r, map[string]uint64{"redirected4": 1, "no_listener": 3})
	p.listen("0.0.0.0:15002", "sidecar")
	same(t, p.dial(users), by(t, r, users))
	// Who merely has the port does not listen.
	q := n.services()
	q.allow(r)
	q.sidecar.Close()
	s := q.socket(unix.AF_INET, func(fd int) error {
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, &unix.SockaddrInet4{Port: 15002}))
	})
	same(t, q.dial(users), "direct "+users)
	s.close()
}

func TestSocketThatCannotReachLoopbackIsLeftAlone(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users, users6)
	device := func(fd int) error { return unix.BindToDevice(fd, "lo") }
	same(t, p.dial(users, device), "direct "+users)
	same(t, p.dial(users6, device), "direct "+users6)
	alone := func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1) }
	same(t, p.dial(users6, alone), "direct "+users6)
	bound := func(fd int) error { return unix.Bind(fd, address(unix.AF_INET6, "[fd00:96::12]:0")) }
	same(t, p.dial(users6, bound), "direct "+users6)
	counted(t, r, map[string]uint64{"bound_device": 2, "ipv6_alone": 2})
}

func TestUDPIsLeftAlone(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users, users6)
	for _, to := range []string{users, users6} {
		var c net.Conn
		p.do(func() (err error) { c, err = net.Dial("udp", to); return err })
		defer c.Close()
		if got := c.RemoteAddr().String(); got != to {
			t.Errorf("the peer of a UDP socket to %s is %s", to, got)
		}
	}
	counted(t, r, nil)
}

// A socket may be connected again (cilium/cilium#42649): its peer is where it is
// now, and it can go wherever it could.
func TestSocketIsUsedAgain(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users, canary, users6)
	at := func(to string) string {
		if _, ok := r.Number(netip.MustParseAddrPort(to)); ok {
			return by(t, r, to)
		}
		if to == direct6mapped {
			to = direct
		}
		return "direct " + to
	}
	for family, ways := range map[int][][]string{
		unix.AF_INET:  {{users, direct}, {direct, users}, {users, canary, direct, users}},
		unix.AF_INET6: {{direct6, users6}, {mapped, direct6mapped, mapped}, {users6, direct6mapped, users6, mapped, users6}},
	} {
		for _, way := range ways {
			s := p.socket(family)
			for i, to := range way {
				if i > 0 {
					// connect with AF_UNSPEC ends what it had.
					unspec := make([]byte, 16)
					if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(s.fd), uintptr(unsafe.Pointer(&unspec[0])), 16); errno != 0 {
						t.Fatal(errno)
					}
				}
				same(t, s.arrives(family, to), at(to))
				if a, err := unix.Getsockname(s.fd); err != nil || addrPort(a).Addr().Unmap().IsLoopback() != strings.HasPrefix(at(to), "sidecar") {
					t.Errorf("a connection to %s comes from %s: %v", to, addrPort(a), err)
				}
			}
			s.close()
		}
	}
}

// 8,000 connections to 3,000 destinations from 4 pods in parallel: each comes
// out with the number of what it dialled, in its own pod.
func TestManyConnectionsAtOnceArriveWhereTheyShould(t *testing.T) {
	n := newNode(t)
	r := n.open()
	var list []netip.AddrPort
	want := map[string]string{}
	for i := range 3000 {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), uint16(50000+i%7))
		if i%3 == 0 {
			b := netip.MustParseAddr("fd00:96::").As16()
			b[14], b[15] = byte(i>>8), byte(i)
			a = netip.AddrPortFrom(netip.AddrFrom16(b), a.Port())
		}
		list = append(list, a)
	}
	if done, err := r.SetDestinations(list); err != nil || done.Redirected != len(list) {
		t.Fatal(done, err)
	}
	for _, a := range list {
		want[a.String()] = by(t, r, a.String())
	}
	pods := []*pod{n.pod(), n.pod(), n.pod(), n.pod()}
	errs := make(chan error)
	const each = 500
	for i := range 16 {
		p := pods[i%len(pods)]
		if i < len(pods) {
			p.allow(r)
		}
	}
	for i := range 16 {
		p := pods[i%len(pods)]
		go func() {
			errs <- p.Do(func() error {
				for k := range each {
					to := list[(i*each+k*7)%len(list)].String()
					c, err := net.Dial("tcp", to)
					if err != nil {
						return err
					}
					var line [64]byte
					got, err := c.Read(line[:])
					c.Close()
					if err != nil {
						return err
					}
					if s := string(line[:got]); s != want[to]+"\n" || c.RemoteAddr().String() != to {
						return fmt.Errorf("%s arrived at %q, want %q, as %s", to, s, want[to], c.RemoteAddr())
					}
				}
				return nil
			})
		}()
	}
	for range 16 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	counters, err := r.Counters()
	if err != nil || counters["redirected4"]+counters["redirected6"] != 16*each {
		t.Errorf("%v, %v", counters, err)
	}
}

// BenchmarkConnect connects to a destination of each family, and, by a socket of a
// cgroup without a program, to the listener itself, in turn, each with its close.
// It gives the median of each in us. Nothing is accepted while the time is taken:
// the kernel greets for the listener.
func BenchmarkConnect(b *testing.B) {
	n := newNode(b)
	r := n.open()
	p := n.pod()
	p.allow(r)
	set(b, r, users, users6)
	number, _ := r.Number(netip.MustParseAddrPort(users))
	p.sidecar.Close()
	var lis net.Listener
	p.do(func() (err error) { lis, err = net.Listen("tcp4", "0.0.0.0:15002"); return err })
	defer lis.Close()
	const batch = 64 // fewer than may wait to be accepted
	ways := []*struct {
		unit, to, cgroup string
		family           int
		took             []time.Duration
		fds              [batch]int
	}{
		{unit: "direct-us", to: number.String() + ":15002", cgroup: n.home, family: unix.AF_INET},
		{unit: "redirected4-us", to: users, cgroup: n.options.Cgroup, family: unix.AF_INET},
		{unit: "redirected6-us", to: users6, cgroup: n.options.Cgroup, family: unix.AF_INET6},
	}
	var rounds int
	for i := 0; b.Loop(); i++ {
		if i%batch > 0 {
			continue // the batch has it
		}
		p.do(func() error {
			for _, w := range ways {
				n.enter(w.cgroup)
				for i := range w.fds {
					fd, err := unix.Socket(w.family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
					if err != nil {
						return err
					}
					// No port is left waiting.
					if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
						return err
					}
					w.fds[i] = fd
				}
			}
			for i := range batch {
				rounds++
				for k := range ways {
					w := ways[(i+k*(1+i%2))%len(ways)] // each comes after each
					sa := address(w.family, w.to)
					began := time.Now()
					err := unix.Connect(w.fds[i], sa)
					err = errors.Join(err, unix.Close(w.fds[i]))
					w.took = append(w.took, time.Since(began))
					if err != nil {
						return err
					}
				}
			}
			return nil
		})
		for range batch * len(ways) {
			c, err := lis.Accept()
			if err != nil {
				b.Fatal(err)
			}
			c.Close()
		}
	}
	counters, err := r.Counters()
	if err != nil || counters["redirected4"] != uint64(rounds) || counters["redirected6"] != uint64(rounds) {
		b.Errorf("%d rounds: %v, %v", rounds, counters, err)
	}
	b.ReportMetric(0, "ns/op") // of a round, with all that is around it
	for _, w := range ways {
		slices.Sort(w.took)
		b.ReportMetric(float64(w.took[len(w.took)/2].Nanoseconds())/1000, w.unit)
	}
}
