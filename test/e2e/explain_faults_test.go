package e2e_test

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// fault is one reason why a call does not go where its caller thinks, and how
// explain call names it.
type fault struct {
	name      string
	from      string
	authority string
	path      string
	code      codes.Code
	says      string // stands in the first line
	// by is how the call is made to compare: through Envoy, at unknown.sock, or
	// not at all.
	by string
}

const (
	byEnvoy   = "Envoy"
	byUnknown = "unknown.sock"
	byNobody  = ""
)

// listenRaw serves bytes, not gRPC, at an address of its own, until the test
// ends.
func listenRaw(t *testing.T, serve func(net.Listener)) *net.TCPAddr {
	t.Helper()
	l, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	serve(l)
	return l.Addr().(*net.TCPAddr)
}

// web serves HTTP/1.
func web(t *testing.T, start func(*httptest.Server)) *net.TCPAddr {
	return listenRaw(t, func(l net.Listener) {
		s := httptest.NewUnstartedServer(http.NotFoundHandler())
		s.Config.ErrorLog = nil
		s.Listener.Close()
		s.Listener = l
		start(s)
		t.Cleanup(s.Close)
	})
}

// silent accepts and says nothing.
func silent(t *testing.T) *net.TCPAddr {
	return listenRaw(t, func(l net.Listener) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			var held []net.Conn
			for {
				c, err := l.Accept()
				if err != nil {
					break
				}
				held = append(held, c)
			}
			for _, c := range held {
				c.Close()
			}
		}()
		t.Cleanup(func() { l.Close(); <-done })
	})
}

// hang takes a stream and answers nothing.
func hang(_ any, s grpc.ServerStream, _ *grpc.StreamServerInfo, _ grpc.StreamHandler) error {
	<-s.Context().Done()
	return nil
}

// faultWorld is a world of faults, each in a namespace of its own but for those
// of the namespace prod, which an Envoy calls.
type faultWorld struct {
	*world
	site   *site
	agent  *agentProcess
	envoy  *sidecar
	after  []func() // what happens once all is served
	faults []fault
}

func (w *faultWorld) fault(f fault) { w.faults = append(w.faults, f) }

// alone is a fault whose pod, at the address, is the only one of its namespace.
func (w *faultWorld) alone(ns string, at *net.TCPAddr, change func(*corev1.Pod), c codes.Code, says string) {
	p := newPod(ns+"-1-a", at.IP.String(), at.Port)
	p.Namespace = ns
	if change != nil {
		change(p)
	}
	w.add(p)
	w.fault(fault{name: ns, from: ns + "/caller", path: "/shop.Web/Say", code: c, says: says, by: byUnknown})
}

// served is a pod of prod that serves shop.<Name>, and changes once that is
// known to all.
func (w *faultWorld) served(id, service string, change func(*corev1.Pod)) *corev1.Pod {
	p, _ := w.serve(id, []string{service})
	if change != nil {
		w.after = append(w.after, func() { change(p) })
	}
	return p
}

func notReady(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }

func (w *faultWorld) unservedFaults() {
	t := w.t
	none := &net.TCPAddr{IP: net.ParseIP(nextAddr()), Port: 50051} // nobody listens
	w.alone("unready", none, notReady, codes.Unimplemented, "ReplicaSet/unready-1 was never asked: pod unready/unready-1-a (is not ready)")
	w.alone("noip", none, func(p *corev1.Pod) { p.Status.PodIP, p.Status.PodIPs = "", nil }, codes.Unimplemented, "pod noip/noip-1-a (has no address)")
	w.alone("nohint", none, func(p *corev1.Pod) { p.Spec.Containers[0].Ports[0].Name = "api" }, codes.Unimplemented, "ReplicaSet/nohint-1: no port has a gRPC hint")
	w.alone("optout", none, func(p *corev1.Pod) {
		p.Annotations = map[string]string{"fingerpost.dev/collect": "false"}
	}, codes.Unimplemented, "ReplicaSet/optout-1: collect is turned off by annotation")
	w.alone("hostnet", none, func(p *corev1.Pod) { p.Spec.HostNetwork = true }, codes.Unimplemented, "ReplicaSet/hostnet-1: hostNetwork pods are not asked unless they opt in")
	w.alone("refused", none, nil, codes.Unavailable, "ReplicaSet/refused-1 could not be asked what it serves: port 50051: refused")
	w.alone("silent", silent(t), nil, codes.Unavailable, "ReplicaSet/silent-1 could not be asked what it serves: port ")
	w.alone("tls", web(t, (*httptest.Server).StartTLS), nil, codes.Unimplemented, ": tls")
	w.alone("http1", web(t, (*httptest.Server).Start), nil, codes.Unimplemented, ": not-grpc")
	w.alone("denied", refusedBy(t, codes.PermissionDenied), nil, codes.Unimplemented, ": denied")
	w.alone("noreflection", refusedBy(t, codes.Unimplemented), nil, codes.Unimplemented, ": no-reflection")
	w.alone("completed", none, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }, codes.Unimplemented, "pod completed/completed-1-a (has finished)")
}

