package nodecache

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Owner returns the view of an owner that has pods, or of which something is
// still known; nil if there is none.
func (d *Directory) Owner(key OwnerKey) *Owner {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.view(key)
}

// Owners returns the views of all owners that have pods at one moment, sorted
// by namespace, name and key. Writers wait meanwhile, some milliseconds where
// there are ten thousand owners: it is for status and for a first look, not
// for following changes.
func (d *Directory) Owners() []*Owner {
	d.mu.RLock()
	os := make([]*Owner, 0, len(d.owners))
	for key := range d.owners {
		os = append(os, d.view(key))
	}
	d.mu.RUnlock()
	slices.SortFunc(os, func(a, b *Owner) int {
		return cmp.Or(
			cmp.Compare(a.Workload.Namespace, b.Workload.Namespace),
			cmp.Compare(a.Name, b.Name),
			cmp.Compare(a.Key.UID, b.Key.UID),
			cmp.Compare(a.Key.Revision, b.Key.Revision),
		)
	})
	return os
}

// Askable tells whether the owner has pods, and whether one of them may be
// asked what it serves, as [Owner.WhyNotAsked] does, without the cost of a view.
func (d *Directory) Askable(key OwnerKey, node string) (there, may bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	rec := d.owners[key]
	if rec == nil {
		return false, false
	}
	return true, slices.ContainsFunc(rec.pods, func(p *Pod) bool { return (node == "" || p.Node == node) && d.asked(p) })
}

// Retained returns the views of the owners of the namespace that have no pods
// and of which something is still known, in no order.
func (d *Directory) Retained(namespace string) []*Owner {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var os []*Owner
	for key, l := range d.infos {
		if !l.until.IsZero() && l.workload.Namespace == namespace {
			os = append(os, d.view(key))
		}
	}
	return os
}

// Member returns the pod with the UID as its owner has it, and whether it is in
// the directory.
func (d *Directory) Member(uid string) (Member, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	p := d.pods[uid]
	if p == nil {
		return Member{}, false
	}
	return d.member(p), true
}

// member needs mu, for reading at least.
func (d *Directory) member(p *Pod) Member {
	return Member{Pod: p, Shadowed: d.shadowed(p), Behind: d.fronts.behind[p.UID]}
}

// shadowed needs mu, for reading at least.
func (d *Directory) shadowed(p *Pod) bool {
	return !p.HostNetwork && d.claims[p.Addr.Unmap()] != p
}

// members needs mu, for reading at least.
func (d *Directory) members(rec *record) []Member {
	ms := make([]Member, len(rec.pods))
	for i, p := range rec.pods {
		ms[i] = d.member(p)
	}
	return ms
}

// Pod returns the pod with the UID, nil if it is not in the directory.
func (d *Directory) Pod(uid string) *Pod {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.pods[uid]
}

// PodAt returns the pod to which the address belongs: of several that claim
// it the live one, never a draining one nor one of the host's network. It
// returns nil if there is none.
func (d *Directory) PodAt(addr netip.Addr) *Pod {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if p := d.claims[addr.Unmap()]; p != nil && p.State == Serving {
		return p
	}
	return nil
}

// MemberAt returns the pod to which the address belongs, whatever its state;
// false if there is none. Pods of the host's network have no address of their
// own.
func (d *Directory) MemberAt(addr netip.Addr) (Member, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	p := d.claims[addr.Unmap()]
	if p == nil {
		return Member{}, false
	}
	return d.member(p), true
}

// Counts says how much the directory holds.
type Counts struct {
	Owners map[Knowledge]int // owners with pods, by knowledge
	Pods   map[PodState]int
	Routes int
	Fronts int // Services
	Slices int
	// Retained counts owners without pods of which something is still known.
	Retained int
}

