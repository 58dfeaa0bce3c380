package e2e_test

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/test/harness"
)

// everywhere serves shop.Users at an address of the host for each pod there can be,
// and answers with the one that was connected to.
func (n *redirectNode) everywhere(prefix, listen string) {
	n.t.Helper()
	n.network.Local(n.t, prefix)
	var lis net.Listener
	if err := n.network.Do(func() (err error) { lis, err = net.Listen("tcp4", listen); return err }); err != nil {
		n.t.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		var in wrapperspb.StringValue
		if err := stream.RecvMsg(&in); err != nil {
			return err
		}
		p, _ := peer.FromContext(stream.Context())
		return stream.SendMsg(wrapperspb.String(p.LocalAddr.String()))
	}))
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(lis) }()
	n.t.Cleanup(func() { s.Stop(); <-done })
}

// Whatever many pods dial at the same time, each call reaches what was dialled: as
// the kernel numbers it, as a sidecar reads the number, and as the agent tells what
// it means.
func TestManyRedirectedConnectionsReachWhatWasDialled(t *testing.T) {
	const (
		pods  = 1000 // each with a Service of its own, of two families: 3,000 destinations
		calls = 2000 // of each of four callers
	)
	n := newRedirectNode(t)
	n.everywhere("10.80.0.0/16", "0.0.0.0:50051")
	var targets []string
	want := map[string]string{} // by target: who answers
	for i := range pods {
		addr := fmt.Sprintf("10.80.%d.%d", i/250, 1+i%250)
		p := n.add(newPod(fmt.Sprintf("users%d-1-%d", i%20, i), addr, 50051))
		p.Annotations = map[string]string{"fingerpost.dev/services": "50051=shop.Users"}
		ip, ip6 := fmt.Sprintf("10.97.%d.%d", i/250, 1+i%250), fmt.Sprintf("fd00:97::%x", 1+i)
		n.service(fmt.Sprintf("users-%d", i), []string{ip, ip6}, p)
		for _, to := range []string{addr + ":50051", ip + ":80", "[" + ip6 + "]:80"} {
			targets = append(targets, to)
			want[to] = addr + ":50051"
		}
	}
	var callers []*caller
	for i := range 4 {
		callers = append(callers, n.caller(fmt.Sprintf("caller%d-1-a", i), fmt.Sprintf("10.77.6.%d", 1+i)))
	}
	a := n.agent()
	harness.Eventually(t, soon, func() error {
		if got := a.metric(`fingerpost_redirect_destinations{redirected="true"}`); got != fmt.Sprint(len(targets)+len(callers)) {
			return fmt.Errorf("%s destinations, want %d", got, len(targets)+len(callers))
		}
		return nil
	})
	for _, c := range callers {
		c.sidecar()
	}
	var done sync.WaitGroup
	for i, c := range callers {
		done.Go(func() {
			e := errand{Service: "shop.Users", Workers: 8}
			for k := range calls {
				to := targets[(i*len(targets)/len(callers)+k)%len(targets)]
				if addr := netip.MustParseAddrPort(to); k%5 == 0 && addr.Addr().Is4() {
					to = fmt.Sprintf("%s[::ffff:%s]:%d", mappedPrefix, addr.Addr(), addr.Port())
				}
				e.Targets = append(e.Targets, to)
			}
			wrong := 0
			for k, got := range c.run(e) {
				to := targets[(i*len(targets)/len(callers)+k)%len(targets)]
				if got.Err == "" && got.Said == want[to] && got.Peer == to {
					continue
				}
				if wrong++; wrong <= 5 {
					t.Errorf("%s of %s: %+v, want %s", e.Targets[k], c.id, got, want[to])
				}
			}
			if wrong > 0 {
				t.Errorf("%s: %d of %d calls went wrong", c.id, wrong, calls)
			}
		})
	}
	done.Wait()
	// None of them got there without a sidecar.
	sum := 0
	for outcome, n := range map[string]int{"redirected4": 0, "redirected6": 0, "no_listener": 0} {
		if _, err := fmt.Sscan(a.metric(fmt.Sprintf("fingerpost_redirect_connections_total{outcome=%q}", outcome)), &n); err != nil || outcome == "no_listener" && n > 0 {
			t.Errorf("%s: %d, %v", outcome, n, err)
		}
		sum += n
	}
	if sum != calls*len(callers) {
		t.Errorf("%d connections were redirected, want %d", sum, calls*len(callers))
	}
}
