package nodecache

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Options configures a [Directory]. The zero Options works.
type Options struct {
	// Keep is how long what was learned of an owner outlives its last pod; 0
	// is 10 minutes. It ends by the first [Directory.Expire] after it.
	Keep time.Duration
}

// Directory is the owner directory. All methods are safe for concurrent use,
// and none of them waits for anything but the lock.
type Directory struct {
	keep time.Duration // read-only

	// mu guards everything below. Deciding and mutating happen under one hold
	// of it; nothing that can block happens under it. Subscription.mu may be
	// taken under it.
	mu         sync.RWMutex
	generation uint64 // of the newest record
	owners     map[OwnerKey]*record
	pods       map[string]*Pod       // by UID
	states     [numStates]int        // pods by state
	claims     map[netip.Addr]*Pod   // to whom an address belongs
	rivals     map[netip.Addr][]*Pod // who else claims it; mostly nobody
	infos      map[OwnerKey]*learned
	workloads  map[Workload][]OwnerKey // that have pods, or of which something is known
	routes     routes
	fronts     fronts
	subs       map[*Subscription]struct{}
	frontSubs  map[*Subscription]struct{} // those of subs that hear of Services

	spoken bool                 // some pod had a policy
	told   map[Workload]*Policy // what workloads said last that said something

	infoChanges uint64 // counts changes of infos
}

// record is an owner that has pods.
type record struct {
	generation uint64
	workload   Workload
	created    time.Time // of the oldest pod seen in this generation
	oldest     time.Time // of the oldest pod seen in any
	pods       []*Pod    // sorted by Pod.Compare
	stored     Knowledge
	before     Knowledge // what stored was before it became Collecting
	reason     string    // of the last failure
	next       time.Time
	hung       bool        // the last failure was one of Hang
	again      bool        // while Collecting: a port came that may not be asked about
	behind     []*Standing // where a pod stood last that stood somewhere
	voice      *Pod        // the oldest of pods; nil while there is none
}

// learned is what outlives the pods of an owner.
type learned struct {
	info *Info // nil if only declared, or if only its policy counts
	// Set while the owner has no pods.
	name     string
	workload Workload
	created  time.Time
	oldest   time.Time
	last     *Info // info, with what the last pod declared; may be nil
	declared []Declared
	behind   []*Standing
	export   string
	policy   *Policy
	until    time.Time // zero while the owner has pods
}

// New returns an empty directory.
func New(o Options) *Directory {
	return &Directory{
		keep:      cmp.Or(o.Keep, 10*time.Minute),
		owners:    map[OwnerKey]*record{},
		pods:      map[string]*Pod{},
		claims:    map[netip.Addr]*Pod{},
		rivals:    map[netip.Addr][]*Pod{},
		infos:     map[OwnerKey]*learned{},
		workloads: map[Workload][]OwnerKey{},
		told:      map[Workload]*Policy{},
		routes:    newRoutes(),
		fronts:    newFronts(),
		subs:      map[*Subscription]struct{}{},
		frontSubs: map[*Subscription]struct{}{},
	}
}

// Reservation is the right to commit what was collected for one generation of
// an owner. The zero Reservation is stale.
type Reservation struct {
	Key        OwnerKey
	Generation uint64
}

// UpsertPod makes the directory hold the pod as given, in one visible step: a
// pod that it held under the same UID is replaced, also in another owner, and
// the pods named by replaces are removed (a pod that was created again under
// its old name arrives as one update with another UID). An Absent pod is
// removed. Nobody is told of a pod that is held already as given. The
// reservation is that of the pod's owner, zero for an Absent pod.
func (d *Directory) UpsertPod(p *Pod, replaces ...string) Reservation {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, uid := range replaces {
		if uid != p.UID {
			d.removePod(uid, nil)
		}
	}
	return d.upsertPod(p, d.pods[p.UID])
}

// UpsertPods is [Directory.UpsertPod] of each, in one visible step. Readers wait
// for all of them: they should be few. Pods of one owner cost less where they
// stand together.
func (d *Directory) UpsertPods(pods []*Pod) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(pods) > 0 {
		n := 1
		for n < len(pods) && pods[n].Owner == pods[0].Owner {
			n++
		}
		d.upsertSome(pods[:n])
		pods = pods[n:]
	}
}

// upsertSome needs mu. The pods are of one owner.
func (d *Directory) upsertSome(pods []*Pod) {
	key, added := pods[0].Owner, false
	var rec *record
	for _, p := range pods {
		if old := d.pods[p.UID]; old != nil || p.absent() {
			d.upsertPod(p, old)
			rec = nil // it may have ended
			continue
		}
		if rec == nil {
			rec = d.recordOf(p)
		}
		d.join(rec, p)
		d.add(rec, p)
		d.changedBehind(p)
		added = true
	}
	if added {
		d.changed(key)
	}
}

