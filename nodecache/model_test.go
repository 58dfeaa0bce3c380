package nodecache_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// model is the directory as one would explain it: lists of what happened, every
// answer computed from scratch, nothing indexed and nothing concurrent.
type model struct {
	keep        time.Duration
	generations uint64
	pods        []nodecache.Pod
	lives       map[nodecache.OwnerKey]*life
	memories    map[nodecache.OwnerKey]*memory
	routes      []nodecache.Route
	fronts      map[string][]string // the Services in front of a pod, by its UID
}

// life is what holds for an owner while it has pods.
type life struct {
	generation uint64
	oldest     time.Time
	ever       time.Time // the same over all its lives
	collecting bool
	again      bool                // while collecting, a port came up
	outcome    nodecache.Knowledge // of the last collect
	reason     string
	next       time.Time
	stood      []string // the Services in front of the pod that came last
}

// memory is what was learned of an owner.
type memory struct {
	info     *nodecache.Info
	ends     time.Time // zero while the owner lives
	services []string  // of the owner when it ended
	// Of the owner when it ended.
	oldest, ever time.Time
	last         nodecache.Pod
	stood        []string
}

func newModel(keep time.Duration) *model {
	return &model{
		keep:     keep,
		lives:    map[nodecache.OwnerKey]*life{},
		memories: map[nodecache.OwnerKey]*memory{},
		fronts:   map[string][]string{},
	}
}

// join is what follows from where a new pod of a living owner stands.
func (m *model) join(l *life, p nodecache.Pod) {
	if len(m.fronts[p.UID]) == 0 {
		return
	}
	l.stood = m.fronts[p.UID]
	var before []uint16
	if i := m.find(p.UID); i >= 0 && m.pods[i].Owner == p.Owner {
		before = nodecache.Member{Pod: &m.pods[i]}.DialPorts()
	} else if others := m.of(p.Owner); len(others) > 0 {
		before = nodecache.Member{Pod: &others[0]}.DialPorts()
	}
	m.reask(l, p, before)
}

// reask opens the knowledge of an owner again of which a pod behind a Service
// has a port that nobody asked about.
func (m *model) reask(l *life, p nodecache.Pod, before []uint16) {
	var asked []nodecache.PortInfo
	if mem := m.memories[p.Owner]; mem != nil && mem.info != nil {
		asked = mem.info.Ports
	}
	for _, port := range (nodecache.Member{Pod: &p}).DialPorts() {
		if len(m.fronts[p.UID]) == 0 || slices.Contains(before, port) ||
			slices.ContainsFunc(asked, func(a nodecache.PortInfo) bool { return a.Port == port }) {
			continue
		}
		if l.collecting {
			l.again = true
		} else {
			l.outcome = nodecache.Unknown
		}
	}
}

// serve puts a Service in front of pods, for the whole of a history.
func (m *model) serve(d *nodecache.Directory, service string, pods ...string) {
	serve(d, service, pods...)
	for _, uid := range pods {
		m.fronts[uid] = append(m.fronts[uid], service)
	}
}

// entries returns what routes lead to an owner.
func (m *model) entries(key nodecache.OwnerKey) []nodecache.RouteEntry {
	var stands []string
	for _, p := range m.of(key) {
		stands = append(stands, m.fronts[p.UID]...)
	}
	if l, mem := m.lives[key], m.memories[key]; len(stands) == 0 && l != nil {
		stands = l.stood
	} else if len(stands) == 0 && mem != nil {
		stands = mem.stood
	}
	var es []nodecache.RouteEntry
	for _, r := range m.routes {
		for i, rule := range r.Rules {
			if b := rule.Backends[0]; b.Weight > 0 && slices.Contains(stands, b.Service.Name) {
				es = append(es, nodecache.RouteEntry{Route: r.UID, Rule: i, Path: rule.Matches[0].Path})
			}
		}
	}
	slices.SortFunc(es, func(a, b nodecache.RouteEntry) int {
		return cmp.Or(strings.Compare(a.Route, b.Route), cmp.Compare(a.Rule, b.Rule))
	})
	return es
}

