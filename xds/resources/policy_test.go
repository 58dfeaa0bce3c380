package resources_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// revision makes a pod of workload web, of the revision and as old as told.
func (m *mesh) revision(uid string, n, minute int, policy *nodecache.Policy) nodecache.OwnerKey {
	key := nodecache.OwnerKey{UID: fmt.Sprint("rs-", n)}
	m.dir.UpsertPod(&nodecache.Pod{
		UID: uid, Name: uid, Node: "n1", State: nodecache.Serving, Addr: netip.MustParseAddr("10.0.0." + uid),
		Created: time.Date(2026, 5, 1, 12, minute, 0, 0, time.UTC),
		Common: &nodecache.Common{
			Namespace: "prod", Owner: key, OwnerName: fmt.Sprint("ReplicaSet/web-", n), Policy: policy,
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "web"},
			Hints:    []nodecache.Hint{{Port: 1000, Why: "port name"}},
		},
	})
	return key
}

// everyCluster is a mesh in which workload web, with one pod, has clusters of
// every kind.
func everyCluster(t *testing.T, policy *nodecache.Policy) *mesh {
	m := newMesh(t)
	u, err := m.c.Namespace("prod", resources.AllClusters)
	if err != nil {
		t.Fatal(err)
	}
	m.take(u)
	m.take(m.c.Aliases(m.dir, "prod"))
	m.learn(m.revision("1", 1, 1, policy), serves(1000, "pkg.v1.A"))
	m.service("prod", "web", rpc, "1", "2", "3", "4")
	m.service("prod", "api", nodecache.FrontPort{Name: "api", Port: 81}, "1", "2", "3", "4")
	m.dir.UpsertFront(&nodecache.Front{UID: "pods", Namespace: "prod", Name: "pods", Type: "ClusterIP", Headless: true, Selects: true, Ports: []nodecache.FrontPort{rpc}})
	m.slices("prod", "pods", rpc, "1")
	g := httpRoute("prod", "g", web, to(web, 80))
	g.Kind = nodecache.GRPCRoute
	g.Rules[0].Matches = []nodecache.RouteMatch{{Service: "pkg.v1.A"}}
	m.route(g)
	m.route(httpRoute("prod", "h", nodecache.Name{Namespace: "prod", Name: "api"}, to(nodecache.Name{Namespace: "prod", Name: "api"}, 81)))
	m.flush()
	u, _ = m.c.Want(m.dir, "prod", "/s", []string{"at/web/pkg.v1.A", "at/10.0.0.1:1000/pkg.v1.A", "at/1.pods/pkg.v1.A"}, 9)
	m.take(u)
	return m
}

// clusters are those that lead somewhere.
func (m *mesh) clusters() map[string]*xds.Resource {
	out := map[string]*xds.Resource{}
	for id, r := range m.published {
		if id.Type == xds.Cluster && !strings.HasPrefix(string(id.Scope), "fallback") {
			out[fmt.Sprint(id.Scope, " ", id.Name)] = r
		}
	}
	return out
}

func upstreamOf(t *testing.T, c *clusterv3.Cluster) *upstreamv3.HttpProtocolOptions {
	t.Helper()
	var o upstreamv3.HttpProtocolOptions
	if err := c.GetTypedExtensionProtocolOptions()["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"].UnmarshalTo(&o); err != nil {
		t.Fatal(err)
	}
	return &o
}

var wholePolicy = &nodecache.Policy{
	RetryOn: "connect-failure,unavailable", Retries: 5, RetryBudget: 40,
	MaxRequests: 100, ConnectTimeout: 3 * time.Second, Keepalive: 2 * time.Second, OutlierFailures: 3,
}

func TestPolicyIsInEveryClusterOfItsWorkload(t *testing.T) {
	m := everyCluster(t, wholePolicy)
	all := m.clusters()
	// By path, alias, on demand by three names, and of two routes.
	if len(all) < 7 {
		t.Fatalf("clusters %v", slices.Sorted(maps.Keys(all)))
	}
	for name, r := range all {
		c := decode(t, r, &clusterv3.Cluster{})
		b, o, u := c.GetCircuitBreakers().GetThresholds()[0], c.GetOutlierDetection(), upstreamOf(t, c)
		alive := u.GetExplicitHttpConfig().GetHttp2ProtocolOptions().GetConnectionKeepalive()
		if strings.HasSuffix(name, "backend/prod/api/81") {
			alive = u.GetUseDownstreamProtocolConfig().GetHttp2ProtocolOptions().GetConnectionKeepalive()
		}
		retry := u.GetRetryPolicy()
		got := fmt.Sprint(b.GetMaxRequests().GetValue(), b.GetMaxPendingRequests().GetValue(), b.GetRetryBudget().GetBudgetPercent().GetValue(),
			c.GetConnectTimeout().AsDuration(), alive.GetInterval().AsDuration(), alive.GetTimeout().AsDuration(),
			o.GetConsecutiveLocalOriginFailure().GetValue(), o.GetEnforcingConsecutiveLocalOriginFailure().GetValue(),
			" ", retry.GetRetryOn(), retry.GetNumRetries().GetValue(), len(retry.GetRetryHostPredicate()))
		if want := "100 100 40 3s 2s 2s 3 100 connect-failure,unavailable5 1"; got != want {
			t.Errorf("%s has %s\nwant %s", name, got, want)
		}
	}
	off := everyCluster(t, &nodecache.Policy{NoOutliers: true, NoRetries: true, Keepalive: time.Minute})
	for name, r := range off.clusters() {
		c := decode(t, r, &clusterv3.Cluster{})
		u := upstreamOf(t, c)
		if c.GetOutlierDetection().GetEnforcingConsecutiveLocalOriginFailure().GetValue() != 0 || u.GetRetryPolicy().GetNumRetries().GetValue() != 0 || u.GetRetryPolicy().GetNumRetries() == nil {
			t.Errorf("%s: %v, %v", name, c.GetOutlierDetection(), u.GetRetryPolicy())
		}
	}
}

