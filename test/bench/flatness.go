package main

import (
	"context"
	"fmt"
	"time"
)

// flatness is what a pod's change costs the agent where there is much else,
// divided by what it costs where there is little.
var flatness = benchmark{names: []string{"ads/flatness/cpu", "ads/flatness/bytes"}, run: runFlatness}

func runFlatness(ctx context.Context, r *run) ([]result, error) {
	small, large, clients, changes, rest := 1_000, 10_000, 110, 1000, 10*time.Second
	if r.short {
		small, large, clients, changes, rest = 200, 2_000, 30, 200, 3*time.Second
	}
	w, err := newWorld(ctx, r, 5)
	if err != nil {
		return nil, err
	}
	defer w.stop()
	var costs []cost
	for place, services := range []int{small, large} {
		r.progress("flatness: writing %d pods of %d services", services*w.each, services)
		if err := w.grow(ctx, services); err != nil {
			return nil, err
		}
		c, err := changeCost(ctx, w, clients, changes, place, rest)
		if err != nil {
			return nil, fmt.Errorf("%d services: %w", services, err)
		}
		r.progress("flatness: %d services: one change costs the agent %v of CPU, and each client %.0f bytes: a CLA of %.0f, %.0f more in the message; %.0f %% of the changes were sent alone",
			services, c.cpu.Round(time.Microsecond), c.bytes, c.cla, c.message-c.cla, 100*c.alone)
		costs = append(costs, c)
	}
	times := float64(large) / float64(small)
	return []result{
		better("ads/flatness/cpu", "x", float64(costs[1].cpu)/float64(costs[0].cpu), times),
		better("ads/flatness/bytes", "x", costs[1].bytes/costs[0].bytes, times),
	}, nil
}

// cost is that of one change; bytes are those of one client.
type cost struct {
	cpu                 time.Duration
	bytes, message, cla float64
	alone               float64 // share of the changes that had a response of their own
}

func changeCost(ctx context.Context, w *world, clients, changes, place int, rest time.Duration) (c cost, err error) {
	s, err := w.agent(ctx)
	if err != nil {
		return c, err
	}
	defer s.stop()
	if _, err := w.crowd.connect(s.path, clients, w); err != nil {
		return c, err
	}
	wr, err := w.newWriter(ctx, place)
	if err != nil {
		return c, err
	}
	defer wr.stop()
	if err := s.pause(ctx, rest/2); err != nil {
		return c, err
	}
	// What it costs to be there is no cost of a change.
	idle, err := s.cpu()
	if err != nil {
		return c, err
	}
	if err := s.pause(ctx, rest); err != nil {
		return c, err
	}
	before, err := s.cpu()
	if err != nil {
		return c, err
	}
	idle = before - idle
	if _, err := w.crowd.take(); err != nil {
		return c, err
	}
	began := now()
	if _, err := wr.run(ctx, changes, 25); err != nil {
		return c, err
	}
	var a answer
	for deadline := now() + int64(limit); len(a.Events) < clients*changes; {
		if err := s.pause(ctx, 200*time.Millisecond); err != nil {
			return c, err
		}
		more, err := w.crowd.take()
		if err != nil {
			return c, err
		}
		a.Events, a.Bytes = append(a.Events, more.Events...), a.Bytes+more.Bytes
		if now() > deadline {
			return c, fmt.Errorf("%d changes reached %d clients %d times", changes, clients, len(a.Events))
		}
	}
	took := time.Duration(now() - began)
	after, err := s.cpu()
	if err != nil {
		return c, err
	}
	// On a busy machine a response may sum up several changes, and that is
	// what the agent's time is spent on.
	alone, responses := 0.0, 0.0
	for _, e := range a.Events {
		responses += 1 / float64(e.Of)
		if e.Of == 1 {
			alone++
			c.message += float64(e.Message)
			c.cla += float64(e.CLA)
		}
	}
	c.message, c.cla, c.bytes = c.message/alone, c.cla/alone, float64(a.Bytes)/float64(len(a.Events))
	c.alone = alone / float64(len(a.Events))
	busy := float64(after-before) - float64(idle)*float64(took)/float64(rest)
	c.cpu = time.Duration(busy / (responses / float64(clients)))
	return c, w.crowd.leave()
}
