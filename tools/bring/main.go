// Bring puts pinned tools into the cache (package tools says where).
//
//	go run ./tools/bring [-path] [NAME|GROUP ...]
//
// Without names it brings the group "test". A tool that is there already is
// left alone; two runs at once do not disturb each other. With -path it prints
// where each named tool stands and brings nothing. Run it from the root of the
// repository.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fingerpost/fingerpost/tools"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bring:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	onlyPath := flag.Bool("path", false, "print where the tools stand, bring nothing")
	flag.Parse()
	list, err := choose(flag.Args())
	if err != nil {
		return err
	}
	if *onlyPath {
		for _, t := range list {
			p, err := tools.Path(t.Name)
			if err != nil {
				return err
			}
			fmt.Println(p)
		}
		return nil
	}
	missing, err := absent(list)
	if err != nil || len(missing) == 0 {
		return err
	}
	if _, err := os.Stat("tools/kube/go.mod"); err != nil {
		return errors.New("run it from the root of the repository")
	}
	unlock, err := lock()
	if err != nil {
		return err
	}
	defer unlock()
	// Another run may have brought them while this one waited for the lock.
	if missing, err = absent(list); err != nil {
		return err
	}
	for i, t := range missing {
		p, err := tools.Path(t.Name)
		if err != nil {
			return err
		}
		how, bring := "building", build
		if t.Package == "" {
			how, bring = "fetching", fetchers[t.Name]
		}
		fmt.Fprintf(os.Stderr, "tools %d/%d: %s %s %s\n", i+1, len(missing), how, t.Name, t.Version)
		start := time.Now()
		if err := bring(ctx, t, p); err != nil {
			return fmt.Errorf("%s %s: %w", t.Name, t.Version, err)
		}
		fmt.Fprintf(os.Stderr, "tools %d/%d: %s done in %d s\n", i+1, len(missing), t.Name, int(time.Since(start).Seconds()))
	}
	return nil
}

// choose turns names and groups into tools.
func choose(args []string) ([]tools.Tool, error) {
	if len(args) == 0 {
		args = []string{string(tools.Test)}
	}
	var list []tools.Tool
	for _, arg := range args {
		found := false
		for _, t := range tools.All() {
			if t.Name == arg || string(t.Group) == arg {
				list, found = append(list, t), true
			}
		}
		if !found {
			return nil, fmt.Errorf("%w: %q", tools.ErrUnknown, arg)
		}
	}
	return list, nil
}

// absent returns those of the list that are not in their place.
func absent(list []tools.Tool) ([]tools.Tool, error) {
	var missing []tools.Tool
	for _, t := range list {
		p, err := tools.Path(t.Name)
		if err != nil {
			return nil, err
		}
		if _, err := os.Stat(p); err == nil {
			continue
		}
		if t.Name == "envoy" && os.Getenv(tools.EnvoyEnv) != "" {
			return nil, fmt.Errorf("%s=%s: no such file", tools.EnvoyEnv, os.Getenv(tools.EnvoyEnv))
		}
		missing = append(missing, t)
	}
	return missing, nil
}

// lock takes the cache's lock, waiting for another run. The kernel releases it
// when the process ends, however it ends.
func lock() (unlock func(), err error) {
	dir, err := tools.Dir()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		fmt.Fprintf(os.Stderr, "tools: waiting for another run that holds %s\n", f.Name())
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
	return func() { _ = f.Close() }, nil
}
