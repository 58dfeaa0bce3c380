// Bench measures what the agent promises to be fast at, each figure beside a
// baseline of the same run, and writes them as a list of
// {name, value, unit, baseline, ratio}; a ratio above 1 is better than the
// baseline. With -short sizes and counts are smaller, and each figure says so.
//
//	go run ./test/bench [-only PREFIX] [-short] [-o bench.json]
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// result is one line of bench.json.
type result struct {
	Name     string  `json:"name"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Baseline float64 `json:"baseline"`
	Ratio    float64 `json:"ratio"`
	Short    bool    `json:"short,omitempty"`
}

// benchmark gives the figures that it names.
type benchmark struct {
	names []string
	run   func(context.Context, *run) ([]result, error)
}

// benchmarks are all there are, in the order in which they run.
var benchmarks = []benchmark{oneChange, propagation, flatness, manyPods, relist, sidecars, redirected}

// run is what the command line asks of a benchmark.
type run struct {
	only  string
	short bool // a rough picture: smaller sizes
	began time.Time
	dir   string
	bin   string // the agent, once it was built
}

// wants tells whether a figure was asked for.
func (r *run) wants(name string) bool { return strings.HasPrefix(name, r.only) }

func (r *run) wantsAny(names ...string) bool { return slices.ContainsFunc(names, r.wants) }

// progress tells the reader what goes on.
func (r *run) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%7.1fs  %s\n", time.Since(r.began).Seconds(), fmt.Sprintf(format, args...))
}

func main() {
	r := &run{began: time.Now()}
	flag.StringVar(&r.only, "only", "", "run only the figures whose name has this `prefix`")
	flag.BoolVar(&r.short, "short", false, "smaller sizes, a rough picture")
	out := flag.String("o", "bench.json", "write the figures to this `file`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if flag.NArg() > 0 {
		if err := part(ctx, flag.Args()); err != nil && ctx.Err() == nil {
			fmt.Fprintf(os.Stderr, "bench %s: %v\n", flag.Arg(0), err)
			stop()
			os.Exit(1)
		}
		return
	}
	if err := r.all(ctx, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// part is what this program is where it starts itself, to be measured in a
// process of its own.
func part(ctx context.Context, args []string) error {
	switch {
	case args[0] == "crowd" && len(args) == 1:
		return beCrowd(ctx, os.Stdin, os.Stdout)
	case args[0] == "informer" && len(args) == 2:
		return beInformer(ctx, args[1])
	case args[0] == "linear" && len(args) == 3:
		return beLinear(ctx, args[1], args[2])
	}
	return fmt.Errorf("no part %q", args)
}

func (r *run) all(ctx context.Context, out string) error {
	var err error
	if r.dir, err = os.MkdirTemp("", "bench"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(r.dir) }()
	results := []result{}
	for _, b := range benchmarks {
		if !r.wantsAny(b.names...) {
			continue
		}
		got, err := b.run(ctx, r)
		if err != nil {
			return fmt.Errorf("%s: %w", b.names[0], err)
		}
		for _, res := range got {
			if r.wants(res.Name) {
				res.Short = r.short
				results = append(results, res)
				fmt.Printf("%-46s %10.3f %-9s  baseline %10.3f  ratio %8.1f\n", res.Name, res.Value, res.Unit, res.Baseline, res.Ratio)
			}
		}
		raw, err := json.MarshalIndent(results, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(out, append(raw, '\n'), 0o644); err != nil {
			return err
		}
	}
	if len(results) == 0 {
		return fmt.Errorf("no figure has a name that begins with %q", r.only)
	}
	return nil
}