func (m *model) upsert(p nodecache.Pod, now time.Time, replaces ...string) nodecache.Reservation {
	for _, uid := range replaces {
		if uid != p.UID {
			m.remove(uid, now)
		}
	}
	if p.State == nodecache.Absent {
		m.remove(p.UID, now)
		return nodecache.Reservation{}
	}
	if i := m.find(p.UID); i >= 0 && m.pods[i].Owner != p.Owner {
		m.remove(p.UID, now)
	}
	l := m.lives[p.Owner]
	if l == nil {
		m.generations++
		l = &life{generation: m.generations}
		m.lives[p.Owner] = l
		if mem := m.memories[p.Owner]; mem != nil {
			mem.ends, l.ever, l.stood = time.Time{}, mem.ever, mem.stood
			if mem.info == nil {
				delete(m.memories, p.Owner)
			} else if l.outcome = nodecache.None; len(servicesIn(mem.info)) > 0 {
				l.outcome = nodecache.Known
			}
		}
	}
	i := m.find(p.UID)
	if i < 0 || !m.pods[i].Equal(&p) {
		m.join(l, p)
	}
	if i >= 0 {
		m.pods[i] = p
	} else {
		m.pods = append(m.pods, p)
	}
	for _, at := range []*time.Time{&l.oldest, &l.ever} {
		if !p.Created.IsZero() && (at.IsZero() || p.Created.Before(*at)) {
			*at = p.Created
		}
	}
	return nodecache.Reservation{Key: p.Owner, Generation: l.generation}
}

func (m *model) find(uid string) int {
	return slices.IndexFunc(m.pods, func(p nodecache.Pod) bool { return p.UID == uid })
}

func (m *model) of(key nodecache.OwnerKey) []nodecache.Pod {
	var ps []nodecache.Pod
	for _, p := range m.pods {
		if p.Owner == key {
			ps = append(ps, p)
		}
	}
	slices.SortFunc(ps, func(a, b nodecache.Pod) int { return strings.Compare(a.Name, b.Name) })
	return ps
}

func (m *model) remove(uid string, now time.Time) {
	i := m.find(uid)
	if i < 0 {
		return
	}
	p := m.pods[i]
	if len(m.of(p.Owner)) == 1 {
		for key, mem := range m.memories {
			if !mem.ends.IsZero() && m.decides(key, p.Owner) {
				mem.ends = now.Add(m.keep)
			}
		}
	}
	m.pods = slices.Delete(m.pods, i, i+1)
	if len(m.of(p.Owner)) > 0 {
		return
	}
	ended := m.lives[p.Owner]
	delete(m.lives, p.Owner)
	mem := m.memories[p.Owner]
	if mem == nil && len(p.Declared) > 0 {
		mem = &memory{}
		m.memories[p.Owner] = mem
	}
	if mem != nil {
		mem.ends, mem.stood = now.Add(m.keep), ended.stood
		mem.oldest, mem.ever, mem.last = ended.oldest, ended.ever, p
		mem.services = nil
		if mem.info != nil {
			for _, port := range mem.info.Ports {
				if !declares(p, port.Port) {
					for _, s := range port.Services {
						mem.services = append(mem.services, s.Name)
					}
				}
			}
		}
		mem.services = sorted(append(mem.services, declaredBy(p)...))
	}
}

// stale tells what the directory must say to a reservation.
func (m *model) stale(r nodecache.Reservation) bool {
	l := m.lives[r.Key]
	return l == nil || l.generation != r.Generation
}

