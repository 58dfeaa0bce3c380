package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/agent/peer"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/test/harness"
)

// fleet is a cluster with an agent on each of some nodes.
type fleet struct {
	*cluster
	config string // kubeconfig
	agents map[string]*nodeAgent
	owners map[string]*fleetOwner
}

// nodeAgent is the agent of a node, and its pod.
type nodeAgent struct {
	*agentProcess
	pod *corev1.Pod
	at  netip.AddrPort // of its peer listener
}

// fleetOwner is an owner with pods on several nodes, each with a server of its own.
type fleetOwner struct {
	pods    map[string]*corev1.Pod // by node
	asked   atomic.Int32           // reflection streams, on all pods
	last    atomic.Pointer[string] // the node whose pod was asked last
	release chan struct{}          // reflection waits for it; nil: it does not
}

func newFleet(t *testing.T) *fleet {
	c := inCluster(t, harness.StartAPIServer(t))
	return &fleet{cluster: c, config: c.kubeconfig(), agents: map[string]*nodeAgent{}, owners: map[string]*fleetOwner{}}
}

// run starts the agent of a node, in a pod of its own.
func (f *fleet) run(node string) *nodeAgent {
	f.t.Helper()
	addr := netip.AddrPortFrom(netip.MustParseAddr(nextAddr()), uint16(harness.FreePort(f.t)))
	pod := f.CreatePod(f.t, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fingerpost", GenerateName: "fingerpost-"}, Spec: corev1.PodSpec{NodeName: node, HostNetwork: true},
	})
	pod = f.SetReady(f.t, pod, true, addr.Addr().String())
	site := newSite(f.t)
	cmd := exec.Command(program, site.args("--source", "kube", "--kubeconfig", f.config, "--node-name", node, "--peer-address", addr.String())...)
	cmd.Env = append(os.Environ(), "POD_NAME="+pod.Name, "POD_NAMESPACE=fingerpost")
	a := &nodeAgent{agentProcess: site.launch(f.t, cmd), pod: pod, at: addr}
	f.agents[node] = a
	return a
}

// end stops the agent of a node, or kills it, and takes its pod away.
func (f *fleet) end(node string, kill bool) {
	f.t.Helper()
	a := f.agents[node]
	delete(f.agents, node)
	if kill {
		a.kill()
	} else {
		a.stop()
	}
	f.Remove(f.t, a.pod)
}

// serve makes an owner with a pod on each node.
func (f *fleet) serve(name, service string, held bool, nodes ...string) *fleetOwner {
	f.t.Helper()
	o := &fleetOwner{pods: map[string]*corev1.Pod{}}
	if held {
		o.release = make(chan struct{})
	}
	f.owners[service] = o
	port := 0
	for _, node := range nodes {
		count := grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			if strings.Contains(info.FullMethod, "ServerReflection") {
				o.asked.Add(1)
				o.last.Store(&node)
				if o.release != nil {
					select {
					case <-o.release:
					case <-stream.Context().Done():
						return stream.Context().Err()
					}
				}
			}
			return handler(srv, stream)
		})
		s := sample(f.t, name, port, []string{service}, count)
		port = s.Port()
		p := newPod(fmt.Sprintf("%s-1-%s", name, node), "", port)
		p.Spec.NodeName = node
		o.pods[node] = f.create(p, s.IP())
	}
	return o
}

