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
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/redirect"
)

// attached checks that the cgroup has each program n times.
func (n *node) attached(times int) {
	n.t.Helper()
	for name, at := range redirect.Programs() {
		// The kernel detaches what nobody has any more when it comes to it.
		until(n.t, fmt.Sprintf("%s is attached %d times", name, times), func() bool {
			dir, err := os.Open(n.options.Cgroup)
			if err != nil {
				n.t.Fatal(err)
			}
			defer dir.Close()
			res, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: at})
			if err != nil {
				n.t.Fatal(err)
			}
			return len(res.Programs) == times
		})
	}
}

// pinned checks that the pins are those of links and maps, and no other.
func (n *node) pinned() {
	n.t.Helper()
	var want []string
	for name := range redirect.Programs() {
		want = append(want, name)
	}
	want = append(want, redirect.Maps()...)
	slices.Sort(want)
	entries, err := os.ReadDir(n.options.Dir)
	if err != nil {
		n.t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, want) {
		n.t.Errorf("pins %q, want %q", got, want)
	}
}

// stream is a redirected connection that says one line after the other.
type stream struct {
	t testing.TB
	net.Conn
	said int
}

func (p *pod) stream(to string) *stream {
	p.t.Helper()
	var c net.Conn
	p.do(func() (err error) { c, err = net.Dial("tcp", to); return err })
	p.t.Cleanup(func() { c.Close() })
	s := &stream{t: p.t, Conn: c}
	if got := s.read(); !strings.HasPrefix(got, "sidecar ") {
		p.t.Fatalf("a stream to %s arrived at %q", to, got)
	}
	return s
}

func (s *stream) read() string {
	s.t.Helper()
	var line []byte
	for b := make([]byte, 1); ; {
		if err := s.SetReadDeadline(time.Now().Add(soon)); err != nil {
			s.t.Fatal(err)
		}
		if _, err := io.ReadFull(s, b); err != nil {
			s.t.Fatalf("after %q: %v", line, err)
		}
		if b[0] == '\n' {
			return string(line)
		}
		line = append(line, b[0])
	}
}

// lives checks that the stream was not cut.
func (s *stream) lives() {
	s.t.Helper()
	s.said++
	line := fmt.Sprint("line ", s.said)
	if _, err := fmt.Fprintln(s, line); err != nil {
		s.t.Fatal(err)
	}
	if got := s.read(); got != line {
		s.t.Errorf("the stream says %q, want %q", got, line)
	}
}

// The programs go on without the process, and a new one puts its own in their
// place (kmesh-net/kmesh#774: two of each after a restart; cilium/cilium#6122:
// connections reset).
func TestRestart(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users, users6)
	want, want6 := by(t, r, users), by(t, r, users6)
	s, series := p.stream(users), r.Series()
	for range 3 {
		r.Close()
		same(t, p.dial(users), want)
		s.lives()
		r = n.open()
		same(t, p.dial(users), want)
		same(t, p.dial(users6), want6)
		set(t, r, canary, users, users6)
		same(t, by(t, r, users), want)
		s.lives()
		n.attached(1)
		n.pinned()
		if r.Recreated() != 0 || r.Replaced() || r.Series() != series {
			t.Errorf("%d links were made anew, maps replaced: %t, series %d after %d", r.Recreated(), r.Replaced(), r.Series(), series)
		}
	}
	if c, err := r.Counters(); err != nil || c["redirected4"] != 7 {
		t.Errorf("counters began anew: %v, %v", c, err)
	}
}

