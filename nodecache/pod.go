package nodecache

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
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

func (k OwnerKey) compare(o OwnerKey) int {
	return cmp.Or(cmp.Compare(k.UID, o.UID), cmp.Compare(k.Revision, o.Revision))
}

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

	numStates = iota
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
	// Why names the sign, for explanations: [WhyAnnotation], "port name",
	// "grpc probe", "appProtocol of Service web".
	Why string
}

// WhyAnnotation is the Why of a port that the pod names outright. Of several
// ports that serve the same, calls go to such a one.
const WhyAnnotation = "annotation"

// Declared says, on the pod's own word, which services a port serves. No dial
// is made for such a port.
type Declared struct {
	Port     uint16
	Services []string
}

func (d Declared) equal(e Declared) bool {
	return d.Port == e.Port && slices.Equal(d.Services, e.Services)
}

// Upstream is what a pod says that it calls.
type Upstream struct {
	// Authority is that of the calls, in lower case and without a dot at the end
	// of the host, with or without a port; empty where they name nothing but the
	// gRPC service.
	Authority string
	// Service is the gRPC service; empty for each that is known to be served
	// there.
	Service string
}

// String is as the pod writes it.
func (u Upstream) String() string {
	if u.Service == "" {
		return u.Authority
	}
	return u.Authority + "/" + u.Service
}

// To whom a pod exports, where it is not a list of namespaces.
const (
	ExportAll  = "*"
	ExportNone = "-" // no name of a namespace
)

// Common is what the pods of one owner mostly have in common. It is immutable
// once a pod with it was given to a [Directory]. A source makes the pods of an
// owner share one: there are many pods.
type Common struct {
	Namespace string
	Owner     OwnerKey
	// OwnerName is the owner's display name, as ReplicaSet/a-5d9.
	OwnerName string
	Workload  Workload
	// Host is the DNS name to which calls go, of a stand-in that has no address;
	// empty of every pod.
	Host string
	// Images names the images that the pod's containers run, by digest; empty
	// where that is not known. Pods of one owner can differ in it: the same tag
	// may have been pulled twice.
	Images string
	// Hints are sorted by port, one per port.
	Hints []Hint
	// Export names the namespaces whose callers may reach the pod's services by
	// their names alone, sorted and with commas between; [ExportAll] or
	// [ExportNone]; empty where the pod says nothing.
	Export string
	// Declared is sorted by port, one per port, its services sorted.
	Declared []Declared
	// Locality is what the pod says of who calls it first.
	Locality Locality
	// Policy is what the pod says of calls to its workload; nil: nothing.
	Policy *Policy
	// Ignored says, one line each, what of the pod's annotations is ignored, and
	// why.
	Ignored []string
	// Upstreams are what the pod says that it calls, each once, in its order.
	Upstreams []Upstream
}

// Pod is one pod as the agent remembers it. A Pod is immutable once it was
// given to a [Directory]; strings that repeat over pods should be interned.
type Pod struct {
	UID  string
	Name string
	*Common
	Node string
	Zone string
	// Created is the creationTimestamp; the zero time is unknown.
	Created time.Time
	// Reason says why the state is Absent; empty otherwise.
	Reason string
	// Addr is the pod's primary address, unmapped (an IPv4 address is never
	// in IPv6 form). The zero Addr is none: such a pod is Absent.
	Addr netip.Addr
	// More holds the further addresses of a dual-stack pod.
	More []netip.Addr

	// The small fields stand together: there are many pods.

	State PodState
	// HostNetwork pods have the address of their node, which many share.
	HostNetwork bool
	// CollectOff is set where the pod or its namespace opted out of being
	// asked; CollectOn where a hostNetwork pod opted in.
	CollectOff, CollectOn bool
	// Unready is set of a pod that is not Ready and Serving all the same: every
	// Service in front of it publishes such pods. It is not asked.
	Unready bool
}

// String is namespace/name.
func (p *Pod) String() string { return p.Namespace + "/" + p.Name }

// Equal tells whether two pods are the same in every field; nil and empty
// slices are.
func (p *Pod) Equal(q *Pod) bool {
	return p == q ||
		p.UID == q.UID &&
			p.State == q.State &&
			p.Addr == q.Addr &&
			p.Name == q.Name &&
			p.Node == q.Node &&
			p.Zone == q.Zone &&
			p.Reason == q.Reason &&
			p.HostNetwork == q.HostNetwork &&
			p.CollectOff == q.CollectOff &&
			p.CollectOn == q.CollectOn &&
			p.Unready == q.Unready &&
			p.Created.Equal(q.Created) &&
			slices.Equal(p.More, q.More) &&
			p.same(q.Common)
}

func (c *Common) same(d *Common) bool {
	return c == d ||
		c.Namespace == d.Namespace &&
			c.Owner == d.Owner &&
			c.OwnerName == d.OwnerName &&
			c.Workload == d.Workload &&
			c.Host == d.Host &&
			c.Images == d.Images &&
			c.Export == d.Export &&
			c.Locality == d.Locality &&
			slices.Equal(c.Hints, d.Hints) &&
			slices.EqualFunc(c.Declared, d.Declared, Declared.equal) &&
			c.Policy.Equal(d.Policy) &&
			slices.Equal(c.Ignored, d.Ignored) &&
			slices.Equal(c.Upstreams, d.Upstreams)
}

// Compare orders pods by namespace, name and UID.
func (p *Pod) Compare(q *Pod) int {
	return cmp.Or(
		cmp.Compare(p.Namespace, q.Namespace),
		cmp.Compare(p.Name, q.Name),
		cmp.Compare(p.UID, q.UID),
	)
}

// shy pods are not asked on any port.
func (p *Pod) shy() bool { return p.CollectOff || p.Unready || p.HostNetwork && !p.CollectOn }

// absent tells whether the directory does not hold such a pod.
func (p *Pod) absent() bool { return p.State == Absent || !p.Addr.IsValid() && p.Host == "" }

func (p *Pod) declares(port uint16) bool {
	for _, d := range p.Declared {
		if d.Port == port {
			return true
		}
	}
	return false
}
