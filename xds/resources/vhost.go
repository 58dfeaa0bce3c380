package resources

import (
	"iter"
	"net"
	"slices"
	"strconv"
	"strings"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

// clusterDomain is the DNS domain of the cluster.
const clusterDomain = "cluster.local"

// host is a port of a Service for which routes speak.
type host struct {
	front   *nodecache.Front
	port    nodecache.FrontPort
	domains []string
	table   routetable.Table
}

// domains returns the authorities by which callers of the namespace may name
// the port of the Service, as Envoy compares them: whole and in lower case. An
// authority without a port means 80, as in HTTP, and where the Service has no
// such port its first.
func domains(namespace string, f *nodecache.Front, port nodecache.FrontPort) []string {
	long := f.Name + "." + f.Namespace
	names := []string{long, long + ".svc", long + ".svc." + clusterDomain}
	if f.Namespace == namespace {
		names = append(names, f.Name)
	}
	for _, n := range slices.Clone(names) {
		names = append(names, n+".")
	}
	// That is the caller's own host, not a Service of such a name.
	names = slices.DeleteFunc(names, func(n string) bool { return strings.TrimSuffix(n, ".") == "localhost" })
	for _, ip := range f.ClusterIPs {
		if !ip.IsLoopback() {
			names = append(names, ip.String())
		}
	}
	var out []string
	for _, n := range names {
		with := net.JoinHostPort(n, strconv.Itoa(int(port.Port)))
		if defaultPort(f) == port.Port {
			out = append(out, strings.TrimSuffix(with, ":"+strconv.Itoa(int(port.Port))))
		}
		out = append(out, with)
	}
	return out
}

// defaultPort is the one that is meant where none is named.
func defaultPort(f *nodecache.Front) uint16 {
	if slices.ContainsFunc(f.Ports, func(p nodecache.FrontPort) bool { return p.Port == 80 }) {
		return 80
	}
	return f.Ports[0].Port
}

// hosts yields the ports for which routes speak where a caller of the namespace
// names them, those of the oldest Service first. It needs mu, for reading at
// least. No two have a domain in common: of two Services that claim one
// address, as one does that is not quite gone, the older has it.
func (c *Compiler) hosts(namespace string) iter.Seq[host] {
	return func(yield func(host) bool) {
		var fs []*front
		for _, f := range c.fronts {
			if f.front != nil && len(f.routes) > 0 && label.MatchString(f.front.Name) && label.MatchString(f.front.Namespace) {
				fs = append(fs, f)
			}
		}
		slices.SortFunc(fs, func(a, b *front) int { return a.front.Compare(b.front) })
		taken := map[string]bool{}
		for _, f := range fs {
			for _, port := range f.front.Ports {
				h := host{front: f.front, port: port, table: routetable.New(namespace, f.front.Key(), port, f.routes)}
				if len(h.table.Entries) == 0 {
					continue
				}
				for _, d := range domains(namespace, f.front, port) {
					if !taken[d] {
						taken[d] = true
						h.domains = append(h.domains, d)
					}
				}
				if len(h.domains) > 0 && !yield(h) {
					return
				}
			}
		}
	}
}

// frontPort is that of [portOf] for the Service of the name. It needs mu, for
// reading at least.
func (c *Compiler) frontPort(name nodecache.Name, port uint16) (nodecache.FrontPort, bool) {
	if f := c.fronts[name]; f != nil {
		return portOf(f.front, port)
	}
	return nodecache.FrontPort{}, false
}

// virtualHosts needs mu. It writes the hosts of a namespace's callers, and
// returns the backends that their routes name.
func (c *Compiler) virtualHosts(namespace string) ([]*routev3.VirtualHost, map[backendID]struct{}) {
	var out []*routev3.VirtualHost
	named := map[backendID]struct{}{}
	scope := xds.NamespaceScope(namespace)
	for h := range c.hosts(namespace) {
		v := &routev3.VirtualHost{Name: h.String(), Domains: h.domains}
		var plain []*routev3.Route
		for _, e := range h.table.Entries {
			to := shares(e, c.frontPort)
			services := []string{""}
			rs, err := entryRoutes(e, to)
			if p := c.transcodes(e.Route.Kind, e.In()); p != nil && err == nil {
				var again []*routev3.Route
				if again, err = transcodedRoutes(e, to, p.set.Services); err == nil {
					// In front of all others: one for every path would take them.
					v.Routes = append(v.Routes, again...)
					services = append(services, p.set.Services...)
					for _, r := range rs {
						r.TypedPerFilterConfig = map[string]*anypb.Any{transcoderName: p.config}
					}
				}
			}
			if err != nil {
				c.leftOut(xds.ID{Type: xds.Route, Name: entryName(e), Scope: scope}, err)
			}
			plain = append(plain, rs...)
			for _, s := range to {
				for _, service := range services {
					if s.id != (backendID{}) {
						named[s.id.calling(service)] = struct{}{}
					}
				}
			}
		}
		v.Routes = append(v.Routes, plain...)
		if err := v.ValidateAll(); err != nil {
			c.leftOut(xds.ID{Type: xds.Route, Name: v.Name, Scope: scope}, err)
			continue
		}
		out = append(out, v)
	}
	return out, named
}
