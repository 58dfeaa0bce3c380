package collect

import (
	"container/heap"
	"math/rand/v2"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// waits is the wait after each failure of a row; the last one stays.
var waits = [...]time.Duration{time.Second, 5 * time.Second, 30 * time.Second, 5 * time.Minute}

// The wait after a heavy failure doubles from the least to the most.
const (
	heavyLeast = 10 * time.Minute
	heavyMost  = 160 * time.Minute
)

// jitter adds up to a fifth, so that agents that failed together part.
func jitter(d time.Duration) time.Duration { return d + rand.N(d/5) }

// failures is the row of failures of an owner since its last success.
// Collector.mu guards it.
type failures struct {
	since  time.Time // of the first
	count  int       // of the light ones
	heavy  int       // of the heavy ones
	class  Class
	hangs  bool // the last attempt was accepted and not answered
	reason string
	next   time.Time
	asked  map[string]bool // UIDs of the pods asked
	seen   map[string]bool // UIDs of the pods that could have been
	unsure map[uint16]bool
}

// hangPatience is how long a server that takes questions and answers none may
// yet turn out to serve what clients hold. A heavy failure is asked about once
// more in that time or just after.
const hangPatience = heavyLeast

// hung tells whether the owner's server has taken the question and given no
// answer, and has not done so for long.
func (f *failures) hung(now time.Time) bool {
	return f.hangs && now.Sub(f.since) < hangPatience
}

func (f *failures) note(now time.Time, out outcome) {
	f.class, f.hangs = out.class, out.hung
	if (&Failure{Class: out.class}).heavy() {
		f.heavy++
		f.next = now.Add(jitter(min(heavyLeast<<min(f.heavy-1, 10), heavyMost)))
	} else {
		f.next = now.Add(jitter(waits[min(f.count, len(waits)-1)]))
		f.count++
	}
	fresh := false
	for _, uid := range out.asked {
		fresh = fresh || !f.asked[uid]
		f.asked[uid] = true
	}
	if !fresh {
		// All had their turn: the next round begins with the others again.
		clear(f.asked)
		for _, uid := range out.asked {
			f.asked[uid] = true
		}
	}
	for port := range out.unsure {
		f.unsure[port] = true
	}
}

// newPod tells whether there is a pod that came after the last failure and may
// be asked before the wait is over. A nil f knows no pod and allows none.
func (f *failures) newPod(pods []nodecache.Member) bool {
	if f == nil || f.heavy > 0 || f.class == Limited {
		return false
	}
	for _, m := range pods {
		if !f.seen[m.UID] {
			return true
		}
	}
	return false
}

// No more than maxCalls connections are made to a port of an owner within
// callWindow: some servers lock out a host that connects and says nothing they
// understand.
const (
	maxCalls   = 5
	callWindow = time.Hour
)

type callKey struct {
	owner nodecache.OwnerKey
	port  uint16
}

// callLog holds the times of the latest connections, oldest first, at most
// maxCalls each. Collector.mu guards it.
type callLog map[callKey][]time.Time

// free returns when the next connection may be made: the zero time for now.
func (l callLog) free(k callKey, now time.Time) time.Time {
	ts := l[k]
	if len(ts) < maxCalls {
		return time.Time{}
	}
	if t := ts[len(ts)-maxCalls].Add(callWindow); t.After(now) {
		return t
	}
	return time.Time{}
}

func (l callLog) note(k callKey, now time.Time) {
	ts := append(l[k], now)
	l[k] = ts[max(0, len(ts)-maxCalls):]
}

func (l callLog) sweep(now time.Time) {
	for k, ts := range l {
		if now.Sub(ts[len(ts)-1]) > callWindow {
			delete(l, k)
		}
	}
}

// timeline knows when which owner is to be considered again. Collector.mu
// guards it. The zero timeline is empty.
type timeline struct {
	heap moments
	at   map[nodecache.OwnerKey]time.Time // the valid moment of each owner
}

type moment struct {
	at  time.Time
	key nodecache.OwnerKey
}

// set gives the owner a moment, in place of the one it had, and tells whether
// it is the first of all now.
func (t *timeline) set(key nodecache.OwnerKey, at time.Time) bool {
	if t.at == nil {
		t.at = map[nodecache.OwnerKey]time.Time{}
	}
	if t.at[key].Equal(at) {
		return false
	}
	t.at[key] = at
	heap.Push(&t.heap, moment{at, key})
	return t.heap[0].key == key
}

// due takes the owners whose moment has come, and returns the next moment,
// zero if there is none.
func (t *timeline) due(now time.Time) (keys []nodecache.OwnerKey, next time.Time) {
	for len(t.heap) > 0 {
		m := t.heap[0]
		switch {
		case !t.at[m.key].Equal(m.at): // replaced
		case m.at.After(now):
			return keys, m.at
		default:
			keys = append(keys, m.key)
			delete(t.at, m.key)
		}
		heap.Pop(&t.heap)
	}
	return keys, time.Time{}
}

// moments is a container/heap.
type moments []moment

func (h moments) Len() int           { return len(h) }
func (h moments) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h moments) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *moments) Push(x any)        { *h = append(*h, x.(moment)) }
func (h *moments) Pop() any {
	last := len(*h) - 1
	m := (*h)[last]
	*h = (*h)[:last]
	return m
}
