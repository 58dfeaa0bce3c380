package gateway

import (
	"strings"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// httpFilters reads the filters of a rule, or of a backend of it.
func httpFilters(rule *nodecache.RouteRule, in []gatewayv1.HTTPRouteFilter) []nodecache.RouteFilter {
	var out []nodecache.RouteFilter
	redirects, rewrites := false, false
	for i := range in {
		f, err := httpFilter(&in[i])
		if err != nil {
			refuse(rule, err)
			continue
		}
		redirects = redirects || f.Type == nodecache.FilterRedirect
		rewrites = rewrites || f.Type == nodecache.FilterRewrite
		out = append(out, f)
	}
	if redirects && rewrites {
		refuse(rule, &refusal{gatewayv1.RouteReasonIncompatibleFilters, "a redirect and a rewrite"})
	}
	return out
}

func httpFilter(in *gatewayv1.HTTPRouteFilter) (nodecache.RouteFilter, error) {
	switch in.Type {
	case gatewayv1.HTTPRouteFilterRequestHeaderModifier:
		return headerFilter(nodecache.FilterRequestHeaders, in.RequestHeaderModifier)
	case gatewayv1.HTTPRouteFilterResponseHeaderModifier:
		return headerFilter(nodecache.FilterResponseHeaders, in.ResponseHeaderModifier)
	case gatewayv1.HTTPRouteFilterRequestRedirect:
		r := in.RequestRedirect
		if r == nil {
			return nodecache.RouteFilter{}, unsupported("filter %s without its part", in.Type)
		}
		f := nodecache.RouteFilter{
			Type: nodecache.FilterRedirect, Scheme: strings.ToLower(or(r.Scheme, "")), Hostname: string(or(r.Hostname, "")),
			Port: port(r.Port), Status: or(r.StatusCode, 0),
		}
		if f.Scheme != "" && f.Scheme != "http" && f.Scheme != "https" {
			return f, unsupported("scheme %q of a redirect", f.Scheme)
		}
		switch f.Status {
		case 0, 301, 302, 303, 307, 308:
		default:
			return f, unsupported("status %d of a redirect", f.Status)
		}
		return pathFilter(f, r.Path)
	case gatewayv1.HTTPRouteFilterURLRewrite:
		r := in.URLRewrite
		if r == nil {
			return nodecache.RouteFilter{}, unsupported("filter %s without its part", in.Type)
		}
		return pathFilter(nodecache.RouteFilter{Type: nodecache.FilterRewrite, Hostname: string(or(r.Hostname, ""))}, r.Path)
	}
	return nodecache.RouteFilter{}, unsupported("filter %q", in.Type)
}

func grpcFilters(rule *nodecache.RouteRule, in []gatewayv1.GRPCRouteFilter) []nodecache.RouteFilter {
	var out []nodecache.RouteFilter
	for i := range in {
		f, err := grpcFilter(&in[i])
		if err != nil {
			refuse(rule, err)
			continue
		}
		out = append(out, f)
	}
	return out
}

func grpcFilter(in *gatewayv1.GRPCRouteFilter) (nodecache.RouteFilter, error) {
	switch in.Type {
	case gatewayv1.GRPCRouteFilterRequestHeaderModifier:
		return headerFilter(nodecache.FilterRequestHeaders, in.RequestHeaderModifier)
	case gatewayv1.GRPCRouteFilterResponseHeaderModifier:
		return headerFilter(nodecache.FilterResponseHeaders, in.ResponseHeaderModifier)
	}
	return nodecache.RouteFilter{}, unsupported("filter %q", in.Type)
}

// pathFilter adds what the filter does to the path.
func pathFilter(f nodecache.RouteFilter, path *gatewayv1.HTTPPathModifier) (nodecache.RouteFilter, error) {
	if f.Hostname != "" && (!token.MatchString(f.Hostname) || strings.Contains(f.Hostname, "*")) {
		return f, unsupported("hostname %q", f.Hostname)
	}
	if path == nil {
		return f, nil
	}
	switch path.Type {
	case gatewayv1.FullPathHTTPPathModifier:
		f.PathOp, f.ReplacePath = nodecache.PathFull, or(path.ReplaceFullPath, "")
	case gatewayv1.PrefixMatchHTTPPathModifier:
		f.PathOp, f.ReplacePath = nodecache.PathPrefix, or(path.ReplacePrefixMatch, "")
	default:
		return f, unsupported("path modifier %q", path.Type)
	}
	if !printable(f.ReplacePath) {
		return f, unsupported("path %q", f.ReplacePath)
	}
	return f, nil
}

func headerFilter(t nodecache.FilterType, in *gatewayv1.HTTPHeaderFilter) (nodecache.RouteFilter, error) {
	f := nodecache.RouteFilter{Type: t}
	if in == nil {
		return f, unsupported("header filter without its part")
	}
	var err error
	if f.Set, err = headers(in.Set); err != nil {
		return f, err
	}
	if f.Add, err = headers(in.Add); err != nil {
		return f, err
	}
	for _, name := range in.Remove {
		if !token.MatchString(name) {
			return f, unsupported("header %q", name)
		}
		f.Remove = append(f.Remove, strings.ToLower(name))
	}
	return f, nil
}

// headers reads what is written, of each name the first.
func headers(in []gatewayv1.HTTPHeader) ([]nodecache.Header, error) {
	var out []nodecache.Header
	seen := map[string]bool{}
	for _, h := range in {
		name := strings.ToLower(string(h.Name))
		switch {
		case !token.MatchString(name) || !printable(h.Value):
			return nil, unsupported("header %q: %q", h.Name, h.Value)
		case !seen[name]:
			seen[name] = true
			out = append(out, nodecache.Header{Name: name, Value: h.Value})
		}
	}
	return out, nil
}
