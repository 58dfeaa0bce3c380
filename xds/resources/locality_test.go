package resources_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// here is where node n1 is, whose clients these are.
var here = nodecache.Place{Zone: "z1", Region: "r1", Near: []string{"z1", "z2"}}

// where are the nodes.
var where = map[string]string{"n1": "z1", "n2": "z1", "n3": "z2", "n4": "z3", "n5": ""}

// local is a mesh whose clients are on node n1.
func local(t *testing.T, policy string) *mesh {
	d := nodecache.New(nodecache.Options{})
	return &mesh{world: newWorldOf(t, resources.Options{Locality: policy, Here: "n1"}), dir: d, sub: d.SubscribeFronts()}
}

// placed is a pod by node and state, as n1 or n1-draining, and what it asks
// for, as n1=zone. Of n1? nobody says where it is.
func placed(i int, says string) *nodecache.Pod {
	says, asks, _ := strings.Cut(says, "=")
	node, state, _ := strings.Cut(says, "-")
	l, _ := nodecache.ParseLocality(asks)
	zone := where[node]
	node = strings.TrimSuffix(node, "?")
	p := &nodecache.Pod{
		UID: fmt.Sprint(says, i), Name: fmt.Sprint(says, i), Node: node, Zone: zone, State: nodecache.Serving,
		Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}),
		Common: &nodecache.Common{
			Namespace: "prod", Owner: nodecache.OwnerKey{UID: "rs"}, OwnerName: "ReplicaSet/rs",
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "rs"},
			Declared: []nodecache.Declared{{Port: 1000, Services: []string{"pkg.A"}}}, Locality: l,
		},
	}
	if state == "draining" {
		p.State = nodecache.Draining
	}
	return p
}

// order is a CLA: priorities in order, of each region/zone/node, and its nodes by
// the addresses, those that get no calls in brackets.
func (m *mesh) order(cla *endpointv3.ClusterLoadAssignment) string {
	var out []string
	for _, l := range cla.GetEndpoints() {
		var nodes []string
		for _, e := range l.GetLbEndpoints() {
			a := netip.MustParseAddr(e.GetEndpoint().GetAddress().GetSocketAddress().GetAddress())
			node := "-"
			if pod, ok := m.dir.MemberAt(a); ok {
				node = pod.Node
			}
			if e.GetHealthStatus() != corev3.HealthStatus_HEALTHY {
				node = "(" + node + ")"
			}
			nodes = append(nodes, node)
		}
		at := l.GetLocality()
		out = append(out, fmt.Sprintf("%d %s/%s/%s: %s", l.GetPriority(), at.GetRegion(), at.GetZone(), at.GetSubZone(), strings.Join(nodes, " ")))
	}
	return strings.Join(out, ", ")
}

