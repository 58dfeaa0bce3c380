package agent

import (
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

// named says what becomes of a call whose authority names a Service or a pod,
// for which no route speaks.
func (c *call) named(d unknown.Decision) {
	a, service := c.a, c.rule.Service
	if !a.complete() {
		c.fact("cluster", "%s", c.Cluster)
		c.gated(d.Status)
		c.kept()
		return
	}
	n := a.know().Resolve(c.namespace, c.Authority, service)
	ends := func(do string) {
		c.fact("cluster", "none: the call ends at unknown.sock")
		c.gets(d.Status.Code(), d.Status.Message(), d.Status.Message(), do)
		c.kept()
	}
	if n.Reason != "" {
		ends("correct the name: it is looked up as the caller's DNS does")
		return
	}
	what := n.String()
	c.fact("names", "%s, where %s looks the authority up", what, c.namespace)
	c.redirected(&n)
	if c.bare {
		c.gets(codes.Unavailable, "", "a gRPC client without a sidecar is served no calls by a Service's name", "name the gRPC service alone")
		return
	}
	absent, got, _ := c.standing(what, service, n.Members)
	switch {
	case n.Refused:
		ends("call a Service with pods that serve it: of all pods there it is known that they do not")
		return
	case c.form.OnDemand(), c.declares(c.rule.Cluster):
	case c.declares(c.rule.Rest):
		c.Cluster = c.rule.Rest
	case n.Alias != c.rule.Authority() || !n.Known && !n.Rest:
		ends(sidecarsWord(&n))
		return
	case n.Rest:
		c.Cluster = c.rule.Rest
	}
	c.fact("cluster", "%s", c.Cluster)
	if !c.held(func(cause, do string) { c.gets(codes.Unavailable, "", cause, do) },
		xds.ID{Type: xds.Cluster, Name: c.Cluster}, xds.ID{Type: xds.Endpoint, Name: c.Cluster}) {
		return
	}
	const shown = 2
	switch {
	case got == 0 && len(n.Members) == 0:
		c.gets(codes.Unavailable, noUpstream, "nothing stands behind "+what, "scale up what should, or correct the Service's selector")
	case got == 0:
		c.gets(codes.Unavailable, noUpstream, fmt.Sprintf("no pod of %s gets the call: %s", what, some(absent, shown)), "make a pod Ready that serves it")
	default:
		cause := fmt.Sprintf("it goes to %s of %s", count(got, "endpoint"), what)
		if !c.serves(&n) {
			cause += fmt.Sprintf(", none of which is known to implement %s", service)
		}
		if len(absent) > 0 {
			cause += "; not to " + some(absent, shown)
		}
		c.gets(codes.OK, "", cause+c.late, "nothing")
	}
}

// redirected says what becomes of connections to what is named, of an application
// that dials it and knows of no sidecar.
func (c *call) redirected(n *resources.Named) {
	d := c.a.redirect
	if d.reason() != "" {
		return
	}
	if !d.chose(c.From) {
		c.fact("redirect", "connections of %s go where they are dialled: no sidecar of it listens for them", c.From)
		return
	}
	var dialled []netip.AddrPort
	if addr, err := netip.ParseAddrPort(c.Authority); err == nil {
		dialled = append(dialled, addr)
	} else if v := c.a.dir.Front(n.Service); v != nil && n.Pod == "" {
		for _, ip := range v.ClusterIPs {
			dialled = append(dialled, netip.AddrPortFrom(ip, n.Port))
		}
	}
	for _, addr := range dialled {
		if number, ok := d.number(addr); ok {
			c.fact("redirect", "a connection to %s goes to the sidecar, by %s: cluster %s", addr, number, resources.RedirectedCluster(number, c.rule.Service))
		} else {
			c.fact("redirect", "a connection to %s goes where it is dialled: it is not known to speak plaintext gRPC", addr)
		}
	}
}

// declares tells whether the caller's sidecar has a cluster since its pod declares
// what is called.
func (c *call) declares(cluster string) bool {
	return c.caller != nil && c.a.compiler.Declares(c.namespace, c.caller.Upstreams, cluster)
}

// serves tells whether one of those who get the call is known to serve what is
// called.
func (c *call) serves(n *resources.Named) bool {
	for _, m := range n.Members {
		pod, ok := c.a.dir.Member(m.UID)
		if ok && m.Absent == "" && slices.Contains(c.a.dir.Owner(m.Owner).On(pod.Pod, m.Port), c.rule.Service) {
			return true
		}
	}
	return false
}

// noUpstream is what Envoy says of a cluster without an endpoint.
const noUpstream = "no healthy upstream"

// sidecarsWord says what to do about a call that the sidecar has no cluster for.
func sidecarsWord(n *resources.Named) string {
	switch {
	case len(n.Pending) > 0:
		return "wait: it is being asked; a call waits for that up to a second"
	case n.Silent != "":
		return "name the port grpc, or write the sidecar's bootstrap with --clusters on-demand"
	case n.Alias != "":
		return fmt.Sprintf("call it as %s, or write the sidecar's bootstrap with --clusters on-demand", n.Alias)
	case n.Pod == "":
		return fmt.Sprintf("declare %s.%s:%d on the caller's pod (annotation %s), or write its sidecar's bootstrap with --clusters on-demand", n.Service.Name, n.Service.Namespace, n.Port, kube.UpstreamsAnnotation)
	}
	return "write the sidecar's bootstrap with --clusters on-demand"
}
