package agent_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// wired is a whole agent between an API server and a client of its socket. Only
// the network of the pods is the test's.
type wired struct {
	*site
	api  *apiServer
	pods *podNet
	dir  *nodecache.Directory

	// mu guards what the client was told; its holder signals told.
	mu        sync.Mutex
	told      sync.Cond
	endpoints map[string][]string // addresses by cluster, sorted
}

// newWired makes an agent that is not started yet.
func newWired(t *testing.T) *wired {
	w := &wired{site: newSite(t), api: newAPIServer(t), pods: newPodNet(t), endpoints: map[string][]string{}}
	w.told.L = &w.mu
	w.config.Source, w.config.Kubeconfig = "kube", w.api.kubeconfig(t)
	w.config.Tune(func(o *collect.Options) {
		w.dir = o.Directory
		o.Dial, o.Budget = w.pods.dial, collect.Budget{Wall: soon, Connect: soon}
	})
	return w
}

// follow connects a client that wants the endpoints of these services.
func (w *wired) follow(services ...string) {
	w.t.Helper()
	conn, err := client.Dial(w.config.ADSSocket)
	if err != nil {
		w.t.Fatal(err)
	}
	c, err := client.Open(context.Background(), conn, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/client"}, Reply: w.note})
	if err != nil {
		w.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range c.Responses() {
		}
	}()
	w.t.Cleanup(func() { c.Close(); <-done; _ = conn.Close() })
	var clusters []string
	for _, s := range services {
		clusters = append(clusters, "prod/"+s)
	}
	if err := errors.Join(c.Subscribe(xds.Cluster), c.Subscribe(xds.Endpoint, clusters...)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *wired) note(r client.Response) client.Reply {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.told.Broadcast()
	for _, name := range r.Removed {
		delete(w.endpoints, name)
	}
	if r.Type != xds.Endpoint {
		return client.Reply{}
	}
	for _, res := range r.Resources {
		var cla endpointv3.ClusterLoadAssignment
		if err := res.Body.UnmarshalTo(&cla); err != nil {
			return client.Reply{Nack: err.Error()}
		}
		addrs := []string{}
		for _, l := range cla.GetEndpoints() {
			for _, e := range l.GetLbEndpoints() {
				addrs = append(addrs, e.GetEndpoint().GetAddress().GetSocketAddress().GetAddress())
			}
		}
		slices.Sort(addrs)
		w.endpoints[res.Name] = addrs
	}
	return client.Reply{}
}

// toldOf waits until the client was told of just these endpoints.
func (w *wired) toldOf(service string, want ...string) error {
	slices.Sort(want)
	w.mu.Lock()
	defer w.mu.Unlock()
	late := false
	defer time.AfterFunc(soon, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		late = true
		w.told.Broadcast()
	}).Stop()
	for !late {
		if got, ok := w.endpoints["prod/"+service]; ok && slices.Equal(got, want) {
			return nil
		}
		w.told.Wait()
	}
	return fmt.Errorf("the client was told of %v behind %s, want %v", w.endpoints["prod/"+service], service, want)
}

// until waits until the directory is as the condition says.
func (w *wired) until(cond func() bool) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(soon); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			return errors.New("the directory does not become what it should")
		}
	}
	return nil
}

// holds waits until the directory has so many pods of the owner.
func (w *wired) holds(key nodecache.OwnerKey, pods int) error {
	return w.until(func() bool {
		o := w.dir.Owner(key)
		return o != nil && len(o.Pods) == pods
	})
}

// The pods of a race, and what they serve, follow from its number. A race has
// one owner.
func (w *wired) pod(race, i int) *corev1.Pod {
	yes, ip, owner := true, podIP(race, i), fmt.Sprintf("race%d-1", race)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "prod", Name: fmt.Sprintf("%s-%d", owner, i), UID: types.UID(fmt.Sprintf("%s-%d", owner, i)),
			Labels:          map[string]string{"pod-template-hash": "1"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: owner, UID: types.UID(owner), Controller: &yes}},
		},
		Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{{Name: "grpc", ContainerPort: 50051}}}}},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
}

func podIP(race, i int) string {
	return netip.AddrFrom4([4]byte{10, byte(i), byte(race >> 8), byte(race)}).String()
}

func addrOf(ip string) netip.Addr { return netip.MustParseAddr(ip) }

func raceOf(a netip.Addr) int { b := a.As4(); return int(b[2])<<8 | int(b[3]) }

func ownerOf(race int) nodecache.OwnerKey {
	return nodecache.OwnerKey{UID: fmt.Sprintf("race%d-1", race), Revision: "1"}
}

func serviceOf(race int) string { return fmt.Sprintf("race.S%d", race) }

// front is the Service before the pods of a race, and its slice of some.
func (w *wired) front(race int, pods ...*corev1.Pod) (*corev1.Service, *discoveryv1.EndpointSlice) {
	name, port, tcp := fmt.Sprintf("race%d", race), int32(50051), corev1.ProtocolTCP
	portName := "grpc"
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0))},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Name: portName, Port: 80, Protocol: tcp}}},
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "prod", Name: name + "-1", UID: types.UID(name + "-1"), Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &tcp}},
	}
	for _, p := range pods {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{p.Status.PodIP},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
		})
	}
	return svc, slice
}

