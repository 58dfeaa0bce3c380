package peer

import (
	"errors"
	"slices"
	"time"

	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/nodecache"
)

// arrival is an entry that is not good yet.
type arrival struct {
	entry
	at time.Time
}

// reason says why a record was not taken; empty: it was, or is known already.
type reason string

const (
	taken        reason = ""
	unknownOwner reason = "unknown-owner" // our directory has no pods of it
	notHosted    reason = "not-hosted"    // none of them on the node that speaks
	unknownKey   reason = "unknown-key"   // the key is not that of the node's agent
	stale        reason = "stale"         // older than what is known
	future       reason = "future"        // collected later than now
	malformed    reason = "malformed"
	forged       reason = "bad-signature"
	unasked      reason = "unasked" // an answer to no question
	tooMuch      reason = "too-much"
	noFiles      reason = "no-files" // its files did not come
	unfit        reason = "unfit"    // our own, that others would not take
)

// passes tells whether the reason may pass: watches are not at the same place.
func (r reason) passes() bool { return r == unknownOwner || r == notHosted || r == unknownKey }

// take looks at records that a peer brought. Its error says that the peer
// misbehaves.
func (x *Exchange) take(via string, raws []*peerv1.Record) error {
	for _, raw := range raws {
		r, err := x.decode(raw)
		if err != nil {
			x.metrics.rejected.WithLabelValues(string(malformed)).Inc()
			return err
		}
		if reason := x.receive(r, via); reason != taken {
			x.metrics.rejected.WithLabelValues(string(reason)).Inc()
			if reason == forged {
				return junk("the record of owner %s is not signed by the key that it names", r.key)
			}
		}
	}
	return nil
}

// receive looks at one record that came from a peer.
func (x *Exchange) receive(r *Record, via string) reason {
	x.mu.Lock()
	defer x.mu.Unlock()
	if held := x.records[r.key]; held != nil && held.id == r.id {
		return taken
	}
	if w, ok := x.waiting[r.key]; ok && w.rec.id == r.id {
		return taken
	}
	now := time.Now()
	if r.collected > now.Add(maxAhead).UnixMilli() || r.signed > now.Add(maxAhead).UnixMilli() {
		return future
	}
	reason := unknownKey
	if x.speaks(r) {
		if !r.verified.Load() {
			x.mu.Unlock()
			ok := r.verify()
			x.mu.Lock()
			if !ok {
				return forged
			}
		}
		reason = x.admit(r, via)
	}
	if reason.passes() {
		if len(x.waiting) >= maxWaiting {
			for key := range x.waiting {
				delete(x.waiting, key)
				break
			}
		}
		x.waiting[r.key] = arrival{entry{r, via}, now}
	}
	return reason
}

// admit needs mu. It takes a record if it counts.
func (x *Exchange) admit(r *Record, via string) reason {
	hosts, there := x.dir.Hosts(r.key)
	switch {
	case !there:
		return unknownOwner
	case !slices.Contains(hosts, r.node):
		return notHosted
	case !x.speaks(r):
		return unknownKey
	case !r.verify():
		return forged
	}
	if held := x.records[r.key]; held != nil && x.valid(held, hosts) && !r.newer(held) {
		if held.id == r.id {
			return taken
		}
		return stale
	}
	if missing := x.files.missing(r.all); len(missing) > 0 {
		if p, ok := x.partial[r.key]; !ok || r.newer(p.rec) {
			x.partial[r.key] = arrival{entry{r, via}, time.Now()}
			for _, h := range missing {
				x.lacking[h] = append(x.lacking[h], r.key)
			}
		} else if p.rec.id != r.id {
			return stale
		}
		if l := x.links[via]; l != nil {
			l.want(missing)
		}
		return taken
	}
	return x.apply(r, via)
}

// apply needs mu. It puts a record into the directory.
func (x *Exchange) apply(r *Record, via string) reason {
	var err error
	if r.failure != nil {
		err = x.dir.LearnFailure(r.key, r.node, *r.failure)
	} else {
		err = x.dir.Learn(r.key, r.node, r.complete(x.files))
	}
	switch {
	case err == nil:
	case errors.Is(err, nodecache.ErrStale):
		return unknownOwner
	case errors.Is(err, nodecache.ErrNotHosted):
		return notHosted
	case errors.Is(err, nodecache.ErrBusy):
		return stale // this agent's own attempt will tell
	default: // ErrOlder
		known := x.dir.Learned(r.key).Info
		if r.failure != nil || known == nil || latest(known).UnixMilli() > r.collected {
			if mine := x.local[r.key]; mine != nil && r.failure == nil {
				mine.contested = true
				x.again[r.key] = struct{}{}
				x.rouse()
			}
			return stale
		}
		// The same, and somebody vouches for it anew.
	}
	delete(x.partial, r.key)
	x.hold(r, via)
	x.settle(r.key)
	return taken
}

// takeFiles looks at files that a peer brought, and returns how many bytes
// nobody had asked for.
func (x *Exchange) takeFiles(files []*peerv1.File) (useless int) {
	for _, f := range files {
		content, h := intern(f.GetContent())
		x.mu.Lock()
		wanted := false
		for _, key := range x.lacking[h] {
			p, ok := x.partial[key]
			if !ok || !slices.Contains(p.rec.all, h) {
				continue
			}
			wanted = true
			x.files.put(h, content)
			if len(x.files.missing(p.rec.all)) == 0 {
				delete(x.partial, key)
				if reason := x.admit(p.rec, p.via); reason != taken {
					x.metrics.rejected.WithLabelValues(string(reason)).Inc()
				}
			}
		}
		delete(x.lacking, h)
		x.mu.Unlock()
		if !wanted {
			x.metrics.rejected.WithLabelValues(string(unasked)).Inc()
			useless += len(f.GetContent())
		}
	}
	return useless
}

// expire drops what waited in vain.
func (x *Exchange) expire(now time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for key, w := range x.waiting {
		if now.Sub(w.at) > waitingTime {
			delete(x.waiting, key)
		}
	}
	for key, p := range x.partial {
		if now.Sub(p.at) > filesTime {
			delete(x.partial, key)
			x.metrics.rejected.WithLabelValues(string(noFiles)).Inc()
		}
	}
}

// sweep forgets files that no record names.
func (x *Exchange) sweep() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.partial) == 0 {
		clear(x.lacking)
		x.files.sweep()
	}
}
