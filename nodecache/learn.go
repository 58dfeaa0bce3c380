package nodecache

import (
	"slices"
	"time"
)

// Learned is what is known of one owner, in short.
type Learned struct {
	// Generation is 0 for an owner without pods.
	Generation uint64
	Namespace  string // empty for an owner without pods
	// Knowledge is that of collects alone: it leaves out what follows from
	// declarations, and from having nobody to ask.
	Knowledge Knowledge
	Info      *Info // nil unless the owner was collected
	// Failure is set where Knowledge is Failed.
	Failure Failure
}

// Failure is a collect that failed.
type Failure struct {
	Reason string
	Next   time.Time // when the owner is asked again
	Hung   bool      // see [Directory.Hang]
}

// Learned returns what is known of an owner, without the cost of a view.
func (d *Directory) Learned(key OwnerKey) Learned {
	d.mu.RLock()
	defer d.mu.RUnlock()
	l := Learned{Info: d.info(key)}
	rec := d.owners[key]
	if rec == nil {
		if l.Info != nil {
			l.Knowledge = knowledgeOf(l.Info)
		}
		return l
	}
	l.Generation, l.Namespace, l.Knowledge = rec.generation, rec.workload.Namespace, rec.stored
	if rec.stored == Failed {
		l.Failure = Failure{Reason: rec.reason, Next: rec.next, Hung: rec.hung}
	}
	return l
}

// Hosts returns the nodes on which a pod of the owner stands that may be asked
// what it serves, each once, sorted; and whether the owner has pods at all.
func (d *Directory) Hosts(key OwnerKey) (nodes []string, there bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	rec := d.owners[key]
	if rec == nil {
		return nil, false
	}
	for _, p := range rec.pods {
		if !slices.Contains(nodes, p.Node) && d.asked(p) {
			nodes = append(nodes, p.Node)
		}
	}
	slices.Sort(nodes)
	return nodes, true
}

// asked needs mu, for reading at least. It tells whether the pod may be asked
// what it serves by somebody on its node.
func (d *Directory) asked(p *Pod) bool {
	m := Member{Pod: p, Behind: d.fronts.behind[p.UID]} // mostly that is enough to know
	return m.WhyNotAsked("") == "" && !d.shadowed(p)
}

// hosted needs mu, for reading at least.
func (d *Directory) hosted(rec *record, node string) bool {
	return slices.ContainsFunc(rec.pods, func(p *Pod) bool { return p.Node == node && d.asked(p) })
}

// Learn keeps what the agent of a node says of an owner. It changes nothing and
// returns [ErrStale] if the owner has no pods, [ErrNotHosted] if none of those
// that may be asked stands on the node, and [ErrOlder] if what is known was
// collected at the same time or later. A collect of one's own that is under way
// goes on, and its result takes the place of this one.
func (d *Directory) Learn(key OwnerKey, node string, info *Info) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec := d.owners[key]
	switch was := d.info(key); {
	case rec == nil:
		return ErrStale
	case !d.hosted(rec, node):
		return ErrNotHosted
	case was != nil && !info.Collected.After(was.Collected):
		return ErrOlder
	}
	d.learn(key, rec, info)
	return nil
}

// LearnFailure keeps that the agent of a node asked an owner in vain. Its errors
// are those of Learn, of which ErrOlder means that something was learned of the
// owner, and [ErrBusy]: a collect of one's own will tell.
func (d *Directory) LearnFailure(key OwnerKey, node string, f Failure) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec := d.owners[key]
	switch {
	case rec == nil:
		return ErrStale
	case !d.hosted(rec, node):
		return ErrNotHosted
	case d.info(key) != nil:
		return ErrOlder
	case rec.stored == Collecting:
		return ErrBusy
	}
	if rec.stored == Failed && rec.reason == f.Reason && rec.next.Equal(f.Next) && rec.hung == f.Hung {
		return nil
	}
	rec.stored, rec.reason, rec.next, rec.hung = Failed, f.Reason, f.Next, f.Hung
	d.changedKnowledge(key)
	return nil
}
