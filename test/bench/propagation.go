package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// propagation is the way of a pod's change from the API server to the clients,
// what it takes to connect them, and what each weighs.
var propagation = benchmark{names: propagationNames, run: runPropagation}

var propagationNames = []string{
	"propagation/1-clients/p50", "propagation/1-clients/p99",
	"propagation/110-clients/p50", "propagation/110-clients/p99", "propagation/110-clients-100-per-second/p99",
	"connect/110-clients", "connect-peak/110-clients", "memory/per-client",
}

// limit is how long a change is waited for. One that takes longer, or never
// comes, counts as this. A service changes again only after more than that.
const limit = 5 * time.Second

// cell is one way to measure propagation.
type cell struct {
	name    string
	clients int
	rate    float64 // changes a second
}

var cells = []cell{
	{"propagation/1-clients", 1, 10},
	{"propagation/110-clients", 110, 10},
	{"propagation/110-clients-100-per-second", 110, 100},
}

func runPropagation(ctx context.Context, r *run) ([]result, error) {
	changes, block := 2000, 200
	if r.short {
		changes, block = 40, 40
	}
	w, err := newWorld(ctx, r, 10)
	if err != nil {
		return nil, err
	}
	defer w.stop()
	r.progress("writing 10,000 pods of 1,000 services")
	if err := w.grow(ctx, 1000); err != nil {
		return nil, err
	}
	var results []result
	if r.wantsAny("connect/110-clients", "connect-peak/110-clients", "memory/per-client") {
		if results, err = runConnect(ctx, r, w); err != nil {
			return nil, err
		}
	}
	wanted := slices.DeleteFunc(slices.Clone(cells), func(c cell) bool { return !r.wantsAny(c.name+"/p50", c.name+"/p99") })
	if len(wanted) == 0 {
		return results, nil
	}
	wr, err := w.newWriter(ctx, 0)
	if err != nil {
		return nil, err
	}
	defer wr.stop()
	for _, c := range wanted {
		var all [2]latencies
		for done := 0; done < changes; done += block {
			// One of the two runs at a time: each change would be work for both.
			for i, start := range w.subjects() {
				s, err := start(ctx)
				if err != nil {
					return nil, err
				}
				got, err := measureBlock(ctx, w, wr, s, c, block)
				s.stop()
				if err != nil {
					return nil, fmt.Errorf("%s: %s: %w", c.name, s.name, err)
				}
				all[i].add(got)
				r.progress("%s: %s: %v", c.name, s.name, got)
			}
		}
		r.progress("%s: all of fingerpost: %v", c.name, &all[0])
		r.progress("%s: all of linear-cache: %v", c.name, &all[1])
		for name, q := range map[string]float64{"/p50": 0.5, "/p99": 0.99} {
			results = append(results, better(c.name+name, "ms", quantile(all[0].fromAck, q), quantile(all[1].fromAck, q)))
		}
	}
	results = slices.DeleteFunc(results, func(res result) bool { return !slices.Contains(propagationNames, res.Name) })
	slices.SortFunc(results, func(a, b result) int {
		return slices.Index(propagationNames, a.Name) - slices.Index(propagationNames, b.Name)
	})
	return results, nil
}

// better is a figure of which less is better. What reaches a client before the
// writer has its acknowledgement counts as a hundredth of the unit.
func better(name, unit string, value, baseline float64) result {
	return result{Name: name, Unit: unit, Value: value, Baseline: baseline, Ratio: max(baseline, 0.01) / max(value, 0.01)}
}

// subjects start the agent and its rival.
func (w *world) subjects() [2]func(context.Context) (*subject, error) {
	return [2]func(context.Context) (*subject, error){w.agent, w.linear}
}

// latencies are in milliseconds, one for each client and change.
type latencies struct {
	fromAck     []float64 // of the API server to the writer
	fromDue     []float64 // when the change was to be made
	fromWatch   []float64 // when the reference watcher had it: what the server adds
	last        []float64 // of all clients, from the acknowledgement
	ackToWatch  []float64
	late, total int // those that took the limit or more
}

func (l *latencies) add(m *latencies) {
	l.fromAck = append(l.fromAck, m.fromAck...)
	l.fromDue = append(l.fromDue, m.fromDue...)
	l.fromWatch = append(l.fromWatch, m.fromWatch...)
	l.last = append(l.last, m.last...)
	l.ackToWatch = append(l.ackToWatch, m.ackToWatch...)
	l.late += m.late
	l.total += m.total
}

func (l *latencies) String() string {
	pair := func(d []float64) string { return fmt.Sprintf("%.2f/%.2f", quantile(d, 0.5), quantile(d, 0.99)) }
	return fmt.Sprintf("ms p50/p99 from ack %s, last client %s, from the reference watcher %s, from schedule %s (watcher from ack %s); %d of %d past %v",
		pair(l.fromAck), pair(l.last), pair(l.fromWatch), pair(l.fromDue), pair(l.ackToWatch), l.late, l.total, limit)
}

func quantile(d []float64, q float64) float64 {
	if len(d) == 0 {
		return 0
	}
	d = slices.Sorted(slices.Values(d))
	return d[min(int(q*float64(len(d))), len(d)-1)]
}

// measureBlock connects the clients to one server, makes the changes, and waits
// until every client has each of them.
func measureBlock(ctx context.Context, w *world, wr *writer, s *subject, c cell, changes int) (*latencies, error) {
	if _, err := w.crowd.connect(s.path, c.clients, w); err != nil {
		return nil, err
	}
	if err := s.pause(ctx, time.Second); err != nil {
		return nil, err
	}
	// What comes first meets cold caches.
	if _, err := wr.run(ctx, changes/20, c.rate); err != nil {
		return nil, err
	}
	flips, err := wr.run(ctx, changes, c.rate)
	if err != nil {
		return nil, err
	}
	var events []event
	for ended := now(); ; {
		a, err := w.crowd.take()
		if err != nil {
			return nil, err
		}
		events = append(events, a.Events...)
		if err := wr.watched(flips); err != nil {
			return nil, err
		}
		l := match(flips, events, c.clients, w.each)
		if l.late == 0 || now()-ended > int64(limit) {
			return l, w.crowd.leave()
		}
		if err := s.pause(ctx, 100*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// match finds for each change and client the first CLA that covers it.
func match(flips []flip, events []event, clients, each int) *latencies {
	type key struct {
		client, service int32
	}
	by := map[key][]event{}
	for _, e := range events {
		k := key{e.Client, e.Service}
		by[k] = append(by[k], e)
	}
	const ms = 1e6
	l := &latencies{}
	for _, f := range flips {
		last := math.Inf(-1)
		for client := range int32(clients) {
			at := int64(0)
			for _, e := range by[key{client, int32(f.pod / each)}] {
				if e.At > f.due && (e.Members>>(f.pod%each)&1 == 1) == f.up {
					at = e.At
					break
				}
			}
			if l.total++; at == 0 || at-f.acked > int64(limit) {
				l.late++
				at = f.acked + int64(limit)
			}
			l.fromAck = append(l.fromAck, float64(at-f.acked)/ms)
			l.fromDue = append(l.fromDue, float64(at-f.due)/ms)
			if f.watched > 0 {
				l.fromWatch = append(l.fromWatch, float64(at-f.watched)/ms)
			}
			last = max(last, float64(at-f.acked)/ms)
		}
		l.last = append(l.last, last)
		if f.watched > 0 {
			l.ackToWatch = append(l.ackToWatch, float64(f.watched-f.acked)/ms)
		}
	}
	return l
}
