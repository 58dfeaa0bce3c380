// Package socket opens the unix sockets that pods and operators reach the
// agent by, so that a name always leads to a living agent and to one alone.
//
//	lock ─▶ nobody answers at the path ─▶ bind beside it ─▶ chmod ─▶ rename over it
//
// The flock decides between agents that agree on the lock's path; the dial
// finds those that do not. The rename leaves no moment without a socket, and
// whatever a killed agent left behind is replaced. Since a directory that pods
// can write to would let them take the name or the lock over, the lock belongs
// into one that no pod mounts.
package socket

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// MaxPath is the longest path of a unix socket in bytes: sun_path holds 108
// with a terminating zero (unix(7)).
const MaxPath = 107

// Options say where a socket is.
type Options struct {
	// Path is the name by which clients find the socket.
	Path string
	// Lock is the file whose flock the one agent holds that serves Path. It
	// stays when the agent ends. Empty: no lock is taken, since another lock
	// of the caller's covers this socket too.
	Lock string
	// Mode is the permission of the socket. Zero means 0666: whoever sees the
	// directory may connect.
	Mode fs.FileMode
	// Replace takes the name over though somebody may listen there: the one
	// who does has given the lock for that, or is the caller itself.
	Replace bool
	// Own means that only this program connects, by [Dial]: the length of the
	// path is not bounded by [MaxPath] then, only that of its last element.
	Own bool
}

// HeldError indicates that another agent serves the socket.
type HeldError struct {
	Path string
	PID  int // 0 if it cannot be seen
}

func (e *HeldError) Error() string { return e.Serves() + "; stop it first" }

// Serves says who serves the socket, without what to do.
func (e *HeldError) Serves() string {
	who := "pid unknown"
	if e.PID != 0 {
		who = "pid " + strconv.Itoa(e.PID)
	}
	return fmt.Sprintf("%s is served by another agent (%s)", e.Path, who)
}

// Socket is a listening socket under its name. It is safe for concurrent use.
type Socket struct {
	*net.UnixListener

	// Set at creation, read-only.
	path     string
	dev, ino uint64

	lockPath string // empty: none

	// mu guards all below.
	mu     sync.Mutex
	lock   *os.File // nil: none, or given away
	given  bool     // the name may be a successor's
	closed bool
}

// Listen takes the socket name over. It returns a [*HeldError] if another
// agent serves it, and an error that says what to do if the name cannot be a
// socket. Nothing but a socket that nobody listens on is ever replaced.
// Directories are created with mode 0755.
func Listen(o Options) (_ *Socket, err error) {
	if n := len(o.Path); n > MaxPath && !o.Own {
		return nil, fmt.Errorf("socket path %q has %d bytes, a unix socket can have %d; choose a shorter one", o.Path, n, MaxPath)
	}
	if o.Path == "" {
		return nil, errors.New("the socket path is empty")
	}
	if o.Mode == 0 {
		o.Mode = 0o666
	}
	if err := makeDir(filepath.Dir(o.Path)); err != nil {
		return nil, fmt.Errorf("socket %s: %w", o.Path, err)
	}
	s := &Socket{path: o.Path, lockPath: o.Lock}
	if o.Lock != "" {
		if s.lock, err = lock(o.Lock, o.Path); err != nil {
			return nil, err
		}
	}
	defer func() {
		if err != nil && s.lock != nil {
			_ = s.lock.Close()
		}
	}()
	if err := vacant(o.Path, o.Replace); err != nil {
		return nil, err
	}
	if s.UnixListener, err = bind(o.Path, o.Mode); err != nil {
		return nil, err
	}
	if s.dev, s.ino, err = inode(o.Path); err != nil {
		_ = s.UnixListener.Close()
		return nil, err
	}
	return s, nil
}

// Path is the name of the socket.
func (s *Socket) Path() string { return s.path }

// Ours tells whether the name still leads to this socket; it does not once the
// socket was closed, another agent took the name over or somebody removed it.
func (s *Socket) Ours() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.closed && s.leadsHere()
}

func (s *Socket) leadsHere() bool {
	dev, ino, err := inode(s.path)
	return err == nil && dev == s.dev && ino == s.ino
}

// Given tells whether the socket was given away by Unlock and not locked since.
func (s *Socket) Given() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.given
}

// Unlock gives name and lock to whoever wants them while the socket goes on to
// serve. From then on Close leaves the name alone: it may be the successor's.
// A second call does nothing.
func (s *Socket) Unlock() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.given = true
	return s.unlock()
}

func (s *Socket) unlock() error {
	if s.lock == nil {
		return nil
	}
	err := s.lock.Close()
	s.lock = nil
	return err
}

// Relock takes back what Unlock gave, if nobody took it. It returns a
// [*HeldError] if another agent has the lock or the name leads elsewhere.
func (s *Socket) Relock() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.given || s.closed {
		return nil
	}
	var f *os.File
	if s.lockPath != "" {
		var err error
		if f, err = lock(s.lockPath, s.path); err != nil {
			return err
		}
	}
	if !s.leadsHere() {
		if f != nil {
			_ = f.Close()
		}
		return &HeldError{Path: s.path}
	}
	s.lock, s.given = f, false
	return nil
}

// Waiting tells whether a connection waits to be accepted. Once the name leads
// elsewhere none is added, and after false none is lost by Close.
func (s *Socket) Waiting() bool {
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	if err := raw.Control(func(fd uintptr) {
		n, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	}); err != nil {
		return false
	}
	return n > 0
}

