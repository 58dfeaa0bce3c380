package identity_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/identity"
	"github.com/fingerpost/fingerpost/test/harness"
)

// Each pod is proved by its own network, in IPv4 and IPv6, beside others.
func TestPodIsProvedByItsNetwork(t *testing.T) {
	n := newNode(t)
	a, b := n.pod("a", "10.7.0.2", "fd07::2"), n.pod("b", "10.7.0.3")
	six := n.pod("six", "fd07::6")
	n.want(n.from(a), "prod/a", identity.NetNS, "")
	n.want(n.from(b), "prod/b", identity.NetNS, "")
	n.want(n.from(six), "prod/six", identity.NetNS, "")
	c := n.from(a)
	n.want(c, "prod/a", identity.NetNS, "")
	n.want(c, "prod/a", identity.NetNS, "") // as often as one likes
}

// Behind a bridge the host says which port has an address.
func TestPodIsProvedBehindABridge(t *testing.T) {
	n := newNode(t)
	n.Bridge(t, "cni0", "10.8.0.1/24")
	t.Cleanup(func() { n.remove("cni0") })
	a, b := harness.NewNetwork(t), harness.NewNetwork(t)
	n.Plug(t, "cni0", "port1", a, "10.8.0.2")
	n.Plug(t, "cni0", "port2", b, "10.8.0.3")
	n.pods.add("a", "uid-a", "10.8.0.2")
	n.pods.add("b", "uid-b", "10.8.0.3")
	for network, want := range map[*harness.Network]string{a: "prod/a", b: "prod/b"} {
		conn := n.from(network)
		// A port forwards nothing before it has a carrier; who asks again is told.
		harness.Eventually(t, soon, func() error {
			if p := n.Prove(conn); p.Pending {
				return errors.New(p.Reason)
			}
			return nil
		})
		n.want(conn, want, identity.NetNS, "")
	}
	// One that claims the other's address too is itself, and the other as well.
	b.Claim(t, "10.8.0.2")
	n.want(n.from(b), "prod/b", identity.NetNS, "")
	n.want(n.from(a), "prod/a", identity.NetNS, "")
	// A port of the same bridge, and the other's address alone, is nobody.
	c := harness.NewNetwork(t)
	n.Plug(t, "cni0", "port3", c, "10.8.0.2")
	n.want(n.from(c), "", identity.None, "leaves by port1")
	n.pods.add("silent", "uid-silent", "10.8.0.9")
	c.Claim(t, "10.8.0.9")
	n.down("port3")
	if p := n.Prove(n.from(c)); !p.Pending {
		t.Errorf("an address that nobody answers for: %+v", p)
	}
}

