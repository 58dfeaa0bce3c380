package resources

import (
	"cmp"
	"slices"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// exports is what owners offer to other namespaces. Compiler.mu guards it.
type exports struct {
	// byName holds, for each service, the owners that export it.
	byName map[string]map[nodecache.OwnerKey]*nodecache.Owner
	// unsettled holds the exporting owners of which it is open what they serve.
	unsettled map[nodecache.OwnerKey]*nodecache.Owner
}

func newExports() exports {
	return exports{
		byName:    map[string]map[nodecache.OwnerKey]*nodecache.Owner{},
		unsettled: map[nodecache.OwnerKey]*nodecache.Owner{},
	}
}

// exporting tells whether the owner exports to anybody.
func (c *Compiler) exporting(o *nodecache.Owner) bool {
	return c.all && o.Export == nil || slices.ContainsFunc(o.Export, func(to string) bool { return to != nodecache.ExportNone })
}

// exportsTo tells whether callers of another namespace may reach the owner's
// services by their names alone.
func (c *Compiler) exportsTo(o *nodecache.Owner, namespace string) bool {
	return o.Workload.Namespace != namespace &&
		(c.all && o.Export == nil || slices.Contains(o.Export, nodecache.ExportAll) || slices.Contains(o.Export, namespace))
}

// from needs mu. It returns the owners that a name means in a namespace: its
// own, else those that export it there. Only namespaces that have clients are
// exported to.
func (c *Compiler) from(id serviceID) map[nodecache.OwnerKey]*nodecache.Owner {
	if s := c.services[id]; s != nil && len(s.owners) > 0 {
		return s.owners
	}
	if c.routes[id.namespace] == nil {
		return nil
	}
	var from map[nodecache.OwnerKey]*nodecache.Owner
	for key, o := range c.exports.byName[id.name] {
		if c.exportsTo(o, id.namespace) {
			if from == nil {
				from = map[nodecache.OwnerKey]*nodecache.Owner{}
			}
			from[key] = o
		}
	}
	return from
}

// offer needs mu. It adds what an owner exports.
func (c *Compiler) offer(o *owner, touched map[serviceID]struct{}, spaces map[string]struct{}) {
	if !c.exporting(o.view) {
		return
	}
	for _, name := range o.services {
		set := c.exports.byName[name]
		if set == nil {
			set = map[nodecache.OwnerKey]*nodecache.Owner{}
			c.exports.byName[name] = set
		}
		set[o.view.Key] = o.view
	}
	if doubt(o.view, c.node) != xds.Complete {
		c.exports.unsettled[o.view.Key] = o.view
	}
	c.touchImports(o, touched, spaces)
}

// withdraw needs mu. It takes back what offer added.
func (c *Compiler) withdraw(o *owner, touched map[serviceID]struct{}, spaces map[string]struct{}) {
	if !c.exporting(o.view) {
		return
	}
	for _, name := range o.services {
		set := c.exports.byName[name]
		delete(set, o.view.Key)
		if len(set) == 0 {
			delete(c.exports.byName, name)
		}
	}
	delete(c.exports.unsettled, o.view.Key)
	c.touchImports(o, touched, spaces)
}

// touchImports needs mu. It notes what may change for the namespaces to which
// the owner exports.
func (c *Compiler) touchImports(o *owner, touched map[serviceID]struct{}, spaces map[string]struct{}) {
	for ns := range c.routes {
		if !c.exportsTo(o.view, ns) {
			continue
		}
		spaces[ns] = struct{}{}
		for _, name := range o.services {
			touched[serviceID{ns, name}] = struct{}{}
		}
	}
}

// importAll needs mu. It compiles what a namespace that has clients from now on
// is offered.
func (c *Compiler) importAll(namespace string, u *xds.Update) {
	c.space(namespace)
	names := map[string]struct{}{}
	for name := range c.exports.byName {
		names[name] = struct{}{}
	}
	for _, name := range sorted(names, cmp.Compare[string]) {
		// What it has of its own stands already.
		if s := c.services[serviceID{namespace, name}]; s == nil {
			c.compile(serviceID{namespace, name}, u)
		}
	}
	c.settle(namespace, u)
	slices.SortStableFunc(u.Set, func(a, b *xds.Resource) int { return cmp.Compare(a.Type, b.Type) })
}

// foreignSuspects needs mu. It returns the owners of other namespaces of which
// it is open whether they export something to this one.
func (c *Compiler) foreignSuspects(namespace string) []*nodecache.Owner {
	if c.routes[namespace] == nil {
		return nil
	}
	var os []*nodecache.Owner
	for _, o := range c.exports.unsettled {
		if c.exportsTo(o, namespace) {
			os = append(os, o)
		}
	}
	return os
}
