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
	node   string // set before the first write; empty: of no interest

	// writing is held over a whole change: decide, store, directory. mu and
	// the directory's lock are taken under it, never both.
	writing sync.Mutex
	// told holds the notes that were logged. Guarded by writing.
	told map[string]struct{}
	// unready holds the pods that are not Ready by their own word, by UID.
	// Guarded by writing.
	unready map[string]name

	// agents hears of the agents' pods; nil: nobody does. Guarded by writing.
	agents *Agents

	// mu guards what follows.
	mu       sync.RWMutex
	pods     map[name]*Record
	here     map[name]*Record    // those of pods that are on node
	regions  votes               // of all pods
	own      topology            // of node, by a Node; mostly unknown
	moves    uint64              // changes of what is above
	optedOut map[string]struct{} // namespaces
}

// name is what the API server knows an object by, within its kind.
type name struct{ namespace, name string }

func (r *Record) key() name { return name{r.Namespace, r.Name} }

func (n name) compare(o name) int {
	return cmp.Or(cmp.Compare(n.namespace, o.namespace), cmp.Compare(n.name, o.name))
}

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
		here:     map[name]*Record{},
		regions:  votes{},
		optedOut: map[string]struct{}{},
	}
}

// expect makes room for so many pods, if there are none.
func (s *Store) expect(pods int) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	if len(s.pods) == 0 {
		s.pods = make(map[name]*Record, pods)
	}
	s.mu.Unlock()
	s.dir.Expect(pods)
}

// Local names the node of which [Store.Here] returns the pods. It is to be
// called before the store is used.
func (s *Store) Local(node string) { s.node = node }

// Here returns the records of the pods of the local node that f wants, in any
// order. It looks at these alone, a few hundred at most.
func (s *Store) Here(f func(*Record) bool) []*Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var rs []*Record
	for _, r := range s.here {
		if f(r) {
			rs = append(rs, r)
		}
	}
	return rs
}

