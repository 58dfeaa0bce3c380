package resources

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"time"

	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

// unresolved is the name of a cluster that is never there. The share of calls
// that has no backend goes to it.
const unresolved = "unresolved"

// maxWeight is the most that the API allows.
const maxWeight = 1_000_000

// share is what one backend gets of the calls.
type share struct {
	id      backendID // zero: the reference leads nowhere
	weight  uint32    // not 0
	filters []nodecache.RouteFilter
}

// shares returns who gets the calls that an entry takes. Where all weights are
// 0 nobody does.
func shares(e routetable.Entry, port func(nodecache.Name, uint16) (nodecache.FrontPort, bool)) []share {
	var out []share
	for _, b := range e.In().Backends {
		if b.Weight == 0 {
			continue
		}
		s := share{weight: min(b.Weight, maxWeight), filters: b.Filters}
		if _, ok := port(b.Service, b.Port); ok && b.Refused == "" {
			s.id = backendOf(e.Route.Kind, e.On(), b)
		}
		out = append(out, s)
	}
	return out
}

// entryName is how access logs and explanations call an entry.
func entryName(e routetable.Entry) string {
	return fmt.Sprintf("%s/%s/%s/%d/%d", e.Route.Kind, e.Route.Namespace, e.Route.Name, e.Rule, e.Match)
}

// entryRoutes writes one entry of a table as Envoy's routes, mostly one. What
// Envoy would refuse must not reach it, since it refuses the whole table: where
// the match is at fault there is no route, else the calls fail. Both come with
// an error that says why.
func entryRoutes(e routetable.Entry, to []share) ([]*routev3.Route, error) {
	match, err := envoyMatch(e)
	if err != nil {
		return nil, err
	}
	rs, err := entryActions(e, match, to)
	if err != nil {
		rs = []*routev3.Route{{Name: entryName(e), Match: match, Action: failing(e)}}
	}
	return rs, err
}

// entryActions writes what becomes of the calls that the match takes.
func entryActions(e routetable.Entry, match *routev3.RouteMatch, to []share) ([]*routev3.Route, error) {
	rs, err := actions(e, match, to)
	if err != nil {
		return nil, err
	}
	for _, r := range rs {
		r.Name = entryName(e)
		if err := r.ValidateAll(); err != nil {
			return nil, err
		}
	}
	return rs, nil
}

// actions writes the rule's filters and backends.
func actions(e routetable.Entry, match *routev3.RouteMatch, to []share) ([]*routev3.Route, error) {
	r := &routev3.Route{Match: match}
	var rewrite *nodecache.RouteFilter
	rule := e.In()
	for i := range rule.Filters {
		switch f := &rule.Filters[i]; f.Type {
		case nodecache.FilterRequestHeaders:
			add, remove, err := headers(f)
			if err != nil {
				return nil, err
			}
			r.RequestHeadersToAdd, r.RequestHeadersToRemove = add, remove
		case nodecache.FilterResponseHeaders:
			add, remove, err := headers(f)
			if err != nil {
				return nil, err
			}
			r.ResponseHeadersToAdd, r.ResponseHeadersToRemove = add, remove
		case nodecache.FilterRedirect:
			return redirect(r, e.On(), f)
		case nodecache.FilterRewrite:
			rewrite = f
		}
	}
	a, err := forward(e, to)
	if err != nil || a == nil {
		r.Action = failing(e)
		return []*routev3.Route{r}, err
	}
	r.Action = &routev3.Route_Route{Route: a}
	if rewrite == nil {
		return []*routev3.Route{r}, nil
	}
	return rewritten(r, a, e.On(), rewrite)
}

// failing is what calls get that have no backend at all: 500 as the API wants
// it of an HTTPRoute, UNAVAILABLE of a GRPCRoute (to which Envoy translates
// 503).
func failing(e routetable.Entry) *routev3.Route_DirectResponse {
	status := uint32(500)
	if e.Route.Kind == nodecache.GRPCRoute {
		status = 503
	}
	// Envoy takes a body of 4 KiB.
	text := fmt.Sprintf("rule %d of %s %.253s/%.253s has no backend that can be called", e.Rule, e.Route.Kind, e.Route.Namespace, e.Route.Name)
	return &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{
		Status: status,
		Body:   &corev3.DataSource{Specifier: &corev3.DataSource_InlineString{InlineString: text}},
	}}
}

// forward returns nil if no backend can be called.
func forward(e routetable.Entry, to []share) (*routev3.RouteAction, error) {
	var sum uint64
	valid, plain := 0, true
	for _, s := range to {
		sum += uint64(s.weight)
		plain = plain && len(s.filters) == 0
		if s.id != (backendID{}) {
			valid++
		}
	}
	if valid == 0 {
		return nil, nil
	}
	a := defaultAction()
	policies(a, e.In())
	if len(to) == 1 && plain {
		a.ClusterSpecifier = &routev3.RouteAction_Cluster{Cluster: to[0].id.String()}
		return a, nil
	}
	weighted := &routev3.WeightedCluster{}
	for _, s := range to {
		// Envoy refuses a sum of more than 32 bits.
		w := &routev3.WeightedCluster_ClusterWeight{Name: unresolved, Weight: number(uint32(uint64(s.weight) / (sum/math.MaxUint32 + 1)))}
		if s.id != (backendID{}) {
			w.Name = s.id.String()
			if err := weightFilters(w, s.filters); err != nil {
				return nil, err
			}
		} else if e.Route.Kind == nodecache.HTTPRoute {
			a.ClusterNotFoundResponseCode = routev3.RouteAction_INTERNAL_SERVER_ERROR
		}
		weighted.Clusters = append(weighted.Clusters, w)
	}
	a.ClusterSpecifier = &routev3.RouteAction_WeightedClusters{WeightedClusters: weighted}
	return a, nil
}