func TestPodsNearbyAreCalledFirst(t *testing.T) {
	for _, c := range []struct {
		policy, pods string
		place        nodecache.Place
		want, says   string
	}{
		{"even", "n1 n2 n3 n4", here, "0 //: n1 n2 n3 n4", "even, by --locality: 4 endpoints get the same share each"},
		{"", "n1 n2-draining", here, "0 //: n1 (n2)", "even, by --locality: 1 endpoints get the same share each"},
		{"zone", "n1 n2 n3 n4", here, "0 r1/z1/: n1 n2, 1 r1//: n3, 2 //: n4",
			"zone, by --locality: 2 of 4 endpoints, in zone z1, take all calls; 1 in region r1, then 1 elsewhere take over as those before them fail"},
		{"node", "n1 n2 n3 n4", here, "0 r1/z1/n1: n1, 1 r1/z1/: n2, 2 r1//: n3, 3 //: n4",
			"node, by --locality: 1 of 4 endpoints, on node n1, take all calls; 1 in zone z1, then 1 in region r1, then 1 elsewhere take over as those before them fail"},
		{"node", "n4 n2 n4", here, "0 r1/z1/: n2, 1 //: n4 n4", "node, by --locality: 1 of 3 endpoints, in zone z1, take all calls; 2 elsewhere take over as those before them fail"},
		{"zone", "n3 n3", here, "0 r1//: n3 n3", "zone, by --locality: all 2 endpoints are in region r1 and get the same share each"},
		{"zone", "n2? n1? n3", here, "0 r1/z1/: n1, 1 r1//: n3, 2 //: n2", ""},
		{"zone", "n4 n5", here, "0 //: n4 n5", "zone, by --locality: all 2 endpoints are elsewhere and get the same share each"},
		// One that drains stays where it is, and is counted by nobody.
		{"node", "n1-draining n2 n3-draining n3", here, "0 r1/z1/n1: (n1), 1 r1/z1/: n2, 2 r1//: (n3) n3",
			"node, by --locality: 1 of 2 endpoints, in zone z1, take all calls; 1 in region r1 take over as those before them fail"},
		{"zone", "n1-draining n4-draining", here, "0 r1/z1/: n1, 1 //: n4", "zone, by --locality: 1 of 2 endpoints, in zone z1, take all calls; 1 elsewhere take over as those before them fail"},
		// Nobody says where the node is, or in which region.
		{"zone", "n1 n2", nodecache.Place{}, "0 //: n1 n2", `zone, by --locality, which means even, since nobody says in which zone node "n1" is: 2 endpoints get the same share each`},
		{"node", "n1 n2", nodecache.Place{}, "0 //n1: n1, 1 //: n2", `node, by --locality, without zones, since nobody says in which one node "n1" is: 1 of 2 endpoints, on node n1, take all calls; 1 elsewhere take over as those before them fail`},
		{"node", "n2 n3 n4", nodecache.Place{Zone: "z1"}, "0 /z1/: n2, 1 //: n3 n4", ""},
		// Pods say otherwise than the flag; where they differ, what prefers least.
		{"even", "n1=node n2=node", here, "0 r1/z1/n1: n1, 1 r1/z1/: n2", "node, by annotation: 1 of 2 endpoints, on node n1, take all calls; 1 in zone z1 take over as those before them fail"},
		{"node", "n1=even n2=even", here, "0 //: n1 n2", "even, by annotation: 2 endpoints get the same share each"},
		{"even", "n1=node n2=zone n3=zone", here, "0 r1/z1/: n1 n2, 1 r1//: n3",
			"zone, what prefers least, as the pods ask for node and zone: 2 of 3 endpoints, in zone z1, take all calls; 1 in region r1 take over as those before them fail"},
		{"even", "n1=node n2", here, "0 //: n1 n2", "even, what prefers least, as the pods ask for even and node: 2 endpoints get the same share each"},
		{"node", "n1 n2=zone", here, "0 r1/z1/: n1 n2", ""},
		// Over a rollout the old pods' word ends with their calls.
		{"even", "n1=node n2-draining", here, "0 r1/z1/n1: n1, 1 r1/z1/: (n2)", "node, by annotation: all 1 endpoints are on node n1 and get the same share each"},
	} {
		t.Run(cmp.Or(c.policy, "none")+" "+c.pods, func(t *testing.T) {
			m := local(t, c.policy)
			m.take(m.c.Relocate(m.dir, c.place))
			for i, p := range strings.Fields(c.pods) {
				m.dir.UpsertPod(placed(i, p))
			}
			m.flush()
			if got := m.order(m.cla("prod", "pkg.A")); got != c.want {
				t.Errorf("order\n%s, want\n%s", got, c.want)
			}
			b, _ := m.c.Behind("prod", "pkg.A")
			if got := m.c.Spread(b.Endpoints); c.says != "" && got != c.says {
				t.Errorf("it says\n%s, want\n%s", got, c.says)
			}
		})
	}
}

