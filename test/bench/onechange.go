package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"time"
)

// oneChange is the time from the start of the call that publishes one changed
// CLA until each of the delta streams has its response written.
var oneChange = benchmark{names: oneChangeNames, run: runOneChange}

var oneChangeNames = []string{"ads/one-change/snapshot-cache", "ads/one-change/linear-cache"}

func runOneChange(ctx context.Context, r *run) ([]result, error) {
	services, streams, rounds, ours := 10_000, 100, 5, 6
	if r.short {
		services, streams, rounds, ours = 1_000, 20, 3, 5
	}
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()

	first, err := newOurs(dir, services)
	if err != nil {
		return nil, err
	}
	servers := []*server{first}
	defer func() {
		for _, s := range servers {
			s.stop()
		}
	}()
	for name, start := range map[string]func(context.Context, string, int) (*server, error){
		oneChangeNames[0]: newSnapshot, oneChangeNames[1]: newLinear,
	} {
		if r.wants(name) {
			s, err := start(ctx, dir, services)
			if err != nil {
				return nil, err
			}
			servers = append(servers, s)
		}
	}
	for _, s := range servers {
		r.progress("%s: connecting %d clients, %d clusters and CLAs each", s.name, streams, services)
		c, err := connect(ctx, s.path, streams, services)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		defer c.close()
		r.progress("%s: connected", s.name)
	}

	times := map[*server][]time.Duration{}
	rev := 0
	for round := range rounds {
		for i, s := range servers {
			changes := 1
			if i == 0 {
				changes = ours
			}
			runtime.GC() // nobody pays for what another left
			for range changes {
				rev++
				d, err := measure(ctx, s, services/2+round, rev, streams)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", s.name, err)
				}
				times[s] = append(times[s], d)
			}
			r.progress("%s: change in %v", s.name, times[s][len(times[s])-1].Round(time.Microsecond))
		}
	}
	value := milliseconds(median(times[servers[0]]))
	var results []result
	for _, s := range servers[1:] {
		baseline := milliseconds(median(times[s]))
		results = append(results, result{
			Name: "ads/one-change/" + s.name, Value: value, Unit: "ms", Baseline: baseline, Ratio: baseline / value,
		})
	}
	slices.SortFunc(results, func(a, b result) int {
		return slices.Index(oneChangeNames, a.Name) - slices.Index(oneChangeNames, b.Name)
	})
	return results, nil
}

// measure makes one change once every client waits for it.
func measure(ctx context.Context, s *server, i, rev, streams int) (time.Duration, error) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.After(2 * time.Minute)
	for !s.idle(i, streams) {
		select {
		case <-tick.C:
		case <-limit:
			return 0, errors.New("the clients do not come to rest")
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	written := s.count.expect(streams)
	began := time.Now()
	if err := s.change(i, rev); err != nil {
		return 0, err
	}
	select {
	case <-written:
		return time.Since(began), nil
	case <-limit:
		return 0, errors.New("the change does not reach every client")
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

func median(d []time.Duration) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[len(d)/2]
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
