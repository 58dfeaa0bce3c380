package redirect

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/cgroup"
)

// pinnedMaps are the maps that outlive the process.
var pinnedMaps = []string{redirectMapPods, redirectMapDestinations, redirectMapNumbers, redirectMapCursor, redirectMapCounters}

// hooks are the programs in the order in which they are attached: from the first
// redirected connection on its peer has the right name.
var hooks = []struct {
	name   string
	attach ebpf.AttachType
}{
	{redirectProgGetpeername4, ebpf.AttachCgroupInet4GetPeername},
	{redirectProgGetpeername6, ebpf.AttachCgroupInet6GetPeername},
	{redirectProgConnect4, ebpf.AttachCGroupInet4Connect},
	{redirectProgConnect6, ebpf.AttachCGroupInet6Connect},
}

// next is what the name of a pin ends in that will take the place of another.
// Names on a bpf file system have no dots.
const next = "_next"

// pins is a directory of pins that this process alone writes to.
type pins struct {
	dir  string
	lock *os.File
}

// openPins makes the directory, if it is not there, and takes its lock.
func openPins(dir string) (*pins, error) {
	dir = filepath.Clean(dir)
	if err := withinBPFFS(dir); err != nil {
		return nil, err
	}
	switch err := os.Mkdir(dir, 0o700); {
	case err == nil, errors.Is(err, os.ErrExist):
	case errors.Is(err, unix.EROFS):
		return nil, unavailable(ReadOnlyBPFFS, "%w", err)
	default:
		return nil, unavailable(NoBPFFS, "%w", err)
	}
	if err := unix.Access(dir, unix.W_OK); err != nil {
		return nil, unavailable(ReadOnlyBPFFS, "%q: %w", dir, err)
	}
	p := &pins{dir: dir}
	var err error
	if p.lock, err = lockDir(dir); err != nil {
		return nil, err
	}
	// Left by a process that ended before it could rename them.
	entries, err := os.ReadDir(dir)
	if err != nil {
		p.close()
		return nil, unavailable(NoBPFFS, "%w", err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), next) {
			if err := os.Remove(p.path(e.Name())); err != nil {
				p.close()
				return nil, unavailable(Garbage, "%w", err)
			}
		}
	}
	return p, nil
}

// withinBPFFS returns an error unless the directory, which need not be there, lies
// in one of a bpf file system: the topmost is everybody's.
func withinBPFFS(dir string) error {
	parent := filepath.Dir(dir)
	var on unix.Statfs_t
	switch err := unix.Statfs(parent, &on); {
	case err != nil:
		return unavailable(NoBPFFS, "%q: %w", parent, err)
	case on.Type != unix.BPF_FS_MAGIC:
		return unavailable(NoBPFFS, "%q is not on a bpf file system", parent)
	}
	return nil
}

// lockDir takes the lock of a directory, for as long as the file is open.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, unavailable(Garbage, "%w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, unavailable(Busy, "another process has the lock of %q", dir)
	}
	return f, nil
}

func (p *pins) close() { p.lock.Close() }

func (p *pins) path(name string) string { return filepath.Join(p.dir, name) }

// put pins something in the place of what has the name.
func (p *pins) put(name string, pin func(string) error) error {
	err := pin(p.path(name + next))
	if err == nil {
		err = os.Rename(p.path(name+next), p.path(name))
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EROFS):
		return unavailable(ReadOnlyBPFFS, "%w", err)
	}
	return unavailable(NoBPFFS, "pin %q: %w", p.path(name), err)
}

// maps opens the maps that are pinned, and says which of them the programs can
// take as they are.
func (p *pins) maps(spec *ebpf.CollectionSpec) (pinned, kept map[string]*ebpf.Map, err error) {
	pinned, kept = map[string]*ebpf.Map{}, map[string]*ebpf.Map{}
	defer func() {
		if err != nil {
			closeAll(pinned)
		}
	}()
	for _, name := range pinnedMaps {
		m, err := ebpf.LoadPinnedMap(p.path(name), nil)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return nil, nil, p.garbage(name, err)
		}
		pinned[name] = m
		if err := spec.Maps[name].Compatible(m); err == nil {
			kept[name] = m
		} else if !errors.Is(err, ebpf.ErrMapIncompatible) {
			return nil, nil, unavailable(Kernel, "%w", err)
		}
	}
	return pinned, kept, nil
}

// garbage is what is in the place of a pin.
func (p *pins) garbage(name string, err error) error {
	return unavailable(Garbage, "in the place of the pin %q: %w; `fingerpost uninstall` removes all of %q", name, err, p.dir)
}

