// Package learn remembers what workloads call: the names of clusters that
// sidecars of their pods have asked for by themselves, and that led to somebody.
// The sidecars of later pods are given them before they ask.
//
// Who asks is whom the kernel proves: what a caller merely claims to be teaches
// nothing. A workload's own pods can at most fill its own names.
package learn

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

const (
	// mostNames bounds the names of all workloads: about 5 MB if each is as long
	// as one can be.
	mostNames = 8 << 10
	// fine is how far the time of a use is kept right: what is in use all the
	// time is no news.
	fine = time.Hour
)

// Upstreams are what was learned. The zero Upstreams are not ready; see [New]. All
// methods are safe for concurrent use.
type Upstreams struct {
	most int // names

	// mu guards what follows.
	mu        sync.Mutex
	workloads map[nodecache.Workload]map[string]time.Time
	names     int
	changes   uint64
}

// New returns what an earlier agent learned.
func New(saved []nodecache.SavedLearned, now time.Time) *Upstreams {
	u := &Upstreams{most: mostNames, workloads: map[nodecache.Workload]map[string]time.Time{}}
	for _, l := range saved {
		for name, at := range l.Names {
			u.use(l.Workload, name, at)
		}
	}
	u.Expire(now)
	u.changes = 0
	return u
}

// Use notes that the workload calls the names now.
func (u *Upstreams) Use(w nodecache.Workload, names []string, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, name := range names {
		u.use(w, name, now)
	}
}

// use needs mu.
func (u *Upstreams) use(w nodecache.Workload, name string, at time.Time) {
	of := u.workloads[w]
	was, known := of[name]
	if known && at.Sub(was) < fine {
		return
	}
	if of == nil {
		of = map[string]time.Time{}
		u.workloads[w] = of
	}
	if !known {
		u.names++
	}
	of[name] = at
	u.changes++
	for len(of) > nodecache.LearnedMost {
		u.drop(w, nodecache.LatestFirst(of)[len(of)-1])
	}
	if u.names > u.most {
		u.forget()
	}
}

// drop needs mu.
func (u *Upstreams) drop(w nodecache.Workload, name string) {
	of := u.workloads[w]
	delete(of, name)
	u.names--
	u.changes++
	if len(of) == 0 {
		delete(u.workloads, w)
	}
}

// forget needs mu. It drops the workload that called something longest ago.
func (u *Upstreams) forget() {
	var oldest nodecache.Workload
	var first time.Time
	for w, of := range u.workloads {
		var last time.Time
		for _, at := range of {
			if at.After(last) {
				last = at
			}
		}
		if first.IsZero() || last.Before(first) {
			oldest, first = w, last
		}
	}
	for name := range u.workloads[oldest] {
		u.drop(oldest, name)
	}
}

// Expire forgets what has not been in use for [nodecache.LearnedKeep].
func (u *Upstreams) Expire(now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for w, of := range u.workloads {
		for name, at := range of {
			if now.Sub(at) >= nodecache.LearnedKeep {
				u.drop(w, name)
			}
		}
	}
}

// Name is one that a workload calls.
type Name struct {
	Cluster string
	Used    time.Time // last, to the hour
}

// Of returns what the workload calls, sorted by name.
func (u *Upstreams) Of(w nodecache.Workload, now time.Time) []Name {
	u.mu.Lock()
	defer u.mu.Unlock()
	var names []Name
	for name, at := range u.workloads[w] {
		if now.Sub(at) < nodecache.LearnedKeep {
			names = append(names, Name{name, at})
		}
	}
	slices.SortFunc(names, func(a, b Name) int { return cmp.Compare(a.Cluster, b.Cluster) })
	return names
}

// Saved returns everything, in no order.
func (u *Upstreams) Saved() []nodecache.SavedLearned {
	u.mu.Lock()
	defer u.mu.Unlock()
	saved := make([]nodecache.SavedLearned, 0, len(u.workloads))
	for w, of := range u.workloads {
		saved = append(saved, nodecache.SavedLearned{Workload: w, Names: maps.Clone(of)})
	}
	return saved
}

// Changes counts the changes of what [Upstreams.Saved] returns.
func (u *Upstreams) Changes() uint64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.changes
}

// Len returns how many workloads are known, and how many names of all of them.
func (u *Upstreams) Len() (workloads, names int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.workloads), u.names
}