// put needs mu.
func (s *Store) put(r *Record) {
	key := r.key()
	if old := s.pods[key]; old != nil {
		s.regions.add(old, -1)
	}
	s.regions.add(r, 1)
	s.moves++
	s.pods[key] = r
	if s.node == "" {
		return
	}
	if r.Node == s.node {
		s.here[key] = r
	} else {
		delete(s.here, key)
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

// bulk is how many pods are put in at most in one hold of what readers wait for.
const bulk = 128

// UpsertAll is [Store.Upsert] of each, at less cost where most are new.
func (s *Store) UpsertAll(records []*Record) {
	for some := range slices.Chunk(records, bulk) {
		s.upsertSome(some)
	}
}

func (s *Store) upsertSome(records []*Record) {
	s.writing.Lock()
	defer s.writing.Unlock()
	fresh := make([]*nodecache.Pod, 0, len(records))
	var rest, agents []*Record
	for i, r := range records {
		s.report(r)
		records[i] = s.published(r)
	}
	s.mu.Lock()
	for _, r := range records {
		key := r.key()
		if s.pods[key] != nil {
			rest = append(rest, r)
			continue
		}
		_, off := s.optedOut[r.Namespace]
		r = r.inNamespace(off)
		s.put(r)
		if s.agents.has(r) {
			agents = append(agents, r)
		}
		fresh = append(fresh, &r.Pod)
	}
	s.mu.Unlock()
	for _, r := range agents {
		s.agents.moved(nil, r)
	}
	s.dir.UpsertPods(fresh)
	for _, r := range rest {
		s.upsert(r)
	}
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
	if old != nil && old.UID != r.UID {
		delete(s.unready, old.UID)
	}
	s.put(r)
	s.mu.Unlock()
	s.agents.moved(old, r)
	if old != nil && old.UID != r.UID && s.gone(old) {
		s.dir.UpsertPod(&r.Pod, old.UID)
	} else {
		s.dir.UpsertPod(&r.Pod)
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
	delete(s.pods, key)
	s.moves++
	s.regions.add(old, -1)
	delete(s.here, key)
	delete(s.unready, old.UID)
	s.mu.Unlock()
	s.agents.moved(old, nil)
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
// all the while, sorted by name. It reads everything, as an index would cost
// every pod.
func (s *Store) InNamespace(namespace string) []*Record {
	return s.filter(func(r *Record) bool { return r.Namespace == namespace })
}

// report needs writing.
func (s *Store) report(r *Record) {
	for _, text := range r.Notes() {
		s.reportOnce(text, "pod", r.String())
	}
	if text := s.agents.note(r); text != "" {
		s.reportOnce(text, "pod", r.String())
	}
}

// reportOnce needs writing. A note is logged once, however many objects have
// it.
func (s *Store) reportOnce(text, kind, object string) {
	const most = 1024 // notes remembered
	if _, known := s.told[text]; known {
		return
	}
	if len(s.told) >= most {
		clear(s.told)
	}
	s.told[text] = struct{}{}
	s.log.Warn(text, kind, object)
}

// Pod returns the record of the pod, nil if there is none.
func (s *Store) Pod(namespace, pod string) *Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.pods[name{namespace, pod}]
}

// OfOwner returns the records of an owner's pods, sorted by namespace and name.
// It looks at every record, as the next three methods do: they are for people
// who ask, and an index for each would cost every pod.
func (s *Store) OfOwner(key nodecache.OwnerKey) []*Record {
	return s.filter(func(r *Record) bool { return r.Owner == key })
}

// OfWorkload returns the records of a workload's pods, of all its revisions,
// sorted by name.
func (s *Store) OfWorkload(w nodecache.Workload) []*Record {
	return s.filter(func(r *Record) bool { return r.Workload == w })
}

// OnNode returns the records of the pods of a node, sorted by namespace and
// name.
func (s *Store) OnNode(node string) []*Record {
	return s.filter(func(r *Record) bool { return node != "" && r.Node == node })
}

// At returns the record of the pod to which the address belongs, nil if there
// is none: never one that has ended, is terminating or is of the host's
// network. Of several that claim it, the Ready one has it, then the one created
// last.
func (s *Store) At(addr netip.Addr) *Record {
	addr = addr.Unmap()
	rs := s.filter(func(r *Record) bool {
		return alive(&r.Pod) && (r.Addr == addr || slices.Contains(r.More, addr))
	})
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

// WithUID returns the record of the pod with the UID, nil if there is none. It
// looks at every record.
func (s *Store) WithUID(uid string) *Record {
	rs := s.gather(nil, func(r *Record) bool { return r.UID == uid })
	if len(rs) == 0 {
		return nil
	}
	return rs[0]
}

// Len returns how many pods the store holds.
func (s *Store) Len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.pods)
}

// names returns the name of every pod that was there all the while.
func (s *Store) names() []name {
	rs := s.records()
	names := make([]name, len(rs))
	for i, r := range rs {
		names[i] = r.key()
	}
	return names
}

// portion is how many pods are looked at in one hold of Store.mu.
const portion = 1024

// records returns the record of every pod that was there all the while.
func (s *Store) records() []*Record {
	return s.gather(make([]*Record, 0, s.Len()), func(*Record) bool { return true })
}

// filter returns the wanted records, sorted by namespace and name.
func (s *Store) filter(wanted func(*Record) bool) []*Record {
	rs := s.gather(nil, wanted)
	slices.SortFunc(rs, func(a, b *Record) int { return a.key().compare(b.key()) })
	return rs
}

// gather appends the wanted records. It lets go of the lock now and then: where a
// writer waits for one long look at everything, all readers wait behind it.
func (s *Store) gather(rs []*Record, wanted func(*Record) bool) []*Record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	seen := 0
	for _, r := range s.pods {
		if wanted(r) {
			rs = append(rs, r)
		}
		if seen++; seen%portion == 0 {
			s.mu.RUnlock()
			s.mu.RLock()
		}
	}
	return rs
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