// Expect makes room for so many pods, if the directory has none: without it
// the room grows with them, several times over.
func (d *Directory) Expect(pods int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.pods) == 0 {
		d.pods, d.claims = make(map[string]*Pod, pods), make(map[netip.Addr]*Pod, pods)
	}
}

// RemovePod removes the pod with the UID, if it is there.
func (d *Directory) RemovePod(uid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.removePod(uid, nil)
}

// upsertPod needs mu. old is what the directory holds under the pod's UID.
func (d *Directory) upsertPod(p, old *Pod) Reservation {
	if p.absent() {
		d.removePod(p.UID, nil)
		return Reservation{}
	}
	if old != nil && old.Equal(p) {
		return Reservation{Key: p.Owner, Generation: d.owners[p.Owner].generation}
	}
	rec := d.recordOf(p)
	d.join(rec, p)
	if old != nil {
		d.removePod(p.UID, rec)
	}
	d.add(rec, p)
	d.changedPod(p)
	return Reservation{Key: p.Owner, Generation: rec.generation}
}

// recordOf needs mu. It returns the record of the pod's owner.
func (d *Directory) recordOf(p *Pod) *record {
	if rec := d.owners[p.Owner]; rec != nil {
		return rec
	}
	return d.reserve(p.Owner, p.Workload)
}

// add needs mu. It adds a pod whose UID is not held.
func (d *Directory) add(rec *record, p *Pod) {
	rec.insert(p)
	d.pods[p.UID] = p
	d.states[p.State]++
	d.spoken = d.spoken || p.Policy != nil
	rec.created, rec.oldest = earlier(rec.created, p.Created), earlier(rec.oldest, p.Created)
	d.claim(p)
}

// reserve needs mu. It begins a generation of an owner that has no record;
// what is still known of the owner is its knowledge again.
func (d *Directory) reserve(key OwnerKey, w Workload) *record {
	d.generation++
	rec := &record{generation: d.generation, workload: w}
	d.owners[key] = rec
	if l := d.infos[key]; l != nil {
		d.dismiss(l.workload, key)
		rec.behind, rec.oldest = l.behind, l.oldest
		if l.info == nil { // the new pod has its own word
			delete(d.infos, key)
		} else {
			d.infos[key] = &learned{info: l.info}
			d.infoChanges++
			rec.stored = knowledgeOf(l.info)
		}
	}
	if len(d.workloads[w]) > 0 {
		d.infoChanges++ // what was learned of another may be needed for longer
	}
	d.enroll(w, key)
	return rec
}

// removePod needs mu. The record keep is not ended even if it becomes empty:
// the caller is about to fill it.
func (d *Directory) removePod(uid string, keep *record) {
	p := d.pods[uid]
	if p == nil {
		return
	}
	delete(d.pods, uid)
	d.states[p.State]--
	d.disclaim(p)
	rec := d.owners[p.Owner]
	ends := len(rec.pods) == 1 && rec != keep
	if ends {
		d.renew(p.Owner, rec)
	}
	rec.remove(p)
	if ends {
		delete(d.owners, p.Owner)
		d.retain(p, rec)
		d.tellMates(rec.workload, p.Owner)
	}
	d.changedPod(p)
}

// retain needs mu. It starts the time for which what was learned of an owner
// outlives p, its last pod, and with it where the owner stood.
func (d *Directory) retain(p *Pod, rec *record) {
	var info *Info
	if l := d.infos[p.Owner]; l != nil {
		info = l.info
	}
	last := withDeclared(info, p.Declared)
	if last == nil && p.Policy == nil && !d.opinionated(rec.workload, p.Owner) {
		d.forget(p.Owner, rec.behind)
		d.dismiss(rec.workload, p.Owner)
		return
	}
	d.infoChanges++
	d.infos[p.Owner] = &learned{
		info: info, name: p.OwnerName, workload: rec.workload, created: rec.created, oldest: rec.oldest,
		last: last, declared: p.Declared, behind: rec.behind, export: p.Export, policy: p.Policy, until: time.Now().Add(d.keep),
	}
}

// earlier returns the earlier of two times, of which a zero one is unknown.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

func (r *record) insert(p *Pod) {
	r.heed(p)
	i, _ := slices.BinarySearchFunc(r.pods, p, (*Pod).Compare)
	r.pods = slices.Insert(r.pods, i, p)
}

