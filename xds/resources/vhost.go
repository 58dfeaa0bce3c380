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
		v := &routev3.VirtualHost{Name: h.front.Key().String() + "/" + strconv.Itoa(int(h.port.Port)), Domains: h.domains}
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

// Choice says what the routes of a Service make of a call.
type Choice struct {
	// Service and Port are what the authority names.
	Service nodecache.Name
	Port    uint16
	// Route takes the call, by its rule and match of these indexes. It is nil
	// if none does: then the call ends with 404 or UNIMPLEMENTED.
	Route       *nodecache.Route
	Rule, Match int
	// Shares are who may get the call; none where the rule redirects, or where
	// it fails for want of a backend.
	Shares []Share
	// Transcodes are the gRPC services to which JSON calls are transcoded by
	// the rule. NotTranscoded says why the descriptors of a backend are not used
	// for that; empty where there are none, or they are.
	Transcodes    []string
	NotTranscoded string
}

// Share is a part of the calls.
type Share struct {
	// Cluster is empty for the share that fails, since its backend may not be
	// called or is not there.
	Cluster string
	Weight  uint32 // of the sum over all shares
}

// Choose says what the routes make of a call that a client of the namespace
// makes to the authority. It returns false if no route speaks for the Service
// there, so that the call goes where its names say.
func (c *Compiler) Choose(namespace, authority string, call routetable.Call) (Choice, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	authority = strings.ToLower(authority)
	for h := range c.hosts(namespace) {
		if !slices.Contains(h.domains, authority) {
			continue
		}
		choice := Choice{Service: h.front.Key(), Port: h.port.Port}
		e, ok := h.table.Match(call)
		if !ok {
			return choice, true
		}
		choice.Route, choice.Rule, choice.Match = e.Route, e.Rule, e.Match
		for _, s := range shares(e, c.frontPort) {
			sh := Share{Weight: s.weight}
			if s.id != (backendID{}) {
				sh.Cluster = s.id.String()
			}
			choice.Shares = append(choice.Shares, sh)
		}
		if p := c.transcodes(e.Route.Kind, e.In()); p != nil {
			choice.Transcodes = p.set.Services
		} else {
			choice.NotTranscoded = c.whyNot(e.In())
		}
		return choice, true
	}
	return Choice{}, false
}
