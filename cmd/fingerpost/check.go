package main

import (
	"encoding/json"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/daemonset/preflight"
)

func newCheck() *cobra.Command {
	a := adminFlags{}
	var kubeconfig, namespace, adsSocket string
	var nodeOnly bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Say what this cluster and node lack, and what follows",
		Long: `Say what this cluster and node lack, and what follows.

Where kubectl works it looks at the cluster with your rights: versions of the
API, admission policies (by pods created with dryRun, which changes nothing),
other meshes, namespaces that ask for injection and their Pod Security level,
nodes and their agents, and what the agents' account may do. What it says of the
node is then about your own machine. For a node run it in the agent's pod, whose
account may see less of the cluster:

  kubectl -n fingerpost exec POD -- /fingerpost check --node

The exit code is 1 if something that is needed is missing. Without a cluster
only the node is looked at.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.check(); err != nil {
				return err
			}
			kube.BridgeKlog(slog.New(slog.DiscardHandler)) // client-go would write lines of its own
			report := &preflight.Report{}
			preflight.Machine(cmd.Context(), report, "/", adsSocket)
			if !nodeOnly {
				if err := checkCluster(cmd, report, kubeconfig, namespace); err != nil {
					return err
				}
			}
			body, err := json.Marshal(report)
			if err != nil {
				return err
			}
			r, err := present(cmd, &a, body, checkTable)
			if err != nil {
				return err
			}
			if n := r.Missing(); n > 0 {
				return fmt.Errorf("check: what is needed is missing; rows that say so: %d", n)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVarP(&a.output, "output", "o", "table", "table, json or yaml")
	f.StringVar(&kubeconfig, "kubeconfig", "", "`FILE` that says how to reach the API server (default: as kubectl does, or as a pod of the cluster)")
	f.StringVarP(&namespace, "namespace", "n", "fingerpost", "namespace of the agents")
	f.StringVar(&adsSocket, "ads-socket", agent.Defaults().ADSSocket, "`path` of the agent's socket on this node")
	f.BoolVar(&nodeOnly, "node", false, "look at this machine alone")
	complete(cmd, "output", "table", "json", "yaml")
	return cmd
}

// checkCluster adds what is found of the cluster. That there is none to ask is
// no error; that the one which is configured does not answer is.
func checkCluster(cmd *cobra.Command, r *preflight.Report, kubeconfig, namespace string) error {
	config, err := kube.Config(kubeconfig)
	switch {
	case err == nil:
		if err := preflight.Cluster(cmd.Context(), r, config, namespace); err != nil {
			return fmt.Errorf("%w; --node looks at this machine alone", err)
		}
	case kubeconfig != "":
		return err
	default:
		r.Findings = append(r.Findings, preflight.Finding{
			About: "cluster", State: preflight.Unknown, Found: oneLine(err), Means: "only the node was looked at",
		})
	}
	return nil
}

func checkTable(w *table, r preflight.Report) {
	if r.Cluster != "" {
		w.row("cluster", "", r.Cluster)
	}
	w.row("machine", "", r.Node)
	for _, f := range r.Findings {
		w.row(f.About, f.State, f.Found)
		if f.Means != "" {
			w.row("", "", "→ "+f.Means)
		}
	}
}
