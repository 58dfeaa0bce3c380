package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/bpf/redirect"
	"github.com/fingerpost/fingerpost/xds/ads/socket"
)

func newUninstall() *cobra.Command {
	c := agent.Defaults()
	pins, force := redirect.DefaultDir, false
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove from this node what agents leave there",
		Long: `Remove from this node what agents leave there when they end: the programs that
redirect connections, with their maps; sockets, locks and the checkpoint. Each
path that was removed is printed. Connections that were redirected go on to their
sidecar, new ones go where they are dialled.

The directory of the ADS socket stays, since pods have it mounted and find there
the socket of an agent that comes later. Programs and maps are removed where this
process has CAP_BPF and CAP_NET_ADMIN; the flags are to be those of the agent.

While an agent runs nothing is removed, unless with --force: delete its DaemonSet
first. It is good to be run again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			removed, err := agent.Uninstall(c, pins, force)
			for _, path := range removed {
				fmt.Fprintln(cmd.OutOrStdout(), plain(path))
			}
			var held *socket.HeldError
			switch {
			case errors.As(err, &held):
				return fmt.Errorf("%s, and nothing is removed while it runs; delete the agents' DaemonSet or stop the agent first, or say --force", held.Serves())
			case err == nil && len(removed) == 0:
				fmt.Fprintln(cmd.OutOrStdout(), "there is nothing to remove")
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.ADSSocket, "ads-socket", c.ADSSocket, "`path` of the ADS socket")
	f.StringVar(&c.AdminSocket, "admin-socket", c.AdminSocket, "`path` of the admin socket")
	f.StringVar(&c.StateDir, "state-dir", c.StateDir, "`directory` of the checkpoint; empty: leave it")
	f.StringVar(&pins, "redirect-dir", pins, "`directory` of the pinned programs and maps")
	f.BoolVar(&force, "force", force, "also while an agent runs, which then serves nobody new")
	return cmd
}
