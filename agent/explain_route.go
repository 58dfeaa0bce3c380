package agent

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

// CallShare is a part of the calls that a route takes.
type CallShare struct {
	Service string `json:"service"` // namespace/name of the backend; empty if it is none
	Port    uint16 `json:"port"`
	Weight  uint32 `json:"weight"`  // of the sum over all shares
	Cluster string `json:"cluster"` // empty for calls that fail, since the backend may not be called or is not there
	// Code is what calls of the share get, as [CallExplanation.Code]; Why is the
	// reason, empty with OK.
	Code string `json:"code"`
	Why  string `json:"why"`
}

// outcome is what becomes of a share's calls.
type outcome struct {
	CallShare
	message, do string
	goes        string // where, if it reaches something
}

// routed says what becomes of the call where routes speak for the Service that
// its authority names.
func (c *call) routed(ch *resources.Choice) {
	c.plain = c.plain || c.rule.Service == "" && ch.Kind == nodecache.HTTPRoute
	at := fmt.Sprintf("port %d of Service %s", ch.Port, ch.Service)
	c.fact("service", "authority %s is %s, for which routes speak", c.Authority, at)
	if !c.hears() {
		return
	}
	for _, r := range ch.Conflicted {
		c.fact("route", "HTTPRoute %s has no say: a GRPCRoute has the port", r.Key())
	}
	for _, r := range c.a.dir.RoutesOf(ch.Service) {
		c.refusals(r)
	}
	if ch.Route == nil {
		c.fact("rule", "none of virtual host %q takes it", ch.VirtualHost)
		c.replies(ch.Status, ch.Text, fmt.Sprintf("routes speak for %s, and none of their rules takes the call", at), "add a rule that takes it to a "+ch.Kind.String())
		return
	}
	c.Route = fmt.Sprintf("%s %s", ch.Route.Kind, ch.Route.Key())
	by := fmt.Sprintf("rule %d of %s", ch.Rule, c.Route)
	c.fact("rule", "%s, match %d (%s), of virtual host %q", by, ch.Match, saysMatch(&ch.Route.Rules[ch.Rule].Matches[ch.Match]), ch.VirtualHost)
	c.fact("precedence", "%s", precedence(ch, c.namespace))
	c.transcoding(ch)
	if ch.Flaw != "" || ch.Status/100 == 3 || len(ch.Shares) == 0 {
		c.answered(ch, by)
		return
	}
	outcomes := make([]outcome, len(ch.Shares))
	for i := range ch.Shares {
		outcomes[i] = c.share(ch, &ch.Shares[i])
		c.Shares = append(c.Shares, outcomes[i].CallShare)
	}
	c.shared(ch, by, outcomes)
}

// hears says whether the client has a route table at all.
func (c *call) hears() bool {
	return c.held(func(cause, do string) { c.gets(codes.Unavailable, "", cause, do) },
		xds.ID{Type: xds.Route, Name: resources.RouteName})
}

// refusals says what of a route is refused.
func (c *call) refusals(r *nodecache.Route) {
	for _, text := range refused(r) {
		c.fact("refused", "%s", text)
	}
}

// refused says what of a route's rules is refused or cannot be served, a line
// each.
func refused(r *nodecache.Route) []string {
	var out []string
	flaws := resources.Unservable(r)
	for i := range r.Rules {
		rule := &r.Rules[i]
		at := fmt.Sprintf("rule %d of %s %s", i, r.Kind, r.Key())
		if rule.Refused != "" {
			out = append(out, fmt.Sprintf("%s takes no call: %s: %s", at, rule.Refused, rule.Detail))
			continue
		}
		if flaws[i] != nil {
			out = append(out, fmt.Sprintf("%s cannot be served: %v", at, flaws[i]))
		}
		for _, b := range rule.Backends {
			if b.Refused != "" {
				out = append(out, fmt.Sprintf("%s may not send to %s: %s", at, backendName(b), b.Refused))
			}
		}
	}
	return out
}

