// Package identity says which pod is at the other end of a unix socket's
// accepted connection, by what the kernel says of it and never by what the
// caller does. There are two ways:
//
//	netns  accepted socket ─▶ network namespace ─▶ its addresses ─▶ the host's route ─▶ the link
//	       (SIOCGSKNS)        (nsid)                (claims)         to each of them     it leaves by
//
//	pidfd  accepted socket ─▶ process ─▶ its cgroup ─▶ the pod's UID
//	       (SO_PEERPIDFD)
//
// # By network namespace
//
// The socket that accept returns belongs to the network namespace in which the
// caller made its own. The addresses that are set there are what the caller
// claims: any process can make a namespace and set in it what it likes. The
// proof is the host's: its own route to the pod's address leaves by a link whose
// other end is in that namespace; or by a bridge, to the port behind which the
// host finds the address, and that port's other end is in it. So an address is
// proved to whom the host would send its packets. CAP_NET_ADMIN suffices, in the
// host's network namespace: no /proc, no pid namespace of the host's.
//
// It cannot tell pods of the host's network from one another, nor where the
// host's route names no link of the pod's (Cilium without endpoint routes,
// ipvlan, macvlan).
//
// # By process
//
// The kernel names the process that connected by a descriptor which no other
// process can come to be behind, and its cgroup names the pod. It needs Linux
// 6.5, and a pid namespace that the process is in: the host's (hostPID).
//
// # Both
//
// Where both can tell they must agree. Where the first cannot, the second
// decides, unless the namespace has the address of another pod.
//
// A proof is as fresh as what [Pods] says: of two pods that have one address one
// after the other, the second is only known once Pods knows it.
package identity

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
)

// Pod is a pod of this node.
type Pod struct {
	Namespace, Name, UID string
	// HostNetwork is set where the pod has no network of its own.
	HostNetwork bool
}

// String is "namespace/name".
func (p Pod) String() string { return p.Namespace + "/" + p.Name }

// Pods knows the pods of this node. Its methods must be safe for concurrent use
// and return at once.
type Pods interface {
	// At returns the pods with a network of their own that have the address:
	// more than one only where it cannot be told which of them lives.
	At(netip.Addr) []Pod
	// WithUID returns the pod of a UID, false if there is none.
	WithUID(string) (Pod, bool)
}

// Method is how a pod was proved.
type Method string

// The methods. Where both told the same, the first counts.
const (
	None  Method = "none"
	NetNS Method = "netns"
	PIDFD Method = "pidfd"
)

// Proof is what is known of one caller.
type Proof struct {
	// Pod is the caller's, where Method is not None.
	Pod    Pod
	Method Method
	// Reason says why nothing is proved; empty if something is.
	Reason string
	// Pending is set where nothing is proved because Pods does not know the
	// pod: it may soon.
	Pending bool
}

// Prover proves who callers are. It is safe for concurrent use, keeps no
// descriptor of a caller and starts neither process nor goroutine.
type Prover struct {
	// Set by Open, read-only. Of each method either it or why it is off.
	pods         Pods
	network      *network
	process      *process
	noNet, noPID string
}

// Options configures a [Prover].
type Options struct {
	// Pods must not be nil.
	Pods Pods
}

// Open returns a prover for connections to this process, which should run in
// the host's network namespace. It returns an error that names the reasons if
// no method works here.
func Open(o Options) (*Prover, error) {
	p := &Prover{pods: o.Pods}
	var err error
	if p.network, err = openNetwork(); err != nil {
		p.noNet = err.Error()
	}
	if p.process, err = openProcess(); err != nil {
		p.noPID = err.Error()
	}
	if p.network == nil && p.process == nil {
		return nil, fmt.Errorf("netns: %s; pidfd: %s", p.noNet, p.noPID)
	}
	return p, nil
}

// Close gives back what the prover holds.
func (p *Prover) Close() {
	if p.network != nil {
		p.network.close()
	}
}

// Complete tells whether both methods work.
func (p *Prover) Complete() bool { return p.network != nil && p.process != nil }

// Methods says which methods work, and why one does not, in one line.
func (p *Prover) Methods() string {
	switch {
	case p.network == nil:
		return "pidfd; netns is off: " + p.noNet
	case p.process == nil:
		return "netns; pidfd is off: " + p.noPID
	}
	return "netns, pidfd"
}

// Prove says who is at the other end of an accepted connection of a unix
// socket. It asks the kernel some ten times, takes a fraction of a millisecond,
// and can be asked again as long as the connection is open.
func (p *Prover) Prove(c syscall.Conn) Proof {
	net, proc := verdict{reason: p.noNet}, verdict{reason: p.noPID}
	if p.network != nil {
		net = p.network.look(c, p.pods)
	}
	if p.process != nil {
		proc = p.process.look(c, p.pods)
	}
	return join(net, proc)
}

// verdict is what one method says.
type verdict struct {
	pod     *Pod   // nil: nothing is proved
	reason  string // why not
	pending bool

	// Of netns only.
	host   bool  // the caller has the network of this process
	claims []Pod // pods whose addresses the namespace has without proof
	// Of pidfd only: the UID that the cgroup names, though no pod may have it.
	uid string
}

// join makes one proof of both verdicts.
func join(net, proc verdict) Proof {
	refused := func(pending bool, format string, args ...any) Proof {
		return Proof{Method: None, Reason: fmt.Sprintf(format, args...), Pending: pending}
	}
	switch {
	case net.pod != nil && proc.pod != nil && net.pod.UID == proc.pod.UID:
		return Proof{Pod: *net.pod, Method: NetNS}
	case net.pod != nil && proc.pod != nil:
		return refused(false, "the network namespace is of pod %s, the process of pod %s", net.pod, proc.pod)
	case net.pod != nil && proc.uid != "":
		// The address had another pod before, or a later one of that name has it.
		return refused(true, "the network namespace is of pod %s (UID %s), the process of one with UID %s, which is not known here", net.pod, net.pod.UID, proc.uid)
	case net.pod != nil:
		return Proof{Pod: *net.pod, Method: NetNS}
	case proc.pod == nil:
		return refused(net.pending || proc.pending, "%s", reasons(net.reason, proc.reason))
	case net.host && !proc.pod.HostNetwork:
		return refused(false, "the socket is of the host's network, the process of pod %s, which has its own", proc.pod)
	case len(net.claims) > 0 && !slices.ContainsFunc(net.claims, func(c Pod) bool { return c.UID == proc.pod.UID }):
		return refused(false, "the process is of pod %s, and its network namespace claims the address of pod %s", proc.pod, net.claims[0])
	}
	return Proof{Pod: *proc.pod, Method: PIDFD}
}

func reasons(net, proc string) string {
	var all []string
	if net != "" {
		all = append(all, "netns: "+net)
	}
	if proc != "" {
		all = append(all, "pidfd: "+proc)
	}
	return strings.Join(all, "; ")
}

// control calls f with the connection's descriptor.
func control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	return errors.Join(raw.Control(func(fd uintptr) { inner = f(int(fd)) }), inner)
}
