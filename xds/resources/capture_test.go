package resources_test

import (
	"net/netip"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// numbers are those of destinations, as the kernel has them.
type numbers map[string]string

func (n numbers) destination(a netip.Addr) (netip.AddrPort, bool) {
	to, ok := n[a.String()]
	if !ok {
		return netip.AddrPort{}, false
	}
	return netip.MustParseAddrPort(to), true
}

// A redirected call means what the address that it dialled means: the pods behind
// that Service, or that pod, and none that is known not to serve what is called.
func TestRedirectedCallMeansWhatItDialled(t *testing.T) {
	of := numbers{
		"127.1.0.0": "10.96.0.10:80", "127.1.0.1": "10.96.0.11:80", "127.1.0.2": "[fd00:96::10]:80", "127.1.0.3": "10.0.0.2:1001",
		"127.1.0.4": "10.96.0.10:81", "127.1.0.5": "10.96.0.99:80",
	}
	m := newMesh(t)
	c, err := resources.New(resources.Options{Destination: of.destination})
	if err != nil {
		t.Fatal(err)
	}
	m.c = c
	m.client("prod")
	port := nodecache.FrontPort{Name: "grpc", Port: 80}
	m.named("prod/users", "10.96.0.10 fd00:96::10", port)
	m.slices("prod", "users", port, "a", "b")
	m.named("prod/users-canary", "10.96.0.11", port)
	m.slices("prod", "users-canary", port, "c")
	for uid, addr := range map[string]string{"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"} {
		m.pod(uid, addr, nodecache.Serving)
	}
	m.learn(nodecache.OwnerKey{UID: "rs-b"}, serves(1001, "pkg.B"))
	m.learn(nodecache.OwnerKey{UID: "rs-c"}, serves(1000, "pkg.A"))
	m.flush()
	names := []string{
		"to/127.1.0.0/pkg.A", "to/127.1.0.1/pkg.A", "to/127.1.0.2/pkg.A", "to/127.1.0.3/pkg.A", "to/127.1.0.3/pkg.B", "to/127.1.0.4/pkg.A",
		"to/127.1.0.5/pkg.A", "to/127.1.0.6/pkg.A", "to/127.1.0.0", "to/127.1.0.0/grpc.health.v1.Health",
		// None of these can be asked for.
		"to/10.0.0.1/pkg.A", "to/127.1.0.0/", "to/127.1.0.0/not a name", "to/127.01.0.0/pkg.A", "to/::1/pkg.A", "to/", "to//pkg.A", "to/127.1.0.0/pkg.A/x",
	}
	known := m.asks(100, names...)
	if got := strings.Join(known, " "); got != strings.Join(names[:10], " ") {
		t.Errorf("asked for %s", got)
	}
	wanted := func(step, want string) {
		t.Helper()
		if got := m.wanted(); got != want {
			t.Errorf("%s: %s\nwant %s", step, got, want)
		}
	}
	const health = "to/127.1.0.0/grpc.health.v1.Health=10.0.0.1:1000,10.0.0.2:1001 "
	const users = health + "to/127.1.0.0=10.0.0.1:1000 to/127.1.0.0=10.0.0.1:1000,10.0.0.2:1001 "
	wanted("as it is", users+"to/127.1.0.1=10.0.0.3:1000 to/127.1.0.2=10.0.0.1:1000 to/127.1.0.3/pkg.B=10.0.0.2:1001")
	// It follows the Service.
	m.slices("prod", "users-canary", port, "c", "a")
	m.flush()
	wanted("another pod", users+"to/127.1.0.1=10.0.0.1:1001,10.0.0.3:1000 to/127.1.0.2=10.0.0.1:1000 to/127.1.0.3/pkg.B=10.0.0.2:1001")
	// And the number: who began without them learns them, and one may be given again.
	of["127.1.0.6"], of["127.1.0.1"] = "10.96.0.11:80", "10.96.0.10:80"
	m.flush()
	m.take(m.c.Renumbered(m.dir))
	wanted("numbers", users+"to/127.1.0.1=10.0.0.1:1000 to/127.1.0.2=10.0.0.1:1000 to/127.1.0.3/pkg.B=10.0.0.2:1001 to/127.1.0.6=10.0.0.1:1001,10.0.0.3:1000")
	if u := m.c.Renumbered(m.dir); !u.Empty() {
		t.Errorf("nothing changed, and %d resources", len(u.Set)+len(u.Remove))
	}
	// What is called without a gRPC service may be HTTP/1.1.
	for name, callers := range map[string]bool{"to/127.1.0.0": true, "to/127.1.0.0/pkg.A": false} {
		c := decode(t, m.published[xds.ID{Type: xds.Cluster, Name: name, Scope: xds.DemandScope("prod")}], &clusterv3.Cluster{})
		o := &upstreamv3.HttpProtocolOptions{}
		if err := c.GetTypedExtensionProtocolOptions()["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"].UnmarshalTo(o); err != nil {
			t.Fatal(err)
		}
		if got := o.GetUseDownstreamProtocolConfig() != nil; got != callers {
			t.Errorf("%s speaks what the caller speaks: %t", name, got)
		}
	}
	m.take(m.c.Unwant("prod", unknownSocket, known))
	wanted("dropped", "")
	m.take(m.c.Renumbered(m.dir))
	wanted("dropped, and other numbers", "")
}

// A client says that its pod's connections may be redirected; only one that fetches its
// clusters can have them.
func TestClientThatListensForRedirectedConnections(t *testing.T) {
	for _, c := range []struct {
		clusters, shape string
		scope           bool
		warnings        int
	}{{"on-demand", "2", true, 0}, {"all", "2", false, 1}, {"", "", false, 1}, {"on-demand", "1", false, 0}} {
		got, err := resources.ParseClient(&corev3.Node{Id: "prod/a-1", Metadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			resources.MetaRedirect: structpb.NewStringValue("true"), resources.MetaClusters: structpb.NewStringValue(c.clusters),
			resources.MetaShape: structpb.NewStringValue(c.shape)}}})
		if err != nil {
			t.Fatal(err)
		}
		has := false
		for _, s := range got.Scopes() {
			has = has || s == resources.ScopeCapture
		}
		if has != c.scope || len(got.Warnings) != c.warnings {
			t.Errorf("%+v: %t, %q", c, has, got.Warnings)
		}
	}
}
