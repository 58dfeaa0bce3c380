package nodecache

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"
	"unique"

	"golang.org/x/sys/unix"
)

// The sections that this program knows; files holds the descriptors that the
// infos name by their SHA-256.
const (
	sectionInfo  = "info"
	sectionFiles = "files"
	sectionPods  = "pods"
	sectionPast  = "past"

	sectionLearned = "learned"
)

const (
	checkpointName = "checkpoint"

	// foreignKeep is how long the info of an owner stays in the file that no
	// writer holds any more: it may be that of an agent that runs beside this
	// one.
	foreignKeep = 10 * time.Minute

	// lockPatience bounds the wait for another agent's write, lockRetry is the
	// time between two tries.
	lockPatience = 5 * time.Second
	lockRetry    = 10 * time.Millisecond
)

// Checkpoint is a file in which agents of one node keep what they learned, so
// that the next one need not learn it again. Several agents may write it in turn
// and at once: each write takes the lock, reads the file, merges, and puts a new
// one in its place, so that none loses what another wrote, and a reader finds a
// whole file whenever a writer is killed. Sections that this program does not
// know are kept. A file that cannot be read, or was written by a later version,
// is renamed and told of once; it is never an error.
//
// The zero Checkpoint is of no use; set Dir. Its methods block on the disk and
// may not be called concurrently.
type Checkpoint struct {
	// Dir is the directory of the file. Prepare and Save make it.
	Dir string
	// Log is told of a file that was set aside; nil discards.
	Log *slog.Logger

	tooLarge bool // was told
}

// Unit is a section that is replaced as a whole.
type Unit struct {
	// Line names what Version belongs to: within one line the higher version
	// wins, and a unit of another line is always replaced. A Unit without a
	// line is none.
	Line    string
	Version uint64
	Data    []byte
	// Force makes the unit win whatever its version: its writer knows that
	// those of the line began anew.
	Force bool
}

// Saved is the content of a checkpoint.
type Saved struct {
	Infos   []SavedInfo
	Past    []SavedPast
	Learned []SavedLearned
	Pods    Unit // may be none
}

// savedOwner is the value of an entry of the section info. Fields that are
// added to Info are kept without a change here.
type savedOwner struct {
	Name     string
	Workload Workload
	Created  time.Time       `json:",omitzero"`
	Oldest   time.Time       `json:",omitzero"`
	Export   string          `json:",omitempty"`
	Policy   *Policy         `json:",omitempty"`
	Declared []Declared      `json:",omitempty"`
	Behind   []SavedStanding `json:",omitempty"`
	Unasked  bool            `json:",omitempty"` // there is no Info
	Info     Info            // without Files
	Files    [][][]byte      // of each port, in the order of Info.All: the hashes of its files
}

// Prepare makes the directory and returns an error if it could not be written.
func (c *Checkpoint) Prepare() error {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	f, err := c.openLock()
	if err != nil {
		return err
	}
	return f.Close()
}

