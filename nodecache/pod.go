package nodecache

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// OwnerKey names an owner: the UID of the pod's controller, and the revision
// of the program behind it. A StatefulSet or DaemonSet keeps its UID over a
// rollout, so the UID alone would mix two programs. Revision may be empty.
type OwnerKey struct {
	UID      string
	Revision string
}

// String is uid/revision.
func (k OwnerKey) String() string { return k.UID + "/" + k.Revision }

// ParseOwnerKey reads what String wrote. The revision may be left out.
func ParseOwnerKey(s string) (OwnerKey, error) {
	uid, rev, _ := strings.Cut(s, "/")
	if uid == "" || strings.Contains(rev, "/") {
		return OwnerKey{}, fmt.Errorf("owner key %q is not uid/revision", s)
	}
	return OwnerKey{UID: uid, Revision: rev}, nil
}

// Workload is what stays the same over rollouts: a rollout makes a new owner
// of the same workload.
type Workload struct {
	Namespace string
	Kind      string
	Name      string
}

// String is Kind/name.
func (w Workload) String() string { return w.Kind + "/" + w.Name }

// Compare orders workloads by namespace, kind and name.
func (w Workload) Compare(o Workload) int {
	if c := strings.Compare(w.Namespace, o.Namespace); c != 0 {
		return c
	}
	if c := strings.Compare(w.Kind, o.Kind); c != 0 {
		return c
	}
	return strings.Compare(w.Name, o.Name)
}

// PodState says whether calls may go to a pod.
type PodState uint8

const (
	// Absent pods get no calls and are not in the directory. It is the zero
	// value.
	Absent PodState = iota
	// Serving pods are Ready and not being deleted.
	Serving
	// Draining pods are being deleted and still Ready: running calls finish,
	// new ones go elsewhere.
	Draining
)

// String is absent, serving or draining.
func (s PodState) String() string {
	switch s {
	case Serving:
		return "serving"
	case Draining:
		return "draining"
	}
	return "absent"
}

// Hint is a positive sign that a port of a pod speaks gRPC. No port without
// one is ever dialled.
type Hint struct {
	Port uint16
	// Why names the sign, for explanations: "annotation", "port name",
	// "appProtocol", "grpc probe".
	Why string
}

// Declared says, on the pod's own word, which services a port serves. No dial
// is made for such a port.
type Declared struct {
	Port     uint16
	Services []string
}

// Pod is one pod as the agent remembers it. A Pod is immutable once it was
// given to a [Directory]; strings that repeat over pods should be interned.
type Pod struct {
	UID       string
	Namespace string
	Name      string
	Node      string
	Zone      string
	Owner     OwnerKey
	// OwnerName is the owner's display name, as ReplicaSet/a-5d9.
	OwnerName string
	Workload  Workload
	// Created is the creationTimestamp; the zero time is unknown.
	Created time.Time
	State   PodState
	// Reason says why the state is Absent; empty otherwise.
	Reason string
	// Addr is the pod's primary address, unmapped (an IPv4 address is never
	// in IPv6 form). The zero Addr is none: such a pod is Absent.
	Addr netip.Addr
	// More holds the further addresses of a dual-stack pod.
	More []netip.Addr
	// HostNetwork pods have the address of their node, which many share.
	HostNetwork bool
	// Hints are sorted by port, one per port.
	Hints []Hint
	// Declared is sorted by port, one per port, its services sorted.
	Declared []Declared
	// CollectOff is set where the pod or its namespace opted out of being
	// asked; CollectOn where a hostNetwork pod opted in.
	CollectOff, CollectOn bool
}

// String is namespace/name.
func (p *Pod) String() string { return p.Namespace + "/" + p.Name }

// DialPorts returns the hinted ports that may be dialled to learn what the pod
// serves: not declared, not opted out, and of a hostNetwork pod only where it
// opted in.
func (p *Pod) DialPorts() []uint16 {
	if p.CollectOff || p.HostNetwork && !p.CollectOn {
		return nil
	}
	var ports []uint16
	for _, h := range p.Hints {
		if !p.declares(h.Port) {
			ports = append(ports, h.Port)
		}
	}
	return ports
}

func (p *Pod) declares(port uint16) bool {
	for _, d := range p.Declared {
		if d.Port == port {
			return true
		}
	}
	return false
}

// whyNoDial says in one phrase why DialPorts is empty.
func (p *Pod) whyNoDial() string {
	switch {
	case p.CollectOff:
		return "collect is turned off by annotation"
	case len(p.Hints) == 0:
		return "no port has a gRPC hint"
	default:
		return "hostNetwork pods are not asked unless they opt in"
	}
}