// Without a word the bytes are those of the shape, and a policy that is taken
// back brings them again. Nothing but clusters changes.
func TestPolicyChangesClustersAlone(t *testing.T) {
	m := everyCluster(t, nil)
	plain := m.clusters()
	for name, r := range plain {
		if u := upstreamOf(t, decode(t, r, &clusterv3.Cluster{})); u.GetRetryPolicy() != nil {
			t.Errorf("%s has a retry policy", name)
		}
	}
	m.revision("1", 1, 1, wholePolicy)
	u := m.flush()
	for _, r := range u.Set {
		if r.Type != xds.Cluster {
			t.Errorf("a policy changes %s", r.Name)
		}
	}
	for name, r := range m.clusters() {
		if r.Version == plain[name].Version {
			t.Errorf("%s does not change", name)
		}
	}
	m.revision("1", 1, 1, nil)
	m.flush()
	for name, r := range m.clusters() {
		if r.Version != plain[name].Version {
			t.Errorf("%s is not what it was", name)
		}
	}
}

// Whatever the pods of a rollout do, each cluster changes once: from the old
// revision's policy to the new one's.
func TestRolloutChangesPolicyOnce(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		m := everyCluster(t, &nodecache.Policy{MaxRequests: 1})
		changes := map[string]int{}
		was := m.clusters()
		count := func() {
			now := m.clusters()
			if !maps.EqualFunc(was, now, func(a, b *xds.Resource) bool { return true }) {
				for name := range was {
					if now[name] == nil && !strings.Contains(name, "10.0.0.1") && !strings.Contains(name, "1.pods") {
						t.Fatalf("seed %d: %s went", seed, name)
					}
				}
			}
			for name, r := range now {
				if old := was[name]; old != nil && old.Version != r.Version {
					changes[name]++
				}
			}
			was = now
		}
		step := func(n int, pods ...string) {
			for range 8 {
				uid := pods[r.IntN(len(pods))]
				if r.IntN(3) == 0 {
					m.dir.RemovePod(uid)
				} else {
					m.revision(uid, n, map[string]int{"1": 1, "2": 2, "3": 10, "4": 11}[uid], &nodecache.Policy{MaxRequests: uint32(n)})
				}
				m.flush()
				count()
			}
		}
		step(1, "1", "2")
		for name, n := range changes {
			t.Fatalf("seed %d: %s changed %d times before the rollout", seed, name, n)
		}
		m.revision("3", 2, 10, &nodecache.Policy{MaxRequests: 2})
		m.flush()
		count()
		for range 4 {
			step(2, "3", "4")
			step(1, "1", "2")
		}
		m.dir.RemovePod("1")
		m.dir.RemovePod("2")
		step(2, "3", "4")
		for name := range m.clusters() {
			if n := changes[name]; n != 1 && !strings.Contains(name, "10.0.0.1") && !strings.Contains(name, "1.pods") {
				t.Fatalf("seed %d: %s changed %d times", seed, name, n)
			}
		}
	}
}

// Envoy takes a cluster's retry policy in place of the route's.
func TestRouteWithItsOwnRetriesKeepsThem(t *testing.T) {
	m := newMesh(t, "prod")
	m.revision("1", 1, 1, wholePolicy)
	m.service("prod", "web", api, "1")
	retries := func() bool {
		t.Helper()
		r := m.published[xds.ID{Type: xds.Cluster, Name: "backend/prod/web/80", Scope: "backend/prod"}]
		c := decode(t, r, &clusterv3.Cluster{})
		if c.GetCircuitBreakers().GetThresholds()[0].GetMaxRequests().GetValue() != 100 {
			t.Errorf("the breaker is gone, too")
		}
		return upstreamOf(t, c).GetRetryPolicy() != nil
	}
	plain := to(web, 80)
	for name, c := range map[string]struct {
		edit func(*nodecache.RouteRule)
		want bool
	}{
		"nothing":        {func(*nodecache.RouteRule) {}, true},
		"retry":          {func(r *nodecache.RouteRule) { r.Retry = &nodecache.RouteRetry{} }, false},
		"backendRequest": {func(r *nodecache.RouteRule) { r.BackendTimeout = time.Second }, true},
	} {
		own := to(web, 80)
		own.Matches = []nodecache.RouteMatch{{Path: "/own"}}
		route := httpRoute("prod", "r", web, plain, own)
		c.edit(&route.Rules[1])
		m.route(route)
		m.flush()
		if retries() != c.want {
			t.Errorf("a rule with %s: the cluster has a retry policy: %t", name, !c.want)
		}
	}
}
