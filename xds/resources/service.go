package resources

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// serviceID is a gRPC service of one namespace.
type serviceID struct{ namespace, name string }

func (a serviceID) compare(b serviceID) int {
	return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
}

// serviceName is what the route table takes for the name of a gRPC service.
var serviceName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$`)

// unservable names get no cluster: no call by path alone could mean them.
func unservable(name string) bool {
	return nodecache.Infrastructure(name) || !serviceName.MatchString(name)
}

// service is a name that some owner serves, or served while it had pods.
type service struct {
	owners map[nodecache.OwnerKey]*nodecache.Owner // of its own namespace
	// from is what it was compiled from: owners, or where there are none those
	// that export it.
	from     map[nodecache.OwnerKey]*nodecache.Owner
	provider nodecache.Workload // the first one, when it was compiled last
	host     string             // host:port of a cluster that follows a DNS name; else empty
	policy   *nodecache.Policy  // that the cluster has
	// What is published, nil where nothing is.
	cluster, cla, api *xds.Resource
}

// endpoint is one address of a service.
type endpoint struct {
	addr     netip.AddrPort // the port alone where there is a host
	host     string         // a DNS name; the provider has no other endpoint
	pod      *nodecache.Pod
	zone     string // empty where nobody says
	presumed bool
}

// String is ip:port or host:port.
func (e endpoint) String() string {
	if e.host != "" {
		return e.host + ":" + strconv.Itoa(int(e.addr.Port()))
	}
	return e.addr.String()
}

// address ends a host with a dot: as the CNAME that it stands for, it is not to
// be looked for in the caller's search domains. One label alone (localhost)
// stands without the dot in /etc/hosts, where resolvers compare it so.
func (e endpoint) address() *corev3.Address {
	switch {
	case e.host == "":
		return tcpAddress(e.addr.Addr().String(), e.addr.Port())
	case strings.Contains(e.host, "."):
		return tcpAddress(e.host+".", e.addr.Port())
	}
	return tcpAddress(e.host, e.addr.Port())
}

func (e endpoint) serving() bool { return e.pod.State == nodecache.Serving }

// state is how listings show it.
func (e endpoint) state() string {
	if e.presumed && e.serving() {
		return StatePresumed
	}
	return e.pod.State.String()
}

func anyServing(es []endpoint) bool { return slices.ContainsFunc(es, endpoint.serving) }

// split returns the owners of the provider and those of the other workloads,
// the provider's first workload first, each sorted by workload and key. The
// provider is the first workload by the order of [claim.compare], with those
// that stand behind one of its Services. One whose pods have gone counts as
// long as its services are remembered: else a rollout that stops the old pods
// first would hand its calls to a workload that merely serves the same name.
func split(claims []*claim) (provider, claimants []*nodecache.Owner) {
	for _, c := range claims {
		if c.related(claims[0]) {
			provider = append(provider, c.owners...)
		} else {
			claimants = append(claimants, c.owners...)
		}
	}
	return provider, claimants
}

// claim is one workload that implements a service.
type claim struct {
	owners []*nodecache.Owner // sorted by key
	// fronts are the Services that lead to a port on which it answers; where
	// none does, all that it stands behind. The oldest is the first.
	fronts []*nodecache.Front
}

// claims returns the workloads that implement the name, the provider's first.
func (s *service) claims(name string) []*claim {
	by := map[nodecache.Workload]*claim{}
	var claims []*claim
	for _, o := range s.from {
		c := by[o.Workload]
		if c == nil {
			c = &claim{}
			by[o.Workload] = c
			claims = append(claims, c)
		}
		c.owners = append(c.owners, o)
	}
	for _, c := range claims {
		slices.SortFunc(c.owners, func(a, b *nodecache.Owner) int { return compareKeys(a.Key, b.Key) })
		c.fronts = frontsOf(name, c.owners)
	}
	slices.SortFunc(claims, (*claim).compare)
	return claims
}

func frontsOf(name string, owners []*nodecache.Owner) []*nodecache.Front {
	var leading, all []*nodecache.Front
	for _, o := range owners {
		ports := o.Ports(name)
		for _, st := range o.Behind {
			all = append(all, st.Front)
			if slices.ContainsFunc(ports, st.Leads) {
				leading = append(leading, st.Front)
			}
		}
	}
	if len(leading) == 0 {
		leading = all
	}
	slices.SortFunc(leading, (*nodecache.Front).Compare)
	return slices.CompactFunc(leading, func(a, b *nodecache.Front) bool { return a.Key() == b.Key() })
}

// compare orders workloads by their oldest Service; those without one come
// last, by themselves. Neither a rollout nor a restart changes it.
func (c *claim) compare(d *claim) int {
	switch {
	case len(c.fronts) > 0 && len(d.fronts) > 0:
		if n := c.fronts[0].Compare(d.fronts[0]); n != 0 {
			return n
		}
	case len(c.fronts) > 0:
		return -1
	case len(d.fronts) > 0:
		return 1
	}
	return cmp.Or(cmp.Compare(c.bare(), d.bare()), c.owners[0].Workload.Compare(d.owners[0].Workload))
}

// bare is 0 for a workload with a controller. A pod without one is there for a
// while: it must not take the calls of those that stay (1), and once it has
// gone it never comes back (2).
func (c *claim) bare() int {
	switch o := c.owners[0]; {
	case o.Workload.Kind != "Pod":
		return 0
	case len(o.Pods) > 0:
		return 1
	}
	return 2
}

// related tells whether the workloads are one, or stand behind a common
// Service.
func (c *claim) related(d *claim) bool {
	return c == d || slices.ContainsFunc(c.fronts, func(f *nodecache.Front) bool {
		return slices.ContainsFunc(d.fronts, func(g *nodecache.Front) bool { return f.Key() == g.Key() })
	})
}

// String names the workload, and the Service by which it has its place.
func (c *claim) String() string {
	name := c.owners[0].Workload.String()
	if len(c.fronts) == 0 {
		return name + ", without a Service"
	}
	f := c.fronts[0]
	if f.Created.IsZero() {
		return fmt.Sprintf("%s, behind Service %s", name, f.Name)
	}
	return fmt.Sprintf("%s, behind Service %s of %s", name, f.Name, f.Created.UTC().Format(time.RFC3339))
}

func compareKeys(a, b nodecache.OwnerKey) int {
	return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Revision, b.Revision))
}

// endpoints returns where the owners serve the name, as [tidy] leaves it.
func endpoints(name string, owners []*nodecache.Owner) []endpoint {
	var es []endpoint
	for _, o := range owners {
		for _, t := range o.Targets(name) {
			if t.Pod.State != nodecache.Absent && (t.Addr.IsValid() || t.Pod.Host != "") && t.Addr.Port() != 0 {
				es = append(es, endpoint{addr: t.Addr, host: t.Pod.Host, pod: t.Pod, zone: t.Zone, presumed: t.Presumed != nil})
			}
		}
	}
	return tidy(es)
}

// tidy sorts by address and leaves each address once. Pods of the host's
// network may share an address; then the pod that serves goes before the one
// that drains, and the newer before the older.
func tidy(es []endpoint) []endpoint {
	slices.SortFunc(es, func(a, b endpoint) int {
		return cmp.Or(
			a.addr.Compare(b.addr),
			cmp.Compare(a.pod.State, b.pod.State), // Serving is the lower one
			b.pod.Created.Compare(a.pod.Created),
			cmp.Compare(a.pod.UID, b.pod.UID),
		)
	})
	return slices.CompactFunc(es, func(a, b endpoint) bool { return a.addr == b.addr })
}

// withPods keeps the owners that have pods.
func withPods(owners []*nodecache.Owner) []*nodecache.Owner {
	return slices.DeleteFunc(slices.Clone(owners), func(o *nodecache.Owner) bool { return len(o.Pods) == 0 })
}

// speaking returns the owners that have pods; where none has, all: they are
// why the name is still there.
func speaking(provider []*nodecache.Owner) []*nodecache.Owner {
	if have := withPods(provider); len(have) > 0 {
		return have
	}
	return provider
}