func (n *node) remove(name string) {
	n.t.Helper()
	link, err := n.LinkByName(name)
	if err == nil {
		err = n.LinkDel(link)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) down(name string) {
	n.t.Helper()
	link, err := n.LinkByName(name)
	if err == nil {
		err = n.LinkSetDown(link)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// What a namespace has of addresses proves nothing by itself.
func TestAddressThatIsMerelyClaimedProvesNothing(t *testing.T) {
	n := newNode(t)
	n.pod("a", "10.9.0.2")
	b := n.pod("b", "10.9.0.3")
	b.Claim(t, "10.9.0.2")
	n.want(n.from(b), "prod/b", identity.NetNS, "")
	loose := harness.NewNetwork(t)
	loose.Claim(t, "10.9.0.2")
	n.want(n.from(loose), "", identity.None, "does not lead into the caller's network namespace")
	empty := harness.NewNetwork(t)
	n.want(n.from(empty), "", identity.None, "has no address")
	// Not even where the host has no other way to the address, or its own.
	n.pods.add("gone", "uid-gone", "10.9.0.9")
	loose = harness.NewNetwork(t)
	loose.Claim(t, "10.9.0.9")
	n.want(n.from(loose), "", identity.None, "no route to 10.9.0.9")
	n.Claim(t, "10.9.0.1")
	n.pods.add("host", "uid-host", "10.9.0.1")
	loose = harness.NewNetwork(t)
	loose.Claim(t, "10.9.0.1")
	n.want(n.from(loose), "", identity.None, "leads to no pod of this node")
}

// Any process of a pod can make a user namespace, and in it a network with any
// address: it is refused, though its pod has a network that proves it.
func TestNestedUserNamespaceThatClaimsAnotherPodsAddressIsRefused(t *testing.T) {
	n := newNode(t)
	a := n.pod("a", "10.10.0.2")
	n.pod("b", "10.10.0.3")
	n.want(n.from(a), "prod/a", identity.NetNS, "")
	c := command(t, "claimant "+n.path+" 10.10.0.3")
	c.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER | unix.CLONE_NEWNET
	c.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
	c.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
	c.run(a.Start).do()
	n.want(n.accept(), "", identity.None, "does not lead into the caller's network namespace")
}

// A hostile owner of a namespace cannot make a proof long.
func TestManyAddressesAreNotLookedAt(t *testing.T) {
	n := newNode(t)
	loose := harness.NewNetwork(t)
	for i := range 200 {
		loose.Claim(t, fmt.Sprintf("10.11.%d.2", i))
	}
	asked := 0
	p, err := identity.Open(identity.Options{Pods: counting{&asked}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	is(t, p.Prove(n.from(loose)), "", identity.None, "10.11.")
	if asked == 0 || asked > 64 {
		t.Errorf("%d addresses were looked at", asked)
	}
}

type counting struct{ asked *int }

func (c counting) At(netip.Addr) []identity.Pod        { *c.asked++; return nil }
func (c counting) WithUID(string) (identity.Pod, bool) { return identity.Pod{}, false }

// The pod of a caller may be known later than the caller.
func TestPodThatIsNotKnownYetIsPending(t *testing.T) {
	n := newNode(t)
	a := harness.NewNetwork(t)
	n.Wire(t, "early", a, "10.12.0.2")
	c := n.from(a)
	if p := n.Prove(c); !p.Pending || !strings.Contains(p.Reason, "no pod of this node with the address 10.12.0.2 is known") {
		t.Errorf("%+v", p)
	}
	n.pods.add("a", "uid-a", "10.12.0.2")
	n.want(c, "prod/a", identity.NetNS, "")
	n.pods.add("next", "uid-next", "10.12.0.2")
	if p := n.Prove(c); !p.Pending || !strings.Contains(p.Reason, "several pods") {
		t.Errorf("%+v", p)
	}
}

// The host's network is many pods': the process tells which.
func TestHostNetworkIsToldByTheProcess(t *testing.T) {
	n := newNode(t)
	n.want(n.from(n.Network), "", identity.None, "netns: the caller has the host's network")
	const uid, other = "aaaaaaaa-0000-4000-8000-000000000001", "aaaaaaaa-0000-4000-8000-000000000002"
	c := command(t, "client "+n.path).run(started)
	enter(t, uid, c.Process.Pid)
	c.do()
	conn := n.accept()
	if p := n.Prove(conn); !p.Pending || !strings.Contains(p.Reason, uid) {
		t.Errorf("a pod that is not known: %+v", p)
	}
	n.pods.add("hostly", uid)
	n.want(conn, "prod/hostly", identity.PIDFD, "")
	// A process of a pod with a network of its own does not come from here.
	c = command(t, "client "+n.path).run(started)
	enter(t, other, c.Process.Pid)
	n.pods.add("own", other, "10.13.0.9")
	c.do()
	n.want(n.accept(), "", identity.None, "which has its own")
}

// Both methods speak of one pod, or nothing is proved.
func TestNetworkAndProcessMustAgree(t *testing.T) {
	n := newNode(t)
	const mine, other = "bbbbbbbb-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000002"
	a := harness.NewNetwork(t)
	n.Wire(t, "agree", a, "10.14.0.2")
	n.pods.add("a", mine, "10.14.0.2")
	n.pods.add("b", other, "10.14.0.3")
	for uid, want := range map[string]string{mine: "prod/a", other: ""} {
		c := command(t, "client "+n.path).run(a.Start)
		enter(t, uid, c.Process.Pid)
		c.do()
		method, reason := identity.NetNS, ""
		if want == "" {
			method, reason = identity.None, "the network namespace is of pod prod/a, the process of pod prod/b"
		}
		n.want(n.accept(), want, method, reason)
	}
	// In a network of its own, which no link leads to, the process is its pod's.
	loose := harness.NewNetwork(t)
	c := command(t, "client "+n.path).run(loose.Start)
	enter(t, mine, c.Process.Pid)
	c.do()
	conn := n.accept()
	n.want(conn, "prod/a", identity.PIDFD, "")
	loose.Claim(t, "10.14.0.3")
	n.want(conn, "", identity.None, "claims the address of pod prod/b")
}

// enter puts a process into a cgroup named as that of a pod's.
func enter(t *testing.T, uid string, pid int) {
	t.Helper()
	root := ""
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
			root = dir
			break
		}
	}
	if root == "" {
		t.Skip("no cgroup can be made here: there is no hierarchy")
	}
	cgroups++
	top := filepath.Join(root, fmt.Sprintf("fingerpost-test-%d-%d", os.Getpid(), cgroups))
	dir := filepath.Join(top, "pod"+uid)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Skipf("no cgroup can be made here: %v", err)
	}
	procs := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(fmt.Sprint(pid)), 0o644)
	}
	if err := procs(dir); err != nil {
		t.Skipf("no process can be put into a cgroup here: %v", err)
	}
	t.Cleanup(func() {
		// The process may have gone already.
		_ = procs(root)
		harness.Eventually(t, soon, func() error { return os.Remove(dir) })
		if err := os.Remove(top); err != nil {
			t.Error(err)
		}
	})
}