func (c *Checkpoint) openLock() (*os.File, error) {
	return os.OpenFile(c.path()+".lock", os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
}

// Load reads the checkpoint. Where there is none, or none that can be read, it
// returns an empty one. The error is that of the disk.
func (c *Checkpoint) Load() (*Saved, error) {
	out, err := c.load()
	if unusable := (*unusableError)(nil); !errors.As(err, &unusable) {
		return out, err
	}
	lock, err := c.lock()
	if err != nil {
		return &Saved{}, err
	}
	defer lock.Close()
	// Another agent may have put a good one in its place.
	if out, err = c.load(); err != nil {
		err = c.setAside(err)
	}
	return out, err
}

func (c *Checkpoint) load() (*Saved, error) {
	sections, err := c.read()
	if err == nil && sections != nil {
		var out *Saved
		if out, err = decode(sections); err == nil {
			return out, nil
		}
		err = &unusableError{err}
	}
	return &Saved{}, err
}

// unusableError says why a file that could be read is of no use.
type unusableError struct{ why error }

func (e *unusableError) Error() string { return e.why.Error() }
func (e *unusableError) Unwrap() error { return e.why }

// decode reads the sections that are known.
func decode(sections []section) (*Saved, error) {
	out := &Saved{}
	pods := find(sections, sectionPods)
	if pods.kind == kindUnit {
		out.Pods = Unit{Line: pods.line, Version: pods.version, Data: pods.payload}
	}
	entries, err := parseEntries(find(sections, sectionInfo).payload)
	if err != nil {
		return nil, fmt.Errorf("section %s %w", sectionInfo, err)
	}
	blobs, err := parseEntries(find(sections, sectionFiles).payload)
	if err != nil {
		return nil, fmt.Errorf("section %s %w", sectionFiles, err)
	}
	files := make(map[string]unique.Handle[string], len(blobs))
	for _, b := range blobs {
		files[b.key] = unique.Make(string(b.value))
	}
	for _, e := range entries {
		// One that another version wrote in other words is collected again.
		if s, err := decodeInfo(&e, files); err == nil {
			out.Infos = append(out.Infos, s)
		}
	}
	if out.Past, err = parsePast(sections); err != nil {
		return nil, err
	}
	out.Learned, err = parseLearned(sections)
	return out, err
}

func decodeInfo(e *entry, files map[string]unique.Handle[string]) (SavedInfo, error) {
	var v savedOwner
	if err := json.Unmarshal(e.value, &v); err != nil {
		return SavedInfo{}, err
	}
	key, err := ParseOwnerKey(e.key)
	if err != nil {
		return SavedInfo{}, err
	}
	s := SavedInfo{
		Key: key, Name: v.Name, Workload: v.Workload, Created: v.Created, Oldest: v.Oldest,
		Export: v.Export, Declared: v.Declared, Policy: v.Policy, Behind: v.Behind, Info: &v.Info,
	}
	if e.until != 0 {
		s.Until = time.Unix(e.until, 0)
	}
	for i := range s.Declared {
		slices.Sort(s.Declared[i].Services) // readers search them
	}
	if v.Unasked {
		s.Info = nil
		return s, nil
	}
	for p := range v.Info.All() {
		if len(v.Files) == 0 {
			return SavedInfo{}, errors.New("ports and files do not match")
		}
		p.Files = nil
		for _, sum := range v.Files[0] {
			f, ok := files[string(sum)]
			if !ok {
				return SavedInfo{}, errors.New("a file is missing")
			}
			p.Files = append(p.Files, f)
		}
		// Readers search them.
		slices.SortFunc(p.Files, func(a, b unique.Handle[string]) int { return cmp.Compare(a.Value(), b.Value()) })
		slices.SortFunc(p.Services, func(a, b Service) int { return cmp.Compare(a.Name, b.Name) })
		v.Files = v.Files[1:]
	}
	for i := -1; i < len(v.Info.Variants); i++ {
		slices.SortFunc(v.Info.program(i), func(a, b PortInfo) int { return cmp.Compare(a.Port, b.Port) })
	}
	return s, nil
}

// Save merges what a writer knows into the file. Of infos that the file has for
// the same owner, those collected later win. What the file has of other owners
// stays until its end, or until nobody has held it for ten minutes. What is past
// or learned counts until its end, whoever saw it. An error leaves the file as it
// was.
func (c *Checkpoint) Save(s Saved) error {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	lock, err := c.lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	old, err := c.read()
	if err != nil {
		if err := c.setAside(err); err != nil {
			return err
		}
	}
	m, err := mergeAll(old, s)
	if err != nil {
		if err := c.setAside(&unusableError{err}); err != nil {
			return err
		}
		if m, err = mergeAll(nil, s); err != nil {
			return err
		}
	}
	if m.dropped > 0 && !c.tooLarge {
		c.log().Warn("the checkpoint is full; some owners will be collected again after a restart", "owners", m.dropped)
	}
	c.tooLarge = m.dropped > 0
	return c.replace(m)
}

// Remove removes the file, and what stands beside it under its name: its lock,
// files that were set aside or not finished. It returns what it removed. A writer
// that comes later begins anew.
func (c *Checkpoint) Remove() (removed []string, err error) {
	beside, _ := filepath.Glob(c.path() + ".*") // the directory's name may be no pattern; then there is none
	for _, path := range append(beside, c.path()) {
		switch failed := os.Remove(path); {
		case failed == nil:
			removed = append(removed, path)
		case !errors.Is(failed, fs.ErrNotExist):
			err = errors.Join(err, failed)
		}
	}
	return removed, err
}

// read returns the sections of the file, nil where there is none.
func (c *Checkpoint) read() ([]section, error) {
	f, err := os.Open(c.path())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > maxFile || !st.Mode().IsRegular() {
		return nil, &unusableError{fmt.Errorf("is no file of at most %d bytes", maxFile)}
	}
	data := make([]byte, st.Size())
	if _, err := f.ReadAt(data, 0); err != nil && len(data) > 0 {
		return nil, err
	}
	sections, err := parseFile(data)
	if err != nil {
		return nil, &unusableError{err}
	}
	return sections, nil
}

// setAside needs the lock. It renames a file that is of no use and tells why;
// any other error it returns.
func (c *Checkpoint) setAside(err error) error {
	why := (*unusableError)(nil)
	if !errors.As(err, &why) {
		return err
	}
	aside := c.path() + ".corrupt"
	if future := (*futureError)(nil); errors.As(why, &future) {
		aside = fmt.Sprintf("%s.version-%d", c.path(), future.version)
	}
	err = os.Rename(c.path(), aside)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // another agent did it
	}
	if err == nil {
		c.log().Warn("the checkpoint cannot be used and is set aside", "file", aside, "reason", why.Error())
	} else {
		err = fmt.Errorf("%s %w, and cannot be set aside: %w", c.path(), why, err)
	}
	return err
}

// lock waits for the lock of the directory. It is released when the file is
// closed, also by the kernel.
func (c *Checkpoint) lock() (*os.File, error) {
	f, err := c.openLock()
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(lockPatience); ; time.Sleep(lockRetry) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, unix.EINTR):
		case !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline):
			_ = f.Close()
			return nil, fmt.Errorf("lock of %s: %w", c.path(), err)
		}
	}
}

// replace needs the lock. It puts what was merged in the place of the file.
func (c *Checkpoint) replace(m *merge) (err error) {
	f, err := os.OpenFile(c.path()+".tmp", os.O_CREATE|os.O_TRUNC|os.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if f != nil {
			_ = f.Close()
		}
		if err != nil {
			_ = os.Remove(c.path() + ".tmp")
		}
	}()
	buffered := bufio.NewWriterSize(f, 1<<16)
	if err := m.write(buffered); err != nil {
		return err
	}
	if err := buffered.Flush(); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	err = f.Close()
	f = nil
	if err != nil {
		return err
	}
	if err := os.Rename(c.path()+".tmp", c.path()); err != nil {
		return err
	}
	// The rename itself has to outlive a crash of the machine.
	dir, err := os.Open(c.Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

func (c *Checkpoint) path() string { return filepath.Join(c.Dir, checkpointName) }

func (c *Checkpoint) log() *slog.Logger {
	if c.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return c.Log
}