// Maps of another layout are replaced, with what they hold, while connections
// are made (kmesh-net/kmesh#951: an update of the image, and a crash loop).
func TestUpgradeThatChangesMaps(t *testing.T) {
	for name, change := range map[string]func(*ebpf.CollectionSpec){
		"all sizes": func(spec *ebpf.CollectionSpec) {
			for _, name := range []string{"pods", "destinations", "numbers"} {
				spec.Maps[name].MaxEntries = 1000
			}
		},
		"one size":        func(spec *ebpf.CollectionSpec) { spec.Maps["destinations"].MaxEntries = 1000 },
		"flags of one":    func(spec *ebpf.CollectionSpec) { spec.Maps["numbers"].Flags = 0 },
		"fewer, and more": func(spec *ebpf.CollectionSpec) { spec.Maps["numbers"].MaxEntries = 1 << 20 },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			old, err := redirect.OpenAs(n.options, change)
			if err != nil {
				t.Fatal(err)
			}
			p := n.services()
			p.allow(old)
			set(t, old, users, canary, users6)
			set(t, old, users, users6) // canary's number waits
			want, want6 := by(t, old, users), by(t, old, users6)
			gone, _ := old.Number(netip.MustParseAddrPort(users))
			s := p.stream(users)
			old.Close()
			var calls atomic.Int64
			stop, done := make(chan struct{}), make(chan error, 1)
			go func() {
				done <- p.Do(func() error {
					for {
						select {
						case <-stop:
							return nil
						default:
						}
						c, err := net.Dial("tcp", users)
						if err != nil {
							return err
						}
						var line [64]byte
						k, err := c.Read(line[:])
						c.Close()
						if err != nil || string(line[:k]) != want+"\n" || c.RemoteAddr().String() != users {
							return fmt.Errorf("arrived at %q as %s: %w", line[:k], c.RemoteAddr(), err)
						}
						calls.Add(1)
					}
				})
			}()
			until(t, "the first call", func() bool { return calls.Load() > 0 })
			r := n.open()
			before := calls.Load()
			until(t, "calls after the upgrade", func() bool { return calls.Load() > before+10 })
			close(stop)
			if err := <-done; err != nil {
				t.Error(err)
			}
			s.lives()
			if !r.Replaced() || r.Recreated() != 0 {
				t.Errorf("replaced: %t, made anew: %d", r.Replaced(), r.Recreated())
			}
			same(t, by(t, r, users), want)
			same(t, p.dial(users6), want6)
			set(t, r, users, canary, users6)
			same(t, by(t, r, users), want)
			if number, ok := r.Destination(gone); !ok || number.String() != users {
				t.Errorf("%s is the number of %s", gone, number)
			}
			n.attached(1)
			n.pinned()
			r.Close()
			r = n.open()
			if r.Replaced() {
				t.Error("maps were replaced twice")
			}
			same(t, p.dial(users), want)
		})
	}
}

// Where the old maps cannot be read, numbers begin elsewhere.
func TestUpgradeThatCannotReadWhatWas(t *testing.T) {
	n := newNode(t)
	if err := os.MkdirAll(n.options.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, size := range map[string][2]uint32{"numbers": {4, 4}, "destinations": {20, 4}} {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: size[0], ValueSize: size[1], MaxEntries: 10})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(m.Put(make([]byte, size[0]), make([]byte, 4)), m.Pin(filepath.Join(n.options.Dir, name))); err != nil {
			t.Fatal(err)
		}
		m.Close()
	}
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users)
	same(t, p.dial(users), by(t, r, users))
	same(t, p.dial(canary), "direct "+canary)
	n.pinned()
}

// A process may end at any moment of an upgrade.
func TestWhatAnEarlierProcessLeftHalfDone(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users)
	want := by(t, r, users)
	r.Close()
	dir := n.options.Dir
	for _, what := range []func() error{
		func() error { return pin(dir, "numbers_next") },
		func() error { return os.Remove(filepath.Join(dir, "destinations")) },
		func() error { return os.Remove(filepath.Join(dir, "cursor")) },
		func() error { return os.Remove(filepath.Join(dir, "connect4")) },
		func() error {
			return errors.Join(os.Remove(filepath.Join(dir, "getpeername6")), os.Remove(filepath.Join(dir, "counters")))
		},
	} {
		if err := what(); err != nil {
			t.Fatal(err)
		}
		r := n.open()
		set(t, r, users)
		same(t, by(t, r, users), want)
		same(t, p.dial(users), want)
		n.attached(1)
		n.pinned()
		r.Close()
	}
}