// A pod without a label of its own is in the zone that a slice says; an address
// without a pod in that of its slice, and it asks for what its Service does.
func TestZoneOfAnEndpointIsThatOfItsSlice(t *testing.T) {
	m := local(t, "zone")
	m.take(m.c.Relocate(m.dir, here))
	a, b := placed(0, "n5"), placed(1, "n5")
	m.dir.UpsertPod(a)
	m.dir.UpsertPod(b)
	m.flush()
	if got := m.order(m.cla("prod", "pkg.A")); got != "0 //: n5 n5" {
		t.Errorf("without a word: %s", got)
	}
	f := &nodecache.Front{
		UID: "f", Namespace: "prod", Name: "hand", Type: "ClusterIP", Ports: []nodecache.FrontPort{{Name: "grpc", Port: 80}},
		Declared: []nodecache.Declared{{Port: 1000, Services: []string{"pkg.Hand"}}}, Locality: nodecache.LocalityEven,
	}
	m.dir.UpsertFront(f)
	s := &nodecache.Slice{UID: "s", Namespace: "prod", Name: "hand-1", Service: "hand", Ports: []nodecache.SlicePort{{Name: "grpc", Port: 1000}}, Endpoints: []nodecache.Endpoint{
		{Pod: a.UID, Zone: "z2", Ready: true, Serving: true}, {Pod: b.UID, Zone: "z1", Ready: true, Serving: true},
		{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.3")}, Zone: "z2", Ready: true, Serving: true},
	}}
	m.dir.UpsertSlice(s)
	m.client("prod")
	m.flush()
	if got := m.order(m.cla("prod", "pkg.A")); got != "0 r1/z1/: n5, 1 r1//: n5" {
		t.Errorf("by the slice: %s", got)
	}
	want, _ := m.c.Want(m.dir, "prod", "/unknown.sock", []string{"at/hand/pkg.A"}, 1)
	m.take(want)
	at := xds.ID{Type: xds.Endpoint, Name: "at/hand/pkg.A", Scope: xds.DemandScope("prod")}
	if got := m.order(decode(t, m.published[at], &endpointv3.ClusterLoadAssignment{})); got != "0 //: n5 n5 -" {
		t.Errorf("beside an address that asks for even: %q", got)
	}
	if got := m.order(m.cla("prod", "pkg.Hand")); got != "0 //: -" {
		t.Errorf("the address alone, which asks for even: %s", got)
	}
	g := *f
	g.Locality = nodecache.LocalityUnsaid
	m.dir.UpsertFront(&g)
	m.flush()
	if got := m.order(decode(t, m.published[at], &endpointv3.ClusterLoadAssignment{})); got != "0 r1/z1/: n5, 1 r1//: n5 -" {
		t.Errorf("beside an address that asks for nothing: %q", got)
	}
	if got := m.order(m.cla("prod", "pkg.Hand")); got != "0 r1//: -" {
		t.Errorf("the address alone, which asks for nothing: %s", got)
	}
	n := m.c.Resolve(m.dir, "prod", "hand", "pkg.A")
	var views []resources.EndpointView
	for _, v := range n.Members {
		views = append(views, v.EndpointView)
	}
	if got, want := m.c.Spread(views), "zone, by --locality: 1 of 3 endpoints, in zone z1, take all calls; 2 in region r1 take over as those before them fail"; got != want {
		t.Errorf("it says\n%s, want\n%s", got, want)
	}
}

// A name that clients resolve for themselves has one endpoint, of one locality.
func TestHostIsOfNoPlace(t *testing.T) {
	m := local(t, "node")
	m.take(m.c.Relocate(m.dir, here))
	m.dir.UpsertFront(&nodecache.Front{
		UID: "f", Namespace: "prod", Name: "bank", Type: "ExternalName", External: "bank.example.com",
		Declared: []nodecache.Declared{{Port: 443, Services: []string{"pkg.Bank"}}}, Locality: nodecache.LocalityZone,
	})
	m.flush()
	if got := m.cluster("prod", "pkg.Bank").GetLoadAssignment(); len(got.GetEndpoints()) != 1 || got.GetEndpoints()[0].GetPriority() != 0 || got.GetEndpoints()[0].GetLocality().GetSubZone() != "" {
		t.Errorf("%v", got)
	}
	b, _ := m.c.Behind("prod", "pkg.Bank")
	if says := m.c.Spread(b.Endpoints); says != "" {
		t.Errorf("it says %q", says)
	}
}

func TestGoldenCLAOfEachPolicy(t *testing.T) {
	for _, policy := range []string{"even", "zone", "node"} {
		m := local(t, policy)
		m.take(m.c.Relocate(m.dir, here))
		for i, p := range strings.Fields("n4 n1 n2-draining n3") {
			m.dir.UpsertPod(placed(i, p))
		}
		m.flush()
		golden(t, "locality-"+policy, m.published[xds.ID{Type: xds.Endpoint, Name: "prod/pkg.A", Scope: xds.NamespaceScope("prod")}])
	}
}

// Whatever happens in whatever order: the endpoints are those of the policy even
// with the same health, no CLA breaks a rule of gRPC or Envoy, nearer ones have
// the lower priority, where the node is changes CLAs alone, and an agent that
// finds all this at its start serves the same bytes.
func TestLocalityKeepsTheRulesOfAssignments(t *testing.T) {
	for seed := range int64(30) {
		localityHistory(t, rand.New(rand.NewSource(seed)))
	}
}

func FuzzLocalityKeepsTheRulesOfAssignments(f *testing.F) {
	f.Fuzz(func(t *testing.T, seed int64) { localityHistory(t, rand.New(rand.NewSource(seed))) })
}

func localityHistory(t *testing.T, rng *rand.Rand) {
	policy := []string{"even", "zone", "node"}[rng.Intn(3)]
	m, even := local(t, policy), newWorldOf(t, resources.Options{})
	names := []string{"at/web/pkg.A", "at/other.prod:80/pkg.A"}
	begin := func(w *world) {
		for _, form := range []resources.Form{resources.ShapeOne, resources.AllClusters} {
			u, err := w.c.Namespace("prod", form)
			if err != nil {
				t.Fatal(err)
			}
			w.take(u)
		}
		w.take(w.c.Aliases(m.dir, "prod"))
		u, _ := w.c.Want(m.dir, "prod", "/unknown.sock", names, 2)
		w.take(u)
	}
	begin(m.world)
	begin(even)
	port := nodecache.FrontPort{Name: "grpc", Port: 80}
	m.route(httpRoute("prod", "r", nodecache.Name{Namespace: "prod", Name: "web"}, to(nodecache.Name{Namespace: "prod", Name: "web"}, 80)))
	place := nodecache.Place{}
	words := []string{"", "", "", "=even", "=zone", "=node"}
	for range 60 {
		i := rng.Intn(9)
		switch rng.Intn(8) {
		case 0:
			m.dir.RemovePod(fmt.Sprint("pod", i))
		case 1:
			place = []nodecache.Place{{}, {Zone: "z1"}, {Zone: "z1", Region: "r1"}, here, {Zone: "z2", Region: "r1", Near: []string{"z1", "z2"}}, {Zone: "z3", Region: "r2", Near: []string{"z3"}}}[rng.Intn(6)]
		case 2:
			var pods []string
			for range rng.Intn(5) {
				pods = append(pods, fmt.Sprint("pod", rng.Intn(9)))
			}
			slices.Sort(pods)
			m.service("prod", []string{"web", "other"}[rng.Intn(2)], port, slices.Compact(pods)...)
		default:
			says := fmt.Sprint("n", 1+rng.Intn(5), []string{"", "", "?"}[rng.Intn(3)], []string{"", "-draining"}[rng.Intn(2)], words[rng.Intn(len(words))])
			p := placed(i, says)
			p.UID, p.Name = fmt.Sprint("pod", i), fmt.Sprint("pod", i)
			p.Declared[0].Port = 1000
			if rng.Intn(4) == 0 {
				p.Declared = nil
			}
			m.dir.UpsertPod(p)
		}
		keys, fronts := m.sub.Poll(), m.sub.PollFronts()
		if rng.Intn(2) == 0 { // as the feed does
			m.take(m.c.Relocate(m.dir, place))
		}
		for _, w := range []*world{m.world, even} {
			w.take(w.c.Apply(m.dir, keys))
			w.take(w.c.Fronts(m.dir, fronts))
		}
		for _, r := range m.take(m.c.Relocate(m.dir, place)).Set {
			// Whether there is a cluster by a Service's name is looked at again then.
			if r.Type != xds.Endpoint && r.Scope != xds.AliasScope("prod") {
				t.Errorf("where the node is changes %v", r.ID)
			}
		}
	}
	again := newWorldOf(t, resources.Options{Locality: policy, Here: "n1"})
	again.take(again.c.Relocate(m.dir, place))
	all := m.dir.SubscribeFronts()
	defer all.Close()
	keys, fronts := all.Poll(), all.PollFronts()
	again.take(again.c.Apply(m.dir, keys))
	again.take(again.c.Fronts(m.dir, fronts))
	begin(again)

	for id, r := range even.published {
		mine := m.published[id]
		if mine == nil && id.Scope == xds.AliasScope("prod") {
			continue
		}
		if mine == nil || id.Type != xds.Endpoint && mine.Version != r.Version {
			t.Fatalf("%v is not as with even", id)
		}
		// What clients have by a Service's name stays as long as it may be of use.
		if b := again.published[id]; b == nil && id.Scope != xds.AliasScope("prod") || b != nil && b.Version != mine.Version {
			t.Errorf("%v differs after a restart", id)
		}
		if id.Type != xds.Endpoint {
			continue
		}
		got, want := decode(t, mine, &endpointv3.ClusterLoadAssignment{}), decode(t, r, &endpointv3.ClusterLoadAssignment{})
		if a, b := healthOf(t, got), healthOf(t, want); !maps.Equal(a, b) {
			t.Errorf("%v has %v, with even %v", id, a, b)
		}
		if err := got.ValidateAll(); err != nil {
			t.Error(err)
		}
		rank := -1
		for i, l := range got.GetEndpoints() {
			if l.GetLocality() == nil || l.GetPriority() != uint32(i) || len(l.GetLbEndpoints()) == 0 || l.GetLoadBalancingWeight().GetValue() != uint32(len(l.GetLbEndpoints())) {
				t.Errorf("%v: %v breaks a rule", id, l)
			}
			at := l.GetLocality()
			now := map[bool]int{true: 0, false: 3}[at.GetSubZone() != ""]
			if now > 0 && at.GetZone() != "" {
				now = 1
			} else if now > 0 && at.GetRegion() != "" {
				now = 2
			}
			if now <= rank {
				t.Errorf("%v: %v stands behind what is farther", id, l)
			}
			rank = now
		}
	}
}

// healthOf is by address; one that is there twice is an error.
func healthOf(t *testing.T, cla *endpointv3.ClusterLoadAssignment) map[string]corev3.HealthStatus {
	out := map[string]corev3.HealthStatus{}
	for _, l := range cla.GetEndpoints() {
		for _, e := range l.GetLbEndpoints() {
			a := e.GetEndpoint().GetAddress().GetSocketAddress()
			at := fmt.Sprintf("%s:%d", a.GetAddress(), a.GetPortValue())
			if _, twice := out[at]; twice {
				t.Errorf("%s is there twice", at)
			}
			out[at] = e.GetHealthStatus()
		}
	}
	return out
}
