package resources

import (
	"cmp"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/fingerpost/fingerpost/nodecache"
)

// What a workload wants of calls ([nodecache.Policy]) stands in the clusters that
// lead to it: a change builds them anew, with new connections. Without a word
// of it they are byte for byte those of their shape. gRPC clients read the
// breaker of running calls (gRFC A32) and nothing else of this.

// policyOf is what the provider says: the word of its first workload that says
// anything.
func policyOf(provider []*nodecache.Owner) *nodecache.Policy {
	for _, o := range provider {
		if o.Policy != nil {
			return o.Policy
		}
	}
	return nil
}

// policy is what those say who stand at a place, which had the cluster, nil for
// none: of one pod its workload, else those behind the Service.
func (r *refresh) policy(p *place, c crowd, had *backend) *nodecache.Policy {
	if p.one && len(c) == 1 && c[0].owner != nil {
		return c[0].owner.Policy
	}
	return r.policyBehind(p.service, had)
}

// policyBehind keeps what the cluster has as long as nobody is behind the Service.
func (r *refresh) policyBehind(service nodecache.Name, had *backend) *nodecache.Policy {
	p, known := r.dir.PolicyBehind(service)
	if !known && had != nil {
		return had.policy
	}
	return p
}

// withoutRetries is for calls whose route says itself when they are repeated:
// Envoy takes a cluster's retry policy in place of the route's. (Only not its
// timeout of an attempt, for which it looks at the route alone: tried with 1.40.)
func withoutRetries(p *nodecache.Policy) *nodecache.Policy {
	if !p.Retry() {
		return p
	}
	rest := *p
	rest.RetryOn, rest.Retries, rest.NoRetries = "", 0, false
	return &rest
}

func connectTimeout(p *nodecache.Policy) time.Duration {
	if p == nil {
		return time.Second
	}
	return cmp.Or(p.ConnectTimeout, time.Second)
}

// upstream is [http2Upstream] as the workload wants it.
func upstream(p *nodecache.Policy) *upstreamv3.HttpProtocolOptions {
	o := http2Upstream()
	if p == nil {
		return o
	}
	if p.Keepalive > 0 {
		// A connection that answers nothing is closed after twice the interval
		// at most, with the jitter that Envoy adds.
		alive := o.GetExplicitHttpConfig().GetHttp2ProtocolOptions().GetConnectionKeepalive()
		alive.Interval = duration(p.Keepalive)
		alive.Timeout = duration(min(p.Keepalive, alive.Timeout.AsDuration()))
	}
	if p.Retry() {
		o.RetryPolicy = retriesOf(p)
	}
	return o
}

// retriesOf is the default with what is said put in its place.
func retriesOf(p *nodecache.Policy) *routev3.RetryPolicy {
	r := retries()
	r.RetryOn = cmp.Or(p.RetryOn, r.RetryOn)
	if p.Retries > 0 || p.NoRetries {
		r.NumRetries = number(p.Retries)
	}
	return r
}

func breakersOf(t *clusterv3.CircuitBreakers_Thresholds, p *nodecache.Policy) {
	if p == nil {
		return
	}
	if p.MaxRequests > 0 {
		t.MaxRequests = number(p.MaxRequests)
		// Calls that wait for a connection count apart.
		t.MaxPendingRequests = number(p.MaxRequests)
	}
	if p.RetryBudget > 0 {
		t.RetryBudget.BudgetPercent = &typev3.Percent{Value: float64(p.RetryBudget)}
	}
}

// outliersOf counts from the first failure where pings are asked for: each
// connection that a stopped process's kernel takes would begin the count anew.
func outliersOf(o *clusterv3.OutlierDetection, p *nodecache.Policy) {
	switch {
	case p == nil:
	case p.NoOutliers:
		o.EnforcingConsecutiveLocalOriginFailure = number(0)
	case p.OutlierFailures > 0:
		o.ConsecutiveLocalOriginFailure = number(p.OutlierFailures)
	case p.Keepalive > 0:
		o.ConsecutiveLocalOriginFailure = number(1)
	}
}
