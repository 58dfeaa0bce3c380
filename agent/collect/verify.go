package collect

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

const (
	// verifyEvery is how long an answer stands before another pod is asked.
	verifyEvery = time.Hour
	// verifyRetry is the least wait after an owner that is known did not answer
	// again: nobody misses anything meanwhile.
	verifyRetry = 20 * time.Minute
	// maxImages is how many different images of one owner are told apart. Pods
	// of further ones are taken for those of the owner.
	maxImages = nodecache.MaxVariants
)

// plan says when an owner of which something is known is asked again, and whom
// not. Collector.mu guards it.
type plan struct {
	at    time.Time       // of the next question; zero: not decided
	asked map[string]bool // UIDs of the pods asked since all had their turn
	last  string          // the one asked last
	// For Recollect: whether somebody wants it now, how often that was done,
	// and what came out last.
	force bool
	done  int
	out   Report
}

// planOf needs mu.
func (c *Collector) planOf(key nodecache.OwnerKey) *plan {
	p := c.plans[key]
	if p == nil {
		p = &plan{asked: map[string]bool{}}
		c.plans[key] = p
	}
	return p
}

// again returns when an owner of which something is known is to be asked again:
// at once if pods run images that nobody has asked yet. It needs mu.
func (c *Collector) again(o *nodecache.Owner, pods []nodecache.Member, now time.Time) time.Time {
	p := c.planOf(o.Key)
	if p.at.IsZero() {
		p.at = o.Info.Collected.Add(jitter(verifyEvery))
		if p.at.Before(now) {
			// Old knowledge, from a peer or from before a restart: there is
			// much of it at such a moment.
			p.at = now.Add(rand.N(verifyEvery))
		}
	}
	if len(Strangers(o.Info, pods)) == 0 {
		return p.at
	}
	if f := c.failed[o.Key]; f != nil && f.next.Before(p.at) {
		return f.next
	} else if f != nil {
		return p.at
	}
	return now
}

// Strangers returns the pods whose images nobody has asked.
func Strangers(info *nodecache.Info, pods []nodecache.Member) []nodecache.Member {
	if len(info.Images) == 0 {
		return nil // what is known was not learned from images that could be told apart
	}
	known := slices.Clone(info.Images)
	for _, v := range info.Variants {
		if v.Pod == "" {
			known = append(known, v.Images)
		}
	}
	if len(known) >= maxImages {
		return nil
	}
	var ms []nodecache.Member
	for _, m := range pods {
		if m.Images != "" && !slices.Contains(known, m.Images) {
			ms = append(ms, m)
		}
	}
	return ms
}

// rotate sorts pods by who is asked first: those that were not asked lately,
// then those of this node, then by name.
func (c *Collector) rotate(key nodecache.OwnerKey, pods []nodecache.Member) []nodecache.Member {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.planOf(key)
	if !slices.ContainsFunc(pods, func(m nodecache.Member) bool { return !p.asked[m.UID] }) {
		p.asked = map[string]bool{p.last: true}
	}
	rank := func(m nodecache.Member) int {
		n := 0
		if p.asked[m.UID] {
			n += 2
		}
		if m.Node != c.node {
			n++
		}
		return n
	}
	slices.SortStableFunc(pods, func(a, b nodecache.Member) int { return cmp.Compare(rank(a), rank(b)) })
	return pods
}

// asked notes whom an attempt asked.
func (c *Collector) asked(key nodecache.OwnerKey, out outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.planOf(key)
	for _, uid := range out.asked {
		p.asked[uid], p.last = true, uid
	}
	if out.pod != nil {
		p.asked[out.pod.UID], p.last = true, out.pod.UID
	}
}

// postpone sets when the owner is asked again.
func (c *Collector) postpone(key nodecache.OwnerKey, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.planOf(key).at = at
}

// verify asks a pod of an owner of which something is known, and a second one
// where the first lacks something. What is known stands meanwhile, and whatever
// the attempt meets.
func (c *Collector) verify(ctx context.Context, o *nodecache.Owner, pods []nodecache.Member, forced bool) string {
	key, now := o.Key, time.Now()
	c.mu.Lock()
	due := c.again(o, pods, now)
	c.mu.Unlock()
	if now.Before(due) && !forced {
		return ""
	}
	c.begun(o)
	ask := Strangers(o.Info, pods)
	if len(ask) == 0 {
		ask = pods
	}
	out := c.attempt(ctx, key, c.rotate(key, ask))
	c.asked(key, out)
	switch {
	case out.info != nil:
	case ctx.Err() != nil:
		return resultAbandoned
	case out.err == nil:
		c.postpone(key, now.Add(waits[0]))
		return resultStaleTarget
	default:
		f := c.noteFailure(key, o, pods, out)
		at := now.Add(jitter(verifyRetry))
		if f.next.After(at) {
			at = f.next
		}
		c.postpone(key, at)
		return resultFailed
	}
	first, second := word{out.pod, out.info.Ports}, (*word)(nil)
	if contradicts(o.Info, first) {
		var others []nodecache.Member
		for _, m := range pods {
			if m.UID != out.pod.UID && m.Images == out.pod.Images {
				others = append(others, m)
			}
		}
		more := c.attempt(ctx, key, c.rotate(key, others))
		c.asked(key, more)
		if more.info != nil {
			second = &word{more.pod, more.info.Ports}
		}
	}
	return c.revise(o, first, second, out)
}

// revise records what pods said of an owner of which something was known.
func (c *Collector) revise(o *nodecache.Owner, first word, second *word, out outcome) string {
	r := nodecache.Reservation{Key: o.Key, Generation: o.Generation}
	for range 3 { // others may revise it as well
		o = c.dir.Owner(r.Key)
		if o == nil || o.Generation != r.Generation || o.Info == nil {
			break
		}
		info := revised(o, first, second, out.info.Collected)
		err := c.dir.Revise(r, o.Info, info)
		if errors.Is(err, nodecache.ErrChanged) {
			continue
		} else if err != nil {
			break
		}
		if len(info.Variants) > 0 && len(o.Info.Variants) == 0 {
			c.log.Warn("pods of one owner serve different things", "owner", o.Key.String(), "name", o.Name,
				"pod", first.pod.String(), "images", first.pod.Images)
		}
		was, is := o.Services(), c.servicesNow(o.Key)
		if !slices.Equal(was, is) {
			c.log.Info("services changed", "owner", o.Key.String(), "name", o.Name, "pod", first.pod.String(), "before", was, "now", is)
		}
		return c.succeeded(o.Key, o, out)
	}
	return c.stale(r.Key)
}

func (c *Collector) servicesNow(key nodecache.OwnerKey) []string {
	if o := c.dir.Owner(key); o != nil {
		return o.Services()
	}
	return nil
}
