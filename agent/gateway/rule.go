package gateway

import (
	"fmt"
	"time"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// refusal is why a rule cannot be served: the reason of its route's condition
// Accepted, and what it is about.
type refusal struct {
	reason gatewayv1.RouteConditionReason
	detail string
}

func (r *refusal) Error() string { return r.detail }

// unsupported says that a rule has a value that is not served. The API allows
// that values come up later; they must be refused, and harm nobody.
func unsupported(format string, args ...any) error {
	return &refusal{gatewayv1.RouteReasonUnsupportedValue, fmt.Sprintf(format, args...)}
}

// refuse notes the first reason against a rule.
func refuse(rule *nodecache.RouteRule, err error) {
	if err == nil || rule.Refused != "" {
		return
	}
	rule.Refused, rule.Detail = string(gatewayv1.RouteReasonUnsupportedValue), err.Error()
	if r, ok := err.(*refusal); ok {
		rule.Refused = string(r.reason)
	}
}

func httpRule(namespace string, in *gatewayv1.HTTPRouteRule) nodecache.RouteRule {
	rule := nodecache.RouteRule{Name: string(or(in.Name, "")), Timeout: -1, BackendTimeout: -1}
	for i := range in.Matches {
		m, err := httpMatch(&in.Matches[i])
		refuse(&rule, err)
		rule.Matches = append(rule.Matches, m)
	}
	if len(in.Matches) == 0 {
		rule.Matches = []nodecache.RouteMatch{{Path: "/", PathType: nodecache.MatchPrefix}}
	}
	rule.Filters = httpFilters(&rule, in.Filters)
	for i := range in.BackendRefs {
		ref := &in.BackendRefs[i]
		b := backend(namespace, &ref.BackendRef)
		b.Filters = httpFilters(&rule, ref.Filters)
		rule.Backends = append(rule.Backends, b)
	}
	if t := in.Timeouts; t != nil {
		rule.Timeout, rule.BackendTimeout = duration(&rule, t.Request, -1), duration(&rule, t.BackendRequest, -1)
	}
	if r := in.Retry; r != nil {
		rule.Retry = &nodecache.RouteRetry{Attempts: max(0, or(r.Attempts, 0)), Backoff: duration(&rule, r.Backoff, 0)}
		for _, code := range r.Codes {
			rule.Retry.Codes = append(rule.Retry.Codes, int(code))
		}
	}
	return rule
}

func grpcRule(namespace string, in *gatewayv1.GRPCRouteRule) nodecache.RouteRule {
	rule := nodecache.RouteRule{Name: string(or(in.Name, "")), Timeout: -1, BackendTimeout: -1}
	for i := range in.Matches {
		m, err := grpcMatch(&in.Matches[i])
		refuse(&rule, err)
		rule.Matches = append(rule.Matches, m)
	}
	if len(in.Matches) == 0 {
		rule.Matches = []nodecache.RouteMatch{{}}
	}
	rule.Filters = grpcFilters(&rule, in.Filters)
	for i := range in.BackendRefs {
		ref := &in.BackendRefs[i]
		b := backend(namespace, &ref.BackendRef)
		b.Filters = grpcFilters(&rule, ref.Filters)
		rule.Backends = append(rule.Backends, b)
	}
	return rule
}

// duration reads a duration of GEP-2257, which is one of Go that is not
// negative.
func duration(rule *nodecache.RouteRule, d *gatewayv1.Duration, none time.Duration) time.Duration {
	if d == nil {
		return none
	}
	v, err := time.ParseDuration(string(*d))
	if err != nil || v < 0 {
		refuse(rule, unsupported("duration %q", *d))
		return none
	}
	return v
}