func backendName(b nodecache.RouteBackend) string {
	if b.Service == (nodecache.Name{}) {
		return "a backend that is no Service"
	}
	return fmt.Sprintf("port %d of Service %s", b.Port, b.Service)
}

// precedence says why it is this route's kind that has a say.
func precedence(ch *resources.Choice, namespace string) string {
	if ch.Route.Namespace == ch.Service.Namespace {
		return fmt.Sprintf("a producer route, of the Service's namespace; %s has no consumer route of its own for it", namespace)
	}
	return fmt.Sprintf("a consumer route, of the caller's namespace %s: it goes before all producer routes of %s", namespace, ch.Service.Namespace)
}

// saysMatch is a match in one line.
func saysMatch(m *nodecache.RouteMatch) string {
	var parts []string
	kinds := map[nodecache.MatchType]string{nodecache.MatchExact: "is", nodecache.MatchPrefix: "begins with", nodecache.MatchRegex: "is like"}
	add := func(what, value string, t nodecache.MatchType) {
		if value != "" {
			parts = append(parts, fmt.Sprintf("%s %s %s", what, kinds[t], value))
		}
	}
	add("path", m.Path, m.PathType)
	add("HTTP method", m.Verb, nodecache.MatchExact)
	add("service", m.Service, m.MethodType)
	add("method", m.Method, m.MethodType)
	for _, h := range m.Headers {
		add("header "+h.Name, strconv.Quote(h.Value), h.Type)
	}
	for _, q := range m.Query {
		add("parameter "+q.Name, strconv.Quote(q.Value), q.Type)
	}
	return cmp.Or(strings.Join(parts, ", "), "all calls")
}

func (c *call) transcoding(ch *resources.Choice) {
	switch {
	case ch.Transcoded != "":
		c.fact("transcoded", "to %s, by the descriptors of the backend; a query parameter that is no field of the message ends with 400", ch.Transcoded)
		if service, method, ok := strings.Cut(ch.Transcoded, "/"); ok {
			c.rule.Service, c.rule.Method = service, method
		}
	case len(ch.Transcodes) > 0:
		c.fact("transcoded", "no: JSON calls of this rule are, for %s, but this is none", strings.Join(ch.Transcodes, ", "))
	case ch.NotTranscoded != "":
		c.fact("transcoded", "no: the descriptors are not used: %s", ch.NotTranscoded)
	}
}

// answered says what the sidecar itself answers to all calls of the rule.
func (c *call) answered(ch *resources.Choice, by string) {
	switch {
	case ch.Flaw != "":
		c.replies(ch.Status, ch.Text, fmt.Sprintf("%s cannot be served, and all its calls fail: %s", by, ch.Flaw), "correct the rule")
	case ch.Status/100 == 3:
		c.replies(ch.Status, ch.Text, by+" redirects it", "nothing")
	default:
		c.replies(ch.Status, ch.Text, by+" names no backend with a weight", "give the rule a backend")
	}
}

// share says what becomes of one share's calls.
func (c *call) share(ch *resources.Choice, s *resources.Share) outcome {
	b := s.Backend
	behind := backendName(b)
	out := outcome{CallShare: CallShare{Port: b.Port, Weight: s.Weight, Cluster: s.Cluster}, goes: "behind " + behind}
	if b.Service != (nodecache.Name{}) {
		out.Service = b.Service.String()
	}
	fails := func(status int, message, why, do string) outcome {
		out.Code, out.message, out.Why, out.do = c.codeOf(status), message, why, do
		return out
	}
	if s.Cluster == "" {
		why, do := c.noBackend(b)
		c.fact("backend", "weight %d, %s: %s", s.Weight, behind, why)
		return fails(cmp.Or(ch.Status, ch.Missing), ch.Text, why, do)
	}
	c.fact("backend", "weight %d, %s: cluster %s", s.Weight, behind, s.Cluster)
	members := s.Members(c.a.dir)
	absent, n, lacking := c.standing(b.Service.String(), s.Called(), members)
	out.goes = count(n, "endpoint") + " behind " + behind
	const shown = 2
	missing := false
	c.held(func(cause, do string) {
		missing = true
		out = fails(ch.Missing, "", cause, do)
	}, xds.ID{Type: xds.Cluster, Name: s.Cluster}, xds.ID{Type: xds.Endpoint, Name: s.Cluster})
	switch {
	case missing:
	case n == 0 && len(members) == 0:
		return fails(503, "no healthy upstream", "nothing stands behind "+behind, "scale up what should, or correct the Service's selector")
	case n == 0:
		return fails(503, "no healthy upstream", fmt.Sprintf("no pod behind %s gets the call: %s", behind, some(absent, shown)), "make a pod Ready that serves it")
	case lacking == n && c.rule.Service != "":
		out.goes += fmt.Sprintf(", none of which is known to implement %s", c.rule.Service)
	case len(absent) > 0:
		out.goes += ", not to " + some(absent, shown)
	}
	if !missing {
		out.Code = codeName(codes.OK)
	}
	return out
}

