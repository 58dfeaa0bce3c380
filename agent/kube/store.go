package kube

import (
	"cmp"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
)

// Store holds the record of every pod, also of those that are absent from the
// directory, and is the directory's only writer of pods. All methods are safe
// for concurrent use; readers wait for one record's change at most.
type Store struct {
	dir    *nodecache.Directory
	log    *slog.Logger
	routes *gateway.Table

	// writing is held over a whole change: decide, store, directory. mu and
	// the directory's lock are taken under it, never both.
	writing sync.Mutex
	// told holds the notes that were logged. Guarded by writing.
	told map[string]struct{}
	// unready holds the pods that are not Ready by their own word, by UID.
	// Guarded by writing.
	unready map[string]name

	// mu guards what follows.
	mu         sync.RWMutex
	pods       map[name]*Record
	optedOut   map[string]struct{} // namespaces
	byOwner    *index[nodecache.OwnerKey]
	byWorkload *index[nodecache.Workload]
	byNode     *index[string]
	byAddr     *index[netip.Addr]
}

// name is what the API server knows an object by, within its kind.
type name struct{ namespace, name string }

func (r *Record) key() name { return name{r.Namespace, r.Name} }

// NewStore returns an empty store that feeds the directory. A nil log discards.
func NewStore(dir *nodecache.Directory, log *slog.Logger) *Store {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Store{
		dir:      dir,
		log:      log,
		routes:   gateway.NewTable(dir, log),
		told:     map[string]struct{}{},
		unready:  map[string]name{},
		pods:     map[name]*Record{},
		optedOut: map[string]struct{}{},
		byOwner: newIndex(func(dst []nodecache.OwnerKey, r *Record) []nodecache.OwnerKey {
			return append(dst, r.Owner)
		}),
		byWorkload: newIndex(func(dst []nodecache.Workload, r *Record) []nodecache.Workload {
			return append(dst, r.Workload)
		}),
		byNode: newIndex(func(dst []string, r *Record) []string {
			if r.Node == "" {
				return dst
			}
			return append(dst, r.Node)
		}),
		byAddr: newIndex(func(dst []netip.Addr, r *Record) []netip.Addr {
			if !alive(r.Pod) {
				return dst
			}
			return append(append(dst, r.Addr), r.More...)
		}),
	}
}

// Routes returns the table of the objects of the Gateway API.
func (s *Store) Routes() *gateway.Table { return s.routes }

// Upsert makes the store and the directory hold the record. A record that
// says what is known already changes nothing. One that has another UID under
// a name that is held replaces it in one visible step. The record is the
// store's from then on.
func (s *Store) Upsert(r *Record) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.report(r)
	s.upsert(r)
}

// upsert needs writing.
func (s *Store) upsert(r *Record) {
	r = s.published(r)
	s.mu.Lock()
	_, off := s.optedOut[r.Namespace]
	r = r.inNamespace(off)
	old := s.pods[r.key()]
	if old != nil && old.equal(r) {
		s.mu.Unlock()
		return
	}
	if old != nil {
		s.unindex(old)
		if old.UID != r.UID {
			delete(s.unready, old.UID)
		}
	}
	r.share(s.byOwner.any(r.Owner))
	s.pods[r.key()] = r
	s.index(r)
	s.mu.Unlock()
	if old != nil && old.UID != r.UID && s.gone(old) {
		s.dir.UpsertPod(r.Pod, old.UID)
	} else {
		s.dir.UpsertPod(r.Pod)
	}
}

// Remove forgets the pod of the name, if its UID is one of uids; with no uids,
// whatever its UID.
func (s *Store) Remove(namespace, pod string, uids ...string) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.remove(name{namespace, pod}, uids)
}

// remove needs writing.
func (s *Store) remove(key name, uids []string) {
	s.mu.Lock()
	old := s.pods[key]
	if old == nil || len(uids) > 0 && !slices.Contains(uids, old.UID) {
		s.mu.Unlock()
		return
	}
	s.unindex(old)
	delete(s.pods, key)
	delete(s.unready, old.UID)
	s.mu.Unlock()
	if s.gone(old) {
		s.dir.RemovePod(old.UID)
	}
}

// gone needs writing. It tells whether the UID of a record that the store
// held ends with it: in a file it may go on under another name.
func (s *Store) gone(old *Record) bool {
	p := s.dir.Pod(old.UID)
	return p != nil && p.Namespace == old.Namespace && p.Name == old.Name
}

