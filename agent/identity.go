package agent

import (
	"cmp"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/bpf/identity"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/ads"
)

// callers proves to the sockets' servers which pod connects, where the kernel
// lets it.
type callers struct {
	prover *identity.Prover // nil: off
	why    string           // it is off
}

func newCallers(s *kube.Store) *callers {
	p, err := identity.Open(identity.Options{Pods: localPods{s}})
	if err != nil {
		return &callers{why: err.Error()}
	}
	return &callers{prover: p}
}

func (c *callers) close() {
	if c.prover != nil {
		c.prover.Close()
	}
}

// Prove says which pod is at the other end of a connection.
func (c *callers) Prove(conn net.Conn) ads.Caller {
	none := func(reason string) ads.Caller {
		return ads.Caller{Identity: ads.Identity{Method: string(identity.None), Reason: reason}}
	}
	if c.prover == nil {
		return none(c.why)
	}
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return none("the connection is not a socket's")
	}
	p := c.prover.Prove(socket)
	if p.Method == identity.None {
		who := none(p.Reason)
		who.Pending = p.Pending
		return who
	}
	who := ads.Caller{Identity: ads.Identity{Pod: p.Pod.String(), Method: string(p.Method)}}
	// Without it the caller's connections are not redirected, and that is all.
	if o, err := identity.OriginOf(socket); err == nil {
		who.Network, who.User = o.Network, o.User
	}
	return who
}

// state is what status says of the part.
func (c *callers) state(required bool) string {
	switch {
	case c.prover != nil && c.prover.Complete():
		return "on"
	case c.prover != nil:
		return "on: " + c.prover.Methods()
	case required:
		return "off: " + c.why + "; --require-identity refuses everybody"
	}
	return "off: " + c.why
}

func (c *callers) log(log *slog.Logger, required bool) {
	state := c.state(required)
	switch {
	case c.prover != nil:
		log.Info("callers are identified", "part", "identity", "methods", c.prover.Methods())
	case required:
		log.Error("callers cannot be identified, and all are refused", "part", "identity", "state", state)
	default:
		log.Info("callers are not identified", "part", "identity", "state", state)
	}
}

// localPods are the pods of this node as identity asks for them.
type localPods struct{ store *kube.Store }

// At returns the pods that may have the address: of several that claim it those
// that are not being deleted.
func (l localPods) At(addr netip.Addr) []identity.Pod {
	rs := l.store.Here(func(r *kube.Record) bool {
		return !r.HostNetwork && r.Reason != kube.ReasonSucceeded && r.Reason != kube.ReasonFailed &&
			(r.Addr == addr || slices.Contains(r.More, addr))
	})
	leaving := func(r *kube.Record) bool {
		return r.State == nodecache.Draining || r.Reason == kube.ReasonTerminating
	}
	if slices.ContainsFunc(rs, func(r *kube.Record) bool { return !leaving(r) }) {
		rs = slices.DeleteFunc(rs, leaving)
	}
	slices.SortFunc(rs, func(a, b *kube.Record) int { return cmp.Compare(a.UID, b.UID) })
	pods := make([]identity.Pod, len(rs))
	for i, r := range rs {
		pods[i] = proved(r)
	}
	return pods
}

// WithUID returns the pod of a UID.
func (l localPods) WithUID(uid string) (identity.Pod, bool) {
	rs := l.store.Here(func(r *kube.Record) bool { return r.UID == uid })
	if len(rs) == 0 {
		return identity.Pod{}, false
	}
	return proved(rs[0]), true
}

func proved(r *kube.Record) identity.Pod {
	return identity.Pod{Namespace: r.Namespace, Name: r.Name, UID: r.UID, HostNetwork: r.HostNetwork}
}
