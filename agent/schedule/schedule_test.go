package schedule_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/fingerpost/fingerpost/agent/schedule"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a scheduler until the test ends.
func start(t *testing.T, o schedule.Options) *schedule.Scheduler {
	t.Helper()
	s := schedule.New(o)
	run(t, s)
	return s
}

func run(t *testing.T, s *schedule.Scheduler) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
}

// recorder notes the order in which work ran.
type recorder struct {
	mu    sync.Mutex
	order []string
}

func (r *recorder) note(name string) func(context.Context) {
	return func(context.Context) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.order = append(r.order, name)
	}
}

func wait(t *testing.T, jobs ...*schedule.Job) {
	t.Helper()
	for _, j := range jobs {
		select {
		case <-j.Done():
		case <-time.After(30 * time.Second):
			t.Fatal("work did not end")
		}
	}
}

func one() schedule.Options { return schedule.Options{Limits: schedule.Limits{Total: 1}} }

func TestEqualPriorityIsFirstInFirstOut(t *testing.T) {
	s, r := schedule.New(one()), &recorder{}
	var want []string
	var jobs []*schedule.Job
	for i := range 100 {
		name := fmt.Sprint(i)
		want = append(want, name)
		jobs = append(jobs, s.Submit(schedule.Collect, schedule.Normal, "ns", r.note(name)))
	}
	run(t, s)
	wait(t, jobs...)
	if !slices.Equal(r.order, want) {
		t.Errorf("ran %v", r.order)
	}
}

func TestHigherPriorityGoesFirst(t *testing.T) {
	s, r := schedule.New(one()), &recorder{}
	jobs := []*schedule.Job{
		s.Submit(schedule.Collect, schedule.Background, "ns", r.note("low")),
		s.Submit(schedule.Collect, schedule.Normal, "ns", r.note("normal")),
		s.Submit(schedule.Collect, schedule.Wanted, "ns", r.note("wanted")),
		s.Submit(schedule.Collect, schedule.Normal, "ns", r.note("raised")),
		s.Submit(schedule.Collect, schedule.Wanted, "ns", r.note("not lowered")),
	}
	jobs[3].Raise(schedule.Wanted)
	jobs[4].Raise(schedule.Background)
	run(t, s)
	wait(t, jobs...)
	if want := []string{"wanted", "not lowered", "raised", "normal", "low"}; !slices.Equal(r.order, want) {
		t.Errorf("ran %v, want %v", r.order, want)
	}
}

func TestGroupsTakeTurns(t *testing.T) {
	s, r := schedule.New(one()), &recorder{}
	var jobs []*schedule.Job
	for range 3 {
		jobs = append(jobs, s.Submit(schedule.Collect, schedule.Wanted, "ns", r.note("c")))
	}
	for range 2 {
		jobs = append(jobs, s.Submit(schedule.PeerFetch, schedule.Background, "ns", r.note("p")))
	}
	jobs = append(jobs, s.Submit("other", schedule.Normal, "ns", r.note("o")))
	run(t, s)
	wait(t, jobs...)
	if want := []string{"c", "p", "o", "c", "p", "c"}; !slices.Equal(r.order, want) {
		t.Errorf("ran %v, want %v", r.order, want)
	}
}

// A group that is always ready must not keep another from running.
func TestAlwaysReadyGroupStarvesNobody(t *testing.T) {
	s := start(t, one())
	var again func(context.Context)
	again = func(ctx context.Context) {
		if ctx.Err() == nil {
			s.Submit(schedule.Collect, schedule.Wanted, "ns", again)
			s.Submit(schedule.Collect, schedule.Wanted, "ns", func(context.Context) {})
		}
	}
	s.Submit(schedule.Collect, schedule.Wanted, "ns", again)
	for range 100 {
		wait(t, s.Submit(schedule.PeerFetch, schedule.Background, "ns", func(context.Context) {}))
	}
}

