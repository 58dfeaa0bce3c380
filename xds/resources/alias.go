package resources

import (
	"fmt"
	"maps"
	"slices"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// A client that has all its clusters from the start cannot ask for what a call
// names, and the names are without end. It gets, for each port of the Services
// of its own namespace, under the one form service.namespace:port, a cluster for
// each gRPC service that somebody behind the port is known to serve, and where
// there are pods that cannot say what they serve one without a service's name,
// for the calls of every other: such a call is not served by the pods that have
// said what they serve, so that it has the same endpoints whatever it names.
// route.lua writes a call's authority in that form.

// alias is the authority of a Service's port in the form that these clients have.
func alias(service nodecache.Name, port uint16) string {
	return fmt.Sprintf("%s.%s:%d", service.Name, service.Namespace, port)
}

// Aliases returns the clusters by Service names that clients with all clusters
// have in the namespace. It is as [Compiler.Namespace]: at the first call, all;
// later what changes comes by [Compiler.Fronts].
func (c *Compiler) Aliases(dir Services, namespace string) xds.Update {
	c.mu.Lock()
	defer c.mu.Unlock()
	var u xds.Update
	if c.aliases[xds.AliasScope(namespace)] != nil {
		return u
	}
	c.aliases[xds.AliasScope(namespace)] = map[nodecache.Name]map[string]*backend{}
	r := c.refresh(dir)
	for _, name := range dir.FrontNames() {
		r.alias(name, &u)
	}
	sortSet(&u)
	return u
}

// alias needs mu. It writes the clusters by the Service's name for clients that
// have all: those of its namespace, and those whose pods declare it.
func (r *refresh) alias(name nodecache.Name, u *xds.Update) {
	if scope := xds.AliasScope(name.Namespace); r.c.aliases[scope] != nil {
		r.aliasIn(scope, name, func(nodecache.Name, uint16) bool { return true }, u)
	}
	for scope, d := range r.c.declared {
		if d.ports[name] != nil {
			r.aliasIn(scope, name, d.has, u)
		}
	}
}

// aliasIn needs mu. It writes those of the ports that has wants, in a scope that
// is there.
func (r *refresh) aliasIn(scope xds.Scope, name nodecache.Name, has func(nodecache.Name, uint16) bool, u *xds.Update) {
	of := r.c.aliases[scope]
	was, now := of[name], map[string]*backend{}
	if v := r.view(name); v != nil && v.External == "" && label.MatchString(name.Name) {
		for _, fp := range v.Ports {
			if has(name, fp.Port) {
				p := place{port: fp.Port}
				r.findMembers(&p, v, v.Members())
				r.aliasPort(scope, fp, &p, was, now, u)
			}
		}
	}
	for _, cluster := range slices.Sorted(maps.Keys(was)) {
		if now[cluster] == nil {
			u.Remove = append(u.Remove, xds.ID{Type: xds.Cluster, Name: cluster, Scope: scope}, xds.ID{Type: xds.Endpoint, Name: cluster, Scope: scope})
		}
	}
	if len(now) == 0 {
		delete(of, name)
	} else {
		of[name] = now
	}
}

// aliasPort needs mu. A cluster that was there stays until it is known of all
// behind the port that they do not serve what it is for.
func (r *refresh) aliasPort(scope xds.Scope, fp nodecache.FrontPort, p *place, was, now map[string]*backend, u *xds.Update) {
	crowd, authority := r.crowd(p, ""), alias(p.service, fp.Port)
	add := func(name, service string, wanted bool) {
		if wanted || was[name] != nil && !crowd.refuses(service) {
			if b := r.c.pair(name, scope, crowd.endpoints(service), r.policy(p, crowd, was[name]), was[name], u); b != nil {
				now[name] = b
			}
		}
	}
	add(atPrefix+authority, anyOther, crowd.silent(fp))
	for _, service := range crowd.services() {
		add(atName(authority, service), service, true)
	}
	for name := range was {
		if service := calledBy(name, authority); service != "" && now[name] == nil {
			add(name, service, false)
		}
	}
}

// calledBy is the gRPC service in the name of the authority's cluster; empty if
// it is another's.
func calledBy(name, authority string) string {
	prefix := atName(authority, "")
	if len(name) <= len(prefix) || name[:len(prefix)] != prefix {
		return ""
	}
	return name[len(prefix):]
}

// services are those that somebody there is known to serve, sorted.
func (c crowd) services() []string {
	var names []string
	for i := range c {
		if s := &c[i]; s.member.Pod != nil && s.absent != NoSuchPort {
			names = append(names, s.owner.On(s.member.Pod, s.target)...)
		}
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), unservable)
}

// silent tells whether somebody there speaks gRPC, for what is said of the
// port, and does not say what it serves: who is yet to be asked may.
func (c crowd) silent(fp nodecache.FrontPort) bool {
	return slices.ContainsFunc(c, func(s standee) bool {
		switch {
		case s.absent != "" || s.lacks(anyOther) || s.owner != nil && unasked(s.owner):
			return false
		case s.member.Pod == nil:
			return fp.GRPC()
		}
		return slices.ContainsFunc(s.member.AllHints(), func(h nodecache.Hint) bool { return h.Port == s.target })
	})
}

// pair needs mu. It returns a cluster and its CLA as they are from now on, nil
// if they cannot be made.
func (c *Compiler) pair(name string, scope xds.Scope, es []endpoint, policy *nodecache.Policy, old *backend, u *xds.Update) *backend {
	return c.pairOf(name, scope, func() *clusterv3.Cluster { return cluster(name, policy) }, es, policy, old, u)
}

// pairOf is pair with a cluster of its own making, which has the policy.
func (c *Compiler) pairOf(name string, scope xds.Scope, make func() *clusterv3.Cluster, es []endpoint, policy *nodecache.Policy, old *backend, u *xds.Update) *backend {
	if old == nil {
		old = &backend{}
	}
	b := &backend{
		cluster: c.build(xds.ID{Type: xds.Cluster, Name: name, Scope: scope}, func() proto.Message { return make() }, old.cluster, u),
		cla:     c.build(xds.ID{Type: xds.Endpoint, Name: name, Scope: scope}, func() proto.Message { return c.locality.assignment(name, es) }, old.cla, u),
		policy:  policy,
	}
	if b.cluster == nil || b.cla == nil {
		return nil
	}
	return b
}