// carry copies to each fresh map what the pinned one of its name held. Where it
// cannot be read, because keys or values are others, what depends on it is not
// copied either: a destination without its number would be nobody's.
func carry(pinned, fresh map[string]*ebpf.Map) error {
	numbered := true
	for _, name := range []string{redirectMapNumbers, redirectMapCursor, redirectMapDestinations, redirectMapPods} {
		old, m := pinned[name], fresh[name]
		if m == nil {
			continue
		}
		same := old != nil && old.KeySize() == m.KeySize() && old.ValueSize() == m.ValueSize() && old.Type() == m.Type()
		if name == redirectMapNumbers {
			numbered = same
		}
		if !same || name == redirectMapDestinations && !numbered {
			continue
		}
		var key, value []byte
		it := old.Iterate()
		for it.Next(&key, &value) {
			// What has no room stays away: it is not redirected.
			if err := m.Put(key, value); err != nil && !errors.Is(err, unix.E2BIG) {
				return fmt.Errorf("map %s: %w", name, err)
			}
		}
		if err := it.Err(); err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
	}
	return nil
}

// attach puts each program in the place of the one that is pinned, or attaches it.
// What is new is pinned when all are attached, and else goes with the process.
func (r *Redirector) attach(dir *os.File, programs map[string]*ebpf.Program) error {
	r.links = map[string]link.Link{}
	var made []string
	var stale []link.Link
	defer func() {
		for _, l := range stale {
			l.Close()
		}
	}()
	for _, h := range hooks {
		l, good, err := r.update(h.name, programs[h.name])
		if err != nil {
			return err
		}
		if l != nil && !good {
			stale = append(stale, l)
		}
		if !good {
			made = append(made, h.name)
			l, err = link.AttachRawLink(link.RawLinkOptions{Target: int(dir.Fd()), Program: programs[h.name], Attach: h.attach})
		}
		switch {
		case errors.Is(err, unix.EPERM):
			return unavailable(Exclusive, "%w", cgroup.NotAttached(err, r.options.Cgroup))
		case err != nil:
			return unavailable(Kernel, "%w", cgroup.NotAttached(err, r.options.Cgroup))
		}
		r.links[h.name] = l
	}
	for _, name := range made {
		if err := r.pins.put(name, r.links[name].Pin); err != nil {
			return err
		}
	}
	for _, l := range stale {
		// Of a cgroup that is no more there is nothing to detach.
		if err := l.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) {
			return unavailable(Kernel, "detach from where it was attached before: %w", err)
		}
	}
	return nil
}

// update puts a program in the place of the one whose link is pinned. It returns
// the link, nil if there is none, and whether it is of use.
func (r *Redirector) update(name string, program *ebpf.Program) (_ link.Link, good bool, _ error) {
	l, err := link.LoadPinnedLink(r.pins.path(name), nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, false, nil
	case err != nil:
		return nil, false, r.pins.garbage(name, err)
	}
	// A link to a cgroup that is no more takes programs for a while, as if it
	// were of use. And one may have been made where another was asked for.
	if err = l.Update(program); err == nil {
		err = r.here(l)
	}
	if err == nil {
		return l, true, nil
	}
	r.recreated++
	r.options.Log.Warn("a pinned program is attached anew", "program", name, "cgroup", r.options.Cgroup, "reason", err.Error())
	return l, false, nil
}

// here tells whether a link is to the cgroup that has the directory's name now.
func (r *Redirector) here(l link.Link) error {
	var st unix.Stat_t
	if err := unix.Stat(r.options.Cgroup, &st); err != nil {
		return err
	}
	info, err := l.Info()
	if err != nil {
		return err
	}
	if cg := info.Cgroup(); cg == nil || cg.CgroupId != st.Ino {
		return fmt.Errorf("it is attached to another cgroup than that with inode %d", st.Ino)
	}
	return nil
}

// Uninstall detaches every program that is pinned in the directory, which is
// [DefaultDir] if empty, and removes all that it holds and itself. It returns what
// it removed, and an [Unavailable] that is [Busy] while a process has the
// directory, unless it is to be forced. It is good to be called again.
func Uninstall(dir string, force bool) (removed []string, err error) {
	if dir == "" {
		dir = DefaultDir
	}
	dir = filepath.Clean(dir)
	switch _, err := os.Stat(dir); {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case err != nil:
		return nil, err
	}
	if err := withinBPFFS(dir); err != nil {
		return nil, err
	}
	if !force {
		lock, err := lockDir(dir)
		if err != nil {
			return nil, err
		}
		defer lock.Close()
	}
	// Connections first, then the names of their peers.
	order := slices.Clone(hooks)
	slices.Reverse(order)
	for _, h := range order {
		path := filepath.Join(dir, h.name)
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			continue // it is none, and goes with the rest
		}
		// Also where a process still holds it.
		if err := l.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) {
			l.Close()
			return removed, fmt.Errorf("detach %s: %w", path, err)
		}
		l.Close()
		if err := os.Remove(path); err != nil {
			return removed, err
		}
		removed = append(removed, path)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return removed, err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if err := os.RemoveAll(path); err != nil {
			return removed, err
		}
		removed = append(removed, path)
	}
	if err := os.Remove(dir); err != nil {
		return removed, err
	}
	return append(removed, dir), nil
}
