package peer

import (
	"slices"
	"time"

	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/nodecache"
)

// entry is a record that came by way of a node, empty for one's own.
type entry struct {
	rec *Record
	via string
}

// local is what this agent knows of an owner that it may speak for.
type local struct {
	seen *nodecache.Info // what was last compared with the record held
	// contested is set where others hold what this agent knows better.
	contested bool
}

// speaks needs mu. It tells whether the record's key speaks for its node.
func (x *Exchange) speaks(r *Record) bool {
	if r.print == x.id.Fingerprint() {
		return r.node == x.node
	}
	if x.trust != nil {
		node, ok := x.trust(r.print, r.raw.GetCertificate())
		return ok && node == r.node
	}
	return x.roster != nil && x.roster.byKey[r.print] == r.node
}

// valid needs mu. It tells whether a record that is held would be taken today.
func (x *Exchange) valid(r *Record, hosts []string) bool {
	return x.speaks(r) && slices.Contains(hosts, r.node)
}

// relook looks at the owners for which somebody asked.
func (x *Exchange) relook() {
	x.mu.Lock()
	again := x.again
	if len(again) > 0 {
		x.again = map[nodecache.OwnerKey]struct{}{}
	}
	x.mu.Unlock()
	for key := range again {
		x.look(key)
		x.collector.Consider(key)
	}
}

// look does what the state of an owner demands: say what is known of it, take
// what others said, or go and ask.
func (x *Exchange) look(key nodecache.OwnerKey) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.lookAt(key)
}

// lookAt is look; it needs mu.
func (x *Exchange) lookAt(key nodecache.OwnerKey) {
	hosts, there := x.dir.Hosts(key)
	if w, ok := x.waiting[key]; ok {
		delete(x.waiting, key)
		if len(hosts) == 0 {
			if there {
				x.waiting[key] = w
			}
		} else if reason := x.admit(w.rec, w.via); reason.passes() {
			x.waiting[key] = w // no longer than before
		}
	}
	if len(hosts) == 0 {
		x.forget(key)
		delete(x.partial, key)
		delete(x.local, key)
		x.settle(key)
		return
	}
	l := x.dir.Learned(key)
	if slices.Contains(hosts, x.node) {
		if x.local[key] == nil {
			x.local[key] = &local{}
		}
		x.speak(key, l, hosts)
	} else {
		delete(x.local, key)
	}
	x.seek(key, l, hosts)
}

// hold needs mu. It keeps a record, in place of the one held, and passes it on.
func (x *Exchange) hold(r *Record, via string) {
	x.files.retain(r.all)
	x.forget(r.key)
	x.records[r.key] = r
	x.sums[bucketOf(r.key)] += r.id
	if len(x.journal) >= maxLog {
		drop := maxLog / 2
		x.journal = slices.Clone(x.journal[drop:])
		x.base += drop
	}
	x.journal = append(x.journal, entry{r, via})
	if via != "" {
		x.metrics.taken.Inc()
	}
	x.told()
}

// forget needs mu. It drops the record of an owner.
func (x *Exchange) forget(key nodecache.OwnerKey) {
	if r := x.records[key]; r != nil {
		delete(x.records, key)
		x.sums[bucketOf(key)] -= r.id
		x.files.release(r.all)
	}
}

func bucketOf(key nodecache.OwnerKey) int { return int(hashOfOwner(key) % buckets) }

// speak needs mu. It signs what this agent knows of an owner with a pod here, if
// it is its own word and new, or if it is in charge and nobody else's word
// counts any more.
func (x *Exchange) speak(key nodecache.OwnerKey, l nodecache.Learned, hosts []string) {
	mine, held := x.local[key], x.records[key]
	good := held != nil && x.valid(held, hosts)
	if good && mine.seen == l.Info && l.Info != nil && !mine.contested {
		return
	}
	inCharge := x.ready && first(key, hosts, x.live) == x.node
	var st *peerv1.Statement
	switch {
	case l.Info != nil:
		own := l.Info.Origin == nodecache.OriginSelf
		if !own && !inCharge {
			mine.seen = l.Info
			return
		}
		st = state(key, x.node, l.Info, x.files)
		if good && held.failure == nil {
			same := content(st) == content(held.statement())
			mine.seen = l.Info
			if !mine.contested && (same || !own) {
				return
			}
			if !same && st.CollectedMs <= held.collected {
				// What was learned since is of images or pods alone.
				st.CollectedMs = held.collected + 1
			}
		}
		mine.seen, mine.contested = l.Info, false
	case l.Knowledge == nodecache.Failed:
		f := l.Failure
		if !inCharge || good && (held.failure == nil || held.failure.Reason == line(f.Reason) && held.failure.Hung == f.Hung &&
			f.Next.Sub(held.failure.Next) < failureNews) {
			return
		}
		st = &peerv1.Statement{
			Owner: ownerKey(key), Node: x.node, CollectedMs: time.Now().UnixMilli(),
			Failure: &peerv1.Failure{Reason: line(f.Reason), NextMs: f.Next.UnixMilli(), Hung: f.Hung},
		}
	default:
		return
	}
	st.SignedMs = time.Now().UnixMilli()
	r, err := sign(x.id, st)
	if err != nil {
		x.log.Warn("what an owner serves cannot be told to other agents", "owner", key.String(), "error", err)
		x.metrics.rejected.WithLabelValues(string(unfit)).Inc()
		return
	}
	x.metrics.signed.Inc()
	x.hold(r, "")
}

// failureNews is how much later the next attempt has to be for others to be
// told: the waits after light failures are shorter.
const failureNews = 6 * time.Minute