// standing says who stands behind something that is called and gets the call, or
// does not and why.
func (c *call) standing(of, called string, members []resources.MemberView) (absent []string, n, lacking int) {
	var es []resources.EndpointView
	for _, m := range members {
		if m.Absent != "" {
			pod, why := c.whyBehind(&m, called)
			c.Absent = append(c.Absent, AbsentPod{Pod: pod, Node: m.Node, Why: why})
			c.fact("absent", "%s of %s: %s", pod, of, why)
			absent = append(absent, fmt.Sprintf("%s (%s)", pod, why))
			continue
		}
		n++
		state := m.State
		if c.lacks(&m) {
			lacking++
			state += ", known not to implement " + c.rule.Service
		}
		c.Endpoints, es = append(c.Endpoints, m.EndpointView), append(es, m.EndpointView)
		c.fact("endpoint", "%s %s on node %q, %s", m.Address, named(&m), m.Node, state)
		if o := c.a.dir.Owner(m.Owner); o != nil && !slices.Contains(c.workloads, o.Workload) {
			c.workloads = append(c.workloads, o.Workload)
		}
	}
	c.spread(c.a.compiler, "locality", es)
	return absent, n, lacking
}

// lacks tells whether it is known of an endpoint that it does not implement
// what the call names.
func (c *call) lacks(m *resources.MemberView) bool {
	pod, ok := c.a.dir.Member(m.UID)
	return ok && c.rule.Service != "" && !c.plain && c.a.dir.Owner(m.Owner).Lacks(pod.Pod, m.Port, c.rule.Service)
}

func named(m *resources.MemberView) string {
	if m.Pod == "" {
		return "without a pod"
	}
	return "pod " + m.Pod
}

// noBackend says why calls may not go to a backend, and what to do about it.
func (c *call) noBackend(b nodecache.RouteBackend) (why, do string) {
	front := c.a.dir.Front(b.Service)
	switch {
	case b.Refused != "":
		return fmt.Sprintf("%s is refused: %s", backendName(b), b.Refused), "correct the reference, or grant it"
	case front == nil:
		return fmt.Sprintf("there is no Service %s", b.Service), "correct the reference"
	case front.External != "":
		return fmt.Sprintf("Service %s is but another name for %s", b.Service, front.External), "name a Service that has pods"
	}
	return fmt.Sprintf("Service %s has no port %d", b.Service, b.Port), "correct the port of the reference"
}

// whyBehind names what stands behind a Service and gets no calls, and why.
func (c *call) whyBehind(m *resources.MemberView, service string) (pod, why string) {
	if m.UID == "" {
		return cmp.Or(m.Address, "an address"), string(m.Absent)
	}
	r := c.a.store.WithUID(m.UID)
	if r == nil {
		return "the pod with UID " + m.UID, "its EndpointSlice names it, and it is not there"
	}
	m.Node = r.Node
	why = string(m.Absent)
	switch m.Absent {
	case resources.NotServed:
		why = cmp.Or(c.a.whyAbsent(r, ""), why)
	case resources.Lacking:
		pod, there := c.a.dir.Member(m.UID)
		if o := c.a.dir.Owner(r.Owner); there && o != nil {
			why = fmt.Sprintf("it is known not to implement %s: %s", service, c.a.whyNotHere(o, pod, service))
		}
	}
	return "pod " + r.String(), why
}

