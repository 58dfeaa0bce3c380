package nodecache

import (
	"net/netip"
	"slices"
	"strings"
)

// fronts is what the directory holds of Services. Directory.mu guards it.
type fronts struct {
	byName map[Name]*frontRecord
	slices map[Name]*sliceRecord // by the slice's own name
	// behind holds how each pod stands, one entry for each slice that has it.
	// The lists are never changed in place: views share them.
	behind map[string][]*Standing
	// rememberers are the owners that remember having stood behind a Service.
	rememberers map[Name]map[OwnerKey]struct{}
	// at holds the Services that have a ClusterIP, mostly one, the oldest first.
	at map[netip.Addr][]*Front
}

// frontRecord is a Service, its slices, or both: either may come first.
type frontRecord struct {
	front  *Front
	slices []*sliceRecord
	host   *Standing // of the stand-in of its name; nil while there is none
}

type sliceRecord struct {
	slice    *Slice
	standing *Standing            // nil while there is no Service
	zoned    map[string]*Standing // the same, of the pods of each zone
	seats    map[string]struct{}  // UIDs of the stand-ins of its addresses
}

// stands says how each pod of the slice stands, by UID.
func (r *sliceRecord) stands() map[string]*Standing {
	pods := make(map[string]*Standing, len(r.slice.Endpoints))
	if r.standing == nil {
		return pods
	}
	for _, e := range r.slice.Endpoints {
		for _, uid := range r.places(e) {
			pods[uid] = r.in(e.Zone)
		}
	}
	return pods
}

func (r *sliceRecord) in(zone string) *Standing {
	if zone == "" {
		return r.standing
	}
	st := r.zoned[zone]
	if st == nil {
		own := *r.standing
		own.Zone, st = zone, &own
		if r.zoned == nil {
			r.zoned = map[string]*Standing{}
		}
		r.zoned[zone] = st
	}
	return st
}

func newFronts() fronts {
	return fronts{
		byName: map[Name]*frontRecord{}, slices: map[Name]*sliceRecord{},
		behind: map[string][]*Standing{}, rememberers: map[Name]map[OwnerKey]struct{}{}, at: map[netip.Addr][]*Front{},
	}
}

// UpsertFront makes the directory hold the Service as given, in place of what
// it held under its name. Owners hear of it if they stand, or stood, behind it.
func (d *Directory) UpsertFront(f *Front) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if rec := d.fronts.byName[f.Key()]; rec != nil && rec.front != nil && rec.front.Equal(f) {
		return
	}
	d.setFront(f.Key(), f)
}

// RemoveFront removes the Service of the name, if its UID is one of uids; with
// no uids, whatever its UID. Its slices stay for their own end.
func (d *Directory) RemoveFront(name Name, uids ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec := d.fronts.byName[name]
	if rec == nil || rec.front == nil || len(uids) > 0 && !slices.Contains(uids, rec.front.UID) {
		return
	}
	d.setFront(name, nil)
}

// setFront needs mu.
func (d *Directory) setFront(name Name, f *Front) {
	rec := d.fronts.record(name)
	d.fronts.address(rec.front, f)
	rec.front = f
	moved := moves{}
	for _, s := range rec.slices {
		d.relink(s, s.slice, f, moved)
	}
	d.seatHost(rec, f, moved)
	d.fronts.prune(name, rec)
	keys := d.settle(moved)
	for key := range d.fronts.rememberers[name] {
		keys[key] = struct{}{}
	}
	for key := range keys {
		d.changed(key)
	}
	d.changedFront(name)
}

// address needs mu. It exchanges whose the ClusterIPs are.
func (f *fronts) address(was, is *Front) {
	if was != nil {
		for _, ip := range was.ClusterIPs {
			if f.at[ip] = slices.DeleteFunc(f.at[ip], func(o *Front) bool { return o == was }); len(f.at[ip]) == 0 {
				delete(f.at, ip)
			}
		}
	}
	if is != nil {
		for _, ip := range is.ClusterIPs {
			f.at[ip] = append(f.at[ip], is)
			slices.SortFunc(f.at[ip], (*Front).Compare)
		}
	}
}

// FrontAt returns the name of the Service with the ClusterIP, of several that
// claim it the oldest; false if there is none.
func (d *Directory) FrontAt(addr netip.Addr) (Name, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if fs := d.fronts.at[addr.Unmap()]; len(fs) > 0 {
		return fs[0].Key(), true
	}
	return Name{}, false
}

