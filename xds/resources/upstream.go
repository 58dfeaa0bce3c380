package resources

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// Upstream returns the clusters by which a client of the namespace, with clusters
// on demand, calls what its pod declares: each, for an upstream without a gRPC
// service, that is known to be served there. reason says why they lead nowhere
// yet, or why there are none; it is empty if they do.
func (c *Compiler) Upstream(dir Services, namespace string, u nodecache.Upstream) (clusters []string, reason string) {
	if u.Authority == "" {
		name := clusterName(namespace, u.Service)
		if len(c.Found(namespace, []string{name})) == 0 {
			reason = "nobody is known to serve it"
		}
		return []string{name}, reason
	}
	r := &refresh{dir: dir, views: map[nodecache.Name]*nodecache.FrontView{}, owners: map[nodecache.OwnerKey]*nodecache.Owner{}}
	host, port := splitAuthority(u.Authority)
	p := r.find(namespace, host, port)
	if u.Service != "" {
		if reason = p.reason; reason == "" && r.crowd(&p, u.Service).refuses(u.Service) {
			reason = "nobody there serves it"
		}
		return []string{atName(host+port, u.Service)}, reason
	}
	if p.reason != "" {
		return nil, p.reason
	}
	for _, service := range r.crowd(&p, "").services() {
		clusters = append(clusters, atName(host+port, service))
	}
	if len(clusters) == 0 {
		reason = "nobody there says what he serves: name the gRPC service as well"
	}
	return clusters, reason
}

// Leads tells whether the cluster of a name that a client of the namespace may
// ask for leads to somebody.
func (c *Compiler) Leads(dir Services, namespace, name string) bool {
	authority, service, ok := parseWanted(namespace, name)
	if !ok {
		return false
	}
	_, reason := c.Upstream(dir, namespace, nodecache.Upstream{Authority: authority, Service: service})
	return reason == ""
}

// declaration is what pods of a namespace declare to call beyond it, for their
// sidecars that have all clusters.
type declaration struct {
	users    int
	ports    map[nodecache.Name]map[uint16]struct{}
	evidence xds.Evidence // as last published
}

// Declare makes the clusters by Service names for one more client of the
// namespace which has all clusters, and whose pod declares the upstreams: those
// of Services of other namespaces, since of its own such a client has all. It
// returns the scope in which they stand; [xds.Shared] for none.
func (c *Compiler) Declare(dir Services, namespace string, ups []nodecache.Upstream) (xds.Scope, xds.Update) {
	ports := beyond(namespace, ups)
	var u xds.Update
	if len(ports) == 0 {
		return xds.Shared, u
	}
	scope := declaredScope(namespace, ports)
	c.mu.Lock()
	defer c.mu.Unlock()
	d := c.declared[scope]
	if d == nil {
		d = &declaration{ports: ports}
		c.declared[scope] = d
		c.aliases[scope] = map[nodecache.Name]map[string]*backend{}
		r := c.refresh(dir)
		for name := range ports {
			r.aliasIn(scope, name, d.has, &u)
		}
		sortSet(&u)
	}
	d.users++
	c.doubtDeclared(scope, &u)
	return scope, u
}

// Undeclare takes back one [Compiler.Declare] that returned the scope.
func (c *Compiler) Undeclare(scope xds.Scope) (u xds.Update) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := c.declared[scope]
	if d == nil {
		return u
	}
	if d.users--; d.users > 0 {
		return u
	}
	for _, made := range c.aliases[scope] {
		for _, b := range made {
			u.Remove = append(u.Remove, b.cluster.ID, b.cla.ID)
		}
	}
	d.tell(scope, xds.Complete, &u) // of nothing all is known
	delete(c.aliases, scope)
	delete(c.declared, scope)
	return u
}

// Declares tells whether a client of the namespace whose pod declares the
// upstreams, and which has all clusters, has that one for it.
func (c *Compiler) Declares(namespace string, ups []nodecache.Upstream, cluster string) bool {
	ports := beyond(namespace, ups)
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, made := range c.aliases[declaredScope(namespace, ports)] {
		if made[cluster] != nil {
			return true
		}
	}
	return false
}

// beyond are the ports of Services of other namespaces among the upstreams, by
// the one form in which a client that has all clusters calls them.
func beyond(namespace string, ups []nodecache.Upstream) map[nodecache.Name]map[uint16]struct{} {
	ports := map[nodecache.Name]map[uint16]struct{}{}
	for _, up := range ups {
		host, port := splitAuthority(up.Authority)
		name, n, ok := parseAlias(aliasOf(namespace, host, port))
		if up.Authority == "" || !ok || name.Namespace == namespace {
			continue
		}
		if ports[name] == nil {
			ports[name] = map[uint16]struct{}{}
		}
		ports[name][n] = struct{}{}
	}
	return ports
}

// has tells whether a port of a Service is declared.
func (d *declaration) has(name nodecache.Name, port uint16) bool {
	_, ok := d.ports[name][port]
	return ok
}

// parseAlias reads what [alias] wrote.
func parseAlias(authority string) (nodecache.Name, uint16, bool) {
	host, port, _ := strings.Cut(authority, ":")
	n, err := strconv.ParseUint(port, 10, 16)
	service, namespace, ok := strings.Cut(host, ".")
	if err != nil || n == 0 || !ok || !label.MatchString(service) || !label.MatchString(namespace) {
		return nodecache.Name{}, 0, false
	}
	return nodecache.Name{Namespace: namespace, Name: service}, uint16(n), true
}

// declaredScope is the same for all that declare the same.
func declaredScope(namespace string, ports map[nodecache.Name]map[uint16]struct{}) xds.Scope {
	var all []string
	for name, of := range ports {
		for port := range of {
			all = append(all, alias(name, port))
		}
	}
	slices.Sort(all)
	sum := sha256.Sum256([]byte(strings.Join(all, ",")))
	return xds.Scope(fmt.Sprintf("declared/%s#%s", namespace, base64.RawURLEncoding.EncodeToString(sum[:12])))
}

// doubtDeclared needs mu. It writes the evidence of a scope of declared
// upstreams: the worst of their namespaces'.
func (c *Compiler) doubtDeclared(scope xds.Scope, u *xds.Update) {
	d, worst := c.declared[scope], xds.Complete
	for name := range d.ports {
		if ns := c.namespaces[name.Namespace]; ns != nil {
			worst = max(worst, ns.evidence)
		}
	}
	d.tell(scope, worst, u)
}

// tell writes evidence if it is news.
func (d *declaration) tell(scope xds.Scope, e xds.Evidence, u *xds.Update) {
	if d.evidence == e {
		return
	}
	d.evidence = e
	if u.Evidence == nil {
		u.Evidence = map[xds.Scope]xds.Evidence{}
	}
	u.Evidence[scope] = e
}

// doubtDeclaredOf needs mu. It does so for those that declare a Service of the
// namespace.
func (c *Compiler) doubtDeclaredOf(namespace string, u *xds.Update) {
	for scope, d := range c.declared {
		for name := range d.ports {
			if name.Namespace == namespace {
				c.doubtDeclared(scope, u)
				break
			}
		}
	}
}
