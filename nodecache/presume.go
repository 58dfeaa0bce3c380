package nodecache

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// Presumption is a service that pods of an owner are presumed to serve: what
// their workload's previous revision was found to serve, as long as nothing
// disproves it of them. It is immutable.
type Presumption struct {
	Service string
	// From is the owner that was found to serve it, Name its display name.
	From OwnerKey
	Name string
	// Ports are those on which From serves it, sorted.
	Ports []uint16
	// Info is what is known of From.
	Info *Info
}

func (p *Presumption) equal(q *Presumption) bool {
	return p.Service == q.Service && p.From == q.From && slices.Equal(p.Ports, q.Ports)
}

// revises tells whether the owners of a workload are its revisions. A pod
// without a controller has none, a Job of the same name is another run, and what
// has no name is no workload.
func (w Workload) revises() bool { return w.Kind != "Pod" && w.Kind != "Job" && w.Name != "" }

// settles tells whether a port has said what it serves. One that knows no
// reflection, or denies it, has not.
func (p *PortInfo) settles() bool { return p.State != PortNoReflection && p.State != PortDenied }

// open returns the ports on which a pod may serve what a predecessor serves on
// the ports was: those of them that are hinted; where none is, the hinted ones;
// where nothing is hinted, all of them. A port that has said what it serves is
// not open.
func open(was, hinted []uint16, said func(port uint16) bool) []uint16 {
	ports := was
	if len(hinted) > 0 {
		ports = nil
		for _, port := range was {
			if slices.Contains(hinted, port) {
				ports = append(ports, port)
			}
		}
		if len(ports) == 0 {
			ports = hinted
		}
	}
	return slices.DeleteFunc(slices.Clone(ports), said)
}

// open returns the ports on which the pod, of an owner with the info, may serve
// what a predecessor serves on the ports was. A port that is declared, or was
// asked, is one of the pod's as one that is hinted.
func (m Member) open(was []uint16, info *Info) []uint16 {
	var known []PortInfo
	if info != nil {
		known = info.For(m.Pod)
	}
	var hinted []uint16
	for _, h := range m.AllHints() {
		hinted = append(hinted, h.Port)
	}
	for _, d := range m.Declared {
		hinted = append(hinted, d.Port)
	}
	for _, p := range known {
		hinted = append(hinted, p.Port)
	}
	slices.Sort(hinted)
	return open(was, slices.Compact(hinted), func(port uint16) bool { return m.declares(port) || said(known, port) })
}

func said(known []PortInfo, port uint16) bool {
	return slices.ContainsFunc(known, func(p PortInfo) bool { return p.Port == port && p.settles() })
}

// serves tells whether the pod, of an owner with the info, serves something by
// its own word.
func (m Member) serves(service string, info *Info) bool {
	var answered []uint16
	if info != nil {
		answered = portsOf(info.For(m.Pod), service)
	}
	_, ok := m.port(service, answered)
	return ok
}

// alike tells whether the two pods, of an owner with the info, answer the
// questions above in the same way. Mostly all pods of an owner do.
func (m Member) alike(n Member, info *Info) bool {
	return slices.Equal(m.Hints, n.Hints) && slices.Equal(m.Behind, n.Behind) &&
		len(m.Declared) == 0 && len(n.Declared) == 0 && (info == nil || info.index(m.Pod) == info.index(n.Pod))
}

// distinct returns one of the pods for each way to answer.
func distinct(pods []Member, info *Info) []Member {
	var ms []Member
	for _, m := range pods {
		if !slices.ContainsFunc(ms, func(n Member) bool { return m.alike(n, info) }) {
			ms = append(ms, m)
		}
	}
	return ms
}

// offer is a service with the ports on which an owner serves it.
type offer struct {
	service string
	ports   []uint16
}

// offers returns what an owner was found to serve, sorted: where it has pods,
// what one of them serves.
func (o *Owner) offers() []offer {
	var out []offer
	for n := -1; n < len(o.Info.Variants); n++ {
		if len(o.Info.Variants) > 0 && !o.uses(n) {
			continue
		}
		for _, p := range o.Info.program(n) {
			for _, s := range p.Services {
				i, found := slices.BinarySearchFunc(out, s.Name, func(f offer, name string) int { return strings.Compare(f.service, name) })
				if !found {
					out = slices.Insert(out, i, offer{service: s.Name})
				}
				if !slices.Contains(out[i].ports, p.Port) {
					out[i].ports = append(out[i].ports, p.Port)
					slices.Sort(out[i].ports)
				}
			}
		}
	}
	return out
}

// mate is another owner of the same workload.
type mate struct {
	*Owner
	info   *Info // what was found; Owner.Info is also what was declared
	pods   []Member
	oldest time.Time
}

// mate needs mu, for reading at least. It fills what the others look at.
func (d *Directory) mate(key OwnerKey) mate {
	m := mate{Owner: &Owner{Key: key}}
	l := d.infos[key]
	if l != nil {
		m.info, m.Info, m.Name, m.Created, m.oldest = l.info, l.last, l.name, l.created, l.oldest
	}
	rec := d.owners[key]
	if rec == nil {
		return m
	}
	m.Info, m.Created, m.oldest = m.info, rec.created, rec.oldest
	if len(rec.pods) > 0 { // else it is about to be filled
		m.Name = rec.pods[0].OwnerName
		m.Pods = d.members(rec)
		m.pods = distinct(m.Pods, m.info)
	}
	return m
}

