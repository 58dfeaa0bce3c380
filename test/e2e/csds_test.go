package e2e_test

import (
	"fmt"
	"strings"
	"testing"

	adminv3 "github.com/envoyproxy/go-control-plane/envoy/admin/v3"
	statusv3 "github.com/envoyproxy/go-control-plane/envoy/service/status/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// accepted waits until the only client is as an id says, and has accepted the
// cluster, as the client status discovery service tells it.
func accepted(t *testing.T, conn *grpc.ClientConn, id, cluster string) {
	t.Helper()
	harness.Eventually(t, soon, func() error {
		resp, err := statusv3.NewClientStatusDiscoveryServiceClient(conn).FetchClientStatus(deadline(t), &statusv3.ClientStatusRequest{})
		if err != nil {
			return err
		}
		if len(resp.GetConfig()) != 1 || resp.GetConfig()[0].GetNode().GetId() != id {
			return fmt.Errorf("clients %v, want %s", resp, id)
		}
		for _, c := range resp.GetConfig()[0].GetGenericXdsConfigs() {
			if c.GetTypeUrl() == xds.Cluster.URL() && c.GetName() == cluster && c.GetClientStatus() == adminv3.ClientResourceStatus_ACKED {
				return nil
			}
		}
		return fmt.Errorf("%s has not accepted %s: %v", id, cluster, resp)
	})
}

func TestClientStatusIsServedOnTheAdminSocketAndGoesOver(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	w.write()
	a := s.instance(t, "--source", w.source()).ready()
	f := s.faithful(t, "prod/delta", true, client.Memory{}, "prod/shop.Web")
	f.has()
	shared, own := dial(t, "unix:"+s.admin), dial(t, "unix:"+a.admin)
	for _, conn := range []*grpc.ClientConn{shared, own} {
		accepted(t, conn, "prod/delta", "prod/shop.Web")
		r, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(deadline(t))
		if err == nil {
			err = r.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}})
		}
		if err != nil {
			t.Fatal(err)
		}
		if resp, err := r.Recv(); err != nil || !strings.Contains(resp.String(), "envoy.service.status.v3.ClientStatusDiscoveryService") {
			t.Errorf("reflection says %v, %v", resp, err)
		}
	}
	// Where pods reach the agent it tells nobody.
	pods := dial(t, "unix:"+s.ads)
	if _, err := statusv3.NewClientStatusDiscoveryServiceClient(pods).FetchClientStatus(deadline(t), &statusv3.ClientStatusRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("at the ADS socket: %v, want UNIMPLEMENTED", err)
	}

	// Who goes on asking does not keep the predecessor from letting go.
	g, err := statusv3.NewClientStatusDiscoveryServiceClient(shared).StreamClientStatus(t.Context())
	if err == nil {
		err = g.Send(&statusv3.ClientStatusRequest{})
	}
	if err == nil {
		_, err = g.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	b := s.instance(t, "--source", w.source()).ready()
	b.takeover("on")
	b.connected("prod/delta", "cds")
	if _, err := g.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("a stream at the predecessor: %v, want UNAVAILABLE", err)
	}
	accepted(t, shared, "prod/delta", "prod/shop.Web")
	resp, err := statusv3.NewClientStatusDiscoveryServiceClient(own).FetchClientStatus(deadline(t), &statusv3.ClientStatusRequest{})
	if err != nil || len(resp.GetConfig()) != 0 {
		t.Errorf("the predecessor has clients %v, %v", resp, err)
	}
	a.stop()
}
