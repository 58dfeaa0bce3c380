package resources

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// locality decides which endpoints of a cluster the clients of this node call
// first. All of them are on one node, so that one CLA is right for all.
type locality struct {
	unsaid nodecache.Locality // where pods say nothing; read-only
	node   string             // of the clients; read-only
	// place is that of the node. Guarded by Compiler.mu.
	place nodecache.Place
	// asked is set once some pod has asked for another than even. Guarded by
	// Compiler.mu.
	asked bool
}

// parseLocality reads a policy; empty is even.
func parseLocality(text string) (nodecache.Locality, error) {
	l, ok := nodecache.ParseLocality(cmp.Or(text, "even"))
	if !ok {
		return l, fmt.Errorf("locality %q is not even, zone or node", text)
	}
	return l, nil
}

// tier is how near an endpoint is to the clients. Endpoints of one tier get
// equal shares of the calls.
type tier uint8

const (
	onNode tier = iota
	inZone
	inRegion
	elsewhere

	numTiers = iota
)

// tier is by the policy, which is not even.
func (l *locality) tier(p nodecache.Locality, e endpoint) tier {
	here := l.node != "" && e.pod.Node == l.node
	switch {
	case here && p == nodecache.LocalityNode:
		return onNode
	case here, l.place.Zone != "" && e.zone == l.place.Zone:
		return inZone
	case slices.Contains(l.place.Near, e.zone):
		return inRegion
	}
	return elsewhere
}

// of is what the endpoints of a tier have in common.
func (l *locality) of(t tier) *corev3.Locality {
	at := &corev3.Locality{}
	if t <= inRegion {
		at.Region = l.place.Region
	}
	if t <= inZone {
		at.Zone = l.place.Zone
	}
	if t == onNode {
		at.SubZone = l.node
	}
	return at
}

// says is what the endpoint asks for.
func (l *locality) says(e endpoint) nodecache.Locality { return cmp.Or(e.pod.Locality, l.unsaid) }

// policy is the one for a cluster, and whether its pods ask for different ones.
// Those count that get its calls. Where they differ, as over a rollout which
// changes the annotation, what prefers least is done: it loads no pod more than
// another.
func (l *locality) policy(es []endpoint) (p nodecache.Locality, differ bool) {
	serving := anyServing(es)
	for _, e := range es {
		if serving && !e.serving() {
			continue
		}
		says := l.says(e)
		differ = differ || p != nodecache.LocalityUnsaid && says != p
		if p == nodecache.LocalityUnsaid || says < p {
			p = says
		}
	}
	return cmp.Or(p, l.unsaid), differ
}

// blind tells whether the policy cannot be followed, since nobody says in which
// zone the node is.
func (l *locality) blind(p nodecache.Locality) bool {
	return p == nodecache.LocalityZone && l.place.Zone == ""
}

// group is the endpoints of one tier, in the order of all.
type group struct {
	tier      tier
	endpoints []endpoint
}

// groups returns the endpoints in the order in which they are called. One that
// drains stays in its tier: Envoy leaves it out when it counts how much of a
// priority is healthy, and gRPC does not see it, so that it neither holds the
// calls there nor sends a part of them away (tried with Envoy 1.40).
func (l *locality) groups(p nodecache.Locality, es []endpoint) []group {
	if p <= nodecache.LocalityEven || l.blind(p) {
		return []group{{elsewhere, es}}
	}
	var by [numTiers][]endpoint
	for _, e := range es {
		t := l.tier(p, e)
		by[t] = append(by[t], e)
	}
	var gs []group
	for t, es := range by {
		if len(es) > 0 {
			gs = append(gs, group{tier(t), es})
		}
	}
	return gs
}

// assignment needs Compiler.mu, if it is the compiler's. It writes endpoints,
// which are sorted and without duplicates. Without a Serving one the Draining
// ones are written as healthy: they are all there is.
//
// A priority is one tier and has one locality, so that all endpoints there get
// the same share. Priorities have no gaps, localities are set and have weights,
// or gRPC would refuse them or pass them over (gRFC A27). An endpoint's locality
// is the same whatever others come and go: Envoy moves it to another priority
// with its connections.
func (l *locality) assignment(name string, es []endpoint) *endpointv3.ClusterLoadAssignment {
	cla := &endpointv3.ClusterLoadAssignment{ClusterName: name}
	if len(es) == 0 {
		return cla
	}
	p, _ := l.policy(es)
	l.asked = l.asked || p > nodecache.LocalityEven
	serving := anyServing(es)
	for priority, g := range l.groups(p, es) {
		lbs := make([]*endpointv3.LbEndpoint, len(g.endpoints))
		for i, e := range g.endpoints {
			health := corev3.HealthStatus_HEALTHY
			if serving && !e.serving() {
				health = corev3.HealthStatus_DRAINING
			}
			lbs[i] = &endpointv3.LbEndpoint{
				HealthStatus: health,
				HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
					Address: e.address(),
				}},
			}
		}
		cla.Endpoints = append(cla.Endpoints, &endpointv3.LocalityLbEndpoints{
			Locality:            l.of(g.tier),
			LbEndpoints:         lbs,
			LoadBalancingWeight: number(uint32(len(lbs))),
			Priority:            uint32(priority),
		})
	}
	return cla
}

