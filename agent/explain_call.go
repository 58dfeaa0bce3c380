package agent

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/agent/journal"
	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

// CallExplanation is the answer to /explain/call: the way of a call through a
// sidecar, as the agent sees it now.
type CallExplanation struct {
	Explanation
	From      string `json:"from"` // namespace/name of the calling pod
	Authority string `json:"authority"`
	Path      string `json:"path"`
	// Code is the gRPC code that the caller gets, as UNAVAILABLE, or the HTTP
	// status where the call is not of gRPC, as 404. OK means in both cases that
	// the call reaches a pod, which may say otherwise. Message is what the caller
	// reads beside it.
	Code    string `json:"code"`
	Message string `json:"message"`
	// Cause is why, in one line; Do what to do about it.
	Cause string `json:"cause"`
	Do    string `json:"do"`
	// Route is kind, namespace and name of the route that takes the call, and
	// Shares are who gets the calls by its rule; empty where none speaks for what
	// the authority names.
	Route  string      `json:"route"`
	Shares []CallShare `json:"shares"`
	// Cluster is what the call asks the sidecar for, the likeliest where a rule
	// has several; empty if for none.
	Cluster   string                   `json:"cluster"`
	Endpoints []resources.EndpointView `json:"endpoints"`
	Absent    []AbsentPod              `json:"absent"`
	Decisions []Decision               `json:"decisions"`
}

// AbsentPod is a pod of the provider, or behind a route's backend, to which the
// call does not go.
type AbsentPod struct {
	Pod  string `json:"pod"` // namespace/name, or an address without a pod
	Node string `json:"node"`
	Why  string `json:"why"`
}

// shownDecisions is how many decisions stand in an explanation.
const shownDecisions = 10

// call is a call while it is explained.
type call struct {
	*CallExplanation
	a         *Agent
	namespace string
	form      resources.Form // of the client's route table
	rule      resources.Rule
	caller    *kube.Record // nil if there is no such pod
	clients   []ads.Client // of the caller
	bare      bool         // the caller is a gRPC client without a sidecar
	plain     bool         // the call is not of gRPC
	late      string       // what the client has of before, and why
	behind    resources.Behind
	workloads []nodecache.Workload // that have to do with the service
}

// explainCall follows a call of a pod from the sidecar on. With an HTTP method
// it is not one of gRPC.
func (a *Agent) explainCall(from, authority, path, verb string, headers map[string]string) (*CallExplanation, error) {
	namespace, pod, err := resources.ParseNodeID(from)
	if err != nil {
		return nil, fmt.Errorf("%q is not NAMESPACE/NAME of a pod", from)
	}
	a.feed.flush()
	c := &call{
		CallExplanation: &CallExplanation{
			From: from, Authority: cmp.Or(authority, "127.0.0.1"), Path: path,
			Explanation: Explanation{Facts: []Fact{}}, Shares: []CallShare{}, Endpoints: []resources.EndpointView{}, Absent: []AbsentPod{},
		},
		a: a, namespace: namespace, caller: a.store.Pod(namespace, pod), plain: verb != "",
	}
	for _, client := range a.server.Clients() {
		if cmp.Or(client.Identity.Pod, client.ID) == from {
			c.clients = append(c.clients, client)
		}
	}
	// Who merely claims to be the pod says nothing of it where the pod itself is there.
	if isProved := func(c ads.Client) bool { return c.Identity.Pod != "" }; slices.ContainsFunc(c.clients, isProved) {
		c.clients = slices.DeleteFunc(c.clients, func(c ads.Client) bool { return !isProved(c) })
	}
	if n := len(c.clients); n > 0 {
		if client, err := resources.ParseClient(c.clients[n-1].Node); err == nil {
			client.OnDemand = client.OnDemand && c.clients[n-1].Delta
			c.form = client.Form()
			if c.form == resources.OnDemand && a.server.Sees(from, xds.TableScope(namespace, resources.Asking.String())) {
				c.form = resources.Asking
			}
		}
	}
	c.rule = resources.ByName(resources.Call{Namespace: namespace, Authority: c.Authority, Path: path, Form: c.form})
	c.identity()
	grpc := !c.plain && c.rule.Service != ""
	choice, routed := a.compiler.Choose(namespace, c.Authority, routeCall(path, verb, headers, grpc), grpc)
	if routed && !c.bare { // what a gRPC client is served knows no routes
		c.routed(&choice)
	} else {
		c.Cluster = c.rule.Cluster
		c.fact("rule", "route %q of virtual host %q: %s", c.rule.Route, c.rule.VirtualHost, c.rule.Why)
		c.way()
		c.withoutSidecar()
		if c.plain {
			c.overHTTP()
		}
	}
	c.unconnected()
	c.finish()
	return c.CallExplanation, nil
}