// Close stops listening, removes the name if it still is this socket's, and
// gives the lock back. Further calls do nothing.
func (s *Socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if !s.given && s.leadsHere() {
		_ = os.Remove(s.path)
	}
	return errors.Join(s.UnixListener.Close(), s.unlock())
}

// Hold takes the lock of a socket that this process does not serve, as long as
// what it returns is not closed. It returns a [*HeldError] if an agent has it.
func Hold(file, path string) (io.Closer, error) { return lock(file, path) }

// Vacant returns nil where Remove would remove the socket, or find none, without
// force; else the error that it would return.
func Vacant(path string) error { return vacant(path, false) }

// Remove removes a socket that nobody serves, or with force one that somebody
// does, and what a killed agent left beside it. It returns what it removed, and
// a [*HeldError] if an agent serves it. What is no socket stays, and is an error.
func Remove(path string, force bool) (removed []string, err error) {
	for _, p := range []string{path, beside(path)} {
		if _, err := os.Lstat(p); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := vacant(p, force); err != nil {
			return removed, err
		}
		if err := os.Remove(p); err != nil {
			return removed, fmt.Errorf("socket: %w", err)
		}
		removed = append(removed, p)
	}
	return removed, nil
}

// beside is where a socket is until it gets its name.
func beside(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
}

// lock takes the flock of the file and writes our pid into it.
func lock(file, path string) (*os.File, error) {
	if err := makeDir(filepath.Dir(file)); err != nil {
		return nil, fmt.Errorf("lock %s: %w", file, err)
	}
	// A file that was unlinked between open and flock guards nothing.
	for range 100 {
		f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			return nil, fmt.Errorf("lock of socket %s: %w", path, err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			pid := pidIn(f)
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, &HeldError{Path: path, PID: pid}
			}
			return nil, fmt.Errorf("lock %s: %w", file, err)
		}
		mine, err1 := f.Stat()
		there, err2 := os.Stat(file)
		if err1 != nil || err2 != nil || !os.SameFile(mine, there) {
			_ = f.Close()
			continue
		}
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
		}
		if err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("write pid to lock: %w", err)
		}
		return f, nil
	}
	return nil, fmt.Errorf("lock %s is removed again and again; something cleans its directory", file)
}

func pidIn(f *os.File) int {
	var b [32]byte
	n, _ := f.ReadAt(b[:], 0)
	pid, err := strconv.Atoi(string(bytes.TrimSpace(b[:n])))
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}

// vacant checks that the name is free: absent, or a socket nobody answers at,
// or any socket if it is to be replaced.
func vacant(path string, replace bool) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("socket path %s is %s; remove it or choose another path", path, kind(fi.Mode()))
	}
	if replace {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := Dial(ctx, path)
	switch {
	case err == nil:
		defer func() { _ = c.Close() }()
		return &HeldError{Path: path, PID: peer(c)}
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return &HeldError{Path: path} // its backlog is full: somebody listens
	}
	return fmt.Errorf("whether socket %s is in use: %w", path, err)
}

// peer is the process that listens at the other end (SO_PEERCRED, unix(7)).
func peer(c *net.UnixConn) int {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	return pid
}

// bind listens beside the name and moves the socket over it.
func bind(path string, mode fs.FileMode) (_ *net.UnixListener, err error) {
	temp := beside(path)
	if fi, err := os.Lstat(temp); err == nil {
		if fi.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("%s, which the socket needs for a moment, is %s; remove it", temp, kind(fi.Mode()))
		}
		if err := os.Remove(temp); err != nil {
			return nil, fmt.Errorf("stale socket: %w", err)
		}
	}
	address, release, err := short(temp)
	if err != nil {
		return nil, err
	}
	defer release()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err = os.Chmod(temp, mode); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		_ = l.Close()
		_ = os.Remove(temp)
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return l, nil
}

// Dial connects to the socket at path, whose length may exceed [MaxPath] as
// long as its last element does not. The error is one of a net.Dialer.
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	address, release, err := short(path)
	if err != nil {
		return nil, err
	}
	defer release()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", address)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// short returns an address of path that fits into sun_path, by the directory's
// descriptor if need be, which release closes.
func short(path string) (address string, release func(), err error) {
	if len(path) <= MaxPath {
		return path, func() {}, nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, fmt.Errorf("socket directory: %w", err)
	}
	address = fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
	if len(address) > MaxPath {
		_ = dir.Close()
		return "", nil, fmt.Errorf("socket name %q is too long by %d bytes; choose a shorter one", filepath.Base(path), len(address)-MaxPath)
	}
	return address, func() { _ = dir.Close() }, nil
}

func inode(path string) (dev, ino uint64, err error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, 0, fmt.Errorf("socket %s: %w", path, err)
	}
	return uint64(st.Dev), st.Ino, nil
}

// makeDir creates dir and its parents with mode 0755 whatever the umask says,
// since pods of any user have to pass.
func makeDir(dir string) error {
	fi, err := os.Stat(dir)
	if err == nil && !fi.IsDir() {
		return fmt.Errorf("%s is %s, not a directory", dir, kind(fi.Mode()))
	}
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return err
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := makeDir(parent); err != nil {
			return err
		}
	}
	switch err := os.Mkdir(dir, 0o755); {
	case errors.Is(err, fs.ErrExist):
		return nil // somebody else made it meanwhile
	case err != nil:
		return err
	}
	return os.Chmod(dir, 0o755)
}

func kind(m fs.FileMode) string {
	switch m.Type() {
	case 0:
		return "a file"
	case fs.ModeDir:
		return "a directory"
	case fs.ModeSymlink:
		return "a symbolic link"
	case fs.ModeSocket:
		return "a socket"
	}
	return "a special file"
}
