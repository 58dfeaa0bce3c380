package collect

import (
	"context"
	"errors"
	"time"

	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// consider submits a flight for the owner if it needs one and has none, and
// raises the priority of one that waits. It is called after every change that
// could make the answer another; the view is read before the lock, so a flight
// may turn out to be needless, which the flight finds out before it dials.
func (c *Collector) consider(key nodecache.OwnerKey, p schedule.Priority) {
	// Most owners have no pod to ask, and change all the same.
	var o *nodecache.Owner
	var pods []nodecache.Member
	there, may := c.dir.Askable(key, c.only)
	if may {
		if o = c.dir.Owner(key); o != nil {
			pods = c.eligible(o)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx == nil || c.ctx.Err() != nil {
		return
	}
	if j := c.flights[key]; j != nil {
		if j.Err() == nil {
			j.Raise(p)
			return
		}
		delete(c.flights, key) // dropped before it ran
	}
	if there && !may {
		return
	}
	if o == nil || len(o.Pods) == 0 {
		delete(c.plans, key)
		return
	}
	forced := c.forced(key)
	if len(pods) == 0 && forced {
		pods = eligible(o, c.only)
	}
	if len(pods) == 0 {
		return
	}
	now := time.Now()
	var at time.Time // when it is to be asked
	switch {
	case o.Knowledge == nodecache.Unknown, forced:
	case o.Knowledge == nodecache.Failed:
		if !c.failed[key].newPod(pods) {
			at = o.NextTry
		}
	case o.Knowledge.Settled() && o.Info != nil:
		at = c.again(o, pods, now)
	default:
		return
	}
	if now.Before(at) {
		if c.timeline.set(key, at) {
			c.rouse()
		}
		return
	}
	c.flights[key] = c.sched.Submit(schedule.Collect, p, o.Workload.Namespace, func(ctx context.Context) {
		c.fly(ctx, key)
	})
}

// rouse makes keepTime look at the timeline again.
func (c *Collector) rouse() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// fly is the work of one flight.
func (c *Collector) fly(ctx context.Context, key nodecache.OwnerKey) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()

	c.metrics.inFlight.Inc()
	forced := c.unforce(key)
	o, result := c.dir.Owner(key), ""
	if o != nil {
		result = c.try(ctx, o, forced)
	}
	c.metrics.inFlight.Dec()
	if forced {
		c.landed(key, result)
	}
	if result != "" {
		c.metrics.collects.WithLabelValues(result).Inc()
		c.told(o, result)
	}

	c.mu.Lock()
	delete(c.flights, key)
	c.mu.Unlock()
	// What changed during the flight was not acted on.
	c.consider(key, schedule.Normal)
}

// The results of a flight, as the metric names them; the empty one is that of
// a flight that had nothing to do.
const (
	resultKnown       = "known"
	resultNone        = "none"
	resultFailed      = "failed"
	resultStale       = "stale"        // the owner ended meanwhile
	resultStaleTarget = "stale-target" // the pods ended or moved meanwhile
	resultAbandoned   = "abandoned"    // the agent stops
)

// begun tells the witness that pods of the owner are asked now.
func (c *Collector) begun(o *nodecache.Owner) {
	if c.witness != nil {
		c.witness.CollectBegun(o)
	}
}

// told tells the witness what came out of an attempt.
func (c *Collector) told(o *nodecache.Owner, result string) {
	if c.witness == nil {
		return
	}
	c.mu.Lock()
	var out Report
	if p := c.plans[o.Key]; p != nil {
		out = p.out
	}
	c.mu.Unlock()
	detail := ""
	if out.Result == result {
		if detail = out.Detail; detail == "" && out.Pod != "" {
			detail = "from pod " + out.Pod
		}
	}
	c.witness.CollectEnded(o, result, detail)
}

// try makes one attempt and records what came out. A forced one is made
// whatever waits failures imposed.
func (c *Collector) try(ctx context.Context, o *nodecache.Owner, forced bool) string {
	key := o.Key
	if ctx.Err() != nil {
		return resultAbandoned
	}
	pods := c.eligible(o)
	if len(pods) == 0 && forced {
		pods = eligible(o, c.only)
	}
	if len(pods) == 0 {
		return ""
	}
	if o.Knowledge.Settled() && o.Info != nil {
		return c.verify(ctx, o, pods, forced)
	}
	if o.Knowledge != nodecache.Unknown && o.Knowledge != nodecache.Failed {
		return ""
	}
	r, err := c.dir.Begin(key)
	if errors.Is(err, nodecache.ErrBusy) {
		return ""
	} else if err != nil {
		return c.stale(key)
	}
	if c.dir.Learned(key).Info != o.Info {
		// Another agent's word came before Begin: a failure must not take it away.
		_ = c.dir.Abandon(r) // stale or not, nothing is left to do
		return ""
	}
	if f, ok := c.held(key); ok && !forced {
		// A new generation of an owner whose server must be left alone.
		if c.fail(r, &f) != nil {
			return c.stale(key)
		}
		return resultFailed
	}

	c.begun(o)
	out := c.attempt(ctx, key, c.order(key, pods))
	c.asked(key, out)
	switch {
	case out.info != nil:
		if c.dir.Commit(r, out.info) != nil {
			return c.stale(key)
		}
		return c.succeeded(key, o, out)
	case ctx.Err() != nil:
		_ = c.dir.Abandon(r) // stale or not, nothing is left to do
		return resultAbandoned
	case out.err == nil:
		if c.dir.Abandon(r) != nil {
			return c.stale(key)
		}
		return resultStaleTarget
	}
	f := c.noteFailure(key, o, pods, out)
	if c.fail(r, &f) != nil {
		return c.stale(key)
	}
	return resultFailed
}

func (c *Collector) stale(key nodecache.OwnerKey) string {
	c.metrics.stale.Inc()
	c.log.Debug("owner ended during its collect", "owner", key.String())
	return resultStale
}

// fail records a failure.
func (c *Collector) fail(r nodecache.Reservation, f *failures) error {
	if f.hung(time.Now()) {
		return c.dir.Hang(r, f.reason, f.next)
	}
	return c.dir.Fail(r, f.reason, f.next)
}

// held returns the failure that forbids an attempt now.
func (c *Collector) held(key nodecache.OwnerKey) (failures, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.failed[key]; f != nil && f.heavy > 0 && time.Now().Before(f.next) {
		return *f, true
	}
	return failures{}, false
}

func (c *Collector) succeeded(key nodecache.OwnerKey, o *nodecache.Owner, out outcome) string {
	services, why := 0, out.info.Reason()
	for _, p := range out.info.Ports {
		services += len(p.Services)
	}
	result := resultKnown
	if services == 0 {
		result = resultNone
	}
	c.mu.Lock()
	failed := c.failed[key] != nil
	delete(c.failed, key)
	p := c.planOf(key)
	p.at = time.Now().Add(jitter(verifyEvery))
	p.out = Report{Result: result, Pod: out.info.Pod, Detail: why}
	c.mu.Unlock()
	if failed {
		c.log.Info("collected after failures", "owner", key.String(), "name", o.Name, "pod", out.info.Pod, "services", services, "reason", why)
	} else {
		c.log.Debug("collected", "owner", key.String(), "name", o.Name, "pod", out.info.Pod, "services", services, "reason", why)
	}
	return result
}

// noteFailure counts a failure, decides when the next attempt is, and returns
// a copy.
func (c *Collector) noteFailure(key nodecache.OwnerKey, o *nodecache.Owner, pods []nodecache.Member, out outcome) failures {
	now := time.Now()
	reason := out.err.Error()
	c.mu.Lock()
	f := c.failed[key]
	if f == nil {
		f = &failures{since: now, asked: map[string]bool{}, unsure: map[uint16]bool{}}
		c.failed[key] = f
	}
	changed := f.class != out.class
	f.note(now, out)
	next := f.next
	for _, port := range out.ports {
		t := c.calls.free(callKey{key, port}, now)
		if end := f.since.Add(hangPatience); f.hung(now) && t.After(end) {
			t = end // that it hangs must not be said for longer
		}
		if t.After(next) {
			next = t
		}
	}
	f.reason, f.next = reason, next
	c.pastChanges++
	c.planOf(key).out = Report{Result: resultFailed, Detail: reason}
	f.seen = map[string]bool{}
	for _, m := range pods {
		f.seen[m.UID] = true
	}
	noted := *f
	c.mu.Unlock()
	if changed {
		c.log.Info("collect failed and will be tried again", "owner", key.String(), "name", o.Name,
			"reason", reason, "next", next.Sub(now).Round(time.Millisecond))
	}
	return noted
}

// sweep considers owners whose flight was dropped, and forgets what is kept of
// owners that went.
func (c *Collector) sweep(now time.Time) {
	var dropped []nodecache.OwnerKey
	c.mu.Lock()
	for key, j := range c.flights {
		if j.Err() != nil {
			dropped = append(dropped, key)
		}
	}
	for key, f := range c.failed {
		if now.Sub(f.next) > callWindow {
			delete(c.failed, key)
		}
	}
	c.calls.sweep(now)
	c.mu.Unlock()
	for _, key := range dropped {
		c.consider(key, schedule.Normal)
	}
}
