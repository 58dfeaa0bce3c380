package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// redirected is a connection that the kernel sends to the sidecar, opened and
// closed, beside one that a process without a program dials to the sidecar's
// listener; they take turns. It needs root, a cgroup of the second version and a
// network namespace, so that the test of the package makes them.
var redirected = benchmark{names: []string{"redirect/connect", "redirect/connect-ipv6"}, run: runRedirected}

func runRedirected(ctx context.Context, r *run) ([]result, error) {
	rounds := 100_000
	if r.short {
		rounds = 10_000
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^BenchmarkConnect$", "-benchtime", fmt.Sprintf("%dx", rounds), "github.com/fingerpost/fingerpost/bpf/redirect")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	took := map[string]float64{}
	fields := strings.Fields(string(out))
	for i, f := range fields {
		if unit, ok := strings.CutSuffix(f, "-us"); ok && i > 0 {
			if took[unit], err = strconv.ParseFloat(fields[i-1], 64); err != nil {
				return nil, err
			}
		}
	}
	direct, ipv4, ipv6 := took["direct"], took["redirected4"], took["redirected6"]
	if direct == 0 || ipv4 == 0 || ipv6 == 0 {
		return nil, fmt.Errorf("not all figures are in %q", out)
	}
	r.progress("redirect: %d connections each: IPv4 %+.2f us, IPv6 %+.2f us", rounds, ipv4-direct, ipv6-direct)
	return []result{
		better("redirect/connect", "us", ipv4, direct),
		better("redirect/connect-ipv6", "us", ipv6, direct),
	}, nil
}