// pin pins some map.
func pin(dir, name string) error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return err
	}
	defer m.Close()
	return m.Pin(filepath.Join(dir, name))
}

// A pinned link to a cgroup that is no more (cilium/cilium#48420: status says
// healthy) takes programs for some milliseconds, and fails later
// (projectcalico/calico#12801: a panic).
func TestCgroupIsMadeAnew(t *testing.T) {
	for name, wait := range map[string]func(n *node, l link.Link){
		"at once": func(*node, link.Link) {},
		"after it was noticed": func(n *node, l link.Link) {
			until(n.t, "the link is severed", func() bool {
				info, err := l.Info()
				return err == nil && info.Cgroup() != nil && info.Cgroup().CgroupId == 0
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			r := n.open()
			n.enter(n.home) // a cgroup with sockets is not quite gone
			p := n.services()
			n.enter(n.options.Cgroup)
			p.allow(r)
			set(t, r, users)
			want := by(t, r, users)
			r.Close()
			l, err := link.LoadPinnedLink(filepath.Join(n.options.Dir, "connect4"), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			n.enter(n.home)
			if err := errors.Join(os.Remove(n.options.Cgroup), os.Mkdir(n.options.Cgroup, 0o755)); err != nil {
				t.Fatal(err)
			}
			n.enter(n.options.Cgroup)
			n.attached(0)
			wait(n, l)
			r = n.open()
			if r.Recreated() != len(redirect.Programs()) {
				t.Errorf("%d programs were attached anew", r.Recreated())
			}
			n.attached(1)
			n.pinned()
			same(t, p.dial(users), want)
			r.Close()
			if r = n.open(); r.Recreated() != 0 {
				t.Errorf("%d programs were attached anew again", r.Recreated())
			}
		})
	}
}

// One who is asked to attach elsewhere does.
func TestAnotherCgroup(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users)
	r.Close()
	below := filepath.Join(n.options.Cgroup, "below")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(below) })
	above := n.options
	n.options.Cgroup = below
	r = n.open()
	n.attached(1)
	same(t, p.dial(users), "direct "+users)
	r.Close()
	n.options = above
	n.attached(0)
}

// reason checks why something is unavailable.
func reason(t testing.TB, err error, want redirect.Reason, text string) {
	t.Helper()
	var u *redirect.Unavailable
	if !errors.As(err, &u) || u.Reason != want || !strings.Contains(err.Error(), text) {
		t.Errorf("%v, want %s with %q", err, want, text)
	}
}

// unavailable opens what is to be refused.
func (n *node) unavailable(want redirect.Reason, text string) {
	n.t.Helper()
	r, err := redirect.Open(n.options)
	if err == nil {
		r.Close()
	}
	reason(n.t, err, want, text)
}

func TestNoCgroup2(t *testing.T) {
	n := newNode(t)
	attach := n.options.Cgroup
	defer func() { n.options.Cgroup = attach }()
	tmp := t.TempDir()
	for dir, text := range map[string]string{
		filepath.Join(tmp, "none"): "no such file",
		tmp:                        "is not on a cgroup2 file system",
	} {
		n.options.Cgroup = dir
		n.unavailable(redirect.NoCgroup2, text)
	}
	// One of the first version.
	if err := unix.Mount("none", tmp, "cgroup", 0, "none,name=fingerpost-test"); err != nil {
		t.Log("no cgroup of the first version can be mounted here:", err)
		return
	}
	defer func() { _ = unix.Unmount(tmp, 0) }()
	n.options.Cgroup = tmp
	n.unavailable(redirect.NoCgroup2, "is not on a cgroup2 file system")
}

// An agent's container may have no cgroup2 mount, or a fresh one of its own
// cgroup namespace, below which no pod is (cilium/cilium#27900, #16078).
func TestContainersOwnCgroups(t *testing.T) {
	n := newNode(t)
	for mount, want := range map[string]string{
		"":          string(redirect.NoCgroup2) + ": no cgroup2 is mounted here",
		t.TempDir(): string(redirect.AttachPoint) + ": cgroup2 at",
	} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), containerEnv+"="+n.options.Dir, "MOUNT="+mount)
		cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.HasPrefix(string(out), want) {
			t.Errorf("with cgroup2 at %q: %v, %s", mount, err, out)
		}
	}
	n.attached(0)
}

