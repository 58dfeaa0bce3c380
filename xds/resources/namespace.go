package resources

import (
	"slices"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// namespace is what is known of the owners of one Kubernetes namespace.
type namespace struct {
	node     string // the one whose pods may be asked; empty: all
	owners   int    // that have a view
	services map[string]*service
	// unsettled holds the owners of which it is open what they serve.
	unsettled map[nodecache.OwnerKey]*nodecache.Owner
	doubts    [3]int        // how many unsettled owners give which evidence
	evidence  xds.Evidence  // as last published
	changed   chan struct{} // closed at the next change; nil while nobody waits
}

func newNamespace(node string) *namespace {
	return &namespace{
		node:      node,
		services:  map[string]*service{},
		unsettled: map[nodecache.OwnerKey]*nodecache.Owner{},
	}
}

// doubt says what the absence of a name from one owner is worth. An owner
// whose info is at hand is no reason for doubt, whatever became of a later
// attempt; nor is one without pods, which could serve nothing. One that hangs
// has not been asked to the end. One that nobody may ask, by the node whose pods
// alone may be, must not keep clients waiting for an answer that does not come.
func doubt(o *nodecache.Owner, node string) xds.Evidence {
	switch {
	case len(o.Pods) == 0 || o.Info != nil || o.Knowledge.Settled():
		return xds.Complete
	case o.Knowledge == nodecache.Failed && !o.Hung:
		return xds.Failed
	case o.Knowledge == nodecache.Unknown && o.WhyNotAsked(node) != "":
		return xds.Failed
	default:
		return xds.Pending
	}
}

// add and drop need the compiler's mu.
func (ns *namespace) add(o *nodecache.Owner) {
	ns.owners++
	if e := doubt(o, ns.node); e != xds.Complete {
		ns.unsettled[o.Key] = o
		ns.doubts[e]++
	}
}

func (ns *namespace) drop(o *nodecache.Owner) {
	ns.owners--
	if e := doubt(o, ns.node); e != xds.Complete {
		delete(ns.unsettled, o.Key)
		ns.doubts[e]--
	}
}

// settle needs mu. It writes the evidence of a namespace that changed, wakes
// who waits for that, and forgets a namespace of which nothing is left.
func (c *Compiler) settle(name string, u *xds.Update) {
	ns := c.namespaces[name]
	if ns == nil {
		return
	}
	doubts := ns.doubts
	for _, o := range c.foreignSuspects(name) {
		doubts[doubt(o, c.node)]++
	}
	worst := xds.Complete
	for _, e := range [...]xds.Evidence{xds.Failed, xds.Pending} {
		if doubts[e] > 0 {
			worst = e
		}
	}
	if worst != ns.evidence {
		ns.evidence = worst
		if u.Evidence == nil {
			u.Evidence = map[xds.Scope]xds.Evidence{}
		}
		u.Evidence[xds.NamespaceScope(name)] = worst
		c.doubtDeclaredOf(name, u)
		c.standInAll(name, u)
	}
	if ns.changed != nil {
		close(ns.changed)
		ns.changed = nil
	}
	if ns.owners == 0 && c.routes[name] == nil {
		delete(c.namespaces, name)
	}
}

// Answer is what is known of one service in one namespace.
type Answer struct {
	// Served is set if the service has a cluster.
	Served bool
	// Suspects are the owners of the namespace of which it is open whether
	// they serve it: Unknown, Collecting or Failed. Sorted by name and key.
	Suspects []*nodecache.Owner
	// Changed is closed at the next change of an owner of the namespace. It
	// is nil unless Suspects has entries.
	Changed <-chan struct{}
}

// Lookup says what is known of a service in a namespace now.
func (c *Compiler) Lookup(name, service string) Answer {
	c.mu.Lock()
	defer c.mu.Unlock()
	ns := c.namespaces[name]
	if ns == nil {
		return Answer{}
	}
	if _, ok := ns.services[service]; ok {
		return Answer{Served: true}
	}
	a := Answer{Suspects: c.foreignSuspects(name)}
	for _, o := range ns.unsettled {
		a.Suspects = append(a.Suspects, o)
	}
	if len(a.Suspects) == 0 {
		return Answer{}
	}
	slices.SortFunc(a.Suspects, compareOwners)
	if ns.changed == nil {
		ns.changed = make(chan struct{})
	}
	a.Changed = ns.changed
	return a
}