func (m *model) commit(r nodecache.Reservation, info *nodecache.Info) {
	if m.stale(r) {
		return
	}
	l := m.lives[r.Key]
	again := l.again
	*l = life{generation: l.generation, oldest: l.oldest, ever: l.ever, outcome: nodecache.None, stood: l.stood}
	if len(servicesIn(info)) > 0 {
		l.outcome = nodecache.Known
	}
	m.memories[r.Key] = &memory{info: info}
	for _, p := range m.of(r.Key) {
		if again {
			m.reask(l, p, nil)
		}
	}
}

func (m *model) fail(r nodecache.Reservation, reason string, next time.Time) {
	if m.stale(r) {
		return
	}
	l := m.lives[r.Key]
	if !l.collecting && (l.outcome == nodecache.Known || l.outcome == nodecache.None) {
		return
	}
	l.collecting, l.outcome, l.reason, l.next = false, nodecache.Failed, reason, next
}

func (m *model) abandon(r nodecache.Reservation) {
	if !m.stale(r) {
		m.lives[r.Key].collecting = false
	}
}

func (m *model) begin(key nodecache.OwnerKey) (nodecache.Reservation, error) {
	l := m.lives[key]
	if l == nil {
		return nodecache.Reservation{}, nodecache.ErrStale
	}
	if l.collecting {
		return nodecache.Reservation{}, nodecache.ErrBusy
	}
	l.collecting, l.again = true, false
	return nodecache.Reservation{Key: key, Generation: l.generation}, nil
}

func (m *model) expire(now time.Time) int {
	var due []nodecache.OwnerKey
	for _, key := range worldOwners {
		if mem := m.memories[key]; mem != nil && !mem.ends.IsZero() && mem.ends.Compare(now) <= 0 {
			due = append(due, key)
		}
	}
	slices.SortStableFunc(due, func(a, b nodecache.OwnerKey) int { return m.memories[a].ends.Compare(m.memories[b].ends) })
	n := 0
	for _, key := range due {
		if !slices.ContainsFunc(worldOwners, func(of nodecache.OwnerKey) bool { return m.decides(key, of) }) {
			delete(m.memories, key)
			n++
		}
	}
	return n
}

func (m *model) upsertRoute(r nodecache.Route) error {
	for i, old := range m.routes {
		if old.UID == r.UID {
			if old.Generation > r.Generation {
				return nodecache.ErrOldRoute
			}
			m.routes[i] = r
			return nil
		}
	}
	m.routes = append(m.routes, r)
	return nil
}

func (m *model) removeRoute(uid string) {
	m.routes = slices.DeleteFunc(m.routes, func(r nodecache.Route) bool { return r.UID == uid })
}

// at returns the UID of the pod that an address belongs to, and whether it
// serves.
func (m *model) at(a netip.Addr) (string, bool) {
	best := -1
	for i, p := range m.pods {
		if p.HostNetwork || p.Addr != a && !slices.Contains(p.More, a) {
			continue
		}
		if best < 0 {
			best = i
			continue
		}
		q := m.pods[best]
		switch {
		case p.State != q.State:
			if p.State == nodecache.Serving {
				best = i
			}
		case !p.Created.Equal(q.Created):
			if p.Created.After(q.Created) {
				best = i
			}
		case p.UID > q.UID:
			best = i
		}
	}
	if best < 0 {
		return "", false
	}
	return m.pods[best].UID, m.pods[best].State == nodecache.Serving
}

func (m *model) knowledge(key nodecache.OwnerKey) nodecache.Knowledge {
	l, mem := m.lives[key], m.memories[key]
	if l == nil {
		switch {
		case mem == nil:
			return nodecache.Unknown
		case len(mem.services) > 0:
			return nodecache.Known
		}
		return nodecache.None
	}
	declared, asked := false, false
	for _, p := range m.of(key) {
		declared = declared || len(p.Declared) > 0
		asked = asked || len(nodecache.Member{Pod: &p}.DialPorts()) > 0
	}
	has := mem != nil && len(servicesIn(mem.info)) > 0
	switch {
	case !l.collecting && l.outcome == nodecache.Known:
		return nodecache.Known
	case declared && (!asked || !l.collecting && l.outcome == nodecache.None):
		return nodecache.Known
	case l.collecting:
		return nodecache.Collecting
	case asked || l.outcome == nodecache.None:
		return l.outcome
	case has:
		return nodecache.Known
	}
	return nodecache.None // nobody can be asked
}