// agree waits until every agent knows every owner, all of them serve the same, and
// that is what the API server's pods say.
func (f *fleet) agree() {
	f.t.Helper()
	var want []string
	for service, o := range f.owners {
		var at []string
		for _, p := range o.pods {
			at = append(at, fmt.Sprintf("%s:%d", p.Status.PodIP, p.Spec.Containers[0].Ports[0].ContainerPort))
		}
		slices.Sort(at)
		want = append(want, fmt.Sprintf("%s at %v", service, at))
	}
	slices.Sort(want)
	for node, a := range f.agents {
		a.live()
		harness.Eventually(f.t, soon, func() error {
			var got []string
			for _, s := range a.services() {
				var at []string
				for _, e := range s.Endpoints {
					if e.State == "serving" {
						at = append(at, e.Address)
					}
				}
				slices.Sort(at)
				got = append(got, fmt.Sprintf("%s at %v", s.Name, at))
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				return fmt.Errorf("the agent of %s serves\n%s\nwant\n%s\nstatus %v\npeers %s", node, strings.Join(got, "\n"), strings.Join(want, "\n"), a.status().Parts, a.must("peers"))
			}
			return nil
		})
	}
}

// asked fails unless every owner was asked so often.
func (f *fleet) asked(want int32) {
	f.t.Helper()
	for service, o := range f.owners {
		if n := o.asked.Load(); n != want {
			f.t.Errorf("the owner of %s was asked %d times, want %d", service, n, want)
		}
	}
}

func (a *nodeAgent) peers() []agent.PeerView {
	return ask[[]agent.PeerView](a.t, a.agentProcess, "peers")
}

var fleetNodes = []string{"node-1", "node-2", "node-3"}

func TestThreeAgentsAskEachOwnerOnce(t *testing.T) {
	f := newFleet(t)
	for i := range 6 {
		f.serve(fmt.Sprintf("web%d", i), fmt.Sprintf("shop.S%d", i), false, fleetNodes...)
	}
	for _, node := range fleetNodes {
		f.run(node)
	}
	f.agree()
	f.asked(1)
	self := map[string]int{}
	for node, a := range f.agents {
		a.ready()
		for _, o := range a.owners() {
			if o.Namespace != f.ns {
				continue
			}
			switch o.Origin {
			case "self":
				self[o.Key]++
			case "peer":
				if out := a.must("explain", "pod", o.Pods[0]); !strings.Contains(out, "by peer") || !strings.Contains(out, "node-") {
					t.Errorf("explain says\n%s", out)
				}
			default:
				t.Errorf("the agent of %s knows %s by %q", node, o.Key, o.Origin)
			}
		}
		if s := a.status().Parts["peers"]; s != "on" {
			t.Errorf("the agent of %s says of peers: %s", node, s)
		}
		if peers := a.peers(); len(peers) != 3 {
			t.Errorf("the agent of %s has peers %+v", node, peers)
		}
	}
	for key, n := range self {
		if n != 1 {
			t.Errorf("%d agents have asked %s", n, key)
		}
	}
	if len(self) != 6 {
		t.Errorf("%d owners were asked by somebody, want 6", len(self))
	}

	// One that comes later is asked once, too; and nobody asks again because the
	// agent that did has gone.
	late := f.serve("late", "shop.Late", false, fleetNodes...)
	f.agree()
	f.asked(1)
	f.end(*late.last.Load(), true)
	f.serve("later", "shop.Later", false, fleetNodes...)
	f.agree()
	f.asked(1)
}

// The agent in charge dies while it asks: one more does.
func TestOwnerIsAskedOnceMoreWhenTheAgentThatAsksDies(t *testing.T) {
	f := newFleet(t)
	for _, node := range fleetNodes {
		f.run(node)
	}
	for _, a := range f.agents {
		a.ready()
		harness.Eventually(t, soon, func() error {
			if peers := a.peers(); len(peers) != 3 {
				return fmt.Errorf("peers %+v", peers)
			}
			return nil
		})
	}
	o := f.serve("web", "shop.Held", true, fleetNodes...)
	awaitAsked := func(n int32) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			if got := o.asked.Load(); got != n {
				return fmt.Errorf("asked %d times, want %d", got, n)
			}
			return nil
		})
	}
	awaitAsked(1)
	f.end(*o.last.Load(), true)
	awaitAsked(2)
	close(o.release)
	f.agree()
	f.asked(2)
}

