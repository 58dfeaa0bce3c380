package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/agent/learn"
	"github.com/fingerpost/fingerpost/nodecache"
)

const (
	// podsEvery is how often at most pods are saved: they change all the time,
	// and what happened since is told by the watch.
	podsEvery = 30 * time.Second

	// infoDelay is the time that changes of what is known have to gather, and
	// saveGap the least time between two saves, or saveShare times what the
	// last one took.
	infoDelay = 500 * time.Millisecond
	saveGap   = 2 * time.Second
	saveShare = 20

	// retryEvery is the time between saves where they fail.
	retryEvery = time.Minute

	// podsBound bounds the wait for a state of the pods that can be saved,
	// stopBound that on stop.
	podsBound = 5 * time.Second
	stopBound = 500 * time.Millisecond
)

// versioned is a source whose pods can be saved.
type versioned interface {
	Resume(nodecache.Unit) bool
	Checkpoint(context.Context) (nodecache.Unit, error)
	Version() uint64
}

// checkpoint is what the next agent of the node finds. Its fields are used by
// newAgent and then by one goroutine.
type checkpoint struct {
	file    *nodecache.Checkpoint // nil: off
	saves   *prometheus.CounterVec
	last    prometheus.Gauge
	infos   uint64 // Directory.InfoChanges of the last save
	past    uint64 // Collector.PastChanges of the last save
	learned uint64 // learn.Upstreams.Changes of the last save
	version uint64 // of the pods of the last save
	failing bool

	savedAt, podsAt time.Time
	took            time.Duration
}

func newCheckpoint(dir string, r prometheus.Registerer) *checkpoint {
	k := &checkpoint{
		saves: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fingerpost_checkpoint_saves_total", Help: "Writes of the checkpoint, by result: ok or failed.",
		}, []string{"result"}),
		last: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fingerpost_checkpoint_last_save_timestamp_seconds", Help: "When the checkpoint was last written; 0 before the first time.",
		}),
	}
	if dir != "" {
		k.file = &nodecache.Checkpoint{Dir: dir}
		for _, result := range []string{"ok", "failed"} {
			k.saves.WithLabelValues(result)
		}
		r.MustRegister(k.saves, k.last)
	}
	return k
}

// restore takes over what an earlier agent left, and returns what the collector
// has to know of it.
func (a *Agent) restore() []nodecache.SavedPast {
	k := newCheckpoint(a.config.StateDir, a.registry)
	a.checkpoint = k
	if k.file == nil {
		a.setPart("checkpoint", "off: no --state-dir")
		a.upstreams = learn.New(nil, time.Now())
		return nil
	}
	k.file.Log = a.log
	saved, err := k.file.Load()
	if err == nil {
		err = k.file.Prepare()
	}
	a.checkpointState(err)
	a.upstreams = learn.New(saved.Learned, time.Now())
	n := a.dir.Restore(saved.Infos, time.Now())
	if n > 0 {
		a.log.Info("restored from the checkpoint", "owners", n)
	}
	if s, ok := a.source.(versioned); ok {
		if s.Resume(saved.Pods) {
			a.collectorSpared = spareCollector()
		}
	}
	return saved.Past
}

// checkpointState says how the checkpoint is; the log hears of a change.
func (a *Agent) checkpointState(err error) {
	k := a.checkpoint
	switch {
	case err != nil:
		a.setPart("checkpoint", "off: "+err.Error())
		if !k.failing {
			a.log.Warn("the checkpoint cannot be kept; the next agent begins anew", "directory", k.file.Dir, "error", err)
		}
	default:
		a.setPart("checkpoint", "on")
		if k.failing {
			a.log.Info("the checkpoint is kept again", "directory", k.file.Dir)
		}
	}
	k.failing = err != nil
}

// keepCheckpoint saves what changes, until ctx ends, and then once more.
func (a *Agent) keepCheckpoint(ctx context.Context) error {
	k := a.checkpoint
	if k.file == nil {
		return nil
	}
	sub := a.dir.Subscribe()
	defer sub.Close()
	next := time.Now().Add(podsEvery)
	timer := time.NewTimer(podsEvery)
	defer timer.Stop()
	for {
		select {
		case <-sub.Changed():
			sub.Poll() // what changed is of no interest
			if k.failing || a.dir.InfoChanges() == k.infos && a.collector.PastChanges() == k.past {
				continue
			}
			now := time.Now()
			due := now.Add(infoDelay)
			if earliest := k.savedAt.Add(max(saveGap, saveShare*k.took)); due.Before(earliest) {
				due = earliest
			}
			if due.Before(next) {
				next = due
				timer.Reset(due.Sub(now))
			}
		case <-timer.C:
			a.save(ctx, podsBound, false)
			wait := podsEvery
			if k.failing {
				wait = retryEvery
			}
			next = time.Now().Add(wait)
			timer.Reset(wait)
		case <-ctx.Done():
			a.save(context.WithoutCancel(ctx), stopBound, true)
			return nil
		}
	}
}

// save writes what is new, if anything is.
func (a *Agent) save(ctx context.Context, bound time.Duration, last bool) {
	k := a.checkpoint
	begun := time.Now()
	if last {
		a.feed.learn(begun)
	}
	infos, past, learned := a.dir.InfoChanges(), a.collector.PastChanges(), a.upstreams.Changes()
	var pods nodecache.Unit
	if s, ok := a.source.(versioned); ok && s.Version() != k.version && (last || begun.Sub(k.podsAt) >= podsEvery) {
		ctx, cancel := context.WithTimeout(ctx, bound)
		// Without a state of the pods the one in the file stays.
		if u, err := s.Checkpoint(ctx); err == nil {
			pods = u
		} else {
			a.log.Debug("pods are not saved", "error", err)
		}
		cancel()
	}
	if infos == k.infos && past == k.past && learned == k.learned && pods.Line == "" && !k.failing {
		return
	}
	err := k.file.Save(nodecache.Saved{Infos: a.dir.Snapshot(), Past: a.collector.Past(), Learned: a.upstreams.Saved(), Pods: pods})
	a.checkpointState(err)
	k.savedAt = time.Now()
	k.took = k.savedAt.Sub(begun)
	if err != nil {
		k.saves.WithLabelValues("failed").Inc()
		return
	}
	k.infos, k.past, k.learned = infos, past, learned
	if pods.Line != "" {
		k.version, k.podsAt = pods.Version, k.savedAt
	}
	k.saves.WithLabelValues("ok").Inc()
	k.last.Set(float64(k.savedAt.Unix()))
	a.log.Debug("checkpoint saved", "took", fmt.Sprint(k.took.Round(time.Millisecond)), "pods", pods.Line != "")
}