// podNet is the network of the pods: behind every address of a race answers a
// server of that race's service, once the test lets it.
type podNet struct {
	conns  chan net.Conn
	closed chan struct{}

	// mu guards what follows.
	mu    sync.Mutex
	calls map[int]*podCalls
}

// podCalls is what the pods of one race saw.
type podCalls struct {
	dials   int             // connections that were tried
	refuse  int             // so many of them
	held    int             // questions that wait
	asked   chan struct{}   // gets one word for each question of what there is
	release <-chan struct{} // if not nil, questions wait until it is closed
}

func newPodNet(t *testing.T) *podNet {
	n := &podNet{conns: make(chan net.Conn), closed: make(chan struct{}), calls: map[int]*podCalls{}}
	s := grpc.NewServer()
	reflectionpb.RegisterServerReflectionServer(s, n)
	served := make(chan struct{})
	go func() { defer close(served); _ = s.Serve(n) }()
	t.Cleanup(func() { s.Stop(); <-served })
	return n
}

// of returns what the race's pods saw. It is called under mu.
func (n *podNet) of(race int) *podCalls {
	c := n.calls[race]
	if c == nil {
		c = &podCalls{asked: make(chan struct{}, 64)}
		n.calls[race] = c
	}
	return c
}

// hold lets the servers of a race answer only after the function was called.
func (n *podNet) hold(race int) (release func()) {
	ch := make(chan struct{})
	n.mu.Lock()
	defer n.mu.Unlock()
	n.of(race).release = ch
	return sync.OnceFunc(func() { close(ch) })
}

// refuse lets so many connections to the pods of a race be refused.
func (n *podNet) refuse(race, dials int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.of(race).refuse = dials
}

// asked waits for a question to one of the race's pods.
func (n *podNet) asked(race int) error {
	n.mu.Lock()
	ch := n.of(race).asked
	n.mu.Unlock()
	select {
	case <-ch:
		return nil
	case <-time.After(soon):
		return errors.New("nobody is asked")
	}
}

func (n *podNet) dials(race int) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.of(race).dials
}

func (n *podNet) dial(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	race := raceOf(addr.Addr())
	n.mu.Lock()
	c := n.of(race)
	c.dials++
	refuse, release := c.dials <= c.refuse, c.release
	n.mu.Unlock()
	if refuse {
		c.asked <- struct{}{}
		if release != nil {
			<-release
		}
		return nil, errors.New("connection refused")
	}
	here, there := net.Pipe()
	select {
	case n.conns <- podConn{there, addr}:
		return here, nil
	case <-n.closed:
	case <-ctx.Done():
	}
	return nil, errors.Join(here.Close(), there.Close(), net.ErrClosed)
}

// podConn is a connection as the pod's end sees it.
type podConn struct {
	net.Conn
	addr netip.AddrPort
}

// RemoteAddr tells the server which pod it is.
func (c podConn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.addr) }

// question notes a question and waits until it may be answered.
func (n *podNet) question(ctx context.Context, race int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.of(race)
	c.asked <- struct{}{}
	if c.release == nil {
		return
	}
	c.held++
	n.mu.Unlock()
	select {
	case <-c.release:
	case <-ctx.Done():
	}
	n.mu.Lock()
	c.held--
}

// waiting are the races of which a question waits.
func (n *podNet) waiting() (races []int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for race, c := range n.calls {
		if c.held > 0 {
			races = append(races, race)
		}
	}
	return races
}

func (n *podNet) Accept() (net.Conn, error) {
	select {
	case c := <-n.conns:
		return c, nil
	case <-n.closed:
		return nil, net.ErrClosed
	}
}

func (n *podNet) Close() error   { close(n.closed); return nil }
func (n *podNet) Addr() net.Addr { return &net.TCPAddr{} }

// ServerReflectionInfo answers what there is, and describes nothing.
func (n *podNet) ServerReflectionInfo(st reflectionpb.ServerReflection_ServerReflectionInfoServer) error {
	p, _ := peer.FromContext(st.Context())
	race := raceOf(p.Addr.(*net.TCPAddr).AddrPort().Addr())
	for {
		req, err := st.Recv()
		if err != nil {
			return nil //nolint:nilerr // the asker is done
		}
		resp := &reflectionpb.ServerReflectionResponse{MessageResponse: &reflectionpb.ServerReflectionResponse_ErrorResponse{ErrorResponse: &reflectionpb.ErrorResponse{ErrorCode: 5}}}
		if _, list := req.MessageRequest.(*reflectionpb.ServerReflectionRequest_ListServices); list {
			n.question(st.Context(), race)
			resp.MessageResponse = &reflectionpb.ServerReflectionResponse_ListServicesResponse{ListServicesResponse: &reflectionpb.ListServiceResponse{
				Service: []*reflectionpb.ServiceResponse{{Name: serviceOf(race)}},
			}}
		}
		if err := st.Send(resp); err != nil {
			return err
		}
	}
}
