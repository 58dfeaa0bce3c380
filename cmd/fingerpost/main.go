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
		var bad *pflag.InvalidValueError
		if errors.As(err, &bad) {
			err = fmt.Errorf("--%s %q: %s", bad.GetFlag().Name, bad.GetValue(), allowed(bad.GetFlag(), bad.Unwrap()))
		}
		return usageError("%w; see %s --help", err, cmd.CommandPath())
	})
	root.AddCommand(
		newAgent(), newBootstrap(), newDemo(), newInject(),
		newStatus(), newServices(), newOwners(), newProxies(), newPeers(), newPaths(), newExplain(),
		newRecollect(), newWait(), newCheck(), newUninstall(),
		newXDS(), newVersion(),
	)
	refuseUnknownShells(root)
	checkArgs(root)
	refuseUnknownTopics(root)
	return root
}

// refuseUnknownTopics makes "help" of a command that is none a usage error: the
// library's prints the help of another one.
func refuseUnknownTopics(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, help := range root.Commands() {
		if help.Name() != "help" {
			continue
		}
		help.Run = nil
		help.RunE = func(_ *cobra.Command, topic []string) error {
			cmd, rest, err := root.Find(topic)
			if err != nil || len(rest) > 0 {
				return usageError("there is no command %q; see fingerpost --help", strings.Join(topic, " "))
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		}
	}
}

// refuseUnknownShells makes "completion" of a shell that is none a usage error:
// the library's, which does nothing itself, has its arguments not looked at.
func refuseUnknownShells(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, completion := range root.Commands() {
		if completion.Name() == "completion" {
			completion.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
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
			first = usageError("%s=%q: %s", name, value, allowed(f, err))
		}
	})
	return first
}

// allowed says what a flag takes, where its parser does not.
func allowed(f *pflag.Flag, err error) string {
	switch f.Value.Type() {
	case "bool":
		return "say true or false"
	case "duration":
		return "say a duration such as 30s or 2m"
	case "int":
		return "say a whole number"
	}
	return err.Error()
}

func variable(flag string) string {
	return "FINGERPOST_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// oneLine keeps an error that spans lines, as those of parsers do, on one, and
// what it quotes of others away from the terminal's controls.
func oneLine(err error) string {
	return plain(strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), " "))
}