// shared says what comes of the call by what comes of each share.
func (c *call) shared(ch *resources.Choice, by string, outcomes []outcome) {
	var sum, failing uint64
	var goes, fails []string
	heaviest := &outcomes[0]
	for i := range outcomes {
		o := &outcomes[i]
		sum += uint64(o.Weight)
	}
	part := func(w uint64) string { return fmt.Sprintf("%.4g %%", 100*float64(w)/float64(sum)) }
	best := func(o *outcome) bool {
		ok, was := o.Code == codeName(codes.OK), heaviest.Code == codeName(codes.OK)
		return ok && !was || ok == was && o.Weight > heaviest.Weight
	}
	for i := range outcomes {
		o := &outcomes[i]
		if best(o) {
			heaviest = o
		}
		if o.Code == codeName(codes.OK) {
			goes = append(goes, fmt.Sprintf("%s (%s)", o.goes, part(uint64(o.Weight))))
			continue
		}
		failing += uint64(o.Weight)
		fails = append(fails, o.Why)
	}
	c.Cluster = heaviest.Cluster
	const shown = 3
	switch {
	case len(goes) == 0:
		c.Code, c.Message = heaviest.Code, heaviest.message
		c.Cause, c.Do = fmt.Sprintf("by %s: %s", by, some(fails, shown)), heaviest.do
	case len(goes) == 1 && failing == 0:
		c.gets(codes.OK, "", fmt.Sprintf("it goes to %s, by %s", heaviest.goes, by), "nothing")
	default:
		c.gets(codes.OK, "", fmt.Sprintf("it goes to %s, by %s", some(goes, shown), by), "nothing")
		if failing > 0 {
			c.Cause += fmt.Sprintf("; %s of the calls fail: %s", part(failing), some(fails, shown))
			c.Do = "mend the share that fails"
		}
	}
	c.Cause += c.late
}

// replies says that the sidecar itself answers with the HTTP status.
func (c *call) replies(status int, message, cause, do string) {
	c.Code, c.Message, c.Cause, c.Do = c.codeOf(status), message, cause+c.late, do
}

// codeOf is what the caller sees of an HTTP status that Envoy itself gives: of
// a gRPC call it makes a gRPC code ("HTTP to gRPC status code mapping" of the
// gRPC project).
func (c *call) codeOf(status int) string {
	if c.plain {
		return strconv.Itoa(status)
	}
	code := codes.Unknown
	switch status {
	case 404:
		code = codes.Unimplemented
	case 429, 502, 503, 504:
		code = codes.Unavailable
	}
	return codeName(code)
}

// overHTTP corrects what comes of a call that is not of gRPC where no route
// takes it.
func (c *call) overHTTP() {
	switch {
	case c.Code == codeName(codes.OK):
	case len(c.Endpoints) > 0 && c.Code == codeName(codes.Unimplemented):
		c.gets(codes.OK, "", fmt.Sprintf("it goes to %s, as a call of gRPC would", count(len(c.Endpoints), "endpoint")), "nothing")
	case c.Message == noUpstream:
		c.Code = "503"
	default:
		c.Code, c.Message = "415", ""
		c.Cause = "no route takes it, and beyond routes only calls of gRPC are answered; one would get: " + c.Cause
		c.Do = "make an HTTPRoute for the Service, or a call of gRPC"
	}
}

// routeCall is what routes look at of the call: that of gRPC if nothing else is
// said.
func routeCall(path, verb string, headers map[string]string, grpc bool) routetable.Call {
	call := routetable.Call{Path: path, Verb: cmp.Or(verb, "GET"), Headers: map[string]string{}}
	if grpc {
		call.Verb, call.Headers["content-type"] = "POST", "application/grpc"
	}
	for name, value := range headers {
		call.Headers[strings.ToLower(name)] = value
	}
	return call
}
