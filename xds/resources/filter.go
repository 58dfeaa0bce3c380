package resources

import (
	"errors"
	"fmt"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

// headers writes a header filter: what it sets and adds, and what it removes.
func headers(f *nodecache.RouteFilter) ([]*corev3.HeaderValueOption, []string, error) {
	var out []*corev3.HeaderValueOption
	put := func(hs []nodecache.Header, how corev3.HeaderValueOption_HeaderAppendAction) error {
		for _, h := range hs {
			if err := changeable(h.Name); err != nil {
				return err
			}
			out = append(out, &corev3.HeaderValueOption{
				// A percent sign would begin one of Envoy's own words.
				Header:       &corev3.HeaderValue{Key: h.Name, Value: strings.ReplaceAll(h.Value, "%", "%%")},
				AppendAction: how,
			})
		}
		return nil
	}
	if err := put(f.Set, corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD); err != nil {
		return nil, nil, err
	}
	if err := put(f.Add, corev3.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD); err != nil {
		return nil, nil, err
	}
	for _, name := range f.Remove {
		if err := changeable(name); err != nil {
			return nil, nil, err
		}
	}
	return out, f.Remove, nil
}

// changeable returns an error for what is not a header of the message but part
// of its address; Envoy refuses to change it.
func changeable(name string) error {
	if name == "" || name[0] == ':' || strings.EqualFold(name, "host") {
		return fmt.Errorf("header %q may not be changed", name)
	}
	return nil
}

// weightFilters writes the filters of one backend.
func weightFilters(w *routev3.WeightedCluster_ClusterWeight, filters []nodecache.RouteFilter) error {
	for i := range filters {
		f := &filters[i]
		add, remove, err := headers(f)
		if err != nil {
			return err
		}
		switch f.Type {
		case nodecache.FilterRequestHeaders:
			w.RequestHeadersToAdd, w.RequestHeadersToRemove = add, remove
		case nodecache.FilterResponseHeaders:
			w.ResponseHeadersToAdd, w.ResponseHeadersToRemove = add, remove
		default:
			return errors.New("a backend cannot redirect or rewrite")
		}
	}
	return nil
}

var redirectCodes = map[int]routev3.RedirectAction_RedirectResponseCode{
	0:   routev3.RedirectAction_FOUND,
	301: routev3.RedirectAction_MOVED_PERMANENTLY,
	302: routev3.RedirectAction_FOUND,
	303: routev3.RedirectAction_SEE_OTHER,
	307: routev3.RedirectAction_TEMPORARY_REDIRECT,
	308: routev3.RedirectAction_PERMANENT_REDIRECT,
}

var wellKnownPorts = map[string]uint16{"http": 80, "https": 443}

// redirect writes the answer of a redirect filter.
func redirect(r *routev3.Route, m *nodecache.RouteMatch, f *nodecache.RouteFilter) ([]*routev3.Route, error) {
	code, ok := redirectCodes[f.Status]
	if !ok {
		return nil, fmt.Errorf("redirect with status %d", f.Status)
	}
	port := f.Port
	switch known := wellKnownPorts[f.Scheme]; {
	case port == 0 && f.Hostname == "":
		// Else the port of the call would stay beside the new scheme.
		port = known
	case port == known && f.Hostname != "":
		port = 0
	}
	with := func(r *routev3.Route, prefix string) {
		a := &routev3.RedirectAction{HostRedirect: f.Hostname, PortRedirect: uint32(port), ResponseCode: code}
		if f.Scheme != "" {
			a.SchemeRewriteSpecifier = &routev3.RedirectAction_SchemeRedirect{SchemeRedirect: f.Scheme}
		}
		switch {
		case f.PathOp == nodecache.PathFull:
			a.PathRewriteSpecifier = &routev3.RedirectAction_PathRedirect{PathRedirect: f.ReplacePath}
		case prefix != "":
			a.PathRewriteSpecifier = &routev3.RedirectAction_PrefixRewrite{PrefixRewrite: prefix}
		}
		r.Action = &routev3.Route_Redirect{Redirect: a}
	}
	return onPrefix(r, m, f, with)
}

// rewritten writes a rewrite filter into the action of a route.
func rewritten(r *routev3.Route, a *routev3.RouteAction, m *nodecache.RouteMatch, f *nodecache.RouteFilter) ([]*routev3.Route, error) {
	if f.Hostname != "" {
		a.HostRewriteSpecifier = &routev3.RouteAction_HostRewriteLiteral{HostRewriteLiteral: f.Hostname}
	}
	if f.PathOp == nodecache.PathFull {
		a.RegexRewrite = &matcherv3.RegexMatchAndSubstitute{
			Pattern: regex("^/.*$"),
			// A backslash would begin the number of a group.
			Substitution: strings.ReplaceAll(f.ReplacePath, `\`, `\\`),
		}
	}
	return onPrefix(r, m, f, func(r *routev3.Route, prefix string) { r.GetRoute().PrefixRewrite = prefix })
}

// onPrefix writes the route for a filter that may replace the prefix of the
// path. Envoy takes prefixes by characters: where one side of the exchange is
// the root it takes care of slashes, and two routes, since /a/b with / for /a
// is /b and not //b. A prefix "" changes nothing.
func onPrefix(r *routev3.Route, m *nodecache.RouteMatch, f *nodecache.RouteFilter, with func(r *routev3.Route, prefix string)) ([]*routev3.Route, error) {
	if f.PathOp != nodecache.PathPrefix {
		with(r, "")
		return []*routev3.Route{r}, nil
	}
	if m.PathType != nodecache.MatchPrefix || m.Path == "" {
		return nil, errors.New("a prefix is replaced where the match has none")
	}
	from, to := routetable.Prefix(m.Path), routetable.Prefix(f.ReplacePath)
	switch {
	case from == "" && to == "":
		with(r, "")
	case from == "":
		with(r, to+"/")
	case to != "":
		with(r, to)
	default:
		below := proto.CloneOf(r)
		setPath(r.Match, from, nodecache.MatchExact)
		with(r, "/")
		below.Match.PathSpecifier = &routev3.RouteMatch_Prefix{Prefix: from + "/"}
		with(below, "/")
		return []*routev3.Route{r, below}, nil
	}
	return []*routev3.Route{r}, nil
}