// What a process that has ended was is not known: its number may be another's.
func TestProcessThatEndsWhileItIsLookedAt(t *testing.T) {
	n := newNode(t)
	const uid = "cccccccc-0000-4000-8000-000000000001"
	n.pods.add("a", uid)
	c := command(t, "client "+n.path).run(started)
	enter(t, uid, c.Process.Pid)
	c.do()
	conn := n.accept()
	n.want(conn, "prod/a", identity.PIDFD, "")
	ends := true
	n.BeforeVerdict(func(int) {
		if ends {
			c.End()
		}
	})
	n.want(conn, "", identity.None, "the process has ended")
	ends = false
	n.want(conn, "", identity.None, "pidfd: ")
}

// A network is proved after its process has ended, as long as it is there.
func TestCallerThatIsGoneStopsNothing(t *testing.T) {
	n := newNode(t)
	a := harness.NewNetwork(t)
	n.Wire(t, "gone", a, "10.15.0.2")
	n.pods.add("a", "uid-a", "10.15.0.2")
	c := command(t, "client "+n.path).run(a.Start)
	c.do()
	conn := n.accept()
	c.End()
	n.want(conn, "prod/a", identity.NetNS, "")
	conn.Close()
	n.want(conn, "", identity.None, "use of closed")
	n.remove("gone")
	n.want(n.from(a), "", identity.None, "has no address")
	n.want(n.from(n.pod("b", "10.15.0.3")), "prod/b", identity.NetNS, "")
}

// A server in a pid namespace of its own proves networks and says why it does
// not prove processes (spiffe/spire-tutorials#121, pelagos-containers/pelagos#299).
func TestServerInAnotherPIDNamespace(t *testing.T) {
	n := newNode(t)
	a := n.pod("a", "10.16.0.2")
	s := n.server(func(c *child) { c.SysProcAttr.Cloneflags = unix.CLONE_NEWPID | unix.CLONE_NEWNS })
	if l := s.Answer(); !strings.HasPrefix(l, "netns; pidfd is off: ") || !strings.Contains(l, "pid namespace") {
		t.Errorf("methods: %s", l)
	}
	s.dial(a)
	is(t, s.proof(), "prod/a", identity.NetNS, "")
	s.dial(n.Network)
	is(t, s.proof(), "", identity.None, "pid namespace")
}

// CAP_NET_ADMIN alone is enough for networks; nothing is for processes.
func TestWhatTheCapabilityIsWorth(t *testing.T) {
	n := newNode(t)
	a := n.pod("a", "10.17.0.2")
	nobody := &syscall.Credential{Uid: 65534, Gid: 65534}
	s := n.server(func(c *child) {
		c.SysProcAttr.Credential, c.SysProcAttr.AmbientCaps = nobody, []uintptr{unix.CAP_NET_ADMIN}
	})
	if l := s.Answer(); l != "netns, pidfd" {
		t.Errorf("methods: %s", l)
	}
	s.dial(a)
	is(t, s.proof(), "prod/a", identity.NetNS, "")
	s = n.server(func(c *child) { c.SysProcAttr.Credential = nobody })
	if l := s.Answer(); l != "pidfd; netns is off: CAP_NET_ADMIN is missing" {
		t.Errorf("methods: %s", l)
	}
	s.dial(a)
	is(t, s.proof(), "", identity.None, "netns: CAP_NET_ADMIN is missing; pidfd: the process is in no pod's cgroup")
	s = n.server(func(c *child) {
		c.SysProcAttr.Cloneflags = unix.CLONE_NEWPID | unix.CLONE_NEWNS
		c.Env = append(c.Env, "NOBODY=1")
	})
	if l := s.Answer(); !strings.HasPrefix(l, "off: netns: CAP_NET_ADMIN is missing; pidfd: ") {
		t.Errorf("methods: %s", l)
	}
}

// server is a child that proves, with what the node knows of pods.
type server struct {
	*child
	path string
}

func (n *node) server(change func(*child)) *server {
	n.t.Helper()
	dir, err := os.MkdirTemp(filepath.Dir(n.path), "")
	if err == nil {
		err = os.Chmod(dir, 0o777)
	}
	known, err2 := json.Marshal(n.pods.at)
	if err := errors.Join(err, err2); err != nil {
		n.t.Fatal(err)
	}
	s := &server{path: filepath.Join(dir, "s")}
	s.child = command(n.t, "server "+s.path)
	// One who is not root cannot reach the binary where go test has it.
	s.Path = filepath.Join(dir, "server")
	program, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(s.Path, program, 0o755)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	s.Env = append(s.Env, "PODS="+string(known))
	change(s.child)
	s.run(started)
	return s
}

