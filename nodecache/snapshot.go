package nodecache

import (
	"maps"
	"slices"
	"time"
)

// SavedInfo is what is worth keeping of an owner over a restart. Pods say again
// what they declare, export and stand behind; of them it counts only if there
// are none.
type SavedInfo struct {
	Key      OwnerKey
	Name     string // display name, as ReplicaSet/a-5d9
	Workload Workload
	// Created is [Owner.Created], Oldest the same over all generations.
	Created, Oldest time.Time
	// Info is what was learned; nil where the last pod's own word is all.
	Info *Info
	// Export, Declared and Policy are the last pod's, Behind is where the owner
	// stood.
	Export   string
	Declared []Declared
	Policy   *Policy
	Behind   []SavedStanding
	// Until is when the info ends, for an owner without pods; zero for one
	// that has pods, or that decides what those of another are presumed to
	// serve.
	Until time.Time
}

// SavedStanding is a [Standing] by the name of its Service.
type SavedStanding struct {
	Service Name
	Ports   []uint16
	AnyPort bool
}

// Snapshot returns what was learned of every owner, in no order. It goes over
// the owners in portions so that no writer waits for it; what changes meanwhile
// may be missed.
func (d *Directory) Snapshot() []SavedInfo {
	d.mu.RLock()
	keys := slices.AppendSeq(make([]OwnerKey, 0, len(d.infos)), maps.Keys(d.infos))
	d.mu.RUnlock()
	saved := make([]SavedInfo, 0, len(keys))
	for portion := range slices.Chunk(keys, 256) {
		d.mu.RLock()
		for _, key := range portion {
			l, rec := d.infos[key], d.owners[key]
			if l == nil {
				continue
			}
			s := SavedInfo{
				Key: key, Info: l.info, Name: l.name, Workload: l.workload, Created: l.created, Oldest: l.oldest,
				Export: l.export, Declared: l.declared, Policy: l.policy, Until: l.until,
			}
			behind := l.behind
			if rec != nil {
				p := rec.pods[0]
				s.Name, s.Workload, s.Created, s.Oldest = p.OwnerName, rec.workload, rec.created, rec.oldest
				s.Export, s.Declared, s.Policy, behind = p.Export, p.Declared, p.Policy, rec.behind
			} else if d.leaned(key, l.workload) {
				s.Until = time.Time{}
			}
			for _, st := range behind {
				s.Behind = append(s.Behind, SavedStanding{Service: st.Key(), Ports: st.Ports, AnyPort: st.AnyPort})
			}
			saved = append(saved, s)
		}
		d.mu.RUnlock()
	}
	return saved
}

// Restore takes what an earlier process learned, as of origin checkpoint, and
// returns of how many owners it did. What this process knows already stays,
// and a collect that is under way decides itself. An owner without pods is kept
// until its end, and at most for Options.Keep from now, as if its last pod had
// just gone.
func (d *Directory) Restore(saved []SavedInfo, now time.Time) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, s := range saved {
		rec := d.owners[s.Key]
		switch {
		case s.Info == nil && (len(s.Declared) == 0 && s.Policy == nil || rec != nil) || d.infos[s.Key] != nil:
			continue
		case !s.Until.IsZero() && !now.Before(s.Until) && rec == nil:
			continue
		case rec != nil && rec.stored != Unknown && rec.stored != Failed:
			continue
		}
		l := &learned{}
		if s.Info != nil {
			info := *s.Info
			info.Origin = OriginCheckpoint
			l.info = &info
		}
		if rec != nil {
			rec.stored, rec.reason, rec.next, rec.hung = knowledgeOf(l.info), "", time.Time{}, false
			rec.oldest = earlier(rec.oldest, s.Oldest)
		} else {
			l.name, l.workload, l.created, l.oldest = s.Name, s.Workload, s.Created, s.Oldest
			l.export, l.declared, l.policy = s.Export, s.Declared, s.Policy
			l.last = withDeclared(l.info, l.declared)
			d.spoken = d.spoken || l.policy != nil
			var behind []*Standing
			for _, st := range s.Behind {
				behind = append(behind, &Standing{Front: &Front{Namespace: st.Service.Namespace, Name: st.Service.Name}, Ports: st.Ports, AnyPort: st.AnyPort})
			}
			d.remember(s.Key, &l.behind, behind)
			l.until = now.Add(d.keep)
			if !s.Until.IsZero() && s.Until.Before(l.until) {
				l.until = s.Until
			}
		}
		d.infos[s.Key] = l
		if rec == nil {
			d.enroll(s.Workload, s.Key)
			d.tellMates(s.Workload, s.Key)
		}
		d.changedKnowledge(s.Key)
		n++
	}
	return n
}

// InfoChanges counts the changes of what [Directory.Snapshot] returns: it is
// equal where nothing has to be saved.
func (d *Directory) InfoChanges() uint64 {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.infoChanges
}
