package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

const (
	gateOpen   = "open"
	gateClosed = "closed"

	// firstAttempts bounds how long the gate waits, after the source has
	// synced, for the first attempt to collect each owner. It lies below the
	// 15 s after which gRPC clients take an unanswered name as absent.
	firstAttempts = 10 * time.Second
)

// gate says whether clients are answered.
type gate struct {
	open   atomic.Bool
	opened chan struct{} // closed when it opens
}

// openGate opens the gate once the source has synced, every listed object is
// in the tables, and every owner that can be asked was asked once, or the
// bound has passed.
func (a *Agent) openGate(ctx context.Context) error {
	select {
	case <-a.source.Synced():
	case <-ctx.Done():
		return nil
	}
	begun := time.Now()
	bound, cancel := context.WithTimeout(ctx, firstAttempts)
	defer cancel()
	err := a.collector.FirstAttempts(bound)
	if ctx.Err() != nil {
		return nil
	}
	a.feed.flush()
	// A client that comes back must not be without them for a moment.
	a.feed.settled(bound)
	current := a.current()
	if current {
		a.feed.current()
	} else {
		// What the checkpoint lacks may be on its way.
		a.server.Publish(xds.Update{Evidence: map[xds.Scope]xds.Evidence{xds.Shared: xds.Pending}})
	}
	a.server.OpenGate()
	a.gate.open.Store(true)
	close(a.gate.opened)
	defer a.release()
	if err != nil {
		a.log.Warn("gate open, though not every owner was asked what it serves", "after", time.Since(begun).Round(time.Millisecond), "missing", a.missing())
	} else {
		a.log.Info("gate open", "after", time.Since(begun).Round(time.Millisecond))
	}
	if current {
		return nil
	}
	select {
	case <-a.source.Current():
	case <-ctx.Done():
		return nil
	}
	a.feed.flush()
	a.feed.current()
	a.server.Publish(xds.Update{Evidence: map[xds.Scope]xds.Evidence{xds.Shared: xds.Complete}})
	return nil
}

// current tells whether everything that happened before the start was heard of.
func (a *Agent) current() bool {
	select {
	case <-a.source.Current():
		return true
	default:
		return false
	}
}

// complete tells whether a name that nobody has does not exist, as far as that
// does not hang on what owners serve.
func (a *Agent) complete() bool { return a.gate.open.Load() && a.current() }

// gateState is what status says of the gate.
func (a *Agent) gateState() (state, reason string) {
	if a.gate.open.Load() {
		return gateOpen, a.missing()
	}
	if s := a.source.Status(); !s.Synced {
		if s.Error != "" {
			return gateClosed, "the source has not synced: " + s.Error
		}
		return gateClosed, "the source has not synced"
	}
	if m := a.missing(); m != "" {
		return gateClosed, m
	}
	return gateClosed, "opening"
}

// missing names the owners whose services are not known yet; empty if there
// are none.
func (a *Agent) missing() string {
	// Owners holds the directory's lock over everything: a probe of an agent
	// that knows all must not.
	if c := a.dir.Counts().Owners; c[nodecache.Unknown]+c[nodecache.Collecting]+c[nodecache.Failed] == 0 {
		return ""
	}
	var names []string
	for _, o := range a.dir.Owners() {
		if !o.Knowledge.Settled() {
			names = append(names, fmt.Sprintf("%s/%s (%s)", o.Workload.Namespace, o.Name, o.Knowledge))
		}
	}
	if len(names) == 0 {
		return ""
	}
	slices.Sort(names)
	n := len(names)
	const shown = 5
	if n > shown {
		names = append(names[:shown], "…")
	}
	return fmt.Sprintf("%d owners not known yet: %s", n, strings.Join(names, ", "))
}
