package nodecache

import (
	"cmp"
	"net/netip"
	"slices"
)

// Owner returns the view of an owner that has pods, or of which something is
// still known, or that a route names; nil if there is none.
func (d *Directory) Owner(key OwnerKey) *Owner {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.view(key)
}

// Owners returns the views of all owners that have pods, sorted by namespace,
// name and key.
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
	if p := d.holder(addr.Unmap()); p != nil && p.State == Serving {
		return p
	}
	return nil
}

// Counts says how much the directory holds.
type Counts struct {
	Owners map[Knowledge]int // owners with pods, by knowledge
	Pods   map[PodState]int
	Routes int
	// Retained counts owners without pods of which something is still known.
	Retained int
}

// Counts counts what the directory holds. It reads everything; it is meant
// for status and scrapes.
func (d *Directory) Counts() Counts {
	c := Counts{Owners: map[Knowledge]int{}, Pods: map[PodState]int{}}
	d.mu.RLock()
	defer d.mu.RUnlock()
	for key, rec := range d.owners {
		c.Owners[d.judged(key, rec).Knowledge]++
	}
	for _, p := range d.pods {
		c.Pods[p.State]++
	}
	for key := range d.infos {
		if d.owners[key] == nil {
			c.Retained++
		}
	}
	c.Routes = len(d.routes)
	return c
}

// view needs mu, for reading at least.
func (d *Directory) view(key OwnerKey) *Owner {
	rec, l, routes := d.owners[key], d.infos[key], d.routeEntries(key)
	if rec != nil {
		o := d.judged(key, rec)
		o.Routes = routes
		return o
	}
	if l == nil && routes == nil {
		return nil
	}
	o := &Owner{Key: key, Routes: routes}
	if l != nil {
		o.Info, o.Name, o.Workload = l.info, l.name, l.workload
		o.judge(knowledgeOf(l.info))
	}
	return o
}

// judged needs mu, for reading at least.
func (d *Directory) judged(key OwnerKey, rec *record) *Owner {
	o := &Owner{
		Key:        key,
		Created:    rec.created,
		Reason:     rec.reason,
		NextTry:    rec.next,
		Generation: rec.generation,
		Pods:       make([]Member, 0, len(rec.pods)),
	}
	for _, p := range rec.pods {
		o.Pods = append(o.Pods, Member{Pod: p, Shadowed: !p.HostNetwork && d.holder(p.Addr) != p})
	}
	slices.SortFunc(o.Pods, compareMember)
	o.Name, o.Workload = o.Pods[0].OwnerName, o.Pods[0].Workload
	if l := d.infos[key]; l != nil {
		o.Info = l.info
	}
	o.judge(rec.stored)
	return o
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
	for key := range d.routesOf {
		set[key] = struct{}{}
	}
	keys := make([]OwnerKey, 0, len(set))
	for key := range set {
		keys = append(keys, key)
	}
	return keys
}
