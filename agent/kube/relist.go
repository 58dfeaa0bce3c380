package kube

import (
	"context"
	"math/rand/v2"
	"time"
)

// An API server that has forgotten a version, as one that was started again,
// has forgotten it for every node in the same moment. A source that serves the
// last state meanwhile can wait for its turn: the longer, the more pods there
// are, for so much more does a list cost. One that has nothing yet lists at once.
const (
	relistPods  = 5000 // for so many pods turns are spread over a second more
	relistLeast = time.Second
	relistMost  = 30 * time.Second
)

// relistSpread is the time over which sources with so many pods list again.
func relistSpread(pods int) time.Duration {
	return min(max(time.Duration(pods)*time.Second/relistPods, relistLeast), relistMost)
}

// turn is that of one watch to list again. It belongs to the reflector.
type turn struct {
	lists int // that were complete when the last turn was waited for
}

// wait returns at a random moment within the spread, or with the error of ctx.
// It waits once after each complete list: what follows a failure waits for the
// reflector's backoff, which grows.
func (t *turn) wait(ctx context.Context, h *health, spread time.Duration) error {
	lists := h.lists()
	if lists == t.lists {
		return nil
	}
	t.lists = lists
	timer := time.NewTimer(rand.N(spread))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