// SetNamespace records whether the namespace opted out of being asked, and
// changes its pods accordingly. Unknown namespaces have not.
func (s *Store) SetNamespace(namespace string, optedOut bool) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	_, before := s.optedOut[namespace]
	if before == optedOut {
		s.mu.Unlock()
		return
	}
	if optedOut {
		s.optedOut[namespace] = struct{}{}
	} else {
		delete(s.optedOut, namespace)
	}
	s.mu.Unlock()
	for _, r := range s.InNamespace(namespace) {
		s.upsert(r)
	}
}

// InNamespace returns the records of the pods of a namespace that were there
// all the while, in no order. It reads everything, as an index would cost every
// pod, and lets go of the lock as names does.
func (s *Store) InNamespace(namespace string) []*Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var rs []*Record
	seen := 0
	for _, r := range s.pods {
		if r.Namespace == namespace {
			rs = append(rs, r)
		}
		if seen++; seen%portion == 0 {
			s.mu.RUnlock()
			s.mu.RLock()
		}
	}
	return rs
}

// index needs mu.
func (s *Store) index(r *Record) {
	s.byOwner.add(r)
	s.byWorkload.add(r)
	s.byNode.add(r)
	s.byAddr.add(r)
}

// unindex needs mu.
func (s *Store) unindex(r *Record) {
	s.byOwner.remove(r)
	s.byWorkload.remove(r)
	s.byNode.remove(r)
	s.byAddr.remove(r)
}

// report needs writing. A note is logged once, however many pods have it.
func (s *Store) report(r *Record) {
	const most = 1024 // notes remembered
	for _, text := range r.Notes {
		if _, known := s.told[text]; known {
			continue
		}
		if len(s.told) >= most {
			clear(s.told)
		}
		s.told[text] = struct{}{}
		s.log.Warn(text, "pod", r.String())
	}
}

// Pod returns the record of the pod, nil if there is none.
func (s *Store) Pod(namespace, pod string) *Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.pods[name{namespace, pod}]
}

// OfOwner returns the records of an owner's pods, sorted by namespace and name.
func (s *Store) OfOwner(key nodecache.OwnerKey) []*Record { return read(s, s.byOwner, key) }

// OfWorkload returns the records of a workload's pods, of all its revisions,
// sorted by name.
func (s *Store) OfWorkload(w nodecache.Workload) []*Record { return read(s, s.byWorkload, w) }

// OnNode returns the records of the pods of a node, sorted by namespace and
// name.
func (s *Store) OnNode(node string) []*Record { return read(s, s.byNode, node) }

// At returns the record of the pod to which the address belongs, nil if there
// is none: never one that has ended, is terminating or is of the host's
// network. Of several that claim it, the Ready one has it, then the one created
// last.
func (s *Store) At(addr netip.Addr) *Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	rs := s.byAddr.held[addr.Unmap()]
	if len(rs) == 0 {
		return nil
	}
	return slices.MaxFunc(rs, func(a, b *Record) int {
		return cmp.Or(
			cmp.Compare(a.State, b.State), // Absent is the lowest
			a.Created.Compare(b.Created),
			cmp.Compare(a.UID, b.UID),
		)
	})
}

// Len returns how many pods the store holds.
func (s *Store) Len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.pods)
}

// names returns the name of every pod that was there all the while. It lets
// go of the lock now and then: where a writer waits for one long look at
// everything, all readers wait behind it.
func (s *Store) names() []name {
	s.mu.RLock()
	defer s.mu.RUnlock()
	names := make([]name, 0, len(s.pods))
	for n := range s.pods {
		if names = append(names, n); len(names)%portion == 0 {
			s.mu.RUnlock()
			s.mu.RLock()
		}
	}
	return names
}

// portion is how many pods are looked at in one hold of Store.mu.
const portion = 1024

// records returns the record of every pod that was there all the while, and
// lets go of the lock as names does.
func (s *Store) records() []*Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	records := make([]*Record, 0, len(s.pods))
	for _, r := range s.pods {
		if records = append(records, r); len(records)%portion == 0 {
			s.mu.RUnlock()
			s.mu.RLock()
		}
	}
	return records
}

func (s *Store) namespacesOptedOut() []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	names := make([]string, 0, len(s.optedOut))
	for n := range s.optedOut {
		names = append(names, n)
	}
	return names
}

func read[K comparable](s *Store, x *index[K], k K) []*Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return x.get(k)
}

func compareRecord(a, b *Record) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}
