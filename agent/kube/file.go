package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
)

// A change is read once nothing more came for quiet, at the latest after
// patience.
const (
	quiet    = 50 * time.Millisecond
	patience = 250 * time.Millisecond
	// pollEvery is how often it is looked whether the files are as they were; where
	// watching fails they are read, and watching is tried again.
	pollEvery = time.Second
)

// File is the source that reads Kubernetes objects from a file, or from the
// *.yaml, *.yml and *.json files of a directory, and again when they change.
// Together they are one snapshot: what cannot be read in full changes nothing.
type File struct {
	path   string
	store  *Store
	log    *slog.Logger
	seed   maphash.Seed
	synced chan struct{}

	// Of the goroutine in Load or Run.
	first *world // read by Load, to be applied by Run
	hash  uint64 // of the files' content when they were read last
	told  string // the error that was logged last
	// stamped is what stamp said before the files were read last.
	stamped string
	// direct is the directory in which only the event of our own name
	// matters; empty where links lead to the files.
	direct string

	// mu guards what follows.
	mu     sync.Mutex
	status Status
}

// NewFile returns a source that reads path, a file or a directory. A nil log
// discards.
func NewFile(path string, store *Store, log *slog.Logger) *File {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &File{
		path: filepath.Clean(path), store: store, log: log, seed: maphash.MakeSeed(), synced: make(chan struct{}),
		status: Status{Kind: "file", Routes: "on"},
	}
}

// Synced implements [Source].
func (f *File) Synced() <-chan struct{} { return f.synced }

// Current implements [Source].
func (f *File) Current() <-chan struct{} { return f.synced }

// Status implements [Source].
func (f *File) Status() Status {
	f.mu.Lock()
	st := f.status
	f.mu.Unlock()
	st.Pods = f.store.Len()
	if st.Error != "" {
		st.stale(st.Since, st.Error)
	}
	return st
}

// Load reads the files for the first time and applies nothing yet. The error is
// one line that names the file and the place in it. Call it, if at all, before
// Run.
func (f *File) Load() error {
	w, hash, err := f.read()
	if err != nil {
		return err
	}
	f.first, f.hash = w, hash
	return nil
}

// Run implements [Source]. It returns the error of Load if the first read
// fails.
func (f *File) Run(ctx context.Context) error {
	if f.first == nil {
		if err := f.Load(); err != nil {
			return err
		}
	}
	f.apply(f.first)
	f.first = nil
	f.mu.Lock()
	f.status.Synced = true
	f.mu.Unlock()
	close(f.synced)

	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		f.log.Warn("file source is read every second: it cannot be watched", "path", f.path, "error", err)
		watcher = &fsnotify.Watcher{} // its channels are nil and never ready
	} else {
		defer func() { _ = watcher.Close() }()
	}
	f.follow(ctx, watcher, err == nil)
	return nil
}

// follow reads the files whenever something happened where they are.
func (f *File) follow(ctx context.Context, watcher *fsnotify.Watcher, watching bool) {
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	settle := time.NewTimer(0) // what changed since Load is read at once
	defer settle.Stop()
	var since time.Time // of the first event not read yet
	complete := false
	for {
		select {
		case <-ctx.Done():
			return
		case err := <-watcher.Errors: // events were lost
			f.log.Debug("file source is read again", "path", f.path, "error", err)
			settle.Reset(quiet)
			continue
		case e := <-watcher.Events:
			if dir, base := filepath.Split(e.Name); filepath.Clean(dir) == f.direct && base != filepath.Base(f.path) {
				continue
			}
			now := time.Now()
			if since.IsZero() {
				since = now
			}
			settle.Reset(min(quiet, max(0, patience-now.Sub(since))))
			continue
		case <-poll.C:
			// Events can be lost, and some file systems send none.
			if complete && f.stamp() == f.stamped {
				continue
			}
		case <-settle.C:
		}
		since = time.Time{}
		// Watch first, read then: nothing falls between.
		complete = watching && f.watch(watcher)
		f.reread()
	}
}

// watch makes the watcher see every change of the files: by the directories
// that hold them, since a file is often replaced by renaming over it, and by
// those that hold the links which lead there, as in a ConfigMap volume. It
// tells whether all of them could be watched.
func (f *File) watch(watcher *fsnotify.Watcher) bool {
	complete, linked := true, false
	var dirs []string
	add := func(dir string) {
		// By its real name: a watch stays with the directory that it was made
		// for when a link to it is turned.
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			complete = false
		} else if !slices.Contains(dirs, real) {
			dirs = append(dirs, real)
		}
	}
	add(filepath.Dir(f.path))
	for path := f.path; path != filepath.Dir(path); path = filepath.Dir(path) {
		if isLink(path) {
			linked = true
			add(filepath.Dir(path))
		}
	}
	if info, err := os.Stat(f.path); err == nil && info.IsDir() {
		add(f.path)
	}
	paths, err := f.paths()
	complete = complete && err == nil
	for _, path := range paths {
		if !isLink(path) {
			continue
		}
		if target, err := filepath.EvalSymlinks(path); err == nil {
			add(filepath.Dir(target))
		}
	}
	f.direct = ""
	if !linked && len(dirs) > 0 {
		f.direct = dirs[0]
	}
	for _, old := range watcher.WatchList() {
		if !slices.Contains(dirs, old) {
			_ = watcher.Remove(old)
		}
	}
	for _, dir := range dirs {
		complete = watcher.Add(dir) == nil && complete
	}
	return complete
}

func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&fs.ModeSymlink != 0
}