// UpsertSlice makes the directory hold the slice as given, in place of what it
// held under its name. The owners of the pods that it brings behind its
// Service, or takes away, hear of it.
func (d *Directory) UpsertSlice(s *Slice) {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec := d.fronts.slices[s.Key()]
	if rec != nil && rec.slice.Equal(s) {
		return
	}
	moved := moves{}
	if rec != nil && rec.slice.Service != s.Service {
		d.unhook(rec, moved)
		rec = nil
	}
	name := Name{s.Namespace, s.Service}
	front := d.fronts.record(name)
	if rec == nil {
		rec = &sliceRecord{slice: &Slice{}}
		front.slices = append(front.slices, rec)
		d.fronts.slices[s.Key()] = rec
	}
	d.relink(rec, s, front.front, moved)
	for key := range d.settle(moved) {
		d.changed(key)
	}
	d.changedFront(name)
}

// RemoveSlice removes the slice of the name, if its UID is one of uids; with
// no uids, whatever its UID.
func (d *Directory) RemoveSlice(name Name, uids ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec := d.fronts.slices[name]
	if rec == nil || len(uids) > 0 && !slices.Contains(uids, rec.slice.UID) {
		return
	}
	moved := moves{}
	d.unhook(rec, moved)
	for key := range d.settle(moved) {
		d.changed(key)
	}
}

// unhook needs mu. It takes a slice away.
func (d *Directory) unhook(rec *sliceRecord, moved moves) {
	d.relink(rec, rec.slice, nil, moved)
	name := Name{rec.slice.Namespace, rec.slice.Service}
	front := d.fronts.byName[name]
	front.slices = slices.DeleteFunc(front.slices, func(r *sliceRecord) bool { return r == rec })
	d.fronts.prune(name, front)
	delete(d.fronts.slices, rec.slice.Key())
	d.changedFront(name)
}

// moves holds how pods stood, by UID, before a change.
type moves map[string][]*Standing

// relink needs mu. It puts the slice in place of that of the record, behind
// the Service, nil for none.
func (d *Directory) relink(rec *sliceRecord, s *Slice, f *Front, moved moves) {
	if f != nil && f.External != "" {
		f = nil // Kubernetes resolves the name, whatever slices there are
	}
	before, was := rec.stands(), rec.standing
	var st *Standing
	if f != nil {
		st = stand(f, s, d.routes.grpcPorts(f.Key()))
	}
	if st.equal(was) {
		st = was // what pods share stays theirs
	} else {
		rec.zoned = nil
	}
	rec.slice, rec.standing = s, st
	d.seat(rec, f)
	after := rec.stands()
	for uid, from := range before {
		if to := after[uid]; to != from {
			d.fronts.move(uid, from, to, moved)
		}
	}
	for uid, to := range after {
		if before[uid] == nil {
			d.fronts.move(uid, nil, to, moved)
		}
	}
}

// move needs mu. It exchanges one standing of a pod.
func (f *fronts) move(uid string, from, to *Standing, moved moves) {
	list := f.behind[uid]
	if _, noted := moved[uid]; !noted {
		moved[uid] = list
	}
	next := make([]*Standing, 0, len(list)+1)
	for _, st := range list {
		if st != from {
			next = append(next, st)
		}
	}
	if to != nil {
		next = append(next, to)
	}
	if len(next) == 0 {
		delete(f.behind, uid)
		return
	}
	f.behind[uid] = next
}

// settle needs mu. It draws the consequences for the owners of pods that stand
// otherwise now, and returns these owners.
func (d *Directory) settle(moved moves) map[OwnerKey]struct{} {
	keys := map[OwnerKey]struct{}{}
	bare := map[OwnerKey]*record{}
	for uid, was := range moved {
		p := d.pods[uid]
		if p == nil {
			continue
		}
		rec, now := d.owners[p.Owner], d.fronts.behind[uid]
		keys[p.Owner] = struct{}{}
		if len(now) > 0 {
			d.remember(p.Owner, &rec.behind, now)
		} else if p.State == Serving {
			bare[p.Owner] = rec
		}
		before := Member{Pod: p, Behind: was}.DialPorts()
		d.reask(p.Owner, rec, Member{Pod: p, Behind: now}, before)
	}
	for key, rec := range bare {
		// A pod that serves was taken from behind its Services: the owner has
		// left them. One that drains is on its way out, and with it the
		// slice's word.
		if !slices.ContainsFunc(rec.pods, func(p *Pod) bool { return len(d.fronts.behind[p.UID]) > 0 }) {
			d.remember(key, &rec.behind, nil)
		}
	}
	return keys
}

// reask needs mu. The owner's knowledge is open again if the pod has a port to
// ask about that is not among those, and that was not asked about.
func (d *Directory) reask(key OwnerKey, rec *record, m Member, before []uint16) {
	if len(m.Behind) == 0 || rec.stored == Unknown {
		return
	}
	info := d.info(key)
	for _, port := range m.DialPorts() {
		if slices.Contains(before, port) || info != nil && slices.ContainsFunc(info.Ports, func(p PortInfo) bool { return p.Port == port }) {
			continue
		}
		if rec.stored == Collecting {
			rec.again = true
		} else {
			rec.stored = Unknown
			d.changedKnowledge(key)
		}
		return
	}
}

