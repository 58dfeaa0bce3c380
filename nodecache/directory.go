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
	// is 10 minutes.
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
	pods       map[string]*Pod // by UID
	claims     map[netip.Addr][]*Pod
	infos      map[OwnerKey]*learned
	routes     map[string]*Route
	routesOf   map[OwnerKey]map[string]struct{}
	subs       map[*Subscription]struct{}
}

// record is an owner that has pods.
type record struct {
	generation uint64
	created    time.Time
	pods       map[string]*Pod
	stored     Knowledge
	reason     string
	next       time.Time
}

// learned is what outlives the pods of an owner.
type learned struct {
	info     *Info
	name     string
	workload Workload
	until    time.Time // zero while the owner has pods
}

// New returns an empty directory.
func New(o Options) *Directory {
	return &Directory{
		keep:     cmp.Or(o.Keep, 10*time.Minute),
		owners:   map[OwnerKey]*record{},
		pods:     map[string]*Pod{},
		claims:   map[netip.Addr][]*Pod{},
		infos:    map[OwnerKey]*learned{},
		routes:   map[string]*Route{},
		routesOf: map[OwnerKey]map[string]struct{}{},
		subs:     map[*Subscription]struct{}{},
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
// removed. The reservation is that of the pod's owner, zero for an Absent pod.
func (d *Directory) UpsertPod(p *Pod, replaces ...string) Reservation {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, uid := range replaces {
		if uid != p.UID {
			d.removePod(uid, nil)
		}
	}
	if p.State == Absent || !p.Addr.IsValid() {
		d.removePod(p.UID, nil)
		return Reservation{}
	}
	return d.upsertPod(p)
}

// RemovePod removes the pod with the UID, if it is there.
func (d *Directory) RemovePod(uid string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.removePod(uid, nil)
}

// upsertPod needs mu.
func (d *Directory) upsertPod(p *Pod) Reservation {
	rec := d.owners[p.Owner]
	if rec == nil {
		d.generation++
		rec = &record{generation: d.generation, pods: map[string]*Pod{}}
		d.owners[p.Owner] = rec
		if l := d.infos[p.Owner]; l != nil {
			l.until = time.Time{}
			rec.stored = knowledgeOf(l.info)
		}
	}
	d.removePod(p.UID, rec)
	rec.pods[p.UID] = p
	d.pods[p.UID] = p
	if !p.Created.IsZero() && (rec.created.IsZero() || p.Created.Before(rec.created)) {
		rec.created = p.Created
	}
	d.claim(p)
	d.changed(p.Owner)
	return Reservation{Key: p.Owner, Generation: rec.generation}
}

// removePod needs mu. The record keep is not ended even if it becomes empty:
// the caller is about to fill it.
func (d *Directory) removePod(uid string, keep *record) {
	p := d.pods[uid]
	if p == nil {
		return
	}
	delete(d.pods, uid)
	d.disclaim(p)
	rec := d.owners[p.Owner]
	delete(rec.pods, uid)
	if len(rec.pods) == 0 && rec != keep {
		delete(d.owners, p.Owner)
		if l := d.infos[p.Owner]; l != nil {
			l.until = time.Now().Add(d.keep)
			l.name, l.workload = p.OwnerName, p.Workload
		}
	}
	d.changed(p.Owner)
}

// claim needs mu. Pods with an address of their own claim it; those of the
// host's network share their node's.
func (d *Directory) claim(p *Pod) {
	if p.HostNetwork {
		return
	}
	d.touchRivals(p)
	d.claims[p.Addr] = append(d.claims[p.Addr], p)
}

// disclaim needs mu.
func (d *Directory) disclaim(p *Pod) {
	if p.HostNetwork {
		return
	}
	ps := slices.DeleteFunc(d.claims[p.Addr], func(q *Pod) bool { return q == p })
	if len(ps) == 0 {
		delete(d.claims, p.Addr)
		return
	}
	d.claims[p.Addr] = ps
	d.touchRivals(p)
}

// touchRivals needs mu. A pod at the same address may have won or lost it.
func (d *Directory) touchRivals(p *Pod) {
	for _, q := range d.claims[p.Addr] {
		if q.Owner != p.Owner {
			d.changed(q.Owner)
		}
	}
}

// holder needs mu, for reading at least. Of several pods that claim an
// address, it belongs to the live one: serving before draining, then the one
// created last.
func (d *Directory) holder(addr netip.Addr) *Pod {
	ps := d.claims[addr]
	if len(ps) == 0 {
		return nil
	}
	return slices.MaxFunc(ps, func(a, b *Pod) int {
		return cmp.Or(
			-cmp.Compare(a.State, b.State), // Serving is the lower one
			a.Created.Compare(b.Created),
			cmp.Compare(a.UID, b.UID),
		)
	})
}

// changed needs mu.
func (d *Directory) changed(key OwnerKey) {
	for s := range d.subs {
		s.add(key)
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
	rec.stored = Collecting
	d.changed(key)
	return Reservation{Key: key, Generation: rec.generation}, nil
}

// Commit keeps what was collected, if the reservation's generation is still
// the owner's; else it changes nothing and returns [ErrStale]. The owner is
// Known if info has a service, else None.
func (d *Directory) Commit(r Reservation, info *Info) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, err := d.reserved(r)
	if err != nil {
		return err
	}
	d.infos[r.Key] = &learned{info: info}
	rec.stored, rec.reason, rec.next = knowledgeOf(info), "", time.Time{}
	d.changed(r.Key)
	return nil
}

// Fail records that a collect failed, why, and when it is tried again. It
// returns [ErrStale] as Commit does. What was learned before stays.
func (d *Directory) Fail(r Reservation, reason string, next time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, err := d.reserved(r)
	if err != nil {
		return err
	}
	rec.stored, rec.reason, rec.next = Failed, reason, next
	d.changed(r.Key)
	return nil
}

// Abandon ends a collect without a result, as if it had not begun. It returns
// [ErrStale] as Commit does.
func (d *Directory) Abandon(r Reservation) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, err := d.reserved(r)
	if err != nil {
		return err
	}
	rec.stored = Unknown
	if l := d.infos[r.Key]; l != nil {
		rec.stored = knowledgeOf(l.info)
	}
	d.changed(r.Key)
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
// Options.Keep before now, and returns of how many.
func (d *Directory) Expire(now time.Time) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for key, l := range d.infos {
		if !l.until.IsZero() && !now.Before(l.until) {
			delete(d.infos, key)
			d.changed(key)
			n++
		}
	}
	return n
}

func knowledgeOf(info *Info) Knowledge {
	for _, p := range info.Ports {
		if len(p.Services) > 0 {
			return Known
		}
	}
	return None
}
