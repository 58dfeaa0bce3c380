package collect

import (
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Past returns what the next collector of the node has to know so that it
// keeps the limits as if it were this one: the connections of the last hour,
// and the owners whose server must be left alone.
func (c *Collector) Past() []nodecache.SavedPast {
	now := time.Now()
	all := map[nodecache.OwnerKey]*nodecache.SavedPast{}
	of := func(key nodecache.OwnerKey, until time.Time) *nodecache.SavedPast {
		p := all[key]
		if p == nil {
			p = &nodecache.SavedPast{Key: key}
			all[key] = p
		}
		if until.After(p.Until) {
			p.Until = until
		}
		return p
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, ts := range c.calls {
		p := of(k.owner, ts[len(ts)-1].Add(callWindow))
		if p.Calls == nil {
			p.Calls = map[uint16][]time.Time{}
		}
		p.Calls[k.port] = append([]time.Time(nil), ts...)
	}
	for key, f := range c.failed {
		if f.heavy > 0 && f.next.After(now) {
			of(key, f.next).Failure = &nodecache.SavedFailure{
				Since: f.since, Count: f.heavy, Class: string(f.class), Hung: f.hangs, Reason: f.reason, Next: f.next,
			}
		}
	}
	saved := make([]nodecache.SavedPast, 0, len(all))
	for _, p := range all {
		if p.Until.After(now) {
			saved = append(saved, *p)
		}
	}
	return saved
}

// PastChanges counts the changes of what [Collector.Past] returns.
func (c *Collector) PastChanges() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pastChanges
}

// recall takes over what an earlier collector left. A clock may have gone back
// since: nothing of it binds for longer than if it had happened now.
func (c *Collector) recall(past []nodecache.SavedPast, now time.Time) {
	soonest := func(a, b time.Time) time.Time {
		if a.Before(b) {
			return a
		}
		return b
	}
	for _, p := range past {
		for port, ts := range p.Calls {
			for _, t := range ts {
				c.calls.note(callKey{p.Key, port}, soonest(t, now))
			}
		}
		if f := p.Failure; f != nil && f.Count > 0 && f.Next.After(now) {
			c.failed[p.Key] = &failures{
				since: soonest(f.Since, now), heavy: f.Count, class: Class(f.Class), hangs: f.Hung, reason: f.Reason,
				next:  soonest(f.Next, now.Add(heavyMost+heavyMost/5)),
				asked: map[string]bool{}, seen: map[string]bool{}, unsure: map[uint16]bool{},
			}
		}
	}
}