// container says what an agent in a container says: it sees one cgroup2 mount,
// or none.
func container(dir string) {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	mounts, err2 := os.ReadFile("/proc/self/mountinfo")
	err = errors.Join(err, err2)
	for line := range strings.Lines(string(mounts)) {
		if mount, fs, ok := strings.Cut(line, " - "); ok && strings.HasPrefix(fs, "cgroup2 ") {
			err = errors.Join(err, unix.Unmount(strings.Fields(mount)[4], unix.MNT_DETACH))
		}
	}
	if at := os.Getenv("MOUNT"); at != "" {
		err = errors.Join(err, unix.Mount("cgroup2", at, "cgroup2", 0, ""))
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	r, err := redirect.Open(redirect.Options{Dir: dir})
	if err == nil {
		r.Close()
	}
	fmt.Println(err)
}

func TestNoBPFFS(t *testing.T) {
	n := newNode(t)
	for dir, text := range map[string]string{
		filepath.Join(t.TempDir(), "pins"):         "is not on a bpf file system",
		filepath.Join(t.TempDir(), "none", "pins"): "no such file",
	} {
		n.options.Dir = dir
		n.unavailable(redirect.NoBPFFS, text)
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s was made: %v", dir, err)
		}
	}
	n.attached(0)
}

func TestReadOnlyBPFFS(t *testing.T) {
	n := newNode(t)
	remount := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", n.bpffs, "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	remount(unix.MS_RDONLY)
	n.unavailable(redirect.ReadOnlyBPFFS, "read-only")
	n.attached(0)
	// What was there before goes on.
	remount(0)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users)
	want := by(t, r, users)
	r.Close()
	remount(unix.MS_RDONLY)
	n.unavailable(redirect.ReadOnlyBPFFS, "read-only")
	same(t, p.dial(users), want)
	remount(0)
	n.open()
}

func TestProgramThatWouldBeTheOnlyOne(t *testing.T) {
	n := newNode(t)
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect,
		Instructions: verdict(1), License: "MIT"})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	above := n.options.Cgroup
	below := filepath.Join(above, "below")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(below) })
	dir, err := os.Open(above)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	attach := link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: other, Attach: ebpf.AttachCGroupInet4Connect}
	if err := link.RawAttachProgram(attach); err != nil {
		t.Fatal(err)
	}
	for _, cgroup := range []string{above, below} {
		n.options.Cgroup = cgroup
		n.unavailable(redirect.Exclusive, "BPF_F_ALLOW_MULTI")
	}
	if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(dir.Fd()), Program: other, Attach: ebpf.AttachCGroupInet4Connect}); err != nil {
		t.Fatal(err)
	}
	n.options.Cgroup = above
	n.open()
	n.attached(1)
	n.pinned()
}

func TestGarbageAtAPin(t *testing.T) {
	program := func(path string) error {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, Instructions: verdict(0), License: "MIT"})
		if err != nil {
			return err
		}
		defer p.Close()
		return p.Pin(path)
	}
	for name, put := range map[string]struct {
		pin string
		put func(path string) error
	}{
		"a directory for a map":   {"numbers", func(path string) error { return os.MkdirAll(filepath.Join(path, "deep"), 0o700) }},
		"a directory for a link":  {"connect6", func(path string) error { return os.Mkdir(path, 0o700) }},
		"a program for a map":     {"pods", program},
		"a program for a link":    {"getpeername4", program},
		"a map for a link":        {"connect4", func(path string) error { return pin(filepath.Dir(path), filepath.Base(path)) }},
		"a directory yet to come": {"cursor_next", func(path string) error { return os.MkdirAll(filepath.Join(path, "deep"), 0o700) }},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			path := filepath.Join(n.options.Dir, put.pin)
			if err := errors.Join(os.Mkdir(n.options.Dir, 0o700), put.put(path)); err != nil {
				t.Fatal(err)
			}
			n.unavailable(redirect.Garbage, put.pin)
			n.unavailable(redirect.Garbage, put.pin)
			removed, err := redirect.Uninstall(n.options.Dir, false)
			if err != nil || !slices.Contains(removed, path) {
				t.Errorf("removed %q: %v", removed, err)
			}
			n.open()
			n.attached(1)
		})
	}
}

