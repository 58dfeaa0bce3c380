package collect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// maxPods is how many pods of an owner one attempt asks.
const maxPods = 3

// outcome is what an attempt brought: info, or err, or neither where no pod
// was there to be asked any more.
type outcome struct {
	info   *nodecache.Info
	pod    *nodecache.Pod // that info is from
	err    error
	class  Class
	hung   bool            // a connection was accepted and nothing was answered in time
	ports  []uint16        // that gave no answer
	asked  []string        // UIDs of the pods asked
	unsure map[uint16]bool // ports whose answer needs another attempt
}

// eligible returns the pods that this agent may ask, none of an owner that is
// collected elsewhere. It must not be called under mu.
func (c *Collector) eligible(o *nodecache.Owner) []nodecache.Member {
	if c.place == nil {
		return eligible(o, c.only)
	}
	switch c.place.Place(o) {
	case OwnNode:
		return eligible(o, c.node)
	case AnyNode:
		return eligible(o, c.only)
	}
	return nil
}

// eligible returns the pods that may be asked from the one node, or, where it is
// empty, from any.
func eligible(o *nodecache.Owner, only string) []nodecache.Member {
	var ms []nodecache.Member
	for _, m := range o.Pods {
		if m.WhyNotAsked(only) == "" {
			ms = append(ms, m)
		}
	}
	return ms
}

// current returns what the directory holds of the pod now, and whether it may
// still be dialled: an address may have passed to another pod meanwhile.
func (c *Collector) current(key nodecache.OwnerKey, was *nodecache.Pod) (nodecache.Member, bool) {
	m, ok := c.dir.Member(was.UID)
	if !ok || m.Owner != key || m.Addr != was.Addr || m.WhyNotAsked(c.only) != "" {
		return m, false
	}
	if !m.HostNetwork {
		if at := c.dir.PodAt(m.Addr); at == nil || at.UID != m.UID {
			return m, false
		}
	}
	return m, true
}

// attempt asks the pods, of one owner, until one has answered on all its ports.
func (c *Collector) attempt(ctx context.Context, key nodecache.OwnerKey, pods []nodecache.Member) outcome {
	var out, partial outcome
	useless := c.patience(key)
	for _, m := range pods {
		if len(out.asked) == maxPods || useless == 0 {
			break
		}
		a := c.ask(ctx, key, m, &out)
		if ctx.Err() != nil && (a.err != nil || a.gone) {
			return outcome{}
		}
		if a.gone {
			continue
		}
		info := &nodecache.Info{Ports: a.ports, Origin: nodecache.OriginSelf, Collected: time.Now(), Pod: m.String()}
		if m.Images != "" {
			info.Images = []string{m.Images}
		}
		if a.err == nil {
			return outcome{info: info, pod: m.Pod}
		}
		if partial.info == nil && info.Reason() == "" && len(a.ports) > 0 {
			partial = outcome{info: info, pod: m.Pod}
		}
		if a.connected {
			useless--
		}
		var f *Failure
		if errors.As(a.err, &f) && (out.err == nil || f.heavy()) {
			out.err, out.class = a.err, f.Class
			out.hung = f.Class == Deadline || f.Class == Silent && a.connected
			if f.heavy() {
				break
			}
		}
	}
	if partial.info != nil {
		return partial
	}
	return out
}

// answers is what one pod gave.
type answers struct {
	ports     []nodecache.PortInfo
	err       error // the first port without an answer
	connected bool  // a connection came about and gave no answer
	gone      bool  // the pod must not be dialled any more
}

// ask asks all ports of one pod, and adds to out what a failure needs to know.
func (c *Collector) ask(ctx context.Context, key nodecache.OwnerKey, pod nodecache.Member, out *outcome) (a answers) {
	for i, port := range pod.DialPorts() {
		p, ok := c.current(key, pod.Pod)
		if !ok || !slices.Contains(p.DialPorts(), port) {
			c.metrics.staleTargets.Inc()
			return answers{gone: true}
		}
		if i == 0 {
			out.asked = append(out.asked, pod.UID)
		}
		r, opened, err := c.port(ctx, key, netip.AddrPortFrom(p.Addr, port))
		if err == nil && r.Unsure && !c.confirmed(key, port) {
			if out.unsure == nil {
				out.unsure = map[uint16]bool{}
			}
			out.unsure[port] = true
			err = &Failure{Class: Unavailable, Detail: r.Detail}
		}
		if err == nil {
			a.ports = append(a.ports, r.PortInfo)
			continue
		}
		if ctx.Err() != nil {
			return answers{err: ctx.Err()}
		}
		out.ports = append(out.ports, port)
		a.connected = a.connected || opened
		var f *Failure
		heavy := errors.As(err, &f) && f.heavy()
		if a.err == nil || heavy {
			a.err = fmt.Errorf("port %d: %w", port, err)
		}
		if heavy {
			break
		}
	}
	return a
}

// port asks one port, if it may have another connection; opened tells whether
// one came about.
func (c *Collector) port(ctx context.Context, key nodecache.OwnerKey, addr netip.AddrPort) (r Result, opened bool, err error) {
	k := callKey{key, addr.Port()}
	c.mu.Lock()
	free := c.calls.free(k, time.Now())
	c.mu.Unlock()
	if !free.IsZero() {
		return Result{}, false, &Failure{Class: Limited, Detail: fmt.Sprintf("it had its %d connections of this hour", maxCalls)}
	}
	var yes atomic.Bool // a dial may outlive the attempt for a moment
	r, err = c.reflect(ctx, addr, func() {
		yes.Store(true)
		c.metrics.connections.Inc()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.calls.note(k, time.Now())
		c.pastChanges++
	})
	return r, yes.Load(), err
}

// order sorts pods by who is asked first: those that can be reached, those of
// this node, those that were not asked since the last success, those that cost
// less, then by name.
func (c *Collector) order(key nodecache.OwnerKey, ms []nodecache.Member) []nodecache.Member {
	type place struct {
		rank int
		cost time.Duration
	}
	places := make(map[string]place, len(ms))
	for _, m := range ms {
		p := place{}
		reachable := false
		if p.cost, reachable = c.cost(m.Pod); !reachable {
			p.rank += 4
		}
		if m.Node != c.node {
			p.rank += 2
		}
		places[m.UID] = p
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.failed[key]; f != nil {
		for uid, p := range places {
			if f.asked[uid] {
				p.rank++
				places[uid] = p
			}
		}
	}
	slices.SortStableFunc(ms, func(a, b nodecache.Member) int {
		pa, pb := places[a.UID], places[b.UID]
		return cmp.Or(cmp.Compare(pa.rank, pb.rank), cmp.Compare(pa.cost, pb.cost))
	})
	return ms
}

// patience is how many useless connections the next attempt may make: they
// are few within an hour, and a slow start needs some of them later.
func (c *Collector) patience(key nodecache.OwnerKey) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed[key] == nil {
		return 2
	}
	return 1
}

// confirmed tells whether an earlier attempt on the port had the same unsure
// answer.
func (c *Collector) confirmed(key nodecache.OwnerKey, port uint16) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.failed[key]
	return f != nil && f.unsure[port]
}
