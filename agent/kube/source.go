package kube

import (
	"context"
	"time"
)

// Source feeds a [Store]: [File] or [Cluster].
type Source interface {
	// Run feeds the store until ctx ends, and then returns nil. It returns an
	// error only where it could not begin. It is called once.
	Run(ctx context.Context) error
	// Synced is closed once every object of the first list was applied to the
	// directory.
	Synced() <-chan struct{}
	// Current is closed once the directory is at least as new as the world was
	// when the source began. It is mostly together with Synced; a source that
	// resumed from a checkpoint is synced before.
	Current() <-chan struct{}
	// Status may be called at any time.
	Status() Status
}

var (
	_ Source = (*File)(nil)
	_ Source = (*Cluster)(nil)
)

// Status says how a source stands.
type Status struct {
	Kind string // "kube" or "file"
	// Synced is set once the first list was applied, and stays.
	Synced bool
	// Since is when the source stopped being up to date: it shows the state
	// of that moment. Zero while it is up to date.
	Since time.Time
	// StaleSeconds is the time passed since Since; 0 while up to date.
	StaleSeconds float64
	// Error says in one line why the source is not up to date; empty if it is.
	Error string
	// Pods counts the pods that the source holds, in any state.
	Pods int
	// Pending counts changes that were heard of and not yet applied.
	Pending int
	// Routes says in one line whether routes of the Gateway API are read, and
	// in which versions: "on", "on: ..." or "off: ...".
	Routes string
	// RoutesCurrent tells whether Services, HTTPRoutes and GRPCRoutes are all up
	// to date, as far as the cluster has them.
	RoutesCurrent bool
	// Ignored counts objects of unknown kinds, by kind. A file source alone has
	// them.
	Ignored map[string]int
}

// stale fills Since, StaleSeconds and Error.
func (s *Status) stale(since time.Time, err string) {
	s.Since, s.Error = since, err
	s.StaleSeconds = max(0, time.Since(since).Seconds())
}
