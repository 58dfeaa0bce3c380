package agent

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// identity says who calls, and how that is known.
func (c *call) identity() {
	switch {
	case len(c.clients) == 0:
		c.fact("identity", "%s, as you say; no client of that id is connected", c.From)
	case c.clients[0].Identity.Pod != "":
		i := c.clients[0].Identity
		c.fact("identity", "%s", strings.TrimSuffix(fmt.Sprintf("%s, proved by %s: %s", i.Pod, i.Method, i.Reason), ": "))
	default:
		c.fact("identity", "%s, claimed by node.id (not proved: %s)", c.From, c.clients[0].Identity.Reason)
	}
	if c.caller == nil {
		c.fact("caller", "there is no pod %s", c.From)
	} else {
		c.fact("caller", "%s on node %q", strings.TrimSuffix(c.caller.State.String()+": "+c.caller.Reason, ": "), c.caller.Node)
	}
	for _, client := range c.clients {
		protocol := "state of the world"
		if client.Delta {
			protocol = "delta"
		}
		// It asks for listeners by name; a sidecar asks for all.
		if hs := c.a.server.Holdings(c.From, xds.Listener, ""); len(hs) > 0 && hs[len(hs)-1].State == ads.Unasked {
			c.bare = true
			protocol += ", gRPC without a sidecar"
		}
		for _, w := range client.Warnings {
			c.fact("warning", "%s", w)
		}
		c.fact("client", "%s", strings.TrimSuffix(fmt.Sprintf("connected since %s, %s: %s", ago(client.Connected), protocol, client.State), ": "))
	}
}

// holding is what the caller's latest stream has of a resource.
func (c *call) holding(id xds.ID) ads.Holding {
	if n := len(c.clients); n > 0 {
		if hs := c.a.server.Holdings(c.From, id.Type, id.Name); len(hs) > 0 {
			return hs[len(hs)-1]
		}
	}
	return ads.Holding{State: ads.Unasked}
}

// byName is what a call needs that goes where its names say.
func (c *call) byName() []xds.ID {
	needs := []xds.ID{{Type: xds.Cluster, Name: c.Cluster}}
	if es := c.behind.Endpoints; len(es) == 0 || !es[0].ByName() {
		needs = append(needs, xds.ID{Type: xds.Endpoint, Name: c.Cluster})
	}
	if c.bare {
		needs = append([]xds.ID{{Type: xds.Listener, Name: c.rule.Service}}, needs...)
	}
	return needs
}

// held says whether the client has what the call needs. If not, then is told
// why, once.
func (c *call) held(then func(cause, do string), needs ...xds.ID) bool {
	if len(c.clients) == 0 {
		return true
	}
	ok := true
	lacks := func(cause, do string) {
		if ok {
			then(cause, do)
		}
		ok = false
	}
	for _, need := range needs {
		h := c.holding(need)
		what := fmt.Sprintf("%s of %s", nouns[need.Type], need.Name)
		c.fact(need.Type.String(), "%s: %s", what, says(&h))
		switch {
		case h.State == ads.Acked:
		case c.form.OnDemand() && need.Type != xds.Route && (h.State == ads.Missing || h.State == ads.Unasked):
			if need.Type == xds.Cluster && c.form == resources.OnDemand {
				c.fact("on-demand", "the first call asks for %s", what)
			} else if need.Type == xds.Cluster {
				lacks(fmt.Sprintf("the sidecar has called so many names that nobody has that it asks for no further one; it is given the %s by the first call, which fails", what), "call again")
			}
		case h.Earlier:
			c.late = fmt.Sprintf("; by earlier content (%s: %s)", what, says(&h))
		case h.State == ads.Unasked && c.bare: // it asks when it dials
		case h.State == ads.Rejected || h.State == ads.Suspect:
			lacks(fmt.Sprintf("the client rejected the %s: %s", what, h.Error), "mend what the client's text says, or report it")
		default:
			lacks(fmt.Sprintf("the client does not have the %s yet: %s", what, says(&h)), "wait; if it stays so, look at the client and at fingerpost proxies")
		}
	}
	return ok
}

var nouns = map[xds.Type]string{xds.Listener: "listener", xds.Cluster: "cluster", xds.Endpoint: "endpoints", xds.Route: "routes"}

// says is a holding in one line.
func says(h *ads.Holding) string {
	since := func(what string) string {
		switch {
		case h.Since.IsZero():
			return what
		case h.Exact || h.State == ads.Rejected || h.State == ads.Suspect:
			return what + " at " + ago(h.Since)
		}
		return what + " at the latest at " + ago(h.Since)
	}
	text := map[ads.HoldingState]string{
		ads.Unasked: "not asked for", ads.Missing: "not there for this client",
		ads.Waiting: "to be sent", ads.Sent: since("sent, not acknowledged,"), ads.Acked: since("acknowledged"),
		ads.Rejected: since("rejected") + ": " + h.Error, ads.Suspect: since("withheld, since a response that held it was rejected") + ": " + h.Error,
	}[h.State]
	if h.Earlier {
		text += " (the client goes on with what it took before)"
	}
	return text
}

// withoutSidecar corrects what comes of a call where no sidecar asks
// unknown.sock: gRPC's own client says UNAVAILABLE, in words of its own, of what
// cannot be resolved or has no endpoint.
func (c *call) withoutSidecar() {
	if !c.bare || c.Code == codeName(codes.OK) || len(c.Endpoints) > 0 && c.Code == codeName(codes.Unimplemented) {
		return
	}
	cause := c.Cause
	if c.behind.Provider == nil {
		cause += " (a gRPC client without a sidecar gives the name up after 15 s)"
	}
	c.gets(codes.Unavailable, "", cause, c.Do)
}

// unconnected puts first that nobody of the caller's id is there to be told.
func (c *call) unconnected() {
	if len(c.clients) > 0 {
		return
	}
	then := fmt.Sprintf("with one it would get %s: %s", c.Code, c.Cause)
	node := c.a.config.nodeName()
	switch {
	case c.caller == nil:
		c.gets(codes.Unavailable, "", fmt.Sprintf("there is no pod %s, and no client of that id is connected; %s", c.From, then), "give the caller's NAMESPACE/NAME")
	case c.caller.Node != node:
		c.gets(codes.Unavailable, "", fmt.Sprintf("no client of that id is connected: the pod is on node %q, and this is the agent of %q; %s", c.caller.Node, node, then), "ask the agent of the pod's node")
	default:
		c.gets(codes.Unavailable, "", fmt.Sprintf("no client of that id is connected: the pod has no sidecar that reaches this agent; %s", then), "look at the sidecar's log, its node.id and its mount of the ADS socket")
	}
}