func TestNamespacesTakeTurns(t *testing.T) {
	s, r := schedule.New(one()), &recorder{}
	var jobs []*schedule.Job
	for range 190 {
		jobs = append(jobs, s.Submit(schedule.Collect, schedule.Normal, "big", r.note("big")))
	}
	for i := range 10 {
		jobs = append(jobs, s.Submit(schedule.Collect, schedule.Normal, "small", r.note(fmt.Sprint(i))))
	}
	run(t, s)
	wait(t, jobs...)
	if at := slices.Index(r.order, "9"); at > 20 {
		t.Errorf("the last job of the small namespace ran as number %d", at)
	}
}

// No more than the maxima ever run, and what the limits allow does run.
func TestMaximaAreReachedAndNeverExceeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, schedule.Options{Limits: schedule.Limits{Collect: 5, PeerFetch: 3, Transcode: 1, Total: 7}})
		var all atomic.Int32
		var most int32
		limit := map[schedule.Group]int32{schedule.Collect: 5, schedule.PeerFetch: 3, schedule.Transcode: 1}
		var jobs []*schedule.Job
		for g, max := range limit {
			running := new(atomic.Int32)
			for range 40 {
				jobs = append(jobs, s.Submit(g, schedule.Normal, "ns", func(context.Context) {
					if n := running.Add(1); n > max {
						t.Errorf("%d of group %s run, at most %d may", n, g, max)
					}
					if n := all.Add(1); n > 7 {
						t.Errorf("%d run, at most 7 may", n)
					}
					time.Sleep(time.Second) // of the bubble's clock
					all.Add(-1)
					running.Add(-1)
				}))
			}
		}
		for range 10 {
			synctest.Wait()
			most = max(most, all.Load())
			time.Sleep(time.Second)
		}
		if most != 7 {
			t.Errorf("at most %d ran at one time, want 7", most)
		}
		wait(t, jobs...)
	})
}

// Limits are enforced before work gets a goroutine: what waits has none, and
// none of those that there are waits for room.
func TestWorkThatWaitsHasNoWorker(t *testing.T) {
	const limit, waiting = 3, 1000
	s := start(t, schedule.Options{Limits: schedule.Limits{Collect: limit}})
	started, release := make(chan struct{}, waiting), make(chan struct{})
	var jobs []*schedule.Job
	for range limit + waiting {
		jobs = append(jobs, s.Submit(schedule.Collect, schedule.Normal, "ns", func(context.Context) { started <- struct{}{}; <-release }))
	}
	for range limit {
		<-started
	}
	if got := s.Stats()[0]; got.Running != limit || got.Waiting != waiting {
		t.Errorf("stats %+v", got)
	}
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	if n := bytes.Count(stacks, []byte("schedule.(*Scheduler).run(")); n != limit {
		t.Errorf("%d workers for %d running pieces of work", n, limit)
	}
	close(release)
	wait(t, jobs...)
}

// A group at its maximum takes nothing from the others.
func TestGroupAtItsMaximumHoldsUpNoOther(t *testing.T) {
	s := start(t, schedule.Options{Limits: schedule.Limits{Collect: 1, Total: 2}})
	release := make(chan struct{})
	var held []*schedule.Job
	for range 10 {
		held = append(held, s.Submit(schedule.Collect, schedule.Wanted, "ns", func(context.Context) { <-release }))
	}
	for range 100 {
		wait(t, s.Submit(schedule.Transcode, schedule.Background, "ns", func(context.Context) {}))
	}
	close(release)
	wait(t, held...)
}

func TestNoLimitMeansNoLimit(t *testing.T) {
	s := start(t, schedule.Options{})
	var started sync.WaitGroup
	release := make(chan struct{})
	var jobs []*schedule.Job
	for range 200 {
		started.Add(1)
		jobs = append(jobs, s.Submit(schedule.Collect, schedule.Normal, "ns", func(context.Context) { started.Done(); <-release }))
	}
	started.Wait()
	close(release)
	wait(t, jobs...)
}