// gets says what comes of the call.
func (c *call) gets(code codes.Code, message, cause, do string) {
	c.Code, c.Message, c.Cause, c.Do = codeName(code), message, cause, do
}

func codeName(c codes.Code) string { return code.Code(c).String() }

// way says what becomes of the call at a sidecar that is connected.
func (c *call) way() {
	a := c.a
	d := unknown.Decide(a.know(), a.complete(), unknown.Call{Node: c.From, Authority: c.Authority, Path: c.Path, Form: c.form})
	service := c.rule.Service
	switch {
	case service == "":
		c.fact("cluster", "none: the path is not /package.Service/Method")
		c.gets(d.Status.Code(), d.Status.Message(), d.Status.Message(), "call /package.Service/Method")
		return
	case !c.rule.ByPath:
		c.named(d)
		return
	case d.Reflection:
		c.fact("cluster", "none: the agent itself answers, from the descriptors of what %s can call", c.namespace)
		c.gets(codes.OK, "", "server reflection is answered by the agent", "nothing")
		return
	case nodecache.Infrastructure(service):
		c.fact("cluster", "none: %s is infrastructure, which every server has", service)
		c.gets(d.Status.Code(), d.Status.Message(), service+" is infrastructure, which is never served by its name alone", "dial the pod itself")
		return
	}
	behind, served := a.compiler.Behind(c.namespace, service)
	if !a.gate.open.Load() || !served && !a.complete() {
		c.fact("cluster", "%s", c.Cluster)
		c.gated(d.Status)
		c.kept()
		return
	}
	if !served {
		c.unserved(d)
		c.kept()
		return
	}
	c.behind = behind
	c.cluster()
	c.pods()
	if !c.held(func(cause, do string) { c.gets(d.Status.Code(), d.Status.Message(), cause, do) }, c.byName()...) {
		return
	}
	c.called()
}

// gated says that nobody is told anything yet.
func (c *call) gated(s *status.Status) {
	_, reason := c.a.gateState()
	src := c.a.source.Status()
	cause, do := "the gate is closed: "+reason, "wait: it opens 10 s after the first list at the latest"
	switch {
	case !src.Synced:
		do = "make the source readable; see fingerpost status"
	case c.a.gate.open.Load():
		cause, do = "the agent has not caught up with what happened before its start", "wait some seconds"
	}
	c.fact("gate", "%s", cause)
	c.gets(s.Code(), s.Message(), cause, do)
}

// unserved says why a name has no cluster.
func (c *call) unserved(d unknown.Decision) {
	reasons := c.a.whyUnknown(c.namespace, c.rule.Service)
	c.fact("cluster", "none: nobody is known to serve %s to %s", c.rule.Service, c.namespace)
	var texts []string
	for _, r := range reasons {
		c.fact("because", "%s", r.text)
		texts = append(texts, r.text)
	}
	cause, do := d.Status.Message(), "mend what the reason says; fingerpost recollect asks again at once"
	switch {
	case len(d.Pending) > 0:
		do = "wait: it is being asked; a call waits for that up to a second"
	case d.Status.Code() == codes.Unavailable:
	case len(reasons) == 0:
		cause += ": no workload of the namespace is left to be asked"
		do = "see fingerpost services for what there is"
	default:
		const shown = 3
		cause += ": " + some(texts, shown)
		do = reasons[0].do
	}
	c.gets(d.Status.Code(), d.Status.Message(), cause, do)
}

