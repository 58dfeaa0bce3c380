package main

import (
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
)

func newExplain() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Say why a pod or a service is, or is not, served",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newExplainOne("pod NAMESPACE/NAME", "Say why a pod is, or is not, served", "pod", func(arg string) error {
			if ns, name, ok := strings.Cut(arg, "/"); !ok || ns == "" || name == "" || strings.Contains(name, "/") {
				return usageError("%q is not NAMESPACE/NAME of a pod", arg)
			}
			return nil
		}),
		newExplainOne("service NAME", "Say why a gRPC service is, or is not, served, in every namespace", "service", func(arg string) error {
			if arg == "" || strings.ContainsAny(arg, "/ ") {
				return usageError("%q is not the name of a gRPC service, as pkg.Service", arg)
			}
			return nil
		}),
	)
	return cmd
}

func newExplainOne(use, short, kind string, check func(string) error) *cobra.Command {
	var a adminFlags
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := check(args[0]); err != nil {
				return err
			}
			_, err := show(cmd, &a, "/explain/"+kind, url.Values{"name": args}, explainTable)
			return err
		},
	}
	a.add(cmd)
	return cmd
}

func explainTable(w *table, e agent.Explanation) {
	w.row(e.Verdict)
	for _, f := range e.Facts {
		w.row("  "+f.What, f.Says)
	}
}