// refusedBy is a gRPC server that answers reflection with the code.
func refusedBy(t *testing.T, c codes.Code) *net.TCPAddr {
	s := sample(t, "refusing", 0, []string{"shop.Web"}, refusing(c))
	return &net.TCPAddr{IP: net.ParseIP(s.IP()), Port: s.Port()}
}

func (w *faultWorld) namedFaults() {
	elsewhere := func(ns, id, service string) *corev1.Pod {
		p, _ := w.serve(id, []string{service})
		p.Namespace = ns
		return p
	}
	elsewhere("typo", "typo-1-a", "shop.v1.Checkout")
	w.fault(fault{name: "typo", from: "typo/caller", path: "/shop.v1.Chekout/Say", code: codes.Unimplemented, says: "did you mean shop.v1.Checkout?", by: byUnknown})
	w.fault(fault{name: "another version", from: "typo/caller", path: "/shop.v2beta1.Checkout/Say", code: codes.Unimplemented, says: "did you mean shop.v1.Checkout?", by: byUnknown})
	elsewhere("back", "back-1-a", "shop.Back")
	w.fault(fault{name: "not exported", from: "front/caller", path: "/shop.Back/Say", code: codes.Unimplemented, says: "namespace back has it and does not export it to front", by: byUnknown})
	w.fault(fault{name: "nobody at all", from: "front/caller", path: "/shop.Nobody/Say", code: codes.Unimplemented, says: "no workload of the namespace is left to be asked", by: byUnknown})
	elsewhere("nack", "nack-1-a", "shop.Web")
	w.fault(fault{name: "client refused the cluster", from: "nack/caller", path: "/shop.Web/Say", code: codes.Unavailable, says: "the client rejected the cluster of nack/shop.Web: shop.Web is not to my taste", by: byUnknown})
	elsewhere("mute", "mute-1-a", "shop.Web")
	w.fault(fault{name: "client does not acknowledge", from: "mute/caller", path: "/shop.Web/Say", code: codes.Unavailable, says: "the client does not have the cluster of mute/shop.Web yet: sent, not acknowledged", by: byUnknown})
	elsewhere("lone", "lone-1-a", "shop.Web")
	lone := w.add(newPod("lonely-1-a", nextAddr(), 80))
	lone.Namespace, lone.Spec.Containers[0].Ports[0].Name = "lone", "http"
	far := w.add(newPod("far-1-a", nextAddr(), 80))
	far.Namespace, far.Spec.NodeName, far.Spec.Containers[0].Ports[0].Name = "lone", "n2", "http"
	w.fault(fault{name: "no client", from: "lone/lonely-1-a", path: "/shop.Web/Say", code: codes.Unavailable, says: "the pod has no sidecar that reaches this agent"})
	w.fault(fault{name: "client of another node", from: "lone/far-1-a", path: "/shop.Web/Say", code: codes.Unavailable, says: `the pod is on node "n2", and this is the agent of "n1"`})
	w.fault(fault{name: "no such pod", from: "lone/ghost", path: "/shop.Web/Say", code: codes.Unavailable, says: "there is no pod lone/ghost"})
	w.fault(fault{name: "malformed path", from: "prod/web", path: "/a/b/c", code: codes.Unimplemented, says: `malformed path "/a/b/c"`, by: byEnvoy})
	w.fault(fault{name: "infrastructure", from: "prod/web", path: "/grpc.health.v1.Health/Check", code: codes.Unimplemented, says: "infrastructure, which is never served by its name alone", by: byEnvoy})
	w.fault(fault{name: "authority of nothing", from: "prod/web", authority: "cart.prod:50051", path: "/shop.Fine/Say", code: codes.Unavailable, says: `authority "cart.prod:50051": no Service and no pod`, by: byEnvoy})
	w.fault(fault{name: "authority of a Service", from: "prod/web", authority: "model", path: "/shop.Model/Say", code: codes.Unavailable, says: "no pod of port 80 of Service prod/model gets the call", by: byEnvoy})
}

