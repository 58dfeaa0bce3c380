package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// wiredPod puts a pod into the world that serves what it declares, and whose
// network is wired to the site's, if it has one.
func (s *site) wiredPod(w *world, namespace, id, addr, service string) (*corev1.Pod, *harness.Network) {
	w.t.Helper()
	p := newPod(id, addr, 50051)
	p.Namespace = namespace
	p.Annotations = map[string]string{"fingerpost.dev/services": "50051=" + service}
	network := harness.NewNetwork(w.t)
	s.network.Wire(w.t, "v"+id, network, addr)
	return w.add(p), network
}

// dialFrom is a connection to a unix socket whose sockets are of a network.
func dialFrom(t *testing.T, from *harness.Network, path, authority string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(authority),
		grpc.WithContextDialer(func(context.Context, string) (c net.Conn, err error) {
			err = from.Do(func() (err error) {
				c, err = net.Dial("unix", path)
				return err
			})
			return c, err
		}))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// rawFrom is a raw client in a network, which says that it is id.
func (s *site) rawFrom(t *testing.T, from *harness.Network, id string) *rawClient {
	t.Helper()
	return openRaw(t, dialFrom(t, from, s.ads, "localhost"), client.Options{Delta: true, Node: &corev3.Node{Id: id}})
}

// identityOf is what proxies shows of the client that says that it is id.
func (a *agentProcess) identityOf(id string) (ads.Client, error) {
	for _, p := range a.proxies() {
		if p.ID == id {
			return p, nil
		}
	}
	return ads.Client{}, fmt.Errorf("no client %s is connected", id)
}

// gets waits until a client has a cluster.
func (c *rawClient) gets(cluster string) {
	c.t.Helper()
	harness.Eventually(c.t, soon, func() error {
		if names := c.names(xds.Cluster); !slices.Contains(names, cluster) {
			return fmt.Errorf("clusters %q; stream: %v", names, c.Err())
		}
		return nil
	})
}

// Clients in networks of pods are proved, and see what is their pod's whatever
// they say; at both sockets.
func TestClientsAreProvedByTheNetworkOfTheirPod(t *testing.T) {
	s, w := newSite(t), newWorld(t)
	s.network = harness.NewNetwork(t)
	_, web := s.wiredPod(w, "prod", "web-1-a", "10.77.0.2", "shop.Web")
	s.wiredPod(w, "test", "other-1-a", "10.77.0.3", "test.Only")
	a := s.start(t, "--source", w.write().source()).ready()
	if state := a.status().Parts["identity"]; state != "on" {
		t.Fatalf("identity is %s", state)
	}
	honest := s.rawFrom(t, web, "prod/web-1-a")
	honest.subscribe(xds.Cluster)
	honest.gets("prod/shop.Web")
	if p, err := a.identityOf("prod/web-1-a"); err != nil || p.Pod != "prod/web-1-a" || p.Identity != (ads.Identity{Pod: "prod/web-1-a", Method: "netns"}) {
		t.Errorf("%+v, %v", p, err)
	}
	liar := s.rawFrom(t, web, "test/other-1-a")
	liar.subscribe(xds.Cluster)
	liar.gets("prod/shop.Web")
	if names := liar.names(xds.Cluster); slices.Contains(names, "test/test.Only") {
		t.Errorf("clusters of another namespace: %q", names)
	}
	if p, err := a.identityOf("test/other-1-a"); err != nil || p.Pod != "prod/web-1-a" || p.Identity.Pod != "prod/web-1-a" || p.Identity.Reason == "" {
		t.Errorf("%+v, %v", p, err)
	}
	if _, text, err := a.get("/metrics"); err != nil || !strings.Contains(text, "\nfingerpost_ads_identity_mismatches_total 1\n") ||
		!strings.Contains(text, `fingerpost_ads_callers_total{method="netns"} 2`) || !strings.Contains(text, `fingerpost_bpf_available{part="identity",reason=""} 1`) {
		t.Errorf("metrics: %v in %s", err, text)
	}
	if out := a.must("explain", "call", "--from", "prod/web-1-a", "/shop.Web/Do"); !strings.Contains(out, "prod/web-1-a, proved by netns") {
		t.Errorf("explain call: %s", out)
	}
	if out := a.must("explain", "call", "--from", "test/other-1-a", "/test.Only/Do"); !strings.Contains(out, "no client of that id is connected") {
		t.Errorf("explain call from the pod that was merely claimed: %s", out)
	}
	// What the sidecar's header says counts no more than node.id.
	conn := dialFrom(t, web, filepath.Join(filepath.Dir(s.ads), "unknown.sock"), "127.0.0.1:15001")
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "fingerpost-node", "test/other-1-a"), soon)
	defer cancel()
	list := &reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}
	stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	if err == nil {
		err = stream.Send(list)
	}
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := stream.Recv(); err != nil || !strings.Contains(resp.String(), "shop.Web") || strings.Contains(resp.String(), "test.Only") {
		t.Errorf("unknown.sock: %v, %v", resp, err)
	}
}

