package e2e_test

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
	"github.com/fingerpost/fingerpost/xds/client"
)

// bareADS is the agent's ADS server alone, so that a test can publish what the
// compiler never would.
type bareADS struct {
	t      *testing.T
	path   string
	server *ads.Server
	grpc   *grpc.Server
	served chan struct{}
}

func newBareADS(t *testing.T) *bareADS {
	t.Helper()
	f := &bareADS{t: t, path: filepath.Join(t.TempDir(), "ads.sock")}
	t.Cleanup(func() { f.stop() })
	return f
}

// start serves the resources from a new process, as far as clients can see.
func (f *bareADS) start(rs ...*xds.Resource) {
	f.t.Helper()
	l, err := net.Listen("unix", f.path)
	if err != nil {
		f.t.Fatal(err)
	}
	f.server = ads.New(ads.Options{})
	f.set(rs...)
	f.server.OpenGate()
	f.grpc, f.served = ads.NewGRPCServer(f.server), make(chan struct{})
	go func(g *grpc.Server, served chan struct{}) { defer close(served); _ = g.Serve(l) }(f.grpc, f.served)
}

func (f *bareADS) stop() {
	if f.grpc != nil {
		f.grpc.Stop()
		<-f.served
		f.grpc = nil
	}
}

func (f *bareADS) set(rs ...*xds.Resource) { f.server.Publish(xds.Update{Set: rs}) }

func (f *bareADS) cds(id string) (ads.TypeStatus, error) {
	for _, c := range f.server.Clients() {
		if c.ID == id {
			return c.Types["cds"], nil
		}
	}
	return ads.TypeStatus{}, fmt.Errorf("%s is not connected", id)
}

// edsCluster passes validation; Envoy refuses it without a source of its
// endpoints. The revision can be seen in Envoy's dump.
func edsCluster(t *testing.T, name string, rev int, sourced bool) *xds.Resource {
	t.Helper()
	c := &clusterv3.Cluster{
		Name: name, AltStatName: fmt.Sprintf("%s_revision_%d", name, rev),
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS},
	}
	if sourced {
		c.EdsClusterConfig = &clusterv3.Cluster_EdsClusterConfig{EdsConfig: &corev3.ConfigSource{
			ResourceApiVersion: corev3.ApiVersion_V3, ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
		}}
	}
	r, err := xds.NewResource(xds.ID{Type: xds.Cluster, Name: name}, c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func emptyCLA(t *testing.T, name string) *xds.Resource {
	t.Helper()
	r, err := xds.NewResource(xds.ID{Type: xds.Endpoint, Name: name}, &endpointv3.ClusterLoadAssignment{ClusterName: name})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// has waits until Envoy has exactly these revisions of its clusters in use.
func has(t *testing.T, e *harness.Envoy, revisions ...string) {
	t.Helper()
	e.WaitFor(t, soon, func() error {
		dump, err := e.Get("/config_dump?resource=dynamic_active_clusters")
		if err != nil {
			return err
		}
		var got []string
		for _, part := range strings.Split(dump, `"alt_stat_name": "`)[1:] {
			name, _, _ := strings.Cut(part, `"`)
			got = append(got, name)
		}
		slices.Sort(got)
		if !slices.Equal(got, revisions) {
			return fmt.Errorf("Envoy has %q, want %q", got, revisions)
		}
		return nil
	})
}

// envoyproxy/gateway#9198, kgateway#14264: a refusal showed nowhere, and what
// came after it, or its repair, did not arrive.
func TestClusterThatEnvoyRefusesHoldsUpNothingElse(t *testing.T) {
	for _, api := range []string{"delta", "sotw"} {
		t.Run(api, func(t *testing.T) {
			t.Parallel()
			f := newBareADS(t)
			a1, a2, a3 := edsCluster(t, "A", 1, true), edsCluster(t, "A", 2, false), edsCluster(t, "A", 3, true)
			b1, b2, b3 := edsCluster(t, "B", 1, true), edsCluster(t, "B", 2, true), edsCluster(t, "B", 3, true)
			c1 := edsCluster(t, "C", 1, true)
			assignments := []*xds.Resource{emptyCLA(t, "A"), emptyCLA(t, "B"), emptyCLA(t, "C")}
			f.start(append(assignments, a1, b1)...)
			config, err := bootstrap.Envoy(bootstrap.Options{NodeID: "prod/web", API: api, ADSSocket: f.path})
			if err != nil {
				t.Fatal(err)
			}
			e := harness.StartEnvoy(t, string(config), harness.EnvoyOptions{Refuses: true})
			has(t, e, "A_revision_1", "B_revision_1")
			var good string
			harness.Eventually(t, soon, func() error {
				s, err := f.cds("prod/web")
				if good = s.Acked; err == nil && (good == "" || good != s.Sent) {
					err = errors.New("not accepted yet")
				}
				return err
			})
			refused := func() error {
				s, err := f.cds("prod/web")
				if err == nil && (s.Nack == nil || !strings.Contains(s.Nack.Error, "A: ") || len(s.Withheld) != 1 || s.Withheld[0].Name != "A") {
					err = fmt.Errorf("the refusal does not show: %+v", s)
				}
				return err
			}

			f.set(a2)
			harness.Eventually(t, soon, refused)
			if s, _ := f.cds("prod/web"); s.Acked != good {
				t.Errorf("shown as accepted: %q, last accepted: %q", s.Acked, good)
			}
			f.set(b2, c1)
			has(t, e, "A_revision_1", "B_revision_2", "C_revision_1")
			if n, _ := e.Stat("cluster_manager.cds.update_rejected"); n != 1 {
				t.Errorf("%d refusals", n)
			}

			other := connectRaw(t, f.path, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/other"}})
			if err := other.Subscribe(xds.Cluster); err != nil {
				t.Fatal(err)
			}
			harness.Eventually(t, soon, func() error {
				if r := other.Memory().Resources[xds.Cluster]["A"]; string(r.Body.GetValue()) != string(a2.Body.GetValue()) {
					return errors.New("the client that accepts it has it not")
				}
				return nil
			})

			f.stop()
			f.start(append(assignments, a2, b3, c1)...)
			has(t, e, "A_revision_1", "B_revision_3", "C_revision_1")
			harness.Eventually(t, soon, refused)
			f.set(a3)
			has(t, e, "A_revision_3", "B_revision_3", "C_revision_1")
			harness.Eventually(t, soon, func() error {
				s, err := f.cds("prod/web")
				if err == nil && (s.Nack != nil || s.Withheld != nil || s.Acked != s.Sent) {
					err = fmt.Errorf("the refusal still stands: %+v", s)
				}
				return err
			})
		})
	}
}