// kept corrects what comes of a call for which the agent has no cluster where
// the client has one: what it brought is not taken from it for want of evidence.
func (c *call) kept() {
	h := c.holding(xds.ID{Type: xds.Cluster, Name: c.Cluster})
	if !h.Earlier {
		return
	}
	c.fact(xds.Cluster.String(), "cluster of %s: %s", c.Cluster, says(&h))
	c.gets(codes.OK, "", fmt.Sprintf("the client goes on with the cluster and endpoints that it has from before; %s", c.Cause), c.Do)
}

// cluster says whose the cluster is, and what is known of those behind it.
func (c *call) cluster() {
	b := c.behind
	first := b.Provider[0].Workload
	if first.Namespace == c.namespace {
		c.fact("cluster", "%s: of the caller's own namespace", c.Cluster)
	} else {
		c.fact("cluster", "%s: namespace %s exports it, and %s has none of its own", c.Cluster, first.Namespace, c.namespace)
	}
	for i, o := range b.Order {
		c.fact("order", "%d: %s", i+1, o)
	}
	for _, o := range b.Provider {
		c.fact("provider", "%s, %s", o.Name, c.a.learned(o))
		c.workloads = append(c.workloads, o.Workload)
	}
	for _, o := range b.Rivals {
		c.fact("claimant", "%s with %s, which gets no call by the name alone", o.Name, count(len(o.Pods), "pod"))
		c.workloads = append(c.workloads, o.Workload)
	}
}

// learned says how old what is known of an owner is, and from where.
func (a *Agent) learned(o *nodecache.Owner) string {
	says := a.knowledge(o)
	switch {
	case o.Origin == nodecache.OriginDeclared:
		says += ", declared by its pods"
	case o.Info != nil:
		says += fmt.Sprintf(", learned by %s at %s", a.by(o), ago(o.Info.Collected))
		if o.Info.Pod != "" {
			says += " from pod " + o.Info.Pod
		}
	}
	if o.Info != nil && len(o.Info.Variants) > 0 {
		says += "; heterogeneous, with " + count(len(o.Info.Variants), "variant")
	}
	return says
}

// pods lists the endpoints, and the provider's other pods.
func (c *call) pods() {
	c.Endpoints = c.behind.Endpoints
	for _, e := range c.Endpoints {
		c.fact("endpoint", "%s, %s", e.String(), c.a.saysState(&e, c.rule.Service))
		if to, err := netip.ParseAddrPort(e.Address); err == nil {
			c.a.paths.explain(&c.Explanation, e.Address+": ", to.Addr(), e.Node)
		}
	}
	c.spread(c.a.compiler, "locality", c.Endpoints)
	done := map[nodecache.Workload]bool{}
	for _, o := range c.behind.Provider {
		if done[o.Workload] {
			continue
		}
		done[o.Workload] = true
		for _, r := range c.a.store.OfWorkload(o.Workload) {
			if slices.ContainsFunc(c.Endpoints, func(e resources.EndpointView) bool { return e.Pod == r.String() }) {
				continue
			}
			why := cmp.Or(c.a.whyAbsent(r, c.rule.Service), "another pod of the provider has the same address and port")
			c.Absent = append(c.Absent, AbsentPod{Pod: r.String(), Node: r.Node, Why: why})
			c.fact("absent", "pod %s on node %q: %s", r, r.Node, why)
		}
	}
}

