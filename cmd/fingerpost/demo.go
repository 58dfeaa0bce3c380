package main

import (
	"bytes"
	"context"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/demo"
)

func newDemo() *cobra.Command {
	var envoy string
	var keep bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show the main job on loopback, without a cluster",
		Long: `Show the main job on loopback, without a cluster: sample gRPC services, the
agent with a file of pods, a gRPC client without a proxy, and Envoy in front
where it is found. The demo ends by itself and leaves nothing behind.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := demo.FindEnvoy(envoy)
			if err != nil {
				return usageError("Envoy (--envoy or ENVOY): %w", err)
			}
			return demo.Run(cmd.Context(), demo.Options{
				Envoy: path, Keep: keep, Out: cmd.OutOrStdout(), Command: runCommand, Version: buildVersion(),
			})
		},
	}
	cmd.Flags().StringVar(&envoy, "envoy", "", "`path` of an Envoy binary (default: from ENVOY, else from PATH)")
	cmd.Flags().BoolVar(&keep, "keep", false, "go on until Ctrl-C, to try things")
	return cmd
}

// runCommand runs a command in this process and returns what it printed.
func runCommand(ctx context.Context, args ...string) (string, error) {
	var out bytes.Buffer
	root := newRoot()
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	return out.String(), err
}