// disproves tells whether what is known of a revision ends the presumption that
// later ones serve what an earlier one serves on the ports was: none of its pods
// may serve it; of one without pods, no such port is open.
func (m *mate) disproves(service string, was []uint16) bool {
	if len(m.pods) > 0 {
		return !slices.ContainsFunc(m.pods, func(p Member) bool { return p.serves(service, m.info) || len(p.open(was, m.info)) > 0 })
	}
	if m.Info == nil {
		return false
	}
	for n := -1; n < len(m.Info.Variants); n++ {
		known := m.Info.program(n)
		if len(portsOf(known, service)) > 0 || len(open(was, nil, func(port uint16) bool { return said(known, port) })) > 0 {
			return false
		}
	}
	return true
}

// older needs mu, for reading at least. It returns the owners of the workload
// that are not known to be younger than the one given, the one that came last
// first: a revision to which somebody went back came again.
func (d *Directory) older(key OwnerKey, rec *record, without OwnerKey) []mate {
	keys := d.workloads[rec.workload]
	if len(keys) < 2 {
		return nil
	}
	var ms []mate
	for _, k := range keys {
		if k == key || k == without {
			continue
		}
		if m := d.mate(k); m.oldest.IsZero() || rec.oldest.IsZero() || !m.oldest.After(rec.oldest) {
			ms = append(ms, m)
		}
	}
	slices.SortFunc(ms, func(a, b mate) int {
		return cmp.Or(b.Created.Compare(a.Created), a.Key.compare(b.Key))
	})
	return ms
}

// presumed needs mu, for reading at least. It returns what some of the owner's
// pods are presumed to serve, sorted by service, as it were without an owner;
// the zero key is none. The last revision that was found to serve something
// decides from where that is presumed; a later one that does not serve it ends
// it. Declarations are presumed of nobody: they are each pod's own word.
func (d *Directory) presumed(key OwnerKey, rec *record, pods []Member, without OwnerKey) []Presumption {
	older := d.older(key, rec, without)
	if len(older) == 0 {
		return nil
	}
	info := d.info(key)
	pods = distinct(pods, info)
	decided := map[string]bool{}
	var out []Presumption
	for i, m := range older {
		if m.info == nil {
			continue
		}
		found := Owner{Info: m.info, Pods: m.Pods}
		for _, f := range found.offers() {
			if decided[f.service] {
				continue
			}
			decided[f.service] = true
			later := slices.ContainsFunc(older[:i], func(l mate) bool { return l.disproves(f.service, f.ports) })
			if !later && slices.ContainsFunc(pods, func(p Member) bool {
				return !p.serves(f.service, info) && len(p.open(f.ports, info)) > 0
			}) {
				out = append(out, Presumption{Service: f.service, From: m.Key, Name: m.Name, Ports: f.ports, Info: m.info})
			}
		}
	}
	slices.SortFunc(out, func(a, b Presumption) int { return strings.Compare(a.Service, b.Service) })
	return out
}

// leans needs mu, for reading at least. It tells whether what the owner's pods
// are presumed to serve would be something else if nothing were known of another
// owner.
func (d *Directory) leans(key OwnerKey, rec *record, on OwnerKey) bool {
	pods := d.members(rec)
	return !slices.EqualFunc(d.presumed(key, rec, pods, OwnerKey{}), d.presumed(key, rec, pods, on),
		func(a, b Presumption) bool { return a.equal(&b) })
}

// leaned needs mu, for reading at least. It tells whether the pods of some
// owner lean on one that has none: then what was learned of it is needed for as
// long.
func (d *Directory) leaned(on OwnerKey, w Workload) bool {
	return slices.ContainsFunc(d.workloads[w], func(key OwnerKey) bool {
		rec := d.owners[key]
		return rec != nil && d.leans(key, rec, on)
	})
}

// renew needs mu. The last pod of the owner is about to go: what was learned of
// those on which it leans outlives it as its own would.
func (d *Directory) renew(key OwnerKey, rec *record) {
	for _, on := range d.workloads[rec.workload] {
		if l := d.infos[on]; l != nil && !l.until.IsZero() && d.leans(key, rec, on) {
			l.until = time.Now().Add(d.keep)
			d.infoChanges++
		}
	}
}

// enroll needs mu. It notes an owner as one of a workload.
func (d *Directory) enroll(w Workload, key OwnerKey) {
	if keys := d.workloads[w]; w.revises() && !slices.Contains(keys, key) {
		d.workloads[w] = append(slices.Clip(keys), key)
	}
}

// dismiss needs mu. It takes back what enroll noted.
func (d *Directory) dismiss(w Workload, key OwnerKey) {
	keys := slices.DeleteFunc(d.workloads[w], func(k OwnerKey) bool { return k == key })
	if len(keys) > 0 {
		d.workloads[w] = keys
	} else {
		delete(d.workloads, w)
	}
}

// tellMates needs mu. It tells of a change those whose pods may be presumed to
// serve something else by it: none as long as nothing is known of the workload.
// All are told of another policy of the workload.
func (d *Directory) tellMates(w Workload, of OwnerKey) {
	keys := d.workloads[w]
	if d.spoken {
		d.tellPolicy(w, of)
	}
	if !slices.ContainsFunc(keys, func(key OwnerKey) bool { return d.infos[key] != nil }) {
		return
	}
	for _, key := range keys {
		if key != of && d.owners[key] != nil {
			d.tell(key)
		}
	}
}
