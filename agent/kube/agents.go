package kube

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// keyPrefix is what the fingerprint of a key begins with in a [PeerAnnotation].
const keyPrefix = "sha256:"

// maxPeer bounds how much of a PeerAnnotation is kept: anybody's pod can have one.
const maxPeer = len("65535 ") + len(keyPrefix) + 2*sha256.Size

// ParsePeer reads a [PeerAnnotation]: a port and the SHA-256 fingerprint of the
// key that answers there, as "9642 sha256:<64 hexadecimal digits>", or the port
// alone, where certificates say who answers; key then is empty.
func ParsePeer(text string) (port uint16, key string, err error) {
	number, key, keyed := strings.Cut(text, " ")
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 {
		return 0, "", fmt.Errorf("%s %q: want a port, as 9642, and then %s<64 hexadecimal digits>", PeerAnnotation, text, keyPrefix)
	}
	if !keyed {
		return uint16(n), "", nil
	}
	digits, prefixed := strings.CutPrefix(key, keyPrefix)
	if sum, err := hex.DecodeString(digits); !prefixed || err != nil || len(sum) != sha256.Size || digits != strings.ToLower(digits) {
		return 0, "", fmt.Errorf("%s %q: a key is %s<64 lower-case hexadecimal digits>", PeerAnnotation, text, keyPrefix)
	}
	return uint16(n), key, nil
}

// FormatPeer is what [ParsePeer] reads. The key may be empty.
func FormatPeer(port uint16, key string) string {
	return strings.TrimSuffix(fmt.Sprintf("%d %s", port, key), " ")
}

// AgentState says how an agent's pod is.
type AgentState uint8

// The states, the best first.
const (
	AgentReady    AgentState = iota
	AgentStarting            // or ill: it is not Ready
	AgentLeaving             // it is being deleted, and Ready still
)

// String is ready, starting or leaving.
func (s AgentState) String() string {
	return [...]string{AgentReady: "ready", AgentStarting: "starting", AgentLeaving: "leaving"}[s]
}

// AgentPod is the pod of an agent that has not ended and says where it answers.
type AgentPod struct {
	Name, UID  string
	Node, Zone string // spec.nodeName; Zone may be empty
	Created    time.Time
	At         netip.AddrPort // the primary address, and the port of the annotation
	Key        string         // as in the annotation; empty: certificates say who it is
	State      AgentState
}

// compare orders the pods of one node: that comes first at which the node is
// reached. Of two that are Ready the older one has the port still, since a
// successor waits for its predecessor's end.
func (p AgentPod) compare(o AgentPod) int {
	return cmp.Or(cmp.Compare(p.State, o.State), p.Created.Compare(o.Created), cmp.Compare(p.UID, o.UID))
}

// agentPod is what a record says of an agent's pod; false if it is none, or its
// end is certain.
func agentPod(r *Record) (AgentPod, bool) {
	port, key, err := ParsePeer(r.at.Value().peer)
	if err != nil || r.Node == "" || !r.Addr.IsValid() {
		return AgentPod{}, false
	}
	p := AgentPod{Name: r.Name, UID: r.UID, Node: r.Node, Zone: r.Zone, Created: r.Created, At: netip.AddrPortFrom(r.Addr, port), Key: key}
	switch {
	case r.State == nodecache.Draining:
		p.State = AgentLeaving
	case r.Unready, r.State == nodecache.Absent && r.Reason == ReasonNotReady:
		p.State = AgentStarting
	case r.State != nodecache.Serving:
		return AgentPod{}, false
	}
	return p, true
}

// Agents are the pods of agents, by node: those of one namespace that have a
// [PeerAnnotation]. Whoever may make pods there can make an agent, by its account,
// so that nothing else is asked of them. It is told by the [Store], and costs
// other pods nothing. Its methods are safe for concurrent use.
type Agents struct {
	namespace string
	wake      chan struct{} // capacity 1

	// mu guards what follows.
	mu      sync.Mutex
	nodes   map[string][]AgentPod // sorted by compare; none is empty
	changed map[string]struct{}   // nodes that were not taken yet
}

// FollowAgents makes the store tell of the agents in the namespace. Call it once,
// before any source runs.
func (s *Store) FollowAgents(namespace string) *Agents {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.agents = &Agents{namespace: namespace, wake: make(chan struct{}, 1), nodes: map[string][]AgentPod{}, changed: map[string]struct{}{}}
	return s.agents
}

// Changed is ready while there is something to take.
func (a *Agents) Changed() <-chan struct{} { return a.wake }

// Take returns the nodes whose agents have changed since it was called last, with
// those that they have now, the one to be called first. A node without any has
// lost them.
func (a *Agents) Take() map[string][]AgentPod {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make(map[string][]AgentPod, len(a.changed))
	for node := range a.changed {
		out[node] = slices.Clone(a.nodes[node])
	}
	clear(a.changed)
	return out
}

// Nodes returns the nodes that have an agent, sorted.
func (a *Agents) Nodes() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.nodes))
}

// has tells whether the pod, which may be nil, says that it is an agent of the
// namespace. Nobody is an agent of a nil Agents.
func (a *Agents) has(r *Record) bool {
	return a != nil && r != nil && r.at.Value().peer != "" && r.Namespace == a.namespace
}

// note says what is wrong with the annotation of a pod; empty if nothing is.
func (a *Agents) note(r *Record) string {
	if !a.has(r) {
		return ""
	}
	if _, _, err := ParsePeer(r.at.Value().peer); err != nil {
		return err.Error()
	}
	return ""
}

// moved hears of each pod that changed, with what the store held before and holds
// now; either may be nil. It is called with Store.writing held, on a nil Agents
// too.
func (a *Agents) moved(before, now *Record) {
	var old, p AgentPod
	var was, is bool
	if a.has(before) {
		old, was = agentPod(before)
	}
	if a.has(now) {
		p, is = agentPod(now)
	}
	if was == is && old == p {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if was {
		pods := slices.DeleteFunc(a.nodes[old.Node], func(p AgentPod) bool { return p == old })
		if a.nodes[old.Node] = pods; len(pods) == 0 {
			delete(a.nodes, old.Node)
		}
		a.changed[old.Node] = struct{}{}
	}
	if is {
		pods := append(a.nodes[p.Node], p)
		slices.SortFunc(pods, AgentPod.compare)
		a.nodes[p.Node] = pods
		a.changed[p.Node] = struct{}{}
	}
	select {
	case a.wake <- struct{}{}:
	default:
	}
}