// diff says how a view differs from the model; it is empty if it does not.
func (m *model) diff(key nodecache.OwnerKey, o *nodecache.Owner) string {
	l, mem, pods, entries := m.lives[key], m.memories[key], m.of(key), m.entries(key)
	if l == nil && mem == nil {
		if o != nil {
			return fmt.Sprintf("is %+v, want none", o)
		}
		return ""
	}
	switch {
	case o == nil:
		return "is nil"
	case o.Key != key:
		return fmt.Sprintf("key %v", o.Key)
	case !slices.Equal(o.Routes, entries):
		return fmt.Sprintf("routes %v, want %v", o.Routes, entries)
	case o.Knowledge != m.knowledge(key):
		return fmt.Sprintf("is %s, want %s", o.Knowledge, m.knowledge(key))
	case len(o.Pods) != len(pods):
		return fmt.Sprintf("pods %v, want %v", uids(o), pods)
	}
	for i, p := range pods {
		holder, _ := m.at(p.Addr)
		if !o.Pods[i].Equal(&p) {
			return fmt.Sprintf("pod %+v, want %+v", o.Pods[i].Pod, p)
		}
		if shadowed := !p.HostNetwork && holder != p.UID; o.Pods[i].Shadowed != shadowed {
			return fmt.Sprintf("pod %s shadowed %v, want %v", p.UID, !shadowed, shadowed)
		}
	}
	if l == nil {
		if mem != nil && !slices.Equal(o.Services(), mem.services) {
			return fmt.Sprintf("services %v, want %v", o.Services(), mem.services)
		}
		if o.Generation != 0 {
			return fmt.Sprintf("generation %d without pods", o.Generation)
		}
		return ""
	}
	var info *nodecache.Info
	if mem != nil {
		info = mem.info
	}
	reason, next := "", time.Time{}
	if o.Knowledge == nodecache.Failed {
		reason, next = l.reason, l.next
	}
	switch {
	case o.Generation != l.generation:
		return fmt.Sprintf("generation %d, want %d", o.Generation, l.generation)
	case o.Info != info:
		return fmt.Sprintf("info %v, want %v", o.Info, info)
	case !slices.Equal(presumedIn(o), m.presumed(key, nodecache.OwnerKey{})):
		return fmt.Sprintf("presumed %v, want %v", presumedIn(o), m.presumed(key, nodecache.OwnerKey{}))
	case !slices.Equal(listed(o), servicesOf(presumedIn(o))):
		return fmt.Sprintf("lists %v as presumed, and its pods %v", listed(o), presumedIn(o))
	case !o.Created.Equal(l.oldest):
		return fmt.Sprintf("created %v, want %v", o.Created, l.oldest)
	case o.Knowledge != nodecache.None && o.Reason != reason, !o.NextTry.Equal(next):
		return fmt.Sprintf("reason %q, next %v, want %q, %v", o.Reason, o.NextTry, reason, next)
	}
	return ""
}

func declares(p nodecache.Pod, port uint16) bool {
	return slices.ContainsFunc(p.Declared, func(d nodecache.Declared) bool { return d.Port == port })
}

func declaredBy(p nodecache.Pod) []string {
	var names []string
	for _, d := range p.Declared {
		names = append(names, d.Services...)
	}
	return names
}

func servicesIn(info *nodecache.Info) []string {
	var names []string
	if info != nil {
		for _, p := range info.Ports {
			for _, s := range p.Services {
				names = append(names, s.Name)
			}
		}
	}
	return names
}

func sorted(names []string) []string {
	slices.Sort(names)
	return slices.Compact(names)
}
