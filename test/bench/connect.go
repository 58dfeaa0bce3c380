package main

import (
	"context"
	"fmt"
	"time"
)

// weighed is how many more clients tell what one weighs.
const weighed = 220

// runConnect lets clients connect, all at once, to servers that have just
// started, and weighs what that costs.
func runConnect(ctx context.Context, r *run, w *world) ([]result, error) {
	rounds := 3
	if r.short {
		rounds = 1
	}
	const clients = 110
	var took [2][]time.Duration
	var peak, each [2]float64
	for round := range rounds {
		for i, start := range w.subjects() {
			s, err := start(ctx)
			if err != nil {
				return nil, err
			}
			c, err := connectAll(ctx, r, w, s, clients, round == rounds-1)
			s.stop()
			if err != nil {
				return nil, fmt.Errorf("connect: %s: %w", s.name, err)
			}
			if err := w.crowd.leave(); err != nil {
				return nil, err
			}
			took[i] = append(took[i], c.took)
			peak[i], each[i] = max(peak[i], c.peak), c.each
			r.progress("connect: %s: %d clients served in %v; %.1f MB resident before, %.1f more at most, %.1f more after", s.name, clients, c.took.Round(time.Millisecond), c.before, c.peak, c.after)
		}
	}
	return []result{
		better("connect/110-clients", "ms", milliseconds(median(took[0])), milliseconds(median(took[1]))),
		better("connect-peak/110-clients", "MB", peak[0], peak[1]),
		better("memory/per-client", "kB", each[0], each[1]),
	}, nil
}

// connected is what it cost to connect clients; memory in MB over that before.
type connected struct {
	took                time.Duration
	before, peak, after float64
	each                float64 // kB for each client more
}

func connectAll(ctx context.Context, r *run, w *world, s *subject, clients int, weigh bool) (c connected, err error) {
	before, err := s.settle(ctx, r)
	if err != nil {
		return c, err
	}
	c.before = before.now
	if err := s.forgetPeak(); err != nil {
		return c, err
	}
	if c.took, err = w.crowd.connect(s.path, clients, w); err != nil {
		return c, err
	}
	after, err := s.settle(ctx, r)
	if err != nil {
		return c, err
	}
	c.peak, c.after = after.peak-before.now, after.now-before.now
	if !weigh {
		return c, nil
	}
	if _, err = w.crowd.connect(s.path, weighed, w); err != nil {
		return c, err
	}
	more, err := s.settle(ctx, r)
	c.each = (more.now - after.now) * 1000 / weighed
	return c, err
}