// called says what comes of a call that a sidecar sends to its endpoints.
func (c *call) called() {
	b := c.behind
	names := map[string]bool{}
	var by []string
	for _, o := range b.Provider {
		if name := in(o.Workload, c.namespace); !names[name] {
			names[name], by = true, append(by, name)
		}
	}
	who := strings.Join(by, " and ")
	var absent []string
	for _, p := range c.Absent {
		absent = append(absent, fmt.Sprintf("pod %s (%s)", p.Pod, p.Why))
	}
	const shown = 2
	if len(b.Endpoints) == 0 {
		cause, do := fmt.Sprintf("no pod of %s serves it", who), "make a pod Ready"
		if len(absent) > 0 {
			cause += ": " + some(absent, shown)
		} else {
			cause += ": it has none (scaled to zero, or all gone)"
			do = "scale it up"
		}
		if len(b.Claimants) > 0 {
			cause += fmt.Sprintf("; %s claims it too and gets no call by the name alone", b.Rivals[0].Workload)
			do += ", or put both workloads behind one Service"
		}
		c.gets(codes.Unavailable, "no healthy upstream", cause, do)
		return
	}
	if o, has := c.lacksMethod(); o != nil {
		c.gets(codes.Unimplemented, fmt.Sprintf("unknown method %s for service %s", c.rule.Method, c.rule.Service),
			fmt.Sprintf("the pods of %s have no method %s of %s, only %s", o.Name, c.rule.Method, c.rule.Service, some(has, 5)), "call a method that they have")
		return
	}
	cause, do := fmt.Sprintf("it goes to %s of %s", count(len(b.Endpoints), "endpoint"), who), "nothing"
	if !slices.ContainsFunc(b.Endpoints, func(e resources.EndpointView) bool { return e.State != nodecache.Draining.String() }) {
		cause, do = fmt.Sprintf("all of %s of %s are draining, and get the calls as there is no other", count(len(b.Endpoints), "endpoint"), who), "make a pod Ready that stays"
	}
	presumed := 0
	for _, e := range b.Endpoints {
		if e.State == resources.StatePresumed {
			presumed++
		}
	}
	if presumed > 0 {
		cause += fmt.Sprintf("; of these %d presumed, by what the revision before served", presumed)
	}
	if len(absent) > 0 {
		cause += "; not to " + some(absent, shown)
	}
	c.gets(codes.OK, "", cause+c.late, do)
}

// lacksMethod returns an owner whose descriptors lack the called method where
// none has it, with the methods that it has.
func (c *call) lacksMethod() (*nodecache.Owner, []string) {
	var without *nodecache.Owner
	var has []string
	for _, o := range c.behind.Provider {
		if o.Info == nil {
			return nil, nil
		}
		for p := range o.Info.All() {
			for _, s := range p.Services {
				switch {
				case s.Name != c.rule.Service:
				case s.Undescribed || slices.Contains(s.Methods, c.rule.Method):
					return nil, nil
				default:
					without, has = o, s.Methods
				}
			}
		}
	}
	return without, has
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// finish writes the verdict, and what was decided lately.
func (c *call) finish() {
	if src := c.a.source.Status(); src.Synced && src.Error != "" {
		c.Cause += fmt.Sprintf("; all this by a state that is %ds old: %s", int(src.StaleSeconds), src.Error)
		c.fact("source", "stale since %s: %s", ago(src.Since), src.Error)
	}
	c.Verdict = fmt.Sprintf("%s calling %s: %s: %s", c.From, c.Path, c.Code, c.Cause)
	c.fact("code", "%s", strings.TrimSuffix(c.Code+": "+c.Message, ": "))
	c.fact("do", "%s", c.Do)
	c.Decisions = c.a.decisions(shownDecisions, func(e *journal.Entry) bool {
		return e.Client == c.From || c.rule.Service != "" && e.Service == c.rule.Service || slices.Contains(c.workloads, e.Workload) && e.Owner != (nodecache.OwnerKey{})
	})
	c.decided(c.Decisions)
}

func (e *Explanation) decided(ds []Decision) {
	for _, d := range ds {
		e.fact(d.At.Format("2006-01-02T15:04:05.000Z"), "%s", d.Says)
	}
}