// stamp is equal where the files are most likely as they were.
func (f *File) stamp() string {
	paths, err := f.paths()
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return err.Error()
		}
		fmt.Fprintln(&b, path, info.Size(), info.ModTime().UnixNano())
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			fmt.Fprintln(&b, st.Dev, st.Ino)
		}
	}
	return b.String()
}

// reread takes over what the files say now, or says why it cannot.
func (f *File) reread() {
	f.stamped = f.stamp()
	before := f.hash
	w, hash, err := f.read()
	f.hash = hash
	if err == nil && w == nil && hash == before {
		return
	}
	if err != nil {
		f.mu.Lock()
		if f.status.Error == "" {
			f.status.Since = time.Now()
		}
		f.status.Error = err.Error()
		f.mu.Unlock()
		if f.told != err.Error() {
			f.told = err.Error()
			f.log.Warn("file source keeps its last good state", "error", err)
		}
		return
	}
	f.apply(w)
	if f.told != "" {
		f.told = ""
		f.log.Info("file source is good again", "path", f.path)
	}
}

// apply makes the store hold what the world says, object by object. Over all
// kinds what comes goes before what leaves: a route that moves off a Service has
// done so before the Service, its slices and its pods go.
func (f *File) apply(w *world) {
	for _, ns := range f.store.namespacesOptedOut() {
		if _, still := w.optedOut[ns]; !still {
			f.store.SetNamespace(ns, false)
		}
	}
	for ns := range w.optedOut {
		f.store.SetNamespace(ns, true)
	}
	f.store.setOwn(w.nodes[f.store.node])
	held := f.store.names()
	if len(held) == 0 { // nothing can go; what Services say of ports is there first
		f.addServices(w)
	}
	for _, r := range w.pods {
		if r.State == nodecache.Serving {
			f.store.Upsert(r)
		}
	}
	f.addServices(w)
	f.applyRoutes(w)
	for _, r := range w.pods {
		if r.State != nodecache.Serving {
			f.store.Upsert(r)
		}
	}
	for _, key := range held {
		if w.pods[key] == nil {
			f.store.Remove(key.namespace, key.name)
		}
	}
	f.cutServices(w)
	f.mu.Lock()
	f.status.Ignored = w.ignored
	f.status.Error, f.status.Since = "", time.Time{}
	f.mu.Unlock()
}

// addServices takes nobody from behind a Service.
func (f *File) addServices(w *world) {
	for key := range w.services {
		f.store.UpsertService(w.services[key])
	}
	for key := range w.slices {
		f.store.UpsertSlice(f.store.grown(w.slices[key]))
	}
}

// cutServices comes after the pods: a pod that goes together with its place in
// a slice goes first, and so is remembered where it stood.
func (f *File) cutServices(w *world) {
	for key := range w.slices {
		f.store.UpsertSlice(w.slices[key])
	}
	for _, key := range f.store.sliceNames() {
		if w.slices[key] == nil {
			f.store.RemoveSlice(key.namespace, key.name)
		}
	}
	for _, key := range f.store.serviceNames() {
		if w.services[key] == nil {
			f.store.RemoveService(key.namespace, key.name)
		}
	}
}

// applyRoutes begins with the grants, so that no route is refused in passing.
func (f *File) applyRoutes(w *world) {
	routes := f.store.Routes()
	for _, grants := range []bool{true, false} {
		for key, o := range w.gateway {
			if (key.kind == gateway.ReferenceGrant) == grants {
				routes.Upsert(o)
			}
		}
	}
	for _, kind := range gateway.Kinds {
		for _, name := range routes.Names(kind) {
			if w.gateway[gatewayKey{kind, name}] == nil {
				routes.Remove(kind, name)
			}
		}
	}
}

// read reads the files. The world is nil without an error where they are as
// they were when they were read last and well.
func (f *File) read() (*world, uint64, error) {
	paths, err := f.paths()
	if err != nil {
		return nil, 0, err
	}
	var hash maphash.Hash
	hash.SetSeed(f.seed)
	contents := make([][]byte, len(paths))
	for i, path := range paths {
		if contents[i], err = os.ReadFile(path); err != nil {
			return nil, 0, fileError(path, err)
		}
		maphash.WriteComparable(&hash, path)
		maphash.WriteComparable(&hash, len(contents[i]))
		_, _ = hash.Write(contents[i])
	}
	sum := cmp.Or(hash.Sum64(), 1) // 0 is none
	if sum == f.hash {
		return nil, sum, nil
	}
	w := newWorld()
	for i, path := range paths {
		if err := w.add(path, contents[i]); err != nil {
			return nil, 0, fileError(path, err)
		}
		contents[i] = nil
	}
	w.settle()
	return w, sum, nil
}

// paths returns the files to read, sorted.
func (f *File) paths() ([]string, error) {
	info, err := os.Stat(f.path)
	if err != nil {
		return nil, fileError(f.path, err)
	}
	if !info.IsDir() {
		if !info.Mode().IsRegular() {
			return nil, fileError(f.path, errors.New("is neither a file nor a directory"))
		}
		return []string{f.path}, nil
	}
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return nil, fileError(f.path, err)
	}
	var paths []string
	for _, e := range entries {
		switch filepath.Ext(e.Name()) {
		case ".yaml", ".yml", ".json":
		default:
			continue
		}
		path := filepath.Join(f.path, e.Name())
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			continue
		}
		paths = append(paths, path)
	}
	if len(paths) == 0 {
		return nil, fileError(f.path, errors.New("has no *.yaml, *.yml or *.json file; an empty world is a file with `items: []`"))
	}
	return paths, nil
}

// fileError names the file once.
func fileError(path string, err error) error {
	var perr *fs.PathError
	if errors.As(err, &perr) {
		err = perr.Err
	}
	return fmt.Errorf("source file %q: %w", path, err)
}
