package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

func newStatus() *cobra.Command {
	var a adminFlags
	var check, ready bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say how the agent of this node is",
		Long: `Say how the agent of this node is: its source, its gate, what it knows, and
which parts are on.

With --check the exit code is 1 while the gate is closed, the source is stale or
not synced, or a client has rejected a resource; 0 otherwise. With --ready it is
1 while the agent is not ready, which is what a readiness probe asks: the gate
is open and whoever dials the ADS socket reaches this agent.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := show(cmd, &a, "/status", nil, statusTable)
			if err != nil {
				return err
			}
			if why := s.Trouble(); check && why != "" {
				return fmt.Errorf("status --check: %s", why)
			}
			if ready {
				_, err = ask(cmd.Context(), a.socket, "/ready", nil)
			}
			return err
		},
	}
	a.add(cmd)
	cmd.Flags().BoolVar(&check, "check", false, "exit 1 unless all is well")
	cmd.Flags().BoolVar(&ready, "ready", false, "exit 1 unless the agent is ready")
	return cmd
}

func statusTable(w *tabwriter.Writer, s agent.Status) {
	fmt.Fprintf(w, "node\t%s\nversion\t%s\n", s.Node, s.Version)
	source := s.Source.Kind
	switch {
	case !s.Source.Synced:
		source += ", not synced"
	case s.Source.StaleSeconds > 0:
		source += fmt.Sprintf(", stale for %s", (time.Duration(s.Source.StaleSeconds) * time.Second))
	default:
		source += ", synced"
	}
	fmt.Fprintf(w, "source\t%s\n", source)
	if s.Source.Error != "" {
		fmt.Fprintf(w, "\t%s\n", s.Source.Error)
	}
	gate := s.Gate
	if s.Reason != "" {
		gate += ": " + s.Reason
	}
	fmt.Fprintf(w, "gate\t%s\n", gate)
	var owners []string
	for _, k := range []string{"known", "none", "collecting", "unknown", "failed"} {
		if n := s.Owners[k]; n > 0 {
			owners = append(owners, fmt.Sprintf("%d %s", n, k))
		}
	}
	fmt.Fprintf(w, "owners\t%s\npods\t%d\nproxies\t%d\nnacks\t%d\nwithheld\t%d\n", cmp.Or(strings.Join(owners, ", "), "0"), s.Pods, s.Proxies, s.Nacks, s.Withheld)
	parts := make([]string, 0, len(s.Parts))
	for name := range s.Parts {
		parts = append(parts, name)
	}
	slices.Sort(parts)
	for _, name := range parts {
		fmt.Fprintf(w, "%s\t%s\n", name, s.Parts[name])
	}
}

func newServices() *cobra.Command {
	var a adminFlags
	cmd := &cobra.Command{
		Use:   "services",
		Short: "List the gRPC services that are served, and where",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := show(cmd, &a, "/services", nil, servicesTable)
			return err
		},
	}
	a.add(cmd)
	return cmd
}

func servicesTable(w *tabwriter.Writer, services []resources.ServiceView) {
	fmt.Fprintln(w, "NAMESPACE\tSERVICE\tENDPOINTS\tOWNERS\tCLAIMANTS")
	for _, s := range services {
		var eps []string
		for _, e := range s.Endpoints {
			ep := e.Address
			if e.State != "serving" {
				ep += " (" + e.State + ")"
			}
			eps = append(eps, ep)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", s.Namespace, s.Name,
			cmp.Or(strings.Join(eps, ", "), "none"), strings.Join(s.Owners, ", "), strings.Join(s.Claimants, ", "))
	}
}

func newOwners() *cobra.Command {
	var a adminFlags
	cmd := &cobra.Command{
		Use:   "owners",
		Short: "List the owners of pods and what is known of them",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := show(cmd, &a, "/owners", nil, ownersTable)
			return err
		},
	}
	a.add(cmd)
	return cmd
}

func ownersTable(w *tabwriter.Writer, owners []agent.OwnerView) {
	fmt.Fprintln(w, "NAMESPACE\tOWNER\tPODS\tKNOWLEDGE\tORIGIN\tSERVICES\tREASON")
	for _, o := range owners {
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%s\t%s\n", o.Namespace, o.Name, len(o.Pods), o.Knowledge, o.Origin, strings.Join(o.Services, ", "), o.Reason)
	}
}

func newProxies() *cobra.Command {
	var a adminFlags
	cmd := &cobra.Command{
		Use:   "proxies",
		Short: "List the connected Envoys and gRPC clients, and what they accepted",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := show(cmd, &a, "/proxies", nil, proxiesTable)
			return err
		},
	}
	a.add(cmd)
	return cmd
}

func proxiesTable(w *tabwriter.Writer, proxies []ads.Client) {
	fmt.Fprintln(w, "ID\tCONNECTED\tPROTOCOL\tCDS\tEDS\tLDS\tRDS\tLAST ERROR")
	for _, p := range proxies {
		protocol := "sotw"
		if p.Delta {
			protocol = "delta"
		}
		row := []string{p.ID, time.Since(p.Connected).Round(time.Second).String(), protocol}
		last := p.State
		for _, name := range []string{"cds", "eds", "lds", "rds"} {
			t, ok := p.Types[name]
			switch {
			case !ok || t.Sent == "":
				row = append(row, "not sent")
			case t.Nack != nil:
				state := "rejected"
				if n := len(t.Withheld) + t.Suspects; n > 0 {
					state = fmt.Sprintf("rejected (%d withheld)", n)
				}
				row = append(row, state)
				last = t.Nack.Error
			case t.Sent == t.Acked:
				row = append(row, "synced")
			default:
				row = append(row, "stale")
			}
		}
		fmt.Fprintln(w, strings.Join(append(row, last), "\t"))
	}
}