// Relocate takes note of where the node is, and returns what follows: mostly
// nothing, since that changes hardly ever, and nobody need ask for it.
func (c *Compiler) Relocate(dir Services, place nodecache.Place) xds.Update {
	c.mu.Lock()
	defer c.mu.Unlock()
	var u xds.Update
	l := &c.locality
	if l.place.Equal(place) {
		return u
	}
	if l.place = place; !l.wanted() {
		return u
	}
	for _, id := range slices.SortedFunc(maps.Keys(c.services), serviceID.compare) {
		c.compile(id, &u)
	}
	r := c.refresh(dir)
	for name := range c.fronts {
		r.touch(name)
	}
	backends := r.finish()
	u.Set, u.Remove = append(u.Set, backends.Set...), append(u.Remove, backends.Remove...)
	for _, name := range dir.FrontNames() {
		r.alias(name, &u)
	}
	for _, w := range c.wants.byName {
		c.wants.stale[w] = struct{}{}
	}
	for _, d := range c.dials {
		c.wants.stale[&d.want] = struct{}{}
	}
	r.wanted(nil, &u)
	sortSet(&u)
	return u
}

// wanted needs Compiler.mu, for reading at least.
func (l *locality) wanted() bool { return l.asked || l.unsaid > nodecache.LocalityEven }

// Locality says how the agent stands to policies that are not even: whether one
// is asked for, by its options or by some pod so far, and whether it knows of the
// zone of its node.
func (c *Compiler) Locality() (asked, placed bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.locality.wanted(), c.locality.place.Zone != ""
}

// Spread says in one line how calls are spread over the endpoints of a cluster;
// empty where there is nothing to spread.
func (c *Compiler) Spread(views []EndpointView) string {
	var es []endpoint
	for _, v := range views {
		if !v.ByName() {
			es = append(es, v.of)
		}
	}
	if len(es) == 0 {
		return ""
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	l := &c.locality
	called := es
	if anyServing(es) {
		called = slices.DeleteFunc(slices.Clone(es), func(e endpoint) bool { return !e.serving() })
	}
	p, differ := l.policy(es)
	says := p.String() + ", " + l.by(p, differ, called)
	switch {
	case l.blind(p):
		says += fmt.Sprintf(", which means even, since nobody says in which zone node %q is", l.node)
	case p == nodecache.LocalityNode && l.place.Zone == "":
		says += fmt.Sprintf(", without zones, since nobody says in which one node %q is", l.node)
	}
	gs := l.groups(p, called)
	switch first := gs[0]; {
	case p <= nodecache.LocalityEven || l.blind(p):
		says += fmt.Sprintf(": %d endpoints get the same share each", len(called))
	case len(gs) == 1:
		says += fmt.Sprintf(": all %d endpoints are %s and get the same share each", len(called), l.where(first.tier))
	default:
		says += fmt.Sprintf(": %d of %d endpoints, %s, take all calls", len(first.endpoints), len(called), l.where(first.tier))
		var then []string
		for _, g := range gs[1:] {
			then = append(then, fmt.Sprintf("%d %s", len(g.endpoints), l.where(g.tier)))
		}
		says += "; " + strings.Join(then, ", then ") + " take over as those before them fail"
	}
	return says
}

// by says whose word the policy is.
func (l *locality) by(p nodecache.Locality, differ bool, es []endpoint) string {
	if differ {
		var said []string
		for _, e := range es {
			said = append(said, l.says(e).String())
		}
		slices.Sort(said)
		return fmt.Sprintf("what prefers least, as the pods ask for %s", strings.Join(slices.Compact(said), " and "))
	}
	if slices.ContainsFunc(es, func(e endpoint) bool { return e.pod.Locality == p }) {
		return "by annotation"
	}
	return "by --locality"
}

// where names a tier.
func (l *locality) where(t tier) string {
	return [numTiers]string{
		onNode: "on node " + l.node, inZone: "in zone " + cmp.Or(l.place.Zone, "of node "+l.node),
		inRegion: "in region " + l.place.Region, elsewhere: "elsewhere",
	}[t]
}
