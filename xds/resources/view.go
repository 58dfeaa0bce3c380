package resources

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/fingerpost/fingerpost/nodecache"
)

// ServiceView is a service as listings show it.
type ServiceView struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	// Owners are the keys of the provider's owners.
	Owners []string `json:"owners"`
	// Claimants are the keys of the owners of other workloads that implement
	// the same name and get no calls by it.
	Claimants []string `json:"claimants"`
	// Policy is what the cluster has by annotations, in their words; empty:
	// nothing.
	Policy    string         `json:"policy,omitempty"`
	Endpoints []EndpointView `json:"endpoints"`
	// Order names the workloads that implement the service in the order in
	// which one of them is the provider, with what gives each its place.
	Order []string `json:"-"`
	// Exported names the namespaces of clients that reach the service here,
	// since they have none of their own. Sorted.
	Exported []string `json:"-"`
}

// EndpointView is one endpoint of a [ServiceView].
type EndpointView struct {
	// Address is ip:port, or host:port of an ExternalName Service.
	Address string `json:"address"`
	Pod     string `json:"pod"` // namespace/name; empty where the address has no pod
	Node    string `json:"node"`
	// State is serving or draining, or [StatePresumed].
	State string             `json:"state"`
	Owner nodecache.OwnerKey `json:"-"`
	of    endpoint
}

// ByName tells whether it is a host that clients resolve themselves, by what
// stands in the cluster: there are no endpoints to be sent.
func (e *EndpointView) ByName() bool { return e.of.host != "" }

// String says where it is.
func (e *EndpointView) String() string {
	if e.ByName() {
		return e.Address + ", by its DNS name"
	}
	if e.Pod == "" {
		return e.Address + ", which is no pod's"
	}
	return fmt.Sprintf("%s pod %s on node %q", e.Address, e.Pod, e.Node)
}

// StatePresumed is the state of a serving pod of which it is presumed that it
// serves this; see [nodecache.Presumption].
const StatePresumed = "presumed"

func compareOwners(a, b *nodecache.Owner) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), compareKeys(a.Key, b.Key))
}

// Services lists all services, sorted by namespace and name. It reads
// everything that is known; it is meant for people.
func (c *Compiler) Services() []ServiceView {
	c.mu.RLock()
	defer c.mu.RUnlock()
	views := make([]ServiceView, 0, len(c.services))
	for id, s := range c.services {
		if len(s.owners) > 0 {
			views = append(views, c.exported(id, s))
		}
	}
	slices.SortFunc(views, func(a, b ServiceView) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return views
}

func (s *service) view(id serviceID) ServiceView {
	claims := s.claims(id.name)
	provider, claimants := split(claims)
	v := ServiceView{
		Name: id.name, Namespace: id.namespace,
		Owners: keysOf(speaking(provider)), Claimants: keysOf(withPods(claimants)),
		Endpoints: []EndpointView{},
		Policy:    s.policy.String(),
	}
	for _, c := range claims {
		v.Order = append(v.Order, c.String())
	}
	for _, e := range endpoints(id.name, provider) {
		v.Endpoints = append(v.Endpoints, e.view())
	}
	return v
}

func (e endpoint) view() EndpointView {
	v := EndpointView{Address: e.String(), Node: e.pod.Node, State: e.state(), Owner: e.pod.Owner, of: e}
	if e.pod.Name != "" && e.host == "" {
		v.Pod = e.pod.String()
	}
	return v
}

// exported needs mu, for reading at least.
func (c *Compiler) exported(id serviceID, s *service) ServiceView {
	v := s.view(id)
	for ns := range c.routes {
		o := c.services[serviceID{ns, id.name}]
		if o == nil || len(o.owners) > 0 {
			continue
		}
		if provider, _ := split(o.claims(id.name)); provider[0].Workload.Namespace == id.namespace {
			v.Exported = append(v.Exported, ns)
		}
	}
	slices.Sort(v.Exported)
	return v
}

// Behind says who stands behind a service in a namespace.
type Behind struct {
	ServiceView
	// Provider and Rivals are the provider's owners and those of the claimants,
	// with those that have no pods any more. They are of other namespaces where
	// these export the service.
	Provider, Rivals []*nodecache.Owner
}

// Behind says who stands behind a service that has a cluster in the namespace;
// false if it has none.
func (c *Compiler) Behind(namespace, service string) (Behind, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	id := serviceID{namespace, service}
	s := c.services[id]
	if s == nil || len(s.from) == 0 {
		return Behind{}, false
	}
	b := Behind{ServiceView: s.view(id)}
	b.Provider, b.Rivals = split(s.claims(service))
	return b, true
}

func keysOf(owners []*nodecache.Owner) []string {
	keys := make([]string, len(owners))
	for i, o := range owners {
		keys[i] = o.Key.String()
	}
	return keys
}

// Names returns the services of a namespace, sorted.
func (c *Compiler) Names(namespace string) []string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	ns := c.namespaces[namespace]
	if ns == nil {
		return nil
	}
	names := make([]string, 0, len(ns.services))
	for name := range ns.services {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Providers returns the views of the owners that provide a service, those with
// pods where there are any; nil if the namespace has no such service.
func (c *Compiler) Providers(namespace, service string) []*nodecache.Owner {
	c.mu.RLock()
	defer c.mu.RUnlock()
	s := c.services[serviceID{namespace, service}]
	if s == nil {
		return nil
	}
	provider, _ := split(s.claims(service))
	return speaking(provider)
}

// Claimants returns the views of the owners with pods that implement a service
// of the namespace and get no calls by its name, and names the workload that
// provides it and the Service by which it does. Both are empty if the namespace
// has no such service.
func (c *Compiler) Claimants(namespace, service string) (provider string, claimants []*nodecache.Owner) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	s := c.services[serviceID{namespace, service}]
	if s == nil || len(s.owners) == 0 {
		return "", nil
	}
	claims := s.claims(service)
	_, claimants = split(claims)
	return claims[0].String(), withPods(claimants)
}