// Counts counts what the directory holds. It goes over the owners in portions
// so that no writer waits for it; what changes meanwhile may be missed.
func (d *Directory) Counts() Counts {
	c := Counts{Owners: map[Knowledge]int{}, Pods: map[PodState]int{}}
	d.mu.RLock()
	for s, n := range d.states {
		if n > 0 {
			c.Pods[PodState(s)] = n
		}
	}
	for _, l := range d.infos {
		if !l.until.IsZero() {
			c.Retained++
		}
	}
	c.Routes, c.Slices = len(d.routes.byUID), len(d.fronts.slices)
	for _, rec := range d.fronts.byName {
		if rec.front != nil {
			c.Fronts++
		}
	}
	keys := slices.AppendSeq(make([]OwnerKey, 0, len(d.owners)), maps.Keys(d.owners))
	d.mu.RUnlock()
	var members []Member
	for portion := range slices.Chunk(keys, 256) {
		d.mu.RLock()
		for _, key := range portion {
			if rec := d.owners[key]; rec != nil {
				members = members[:0]
				for _, p := range rec.pods {
					members = append(members, Member{Pod: p, Behind: d.fronts.behind[p.UID]})
				}
				k, _ := judge(rec.stored, d.info(key), members)
				c.Owners[k]++
			}
		}
		d.mu.RUnlock()
	}
	return c
}

// info needs mu, for reading at least.
func (d *Directory) info(key OwnerKey) *Info {
	if l := d.infos[key]; l != nil {
		return l.info
	}
	return nil
}

// view needs mu, for reading at least.
func (d *Directory) view(key OwnerKey) *Owner {
	rec, l := d.owners[key], d.infos[key]
	if rec == nil && l == nil {
		return nil
	}
	o := &Owner{Key: key}
	switch {
	case rec != nil:
		d.fill(o, rec)
	case l != nil:
		o.Info, o.Name, o.Workload = l.last, l.name, l.workload
		o.Behind, o.Export = d.fronts.recall(l.behind), exportList(l.export)
		o.setKnowledge(l.knowledge())
	}
	o.Routes = d.routes.entries(o.Behind)
	o.Policy = d.policy(o.Workload, key)
	return o
}

// fill needs mu, for reading at least.
func (d *Directory) fill(o *Owner, rec *record) {
	o.Created, o.Generation, o.Info = rec.created, rec.generation, d.info(o.Key)
	o.Name, o.Workload = rec.pods[0].OwnerName, rec.workload
	o.Pods = d.members(rec)
	o.Presumed = d.presumed(o.Key, rec, o.Pods, OwnerKey{})
	var behind []*Standing
	for _, m := range o.Pods {
		for _, st := range m.Behind {
			if !slices.Contains(behind, st) {
				behind = append(behind, st)
			}
		}
	}
	o.Export, o.Ignored = exports(rec.pods), ignored(rec.pods)
	if len(behind) > 0 {
		o.Behind = union(behind)
	} else {
		o.Behind = d.fronts.recall(rec.behind)
	}
	o.setKnowledge(rec.stored)
	if o.Knowledge == Failed {
		o.Reason, o.NextTry, o.Hung = rec.reason, rec.next, rec.hung
	}
}

// exports is what the pods say together; mostly all say the same.
func exports(pods []*Pod) []string {
	said := pods[0].Export
	all := exportList(said)
	for _, p := range pods[1:] {
		if p.Export != said {
			all = append(all, exportList(p.Export)...)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// ignored is what is ignored of all pods; mostly it is the same of each.
func ignored(pods []*Pod) []string {
	said := pods[0].Ignored
	for _, p := range pods[1:] {
		if !slices.Equal(p.Ignored, pods[0].Ignored) {
			said = slices.Concat(said, p.Ignored)
		}
	}
	if len(said) < 2 {
		return said
	}
	said = slices.Sorted(slices.Values(said))
	return slices.Compact(said)
}

func exportList(export string) []string {
	if export == "" {
		return nil
	}
	return strings.Split(export, ",")
}

// keysLocked needs mu, for reading at least.
func (d *Directory) keysLocked() []OwnerKey {
	set := make(map[OwnerKey]struct{}, len(d.owners))
	for key := range d.owners {
		set[key] = struct{}{}
	}
	for key := range d.infos {
		set[key] = struct{}{}
	}
	keys := make([]OwnerKey, 0, len(set))
	for key := range set {
		keys = append(keys, key)
	}
	return keys
}