// A sidecar that is faster than the report of its pod's address is proved once
// that has come.
func TestClientIsProvedOnceItsPodIsKnown(t *testing.T) {
	s, w := newSite(t), newWorld(t)
	s.network = harness.NewNetwork(t)
	s.wiredPod(w, "prod", "web-1-a", "10.77.1.2", "shop.Web")
	a := s.start(t, "--require-identity", "--source", w.write().source()).ready()
	late, network := s.wiredPod(w, "prod", "late-1-a", "10.77.1.3", "shop.Late")
	late.Status.Conditions[0].Status = corev1.ConditionFalse // a sidecar comes before its pod is Ready
	c := s.rawFrom(t, network, "prod/late-1-a")
	c.subscribe(xds.Cluster)
	w.write()
	c.gets("prod/shop.Web")
	if p, err := a.identityOf("prod/late-1-a"); err != nil || p.Identity.Method != "netns" {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestRequireIdentityRefusesWhoIsNotProved(t *testing.T) {
	s, w := newSite(t), newWorld(t)
	s.network = harness.NewNetwork(t)
	_, web := s.wiredPod(w, "prod", "web-1-a", "10.77.2.2", "shop.Web")
	a := s.start(t, "--require-identity", "--source", w.write().source()).ready()
	loose := harness.NewNetwork(t)
	loose.Claim(t, "10.77.2.2")
	c := s.rawFrom(t, loose, "prod/web-1-a")
	c.subscribe(xds.Cluster)
	if err := c.end(); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "does not lead into the caller's network namespace") {
		t.Errorf("%v, want UNAUTHENTICATED", err)
	}
	// One of the host's network, as an operator's command is.
	cmd := exec.Command(program, "xds", "get", "--type", "clusters", "--node-id", "prod/web-1-a", "--ads-socket", s.ads)
	var errs output
	cmd.Stderr = &errs
	if err := errors.Join(s.network.Start(cmd), cmd.Wait()); err == nil || !strings.Contains(errs.String(), "--require-identity") {
		t.Errorf("xds get: %v, %s", err, &errs)
	}
	c = s.rawFrom(t, web, "prod/web-1-a")
	c.subscribe(xds.Cluster)
	c.gets("prod/shop.Web")
	conn := dialFrom(t, loose, filepath.Join(filepath.Dir(s.ads), "unknown.sock"), "127.0.0.1:15001")
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "fingerpost-node", "prod/web-1-a"), soon)
	defer cancel()
	if err := conn.Invoke(ctx, "/shop.Web/Do", &reflectionv1.ServerReflectionRequest{}, &reflectionv1.ServerReflectionRequest{}); status.Code(err) != codes.Unauthenticated {
		t.Errorf("unknown.sock: %v, want UNAUTHENTICATED", err)
	}
	if n := len(a.proxies()); n != 1 {
		t.Errorf("%d proxies", n)
	}
}

// An agent without the capability serves all the same, and says what it lacks.
func TestAgentWithoutTheCapabilityServesByNodeID(t *testing.T) {
	s, w := newSite(t), newWorld(t)
	s.network = harness.NewNetwork(t)
	_, web := s.wiredPod(w, "prod", "web-1-a", "10.77.3.2", "shop.Web")
	cmd := exec.Command(program, s.args("--source", w.write().source())...)
	// Root in a user namespace has no capability over a network outside of it.
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
	}
	a := s.launch(t, cmd).ready()
	if state := a.status().Parts["identity"]; !strings.Contains(state, "netns is off: CAP_NET_ADMIN is missing") {
		t.Errorf("identity is %s", state)
	}
	c := s.rawFrom(t, web, "prod/web-1-a")
	c.subscribe(xds.Cluster)
	c.gets("prod/shop.Web")
	if p, err := a.identityOf("prod/web-1-a"); err != nil || p.Identity.Method != "none" || !strings.Contains(p.Identity.Reason, "CAP_NET_ADMIN is missing") {
		t.Errorf("%+v, %v", p, err)
	}
}