func (s *server) dial(from *harness.Network) {
	s.t.Helper()
	harness.Eventually(s.t, soon, func() error {
		return from.Do(func() error {
			c, err := net.Dial("unix", s.path)
			if err == nil {
				s.t.Cleanup(func() { c.Close() })
			}
			return err
		})
	})
}

func (s *server) proof() (p identity.Proof) {
	s.t.Helper()
	if err := json.Unmarshal([]byte(s.Answer()), &p); err != nil {
		s.t.Fatal(err)
	}
	return p
}

// A thousand callers from two pods, at once and one after the other, are each
// proved right, and nothing of them is left.
func TestThousandCallersLeaveNothing(t *testing.T) {
	n := newNode(t)
	names := []string{"prod/a", "prod/b"}
	networks := []*harness.Network{n.pod("a", "10.18.0.2"), n.pod("b", "10.18.0.3")}
	n.want(n.from(networks[0]), "prod/a", identity.NetNS, "")
	before := descriptors(t)
	const callers, each = 10, 100
	var wg sync.WaitGroup
	failed := make(chan error, callers*each)
	dial := sync.Mutex{} // a connection is accepted by who made it
	for i := range callers {
		wg.Go(func() {
			for range each {
				var client, conn *net.UnixConn
				dial.Lock()
				err := networks[i%2].Do(func() (err error) {
					client, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: n.path, Net: "unix"})
					return err
				})
				if err == nil {
					conn, err = n.lis.AcceptUnix()
				}
				dial.Unlock()
				if err != nil {
					failed <- err
					return
				}
				if p := n.Prove(conn); p.Method != identity.NetNS || p.Pod.String() != names[i%2] {
					failed <- fmt.Errorf("%s: %+v", names[i%2], p)
				}
				client.Close()
				conn.Close()
			}
		})
	}
	wg.Wait()
	close(failed)
	for err := range failed {
		t.Error(err)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// What a proof costs beside the accept that it belongs to.
func BenchmarkAccept(b *testing.B) {
	n := newNode(b)
	pod := n.pod("a", "10.19.0.2")
	// One goroutine connects from the pod, another accepts on the host.
	wanted, dialled := make(chan struct{}), make(chan *net.UnixConn)
	go func() {
		defer close(dialled)
		_ = pod.Do(func() error {
			for range wanted {
				c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: n.path, Net: "unix"})
				if err != nil {
					return err
				}
				dialled <- c
			}
			return nil
		})
	}()
	defer func() { close(wanted); <-dialled }()
	run := func(b *testing.B, prove bool) {
		for b.Loop() {
			wanted <- struct{}{}
			client := <-dialled
			if client == nil {
				b.Fatal("no connection")
			}
			conn, err := n.lis.AcceptUnix()
			if err != nil {
				b.Fatal(err)
			}
			if prove {
				if p := n.Prove(conn); p.Method != identity.NetNS {
					b.Fatal(p.Reason)
				}
			}
			client.Close()
			conn.Close()
		}
	}
	var plain time.Duration
	b.Run("plain", func(b *testing.B) {
		run(b, false)
		plain = b.Elapsed() / time.Duration(b.N)
	})
	b.Run("proved", func(b *testing.B) {
		run(b, true)
		if plain > 0 {
			b.ReportMetric(float64(b.Elapsed()/time.Duration(b.N))/float64(plain), "x-plain")
		}
	})
}

// The kernel's word of where a connection was made: the network's cookie is that
// of the caller's own, and the uid that of its process.
func TestOriginIsTheCallers(t *testing.T) {
	n := newNode(t)
	cookie := func(network *harness.Network) (v uint64) {
		t.Helper()
		if err := network.Do(func() error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			v, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return v
	}
	a, b := n.pod("a", "10.14.0.2"), n.pod("b", "10.14.0.3")
	seen := map[uint64]bool{}
	for _, network := range []*harness.Network{n.Network, a, b} {
		o, err := identity.OriginOf(n.from(network))
		if err != nil || o.Network != cookie(network) || o.Network == 0 || o.User != uint32(os.Getuid()) {
			t.Errorf("%+v, %v, want network %d", o, err, cookie(network))
		}
		seen[o.Network] = true
	}
	if len(seen) != 3 {
		t.Errorf("%d cookies of 3 networks", len(seen))
	}
	if os.Getuid() != 0 {
		return // it can be nobody else
	}
	c := command(t, "client "+n.path)
	c.SysProcAttr.Credential = &syscall.Credential{Uid: 15001, Gid: 15001}
	c.run(a.Start).do()
	if o, err := identity.OriginOf(n.accept()); err != nil || o.User != 15001 || o.Network != cookie(a) {
		t.Errorf("%+v, %v", o, err)
	}
}