// Agents are exchanged one after the other in every order: what is known stays. An
// owner is asked once more at most for each agent that was lost, since a new one of
// the same node may be in charge before the others have vouched for what they know.
func TestAgentsComeAndGoInEveryOrderAndOwnersAreAskedOnceMoreAtMost(t *testing.T) {
	f := newFleet(t)
	for i := range 3 {
		f.serve(fmt.Sprintf("web%d", i), fmt.Sprintf("shop.S%d", i), false, fleetNodes...)
	}
	for _, node := range fleetNodes {
		f.run(node)
	}
	f.agree()
	f.asked(1)
	for i, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		for _, n := range order {
			before := map[string]int32{}
			for service, o := range f.owners {
				before[service] = o.asked.Load()
			}
			f.end(fleetNodes[n], i%2 == 1)
			f.run(fleetNodes[n])
			f.agree()
			for service, o := range f.owners {
				if n := o.asked.Load() - before[service]; n > 1 {
					t.Errorf("the owner of %s was asked %d times because one agent was exchanged", service, n)
				}
			}
		}
	}
}

// Whoever is no agent is refused, whatever a pod of his says.
func TestForgedPeerIsRefused(t *testing.T) {
	f := newFleet(t)
	f.serve("web", "shop.S", false, fleetNodes[:2]...)
	for _, node := range fleetNodes[:2] {
		f.run(node)
	}
	f.agree()
	forger, err := peer.NewIdentity("node-1")
	if err != nil {
		t.Fatal(err)
	}
	var target peer.Member
	for node, a := range f.agents {
		pod, err := f.Client.CoreV1().Pods("fingerpost").Get(t.Context(), a.pod.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_, key, err := kube.ParsePeer(pod.Annotations[kube.PeerAnnotation])
		if err != nil {
			t.Fatal(err)
		}
		print, err := peer.ParseFingerprint(strings.TrimPrefix(key, "sha256:"))
		if err != nil {
			t.Fatal(err)
		}
		target = peer.Member{Node: node, Address: a.at, Keys: []peer.Fingerprint{print}}
	}
	refused := func(when string) {
		t.Helper()
		transport := peer.NewTransport(forger, nil)
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		transport.Retain([]peer.Member{target})
		defer transport.Retain(nil)
		if resp, err := transport.Fetch(ctx, target, &peerv1.FetchRequest{}); err == nil {
			t.Errorf("%s: an agent answers %v", when, resp)
		}
	}
	refused("unknown key")
	annotate := func(namespace, name string) error {
		patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, kube.PeerAnnotation, kube.FormatPeer(9642, "sha256:"+forger.Fingerprint().String()))
		_, err := f.Client.CoreV1().Pods(namespace).Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	if err := annotate(f.ns, f.pods[0].Name); err != nil {
		t.Fatal(err)
	}
	// What comes later in the same watch has been heard of: so was the annotation.
	f.serve("late", "shop.Late", false, fleetNodes[:2]...)
	f.agree()
	refused("key on a pod that is no agent's")
	for node, a := range f.agents {
		if peers := a.peers(); len(peers) != 2 {
			t.Errorf("the agent of %s has peers %+v", node, peers)
		}
	}
	f.asked(1)
}

// Without the right to say who it is an agent works alone, and says so.
func TestAgentThatMayNotAnnounceItselfWorksAlone(t *testing.T) {
	f := newFleet(t)
	if err := f.Client.RbacV1().Roles("fingerpost").Delete(t.Context(), "fingerpost-peer", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	f.serve("web", "shop.S", false, fleetNodes[1:]...)
	a := f.run(fleetNodes[0])
	f.agree()
	parts := a.status().Parts
	if s := parts["peers"]; !strings.HasPrefix(s, "off: no right to write the annotation") || !strings.HasSuffix(s, "; this agent asks pods of all nodes") {
		raw, _ := json.Marshal(parts)
		t.Errorf("status says %s", raw)
	}
}