// join needs mu. It draws the consequences of where a pod stands that is about
// to be one of the record's, which may hold it as it was.
func (d *Directory) join(rec *record, p *Pod) {
	behind := d.fronts.behind[p.UID]
	if len(behind) == 0 {
		return
	}
	d.remember(p.Owner, &rec.behind, behind)
	var before []uint16
	if old := d.pods[p.UID]; old != nil && old.Owner == p.Owner {
		before = d.member(old).DialPorts()
	} else if len(rec.pods) > 0 { // most likely the others have what it has
		before = d.member(rec.pods[0]).DialPorts()
	}
	d.reask(p.Owner, rec, d.member(p), before)
}

// reaskAll needs mu. It opens the knowledge that was just committed again if a
// port came up while it was collected and is not in it.
func (d *Directory) reaskAll(key OwnerKey, rec *record) {
	if !rec.again {
		return
	}
	rec.again = false
	for _, p := range rec.pods {
		d.reask(key, rec, d.member(p), nil)
	}
}

// remember needs mu. It keeps, at *at, behind which Services an owner stands.
func (d *Directory) remember(key OwnerKey, at *[]*Standing, behind []*Standing) {
	if slices.EqualFunc(*at, behind, (*Standing).equal) {
		return
	}
	d.forget(key, *at)
	if d.spoken {
		for _, st := range slices.Concat(*at, behind) {
			d.changedFront(st.Key())
		}
	}
	*at = behind
	if d.infos[key] != nil {
		d.infoChanges++
	}
	for _, st := range behind {
		set := d.fronts.rememberers[st.Key()]
		if set == nil {
			set = map[OwnerKey]struct{}{}
			d.fronts.rememberers[st.Key()] = set
		}
		set[key] = struct{}{}
	}
}

// forget needs mu. It ends what an owner remembered.
func (d *Directory) forget(key OwnerKey, behind []*Standing) {
	for _, st := range behind {
		set := d.fronts.rememberers[st.Key()]
		delete(set, key)
		if len(set) == 0 {
			delete(d.fronts.rememberers, st.Key())
		}
	}
}

// recall needs mu, for reading at least. It returns what is remembered, as the
// Services that are still there say it.
func (f *fronts) recall(behind []*Standing) []*Standing {
	var out []*Standing
	for _, st := range behind {
		rec := f.byName[st.Key()]
		if rec == nil || rec.front == nil || rec.front.External != "" {
			continue
		}
		if rec.front != st.Front {
			st = &Standing{Front: rec.front, Ports: st.Ports, AnyPort: st.AnyPort, Hints: st.Hints}
		}
		out = append(out, st)
	}
	return union(out)
}

func (f *fronts) record(name Name) *frontRecord {
	rec := f.byName[name]
	if rec == nil {
		rec = &frontRecord{}
		f.byName[name] = rec
	}
	return rec
}

func (f *fronts) prune(name Name, rec *frontRecord) {
	if rec.front == nil && len(rec.slices) == 0 {
		delete(f.byName, name)
	}
}

// Published tells whether the pod, which need not be in the directory, stands
// behind Services of which all publish pods that are not Ready. One Service
// that does not is one that promises its callers more.
func (d *Directory) Published(uid string) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	behind := d.fronts.behind[uid]
	return len(behind) > 0 && !slices.ContainsFunc(behind, func(st *Standing) bool { return !st.NotReady })
}

// ZoneOf returns the zone of a pod, which need not be in the directory, by the
// slices that hold it; empty where none says.
func (d *Directory) ZoneOf(uid string) string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return zoneOf(d.fronts.behind[uid])
}

// Front returns the view of the Service, nil if there is none.
func (d *Directory) Front(name Name) *FrontView {
	d.mu.RLock()
	defer d.mu.RUnlock()
	rec := d.fronts.byName[name]
	if rec == nil || rec.front == nil {
		return nil
	}
	v := &FrontView{Front: rec.front}
	for _, s := range rec.slices {
		v.Slices = append(v.Slices, s.slice)
	}
	slices.SortFunc(v.Slices, func(a, b *Slice) int { return strings.Compare(a.Name, b.Name) })
	return v
}

// FrontNames returns the names of all Services, in no order.
func (d *Directory) FrontNames() []Name {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var names []Name
	for name, rec := range d.fronts.byName {
		if rec.front != nil {
			names = append(names, name)
		}
	}
	return names
}

// SliceNames returns the names of all slices, in no order.
func (d *Directory) SliceNames() []Name {
	d.mu.RLock()
	defer d.mu.RUnlock()
	names := make([]Name, 0, len(d.fronts.slices))
	for name := range d.fronts.slices {
		names = append(names, name)
	}
	return names
}