func TestMissingCapability(t *testing.T) {
	n := newNode(t)
	with := func(caps ...uint) error {
		return onThread(func() error {
			hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var data [2]unix.CapUserData
			for _, c := range caps {
				data[c/32].Permitted |= 1 << (c % 32)
				data[c/32].Effective |= 1 << (c % 32)
			}
			if err := unix.Capset(&hdr, &data[0]); err != nil {
				return err
			}
			r, err := redirect.Open(n.options)
			if err == nil {
				r.Close()
			}
			return err
		})
	}
	reason(t, with(), redirect.Capability, "CAP_BPF")
	reason(t, with(unix.CAP_NET_ADMIN), redirect.Capability, "CAP_BPF")
	reason(t, with(unix.CAP_BPF), redirect.Capability, "CAP_NET_ADMIN")
	n.attached(0)
	if err := with(unix.CAP_BPF, unix.CAP_NET_ADMIN); err != nil {
		t.Errorf("with both that it needs: %v", err)
	}
	n.attached(1)
}

func TestOneProcessAtATime(t *testing.T) {
	n := newNode(t)
	r := n.open()
	p := n.services()
	p.allow(r)
	set(t, r, users)
	want := by(t, r, users)
	n.unavailable(redirect.Busy, "another process")
	_, err := redirect.Uninstall(n.options.Dir, false)
	reason(t, err, redirect.Busy, "another process")
	same(t, p.dial(users), want)
	n.pinned()
	r.Close()
	n.open()
}

func TestUninstallLeavesNothing(t *testing.T) {
	n := newNode(t)
	series := map[uint32]bool{0: true}
	for _, force := range []bool{false, true} {
		r := n.open()
		if series[r.Series()] {
			t.Errorf("series %d again", r.Series())
		}
		series[r.Series()] = true
		p := n.services()
		p.allow(r)
		set(t, r, users)
		same(t, p.dial(users), by(t, r, users))
		s := p.stream(users)
		if !force {
			r.Close()
		}
		removed, err := redirect.Uninstall(n.options.Dir, force)
		if err != nil || len(removed) != len(redirect.Programs())+len(redirect.Maps())+1 {
			t.Errorf("removed %q: %v", removed, err)
		}
		n.attached(0)
		if left, err := os.ReadDir(n.bpffs); err != nil || slices.ContainsFunc(left, func(e os.DirEntry) bool { return !strings.HasSuffix(e.Name(), ".debug") }) {
			t.Errorf("left: %v, %v", left, err) // the kernel's own end in .debug
		}
		same(t, p.dial(users), "direct "+users)
		s.lives()
		if removed, err := redirect.Uninstall(n.options.Dir, force); err != nil || len(removed) != 0 {
			t.Errorf("the second time %q was removed: %v", removed, err)
		}
		r.Close()
	}
	// What is no directory of pins is not touched.
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := redirect.Uninstall(dir, true)
	reason(t, err, redirect.NoBPFFS, filepath.Dir(dir))
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
	// Nor is the topmost directory, in which others have pins.
	others := filepath.Join(n.bpffs, "others")
	if err := os.Mkdir(others, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{n.bpffs, n.bpffs + "/"} {
		_, err := redirect.Uninstall(dir, true)
		reason(t, err, redirect.NoBPFFS, filepath.Dir(n.bpffs))
		if _, err := os.Stat(others); err != nil {
			t.Error(err)
		}
		o := n.options
		o.Dir = dir
		_, err = redirect.Open(o)
		reason(t, err, redirect.NoBPFFS, filepath.Dir(n.bpffs))
	}
}
