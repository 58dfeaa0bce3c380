package resources

import (
	"fmt"
	"slices"
	"strings"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

// Choice says what the routes of a Service make of a call.
type Choice struct {
	// VirtualHost is that of the route table; Service and Port are what the
	// authority names.
	VirtualHost string
	Service     nodecache.Name
	Port        uint16
	// Kind is that of all routes that have a say; Conflicted are the HTTPRoutes
	// that have none since there are GRPCRoutes.
	Kind       nodecache.RouteKind
	Conflicted []*nodecache.Route
	// Route takes the call, by its rule and match of these indexes. It is nil
	// if none does.
	Route       *nodecache.Route
	Rule, Match int
	// Status is the HTTP status with which the sidecar itself answers, Text the
	// body: where no route takes the call, the rule redirects, or all calls fail
	// for want of a backend. 0 where calls go to Shares.
	Status int
	Text   string
	// Flaw says why the rule cannot be written for Envoy, so that all calls
	// fail; empty if it can.
	Flaw string
	// Shares are who may get the call; none where the rule names no backend.
	Shares []Share
	// Missing is the HTTP status for calls to a share without a cluster.
	Missing int
	// Transcoded is the gRPC method, as pkg.Service/Method, to which the call is
	// transcoded if its body is not gRPC; Shares are what a call to that one
	// gets. Empty where the call goes as it is.
	Transcoded string
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
	Backend nodecache.RouteBackend

	id backendID
}

// Choose says what the routes make of a call that a client of the namespace
// makes to the authority; grpc tells that its body is gRPC. It returns false if
// no route speaks for the Service there, so that the call goes where its names
// say.
func (c *Compiler) Choose(namespace, authority string, call routetable.Call, grpc bool) (Choice, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	authority = strings.ToLower(authority)
	for h := range c.hosts(namespace) {
		if slices.Contains(h.domains, authority) {
			return c.choose(h, call, grpc), true
		}
	}
	return Choice{}, false
}

// choose needs mu, for reading at least.
func (c *Compiler) choose(h host, call routetable.Call, grpc bool) Choice {
	out := Choice{VirtualHost: h.String(), Service: h.front.Key(), Port: h.port.Port, Kind: h.table.Kind, Conflicted: h.table.Conflicted, Status: 404}
	h.table.Entries = slices.DeleteFunc(h.table.Entries, func(e routetable.Entry) bool {
		_, err := envoyMatch(e)
		return err != nil // it is not in the table
	})
	e, ok := h.table.Match(call)
	if !ok {
		return out
	}
	out.Route, out.Rule, out.Match, out.Status = e.Route, e.Rule, e.Match, 0
	to := shares(e, c.frontPort)
	p := c.transcodes(e.Route.Kind, e.In())
	rs, err := entryRoutes(e, to)
	switch {
	case err != nil:
		out.Flaw = err.Error()
	case p == nil:
		out.NotTranscoded = c.whyNot(e.In())
	default:
		out.Transcodes = p.set.Services
		if !grpc {
			out.Transcoded = p.set.Method(call.Verb, call.Path)
		}
	}
	switch a := rs[0].Action.(type) {
	case *routev3.Route_DirectResponse:
		out.Status, out.Text = int(a.DirectResponse.Status), a.DirectResponse.Body.GetInlineString()
	case *routev3.Route_Redirect:
		out.Status = redirects(e.In())
	case *routev3.Route_Route:
		out.Missing = 503
		if a.Route.ClusterNotFoundResponseCode == routev3.RouteAction_INTERNAL_SERVER_ERROR {
			out.Missing = 500
		}
	}
	service, _, _ := strings.Cut(out.Transcoded, "/")
	for _, s := range to {
		sh := Share{Weight: s.weight, Backend: s.backend, id: s.id}
		if s.id != (backendID{}) {
			sh.id = s.id.calling(service)
			sh.Cluster = sh.id.String()
		}
		out.Shares = append(out.Shares, sh)
	}
	return out
}

// redirects is the HTTP status by which a rule redirects.
func redirects(rule *nodecache.RouteRule) int {
	for _, f := range rule.Filters {
		if f.Type == nodecache.FilterRedirect && f.Status != 0 {
			return f.Status
		}
	}
	return 302
}

// MemberView is what stands behind the Service of a backend: a pod, or an
// address without one.
type MemberView struct {
	EndpointView
	UID    string // of the pod; empty where there is none
	Port   uint16 // that is called; 0 where Absent says that the pod has none
	Absent Absence
}

// Members returns what stands behind the share's backend, and gets its calls or
// does not. It reads dir alone; a share without a cluster has none.
func (s *Share) Members(dir Services) []MemberView {
	v := dir.Front(s.id.service)
	if s.Cluster == "" || v == nil {
		return nil
	}
	port, ok := portOf(v.Front, s.id.port)
	if !ok {
		return nil
	}
	r := &refresh{dir: dir, owners: map[nodecache.OwnerKey]*nodecache.Owner{}}
	es := r.behind(v, port, s.id.grpc)
	var out []MemberView
	for _, m := range v.Members() {
		mv := MemberView{UID: m.Pod}
		e, absence := r.place(m, port, s.id.grpc)
		switch {
		case absence != "":
			mv.Absent = absence
			if p, ok := dir.Member(m.Pod); ok {
				mv.Pod, mv.Node, mv.Owner = p.String(), p.Node, p.Owner
			} else if len(m.Addrs) > 0 {
				mv.Address = m.Addrs[0].String()
			}
		case slices.ContainsFunc(es, func(o endpoint) bool { return o.addr == e.addr && o.pod.UID == e.pod.UID }):
			mv.EndpointView, mv.Port = e.view(), e.addr.Port()
		default:
			mv.EndpointView, mv.Port, mv.Absent = e.view(), e.addr.Port(), SameAddress
		}
		out = append(out, mv)
	}
	return out
}

// Called is the gRPC service of which the share's cluster holds only those pods
// that may serve it; empty if it holds all.
func (s *Share) Called() string { return s.id.grpc }

func (h *host) String() string { return fmt.Sprintf("%s/%d", h.front.Key(), h.port.Port) }
