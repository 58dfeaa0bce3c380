// Command fingerpost is a per-node Kubernetes agent that tells the Envoy
// sidecars and the proxyless gRPC clients of its node where every gRPC service
// lives, and the tools to look at it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fingerpost/fingerpost/agent"
)

// Exit codes, as docs/operations.md promises.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := newRoot()
	err := root.ExecuteContext(ctx)
	if err == nil {
		return
	}
	var u *agent.UsageError
	if !errors.Is(err, errSilent) {
		fmt.Fprintf(os.Stderr, "fingerpost: %s\n", oneLine(err))
	}
	if errors.As(err, &u) {
		os.Exit(exitUsage)
	}
	os.Exit(exitFailed)
}

// errSilent is a failure that has said all there is to say already.
var errSilent = errors.New("failed")

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "fingerpost",
		Short: "Tells the sidecars of a node where every gRPC service lives",
		Long: `Fingerpost runs on each Kubernetes node. It learns which gRPC services each
workload really implements and serves Envoy's ADS on a unix socket to the Envoy
sidecars and the proxyless gRPC clients of its node.

Every flag can also be set by the environment variable FINGERPOST_<FLAG>, in
upper case with underscores. A flag goes before its variable.

Exit codes: 0 good, 1 failed, 2 wrong usage.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return fromEnvironment(cmd.Flags())
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError("%w; see %s --help", err, cmd.CommandPath())
	})
	root.AddCommand(
		newAgent(), newBootstrap(), newDemo(),
		newStatus(), newServices(), newOwners(), newProxies(), newPeers(), newExplain(),
		newRecollect(),
		newXDS(), newVersion(),
	)
	checkArgs(root)
	return root
}

// checkArgs makes wrong arguments a usage error in every command.
func checkArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usageError("%w; see %s --help", err, cmd.CommandPath())
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		checkArgs(sub)
	}
}

func usageError(format string, args ...any) error {
	return &agent.UsageError{Err: fmt.Errorf(format, args...)}
}

// ownEnvironment marks a flag whose variable has rules of its own.
const ownEnvironment = "fingerpost/own-environment"

// fromEnvironment sets each flag that the command line left alone from its
// variable.
func fromEnvironment(flags *pflag.FlagSet) error {
	var first error
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "help" || f.Annotations[ownEnvironment] != nil || first != nil {
			return
		}
		name := variable(f.Name)
		value, ok := os.LookupEnv(name)
		if !ok {
			return
		}
		if err := flags.Set(f.Name, value); err != nil {
			first = usageError("%s=%q: %w", name, value, err)
		}
	})
	return first
}

func variable(flag string) string {
	return "FINGERPOST_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// oneLine keeps an error that spans lines, as those of parsers do, on one, and
// what it quotes of others away from the terminal's controls.
func oneLine(err error) string {
	return plain(strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), " "))
}
