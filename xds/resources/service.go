package resources

import (
	"cmp"
	"net/netip"
	"regexp"
	"slices"

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
	owners map[nodecache.OwnerKey]*nodecache.Owner
	// What is published, nil where nothing is.
	cluster, cla, api *xds.Resource
}

// endpoint is one address of a service.
type endpoint struct {
	addr netip.AddrPort
	pod  *nodecache.Pod
}

func (e endpoint) serving() bool { return e.pod.State == nodecache.Serving }

func anyServing(es []endpoint) bool { return slices.ContainsFunc(es, endpoint.serving) }

// split returns the owners of the provider and those of the other workloads,
// both sorted by workload and key. The provider is the lowest workload that
// implements the name. One whose pods have gone counts as long as its services
// are remembered: else a rollout that stops the old pods first would hand its
// calls to a workload that merely serves the same name.
func (s *service) split() (provider, claimants []*nodecache.Owner) {
	all := make([]*nodecache.Owner, 0, len(s.owners))
	for _, o := range s.owners {
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b *nodecache.Owner) int {
		return cmp.Or(a.Workload.Compare(b.Workload), compareKeys(a.Key, b.Key))
	})
	n := slices.IndexFunc(all, func(o *nodecache.Owner) bool { return o.Workload != all[0].Workload })
	if n < 0 {
		n = len(all)
	}
	return all[:n:n], all[n:]
}

func compareKeys(a, b nodecache.OwnerKey) int {
	return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Revision, b.Revision))
}

// endpoints returns where the owners serve the name, sorted by address, each
// address once. Pods of the host's network may share an address; then the pod
// that serves goes before the one that drains, and the newer before the older.
func endpoints(name string, owners []*nodecache.Owner) []endpoint {
	var es []endpoint
	for _, o := range owners {
		for _, t := range o.Targets(name) {
			if t.Pod.State != nodecache.Absent && t.Addr.IsValid() && t.Addr.Port() != 0 {
				es = append(es, endpoint{addr: t.Addr, pod: t.Pod})
			}
		}
	}
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
