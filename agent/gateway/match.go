package gateway

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// verbs are the methods that a match may name.
var verbs = []gatewayv1.HTTPMethod{
	gatewayv1.HTTPMethodGet, gatewayv1.HTTPMethodHead, gatewayv1.HTTPMethodPost, gatewayv1.HTTPMethodPut, gatewayv1.HTTPMethodDelete,
	gatewayv1.HTTPMethodConnect, gatewayv1.HTTPMethodOptions, gatewayv1.HTTPMethodTrace, gatewayv1.HTTPMethodPatch,
}

// What a gRPC path is made of, as the API's own schema has it.
var (
	grpcService = regexp.MustCompile(`^\.?[A-Za-z_][A-Za-z_0-9]*(\.[A-Za-z_][A-Za-z_0-9]*)*$`)
	grpcMethod  = regexp.MustCompile(`^[A-Za-z_][A-Za-z_0-9]*$`)
	// token is what the name of a header or query parameter may be (RFC 9110,
	// section 5.6.2).
	token = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+\\-.^_`|~]+$")
)

func httpMatch(in *gatewayv1.HTTPRouteMatch) (m nodecache.RouteMatch, err error) {
	path := or(in.Path, gatewayv1.HTTPPathMatch{})
	if m.Path, m.PathType, err = pathMatch(or(path.Type, gatewayv1.PathMatchPathPrefix), or(path.Value, "/")); err != nil {
		return m, err
	}
	if v := or(in.Method, ""); v != "" {
		if !slices.Contains(verbs, v) {
			return m, unsupported("method %q", v)
		}
		m.Verb = string(v)
	}
	for _, h := range in.Headers {
		m.Headers, err = header(m.Headers, string(or(h.Type, gatewayv1.HeaderMatchExact)), string(h.Name), h.Value)
		if err != nil {
			return m, err
		}
	}
	for _, q := range in.QueryParams {
		m.Query, err = valueMatch(m.Query, "query parameter", string(or(q.Type, gatewayv1.QueryParamMatchExact)), string(q.Name), q.Value)
		if err != nil {
			return m, err
		}
	}
	return m, nil
}

func grpcMatch(in *gatewayv1.GRPCRouteMatch) (m nodecache.RouteMatch, err error) {
	method := or(in.Method, gatewayv1.GRPCMethodMatch{})
	m.Service, m.Method = or(method.Service, ""), or(method.Method, "")
	if m.MethodType, err = matchType(string(or(method.Type, gatewayv1.GRPCMethodMatchExact)), m.Service, m.Method); err != nil {
		return m, err
	}
	if m.MethodType == nodecache.MatchExact {
		if m.Service != "" && !grpcService.MatchString(m.Service) || m.Method != "" && !grpcMethod.MatchString(m.Method) {
			return m, unsupported("gRPC method %q of service %q", m.Method, m.Service)
		}
	}
	for _, h := range in.Headers {
		m.Headers, err = header(m.Headers, string(or(h.Type, gatewayv1.GRPCHeaderMatchExact)), string(h.Name), h.Value)
		if err != nil {
			return m, err
		}
	}
	return m, nil
}

// pathMatch reads a path. A prefix is by path element, so that the slash at its
// end says nothing.
func pathMatch(kind gatewayv1.PathMatchType, value string) (string, nodecache.MatchType, error) {
	if kind == gatewayv1.PathMatchPathPrefix {
		value = cmp.Or(strings.TrimRight(value, "/"), "/")
	}
	switch {
	case kind == gatewayv1.PathMatchRegularExpression:
		t, err := matchType(string(kind), value)
		return value, t, err
	case kind != gatewayv1.PathMatchExact && kind != gatewayv1.PathMatchPathPrefix:
		return value, 0, unsupported("path type %q", kind)
	case !strings.HasPrefix(value, "/") || !printable(value) || strings.ContainsAny(value, "?#"):
		return value, 0, unsupported("path %q", value)
	case kind == gatewayv1.PathMatchExact:
		return value, nodecache.MatchExact, nil
	}
	return value, nodecache.MatchPrefix, nil
}

// matchType reads the type of a match of values: all types of matches but that
// of paths have these two. The expressions are RE2's, in Go as in Envoy.
func matchType(kind string, values ...string) (nodecache.MatchType, error) {
	switch kind {
	case string(gatewayv1.HeaderMatchExact):
		return nodecache.MatchExact, nil
	case string(gatewayv1.HeaderMatchRegularExpression):
		for _, v := range values {
			if _, err := regexp.Compile(v); err != nil {
				return nodecache.MatchRegex, unsupported("%s", line(err))
			}
		}
		return nodecache.MatchRegex, nil
	}
	return 0, unsupported("match type %q", kind)
}

// header reads one match of a header: names differ in no case.
func header(to []nodecache.ValueMatch, kind, name, value string) ([]nodecache.ValueMatch, error) {
	return valueMatch(to, "header", kind, strings.ToLower(name), value)
}

// valueMatch adds a match, unless there is one of that name: the first counts.
func valueMatch(to []nodecache.ValueMatch, what, kind, name, value string) ([]nodecache.ValueMatch, error) {
	t, err := matchType(kind, value)
	switch {
	case err != nil:
		return to, err
	case !token.MatchString(name):
		return to, unsupported("%s %q", what, name)
	case !printable(value):
		return to, unsupported("%s %s: value %q", what, name, value)
	case slices.ContainsFunc(to, func(m nodecache.ValueMatch) bool { return m.Name == name }):
		return to, nil
	}
	return append(to, nodecache.ValueMatch{Name: name, Value: value, Type: t}), nil
}

// printable tells whether a text has no character that ends a line or a
// string.
func printable(s string) bool { return !strings.ContainsAny(s, "\r\n\x00") }