// authorities of the caller's own sidecar, in every form, and some that look
// like them.
func (w *faultWorld) authorities() {
	for authority, c := range map[string]codes.Code{
		"localhost": codes.OK, "LocalHost.:80": codes.OK, "[::1]:15001": codes.OK, "127.0.0.1": codes.OK,
		"127.0.0.2": codes.Unavailable, "localhost..": codes.Unavailable, "localhost.prod": codes.Unavailable,
	} {
		says := "it goes to 1 endpoint of ReplicaSet/fine"
		if c != codes.OK {
			says = fmt.Sprintf("authority %q: ", authority)
		}
		w.fault(fault{name: "authority " + authority, from: "prod/web", authority: authority, path: "/shop.Fine/Say", code: c, says: says, by: byEnvoy})
	}
}

// providedFaults are those of services that are known.
func (w *faultWorld) providedFaults() {
	prod := func(name, path string, c codes.Code, says string) {
		w.fault(fault{name: name, from: "prod/web", path: path, code: c, says: says, by: byEnvoy})
	}
	w.served("fine-1-a", "shop.Fine", nil)
	prod("nothing is wrong", "/shop.Fine/Say", codes.OK, "it goes to 1 endpoint of ReplicaSet/fine")
	prod("no such method", "/shop.Fine/Nothing", codes.Unimplemented, "have no method Nothing of shop.Fine, only Chat; Say; Watch")
	w.served("late-1-a", "shop.NotReady", notReady)
	prod("is not Ready any more", "/shop.NotReady/Say", codes.Unavailable, "no pod of ReplicaSet/late serves it: pod prod/late-1-a (is not ready)")
	w.served("term-1-a", "shop.Terminating", func(p *corev1.Pod) { notReady(p); terminate(p) })
	prod("terminating", "/shop.Terminating/Say", codes.Unavailable, "pod prod/term-1-a (is terminating and not ready)")
	w.served("evicted-1-a", "shop.Evicted", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
	prod("evicted", "/shop.Evicted/Say", codes.Unavailable, "pod prod/evicted-1-a (has failed)")
	w.served("drain-1-a", "shop.Draining", terminate)
	prod("all are draining", "/shop.Draining/Say", codes.OK, "all of 1 endpoint of ReplicaSet/drain are draining")
	w.served("zero-1-a", "shop.Zero", func(p *corev1.Pod) { w.remove(p) })
	prod("scaled to zero", "/shop.Zero/Say", codes.Unavailable, "no pod of ReplicaSet/zero serves it: it has none (scaled to zero")

	before := w.served("next-1-a", "shop.Next", func(p *corev1.Pod) { w.remove(p) })
	mute, _ := w.serve("next-2-a", []string{"shop.Next"}, refusing(codes.PermissionDenied))
	before.CreationTimestamp, mute.CreationTimestamp = metav1.NewTime(time.Unix(1, 0)), metav1.NewTime(time.Unix(2, 0))
	prod("presumed", "/shop.Next/Say", codes.OK, "it goes to 1 endpoint of ReplicaSet/next; of these 1 presumed, by what the revision before served")

	owner := w.served("model-1-a", "shop.Model", func(p *corev1.Pod) { w.remove(p) })
	rival, _ := w.serve("rival-1-a", []string{"shop.Model"})
	w.more = slices.Concat(service("model", 1, "api", owner), service("rival", 2, "api", rival))
	prod("claimant only", "/shop.Model/Say", codes.Unavailable, "ReplicaSet/rival claims it too and gets no call by the name alone")

	image := func(p *corev1.Pod, digest string) {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", ImageID: "example/app@sha256:" + digest}}
	}
	one, _ := w.serve("mixed-1-a", []string{"shop.Mixed"})
	two, _ := w.serve("mixed-1-b", []string{"shop.Other"})
	image(one, "1")
	image(two, "2")
	prod("heterogeneous", "/shop.Mixed/Say", codes.OK, "not to pod prod/mixed-1-b (the owner's pods run different images; with its own it was collected without shop.Mixed")

	old, sampled := w.serve("shared-1-a", []string{"shop.Shared"})
	fresh := w.add(newPod("shared-1-b", sampled.IP(), sampled.Port()))
	old.CreationTimestamp, fresh.CreationTimestamp = metav1.NewTime(time.Unix(1, 0)), metav1.NewTime(time.Unix(2, 0))
	prod("address of another", "/shop.Shared/Say", codes.OK, "not to pod prod/shared-1-a (another pod that is alive has its address: prod/shared-1-b)")
}