func TestStopEndsRunningWorkAndDropsWaiting(t *testing.T) {
	s := schedule.New(one())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); s.Run(ctx) }()
	started := make(chan struct{})
	running := s.Submit(schedule.Collect, schedule.Normal, "ns", func(ctx context.Context) { close(started); <-ctx.Done() })
	waiting := s.Submit(schedule.Collect, schedule.Normal, "ns", func(context.Context) { t.Error("ran after the stop") })
	<-started
	cancel()
	<-ended
	if err := running.Err(); err != nil {
		t.Errorf("running work: %v", err)
	}
	late := s.Submit(schedule.Collect, schedule.Normal, "ns", func(context.Context) { t.Error("ran after the stop") })
	wait(t, running, waiting, late)
	for _, j := range []*schedule.Job{waiting, late} {
		if err := j.Err(); !errors.Is(err, schedule.ErrStopped) {
			t.Errorf("error %v, want ErrStopped", err)
		}
	}
}

func TestCancelTakesOnlyWaitingWork(t *testing.T) {
	s := start(t, one())
	started, release := make(chan struct{}), make(chan struct{})
	running := s.Submit(schedule.Collect, schedule.Normal, "ns", func(context.Context) { close(started); <-release })
	waiting := s.Submit(schedule.Collect, schedule.Normal, "ns", func(context.Context) { t.Error("ran after Cancel") })
	<-started
	if running.Cancel() {
		t.Error("running work was cancelled")
	}
	if !waiting.Cancel() || !errors.Is(waiting.Err(), schedule.ErrCancelled) {
		t.Errorf("waiting work was not cancelled: %v", waiting.Err())
	}
	if waiting.Cancel() {
		t.Error("cancelled twice")
	}
	close(release)
	wait(t, running, waiting)
}

func TestFullQueueDropsTheOldestOfTheLowestPriority(t *testing.T) {
	reg := prometheus.NewRegistry()
	s, r := schedule.New(schedule.Options{Limits: schedule.Limits{Total: 1}, Queue: 3, Metrics: reg}), &recorder{}
	var jobs []*schedule.Job
	for i, p := range []schedule.Priority{schedule.Normal, schedule.Background, schedule.Background, schedule.Normal, schedule.Wanted} {
		jobs = append(jobs, s.Submit(schedule.Collect, p, fmt.Sprint("ns", i), r.note(fmt.Sprint(i))))
	}
	run(t, s)
	wait(t, jobs...)
	for i, j := range jobs {
		if dropped := i == 1 || i == 2; errors.Is(j.Err(), schedule.ErrOverflow) != dropped {
			t.Errorf("job %d: %v", i, j.Err())
		}
	}
	if want := []string{"4", "0", "3"}; !slices.Equal(r.order, want) {
		t.Errorf("ran %v, want %v", r.order, want)
	}
	if got := metric(t, reg, "fingerpost_work_dropped_total"); got != 2 {
		t.Errorf("dropped counter %v, want 2", got)
	}
}

func metric(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	mfs, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, mf := range mfs {
		if mf.GetName() == name {
			return mf.GetMetric()[0].GetCounter().GetValue()
		}
	}
	return 0
}

// Work that ends its goroutine must not keep its place.
func TestWorkThatExitsGivesItsPlaceBack(t *testing.T) {
	s := start(t, one())
	wait(t,
		s.Submit(schedule.Collect, schedule.Normal, "ns", func(context.Context) { runtime.Goexit() }),
		s.Submit(schedule.Collect, schedule.Normal, "ns", func(context.Context) {}),
	)
	if got := s.Stats()[0]; !reflect.DeepEqual(got, schedule.Stats{Group: schedule.Collect}) {
		t.Errorf("stats %+v after all work ended", got)
	}
}