// policies writes the timeouts and retries of a rule over the defaults.
func policies(a *routev3.RouteAction, rule *nodecache.RouteRule) {
	if rule.Timeout > 0 {
		// Where a maximum duration is set Envoy looks at no timeout.
		a.Timeout, a.MaxStreamDuration = duration(rule.Timeout), nil
	}
	if rule.BackendTimeout > 0 {
		a.RetryPolicy.PerTryTimeout = duration(rule.BackendTimeout)
	}
	own := rule.Retry
	if own == nil {
		return
	}
	if own.Attempts > 0 {
		a.RetryPolicy.NumRetries = number(uint32(own.Attempts))
	}
	if len(own.Codes) > 0 {
		a.RetryPolicy.RetryOn += ",retriable-status-codes"
		for _, code := range own.Codes {
			a.RetryPolicy.RetriableStatusCodes = append(a.RetryPolicy.RetriableStatusCodes, uint32(code))
		}
	}
	if own.Backoff > 0 {
		a.RetryPolicy.RetryBackOff = &routev3.RetryPolicy_RetryBackOff{
			BaseInterval: duration(max(own.Backoff, time.Millisecond)),
			MaxInterval:  duration(max(own.Backoff, time.Millisecond) * 10),
		}
	}
}

// envoyMatch writes a match. It returns an error if Envoy could not take it.
func envoyMatch(e routetable.Entry) (*routev3.RouteMatch, error) {
	m, out := e.On(), &routev3.RouteMatch{}
	if e.Route.Kind == nodecache.GRPCRoute {
		grpcPath(out, m)
	} else {
		setPath(out, m.Path, m.PathType)
	}
	if m.Verb != "" {
		out.Headers = append(out.Headers, &routev3.HeaderMatcher{
			Name:                 ":method",
			HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: value(m.Verb, nodecache.MatchExact)},
		})
	}
	for _, h := range m.Headers {
		out.Headers = append(out.Headers, &routev3.HeaderMatcher{
			Name:                 h.Name,
			HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: value(h.Value, h.Type)},
		})
	}
	for _, q := range m.Query {
		out.QueryParameters = append(out.QueryParameters, &routev3.QueryParameterMatcher{
			Name:                         q.Name,
			QueryParameterMatchSpecifier: &routev3.QueryParameterMatcher_StringMatch{StringMatch: value(q.Value, q.Type)},
		})
	}
	err := out.ValidateAll()
	for _, re := range regexes(out) {
		err = errors.Join(err, checkRegex(re))
	}
	return out, err
}

func setPath(out *routev3.RouteMatch, path string, t nodecache.MatchType) {
	prefix := routetable.Prefix(path)
	switch {
	case t == nodecache.MatchExact:
		out.PathSpecifier = &routev3.RouteMatch_Path{Path: path}
	case t == nodecache.MatchRegex:
		out.PathSpecifier = &routev3.RouteMatch_SafeRegex{SafeRegex: regex(path)}
	case prefix == "":
		out.PathSpecifier = &routev3.RouteMatch_Prefix{Prefix: "/"}
	default:
		out.PathSpecifier = &routev3.RouteMatch_PathSeparatedPrefix{PathSeparatedPrefix: prefix}
	}
}

// grpcPath matches /service/method.
func grpcPath(out *routev3.RouteMatch, m *nodecache.RouteMatch) {
	part := func(name string) string {
		switch {
		case name == "":
			return "[^/]+"
		case m.MethodType == nodecache.MatchRegex:
			return "(?:" + name + ")"
		}
		return regexp.QuoteMeta(name)
	}
	switch {
	case m.Service == "" && m.Method == "":
		out.PathSpecifier = &routev3.RouteMatch_Prefix{Prefix: "/"}
	case m.MethodType == nodecache.MatchRegex || m.Service == "":
		out.PathSpecifier = &routev3.RouteMatch_SafeRegex{SafeRegex: regex("/" + part(m.Service) + "/" + part(m.Method))}
	case m.Method == "":
		out.PathSpecifier = &routev3.RouteMatch_Prefix{Prefix: "/" + m.Service + "/"}
	default:
		out.PathSpecifier = &routev3.RouteMatch_Path{Path: "/" + m.Service + "/" + m.Method}
	}
}

func regex(re string) *matcherv3.RegexMatcher { return &matcherv3.RegexMatcher{Regex: re} }

func value(v string, t nodecache.MatchType) *matcherv3.StringMatcher {
	if t == nodecache.MatchRegex {
		return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_SafeRegex{SafeRegex: regex(v)}}
	}
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: v}}
}
