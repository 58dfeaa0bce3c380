package collect

import (
	"context"
	"errors"

	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// ErrNotAsked indicates that an owner has no pod that may be asked, or none any
// more.
var ErrNotAsked = errors.New("the owner has no pod that may be asked")

// Report is what came out of asking an owner. The zero Report says nothing.
type Report struct {
	// Result is known, none, failed, stale, stale-target or abandoned, as the
	// metric of collects names it.
	Result string `json:"result"`
	// Pod is namespace/name of the pod that answered; empty if none did.
	Pod string `json:"pod"`
	// Detail says why it failed, or why there is no service.
	Detail string `json:"detail"`
}

// forced needs mu. It tells whether somebody wants the owner asked whatever is
// known of it.
func (c *Collector) forced(key nodecache.OwnerKey) bool {
	p := c.plans[key]
	return p != nil && p.force
}

// unforce takes that wish, as the flight does that fulfils it.
func (c *Collector) unforce(key nodecache.OwnerKey) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.plans[key]
	if p == nil || !p.force {
		return false
	}
	p.force = false
	return true
}

// Recollect asks the owner at once, whatever is known of it, whoever is in charge
// of it, and whatever waits the last failure imposed, before what nobody waits for. Only the limit of
// connections holds. It waits for what comes out, which is in the directory
// then, and which is no error if it is a failure of the pods. The errors are
// [ErrNotAsked], [ErrStopped] and that of ctx, whose end does no harm to the
// collect.
func (c *Collector) Recollect(ctx context.Context, key nodecache.OwnerKey) (Report, error) {
	select {
	case <-c.started:
	case <-ctx.Done():
		return Report{}, ctx.Err()
	}
	o := c.dir.Owner(key)
	if o == nil || len(eligible(o, c.only)) == 0 {
		return Report{}, ErrNotAsked
	}
	c.mu.Lock()
	p := c.planOf(key)
	p.force = true
	before := p.done
	c.mu.Unlock()
	// A flight that is under way began before the wish, a second one may end
	// without a word because the pods changed.
	for range 4 {
		c.consider(key, schedule.Wanted)
		c.mu.Lock()
		j := c.flights[key]
		c.mu.Unlock()
		if j != nil {
			select {
			case <-j.Done():
			case <-ctx.Done():
				return Report{}, ctx.Err()
			case <-c.stopped:
			}
		}
		if c.over() {
			return Report{}, ErrStopped
		}
		c.mu.Lock()
		p := c.plans[key]
		done := p != nil && p.done != before
		var out Report
		if p != nil {
			out = p.out
		}
		c.mu.Unlock()
		if done {
			return out, nil
		}
	}
	return Report{}, ErrNotAsked
}

// landed notes the end of a flight that was to fulfil a wish. One without a
// result found nobody to ask.
func (c *Collector) landed(key nodecache.OwnerKey, result string) {
	if result == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.planOf(key)
	p.done++
	if p.out.Result != result {
		p.out = Report{Result: result}
	}
}