func (r *record) remove(p *Pod) {
	if i, ok := slices.BinarySearchFunc(r.pods, p, (*Pod).Compare); ok {
		r.pods = slices.Delete(r.pods, i, i+1)
		r.unheed(p)
	}
}

// Begin starts a collect: the owner is Collecting until the reservation is
// committed, failed or abandoned. It returns [ErrStale] if the owner has no
// pods and [ErrBusy] if a collect is under way.
func (d *Directory) Begin(key OwnerKey) (Reservation, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec := d.owners[key]
	switch {
	case rec == nil:
		return Reservation{}, ErrStale
	case rec.stored == Collecting:
		return Reservation{}, ErrBusy
	}
	rec.before, rec.stored, rec.again = rec.stored, Collecting, false
	d.changedKnowledge(key)
	return Reservation{Key: key, Generation: rec.generation}, nil
}

// Commit keeps what was collected, if the reservation's generation is still
// the owner's; else it changes nothing and returns [ErrStale]. The owner is
// Known if info has a service, else None; a nil info is an empty one.
func (d *Directory) Commit(r Reservation, info *Info) error {
	if info == nil {
		info = &Info{}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, err := d.reserved(r)
	if err != nil {
		return err
	}
	d.learn(r.Key, rec, info)
	return nil
}

// Revise is Commit for an owner that was asked again: info replaces was, from
// which it was made. It returns [ErrChanged] if the owner's info is another by
// now, and changes nothing; else as Commit. An owner need not have been begun:
// what is known of it holds meanwhile.
func (d *Directory) Revise(r Reservation, was, info *Info) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, err := d.reserved(r)
	if err != nil {
		return err
	}
	if d.info(r.Key) != was {
		return ErrChanged
	}
	d.learn(r.Key, rec, info)
	return nil
}

// learn needs mu.
func (d *Directory) learn(key OwnerKey, rec *record, info *Info) {
	d.infos[key] = &learned{info: info}
	d.infoChanges++
	rec.stored, rec.reason, rec.next = knowledgeOf(info), "", time.Time{}
	rec.hung = false
	d.reaskAll(key, rec)
	d.changedKnowledge(key)
}

// Fail records that a collect failed, why, and when it is tried again. It
// returns [ErrStale] as Commit does. What was learned before stays, and if
// somebody else has committed since the collect began, the failure is of no
// interest and changes nothing.
func (d *Directory) Fail(r Reservation, reason string, next time.Time) error {
	return d.fail(r, reason, next, false)
}

// Hang is Fail where the server took the question and gave no answer in time:
// what the owner serves is as open as before it was asked.
func (d *Directory) Hang(r Reservation, reason string, next time.Time) error {
	return d.fail(r, reason, next, true)
}

func (d *Directory) fail(r Reservation, reason string, next time.Time, hung bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, err := d.reserved(r)
	if err != nil || rec.stored.Settled() {
		return err
	}
	rec.stored, rec.reason, rec.next = Failed, reason, next
	rec.hung = hung
	d.changedKnowledge(r.Key)
	return nil
}

// Abandon ends a collect without a result, as if it had not begun: a failure
// before it stands again. It returns [ErrStale] as Commit does.
func (d *Directory) Abandon(r Reservation) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, err := d.reserved(r)
	if err != nil || rec.stored != Collecting {
		return err
	}
	rec.stored = rec.before
	d.changedKnowledge(r.Key)
	return nil
}

// reserved needs mu.
func (d *Directory) reserved(r Reservation) (*record, error) {
	rec := d.owners[r.Key]
	if rec == nil || rec.generation != r.Generation {
		return nil, ErrStale
	}
	return rec, nil
}

// Expire forgets what was learned of owners whose last pod went longer than
// Options.Keep before now, and returns of how many. What decides what pods of
// another owner are presumed to serve is not forgotten before they are gone as
// long.
func (d *Directory) Expire(now time.Time) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	var due []OwnerKey
	for key, l := range d.infos {
		if !l.until.IsZero() && !now.Before(l.until) {
			due = append(due, key)
		}
	}
	// Whether one is needed may hang on whether another is there.
	slices.SortFunc(due, func(a, b OwnerKey) int {
		return cmp.Or(d.infos[a].until.Compare(d.infos[b].until), a.compare(b))
	})
	n := 0
	for _, key := range due {
		l := d.infos[key]
		if d.leaned(key, l.workload) {
			continue
		}
		delete(d.infos, key)
		d.dismiss(l.workload, key)
		d.infoChanges++
		d.forget(key, l.behind)
		d.changed(key)
		d.tellMates(l.workload, key)
		for _, st := range l.behind {
			d.changedFront(st.Key())
		}
		n++
	}
	return n
}
