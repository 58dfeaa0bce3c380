package peer

import (
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/time/rate"
)

// contact is how it stands with another agent.
type contact struct {
	failures int
	until    time.Time // it is left alone
	reason   string
	// gone is set where a Fetch failed: until the time is over, others collect
	// in its place. A stream may end for many a reason.
	gone    bool
	streams int           // that it has open to this agent
	limiter *rate.Limiter // of its fetches
	last    time.Time     // it answered
}

// live needs mu. It tells whether the node has an agent that could be asked when
// it last was.
func (x *Exchange) live(node string) bool {
	if node == x.node {
		return true
	}
	c := x.peers[node]
	return x.roster != nil && x.roster.byNode[node] != nil && (c == nil || !c.gone || !time.Now().Before(c.until))
}

// avoided needs mu. It tells whether the peer is left alone for now.
func (x *Exchange) avoided(node string) bool {
	c := x.peers[node]
	return c != nil && time.Now().Before(c.until)
}

// contact needs mu.
func (x *Exchange) contact(node string) *contact {
	c := x.peers[node]
	if c == nil {
		c = &contact{limiter: rate.NewLimiter(servePeerRate, servePeerBurst)}
		x.peers[node] = c
	}
	return c
}

// failed notes that a peer misbehaved, or that it could not be asked: for
// records, where it is gone, else for a stream.
func (x *Exchange) failed(node string, gone bool, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := x.contact(node)
	was := x.live(node)
	c.gone = c.gone || gone
	c.reason = line(err.Error())
	wait := min(backoffLeast<<min(c.failures, 16), backoffMost)
	if errors.Is(err, errJunk) || errors.Is(err, errTooMuch) {
		wait = max(wait, misbehaved)
	}
	c.failures++
	c.until = time.Now().Add(wait/2 + rand.N(wait))
	x.relinkAt = time.Time{}
	x.log.Debug("peer is left alone for a while", "node", node, "reason", c.reason, "failures", c.failures)
	if was && !x.live(node) {
		x.relocate()
	}
	x.told()
}

// worked notes that a peer answered.
func (x *Exchange) worked(node string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := x.contact(node)
	c.last = time.Now()
	if c.failures > 0 {
		was := x.live(node)
		c.failures, c.until, c.reason, c.gone = 0, time.Time{}, "", false
		x.relinkAt = time.Time{}
		if !was {
			x.relocate()
		}
	}
}

// errStranger indicates a peer whose key is not that of the node's agent.
var errStranger = errors.New("its key is not that of the node's agent")

// refused counts what an error of a peer means, if it is a reason.
func (x *Exchange) refused(err error) {
	switch {
	case errors.Is(err, errTooMuch):
		x.metrics.rejected.WithLabelValues(string(tooMuch)).Inc()
	case errors.Is(err, errStranger):
		x.metrics.rejected.WithLabelValues(string(unknownKey)).Inc()
	}
}

// errTooMuch indicates a peer that sends more than anybody has.
var errTooMuch = errors.New("it sent more than there can be")

// ended is the error of a stream for a log; nil where it ended as it should.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// State is that of a [PeerStatus].
type State string

// The states.
const (
	StateSelf      State = "self"
	StateConnected State = "connected" // its records come in by a stream
	StateIdle      State = "idle"
	StateBackoff   State = "backoff" // it is left alone
)

// PeerStatus is how it stands with one member.
type PeerStatus struct {
	Member
	State State
	// Serving tells whether the peer has a stream open to this agent.
	Serving bool
	// Reason is the last error in one line, Until when the peer is asked again;
	// both are zero after it has answered.
	Reason string
	Until  time.Time
	// Last is when it answered last; zero: never.
	Last time.Time
	// Records is how many of the records held are this peer's word.
	Records int
}

// Status is how it stands with every member, sorted by node.
func (x *Exchange) Status() []PeerStatus {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.roster == nil {
		return nil
	}
	words := map[string]int{}
	for _, r := range x.records {
		words[r.node]++
	}
	out := make([]PeerStatus, 0, len(x.roster.ring))
	for _, s := range x.roster.ring {
		p := PeerStatus{Member: s.Member, State: StateIdle, Records: words[s.Node]}
		if l := x.links[s.Node]; l != nil && l.open {
			p.State = StateConnected
		}
		if c := x.peers[s.Node]; c != nil {
			p.Serving, p.Reason, p.Until, p.Last = c.streams > 0, c.reason, c.until, c.last
			if x.avoided(s.Node) {
				p.State = StateBackoff
			}
		}
		if s.Node == x.node {
			p.State = StateSelf
		}
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b PeerStatus) int {
		if a.Node < b.Node {
			return -1
		}
		return 1
	})
	return out
}
