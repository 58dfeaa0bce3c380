package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
)

// waitPace is how often wait asks the agent.
const waitPace = 100 * time.Millisecond

func newWait() *cobra.Command {
	var a adminFlags
	var service string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "wait --service NAME",
		Short: "Wait until a service is served and every client that asked for it has it",
		Long: `Wait until a gRPC service has an endpoint and every connected client of this
node that asked for it has acknowledged it. NAME is pkg.Service, or
NAMESPACE/pkg.Service, which looks at the clients of that namespace alone.

Exit code 0 once that is so. It is 1, with one line that says why, as soon as a
client that asked for the service rejects something, or the source is stale;
and when the time is over: the gate is still closed then, nothing serves the
service, or a client has not acknowledged it.`,
		Example: `  fingerpost wait --service shop.v1.Cart --timeout 2m`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if ns, name, ok := strings.Cut(service, "/"); service == "" || ok && (ns == "" || name == "" || strings.Contains(name, "/")) {
				return usageError("--service %q: say pkg.Service or NAMESPACE/pkg.Service", service)
			}
			if timeout <= 0 {
				return usageError("--timeout %s: it must be longer than 0", timeout)
			}
			return waitFor(cmd.Context(), a.socket, service, timeout)
		},
	}
	a.addSocket(cmd)
	cmd.Flags().StringVar(&service, "service", "", "`NAME` of the gRPC service")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "give up after this long")
	return cmd
}

func waitFor(ctx context.Context, admin, service string, timeout time.Duration) error {
	over := time.NewTimer(timeout)
	defer over.Stop()
	tick := time.NewTicker(waitPace)
	defer tick.Stop()
	for {
		body, err := ask(ctx, admin, "/wait", url.Values{"service": {service}})
		if err != nil {
			return err
		}
		var w agent.Waited
		if err := json.Unmarshal(body, &w); err != nil {
			return fmt.Errorf("the agent's answer is not understood (another version?): %w", err)
		}
		switch {
		case w.Done:
			return nil
		case w.Failed:
			return fmt.Errorf("wait: %s", w.Reason)
		}
		select {
		case <-tick.C:
		case <-over.C:
			return fmt.Errorf("wait: not within %s: %s", timeout, w.Reason)
		case <-ctx.Done():
			return errors.New("wait: interrupted: " + w.Reason)
		}
	}
}
