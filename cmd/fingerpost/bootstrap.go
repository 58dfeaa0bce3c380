package main

import (
	"cmp"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
)

func newBootstrap() *cobra.Command {
	var o bootstrap.Options
	var format string
	cmd := &cobra.Command{
		Use:   "bootstrap",
		Short: "Print the configuration that an Envoy or a gRPC client starts with",
		Long: `Print the configuration that an Envoy or a gRPC client starts with, to standard
output.

  fingerpost bootstrap --format envoy > envoy.yaml && envoy -c envoy.yaml
  GRPC_XDS_BOOTSTRAP_CONFIG="$(fingerpost bootstrap --format grpc)" ./application

The node id is NAMESPACE/NAME of the pod, by default from POD_NAMESPACE and
POD_NAME.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			write, ok := map[string]func(bootstrap.Options) ([]byte, error){"envoy": bootstrap.Envoy, "grpc": bootstrap.GRPC}[format]
			switch {
			case !ok:
				return usageError("--format %q: say envoy or grpc", format)
			case o.Clusters != "" && o.Clusters != "all" && o.Clusters != "on-demand":
				return usageError("--clusters %q: say on-demand or all", o.Clusters)
			case o.API != "delta" && o.API != "sotw":
				return usageError("--api %q: say delta or sotw", o.API)
			case o.Clusters == "on-demand" && o.API == "sotw":
				return usageError("--clusters on-demand needs --api delta: the state-of-the-world protocol has no clusters on demand")
			case o.Redirect && (o.API == "sotw" || o.Clusters == "all"):
				return usageError("--redirect needs clusters on demand: the addresses that may be called cannot all have clusters from the start")
			case o.Redirect && format == "grpc":
				return usageError("--redirect needs --format envoy: a gRPC client listens for no connections")
			case o.NodeID == "":
				return usageError("--node-id is needed: say NAMESPACE/NAME of the pod, or set POD_NAMESPACE and POD_NAME")
			}
			if err := checkNodeID(o.NodeID); err != nil {
				return err
			}
			conf, err := write(o)
			if err != nil {
				return &agent.UsageError{Err: err} // an option that cannot work
			}
			_, err = cmd.OutOrStdout().Write(conf)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&format, "format", "", "envoy or grpc")
	f.StringVar(&o.ADSSocket, "ads-socket", agent.Defaults().ADSSocket, "`path` of the ADS socket as the pod sees it")
	f.StringVar(&o.NodeID, "node-id", podID(), "`NAMESPACE/NAME` of the pod")
	f.StringVar(&o.Clusters, "clusters", "", "which clusters the sidecar has: on-demand, at the first call to each, or all from the start (default on-demand with delta, all with sotw; gRPC clients ask for what they dial)")
	f.StringVar(&o.API, "api", "delta", "delta or sotw; gRPC clients always speak sotw")
	f.BoolVar(&o.Redirect, "redirect", false, "let Envoy listen for connections that the agent redirects (agent --redirect); on 0.0.0.0:15002, where only those are taken")
	f.StringVar(&o.AdminSocket, "admin-socket-envoy", "", "`path` of a unix socket for Envoy's admin interface (default: none)")
	complete(cmd, "format", "envoy", "grpc")
	complete(cmd, "clusters", "on-demand", "all")
	complete(cmd, "api", "delta", "sotw")
	return cmd
}

// podID is the id of the pod in which the command runs, empty if it is not
// known.
func podID() string {
	ns, name := os.Getenv("POD_NAMESPACE"), os.Getenv("POD_NAME")
	if ns == "" || name == "" {
		return ""
	}
	return ns + "/" + name
}

// defaultNodeID is that of the pod, else one that sees the namespace default.
func defaultNodeID() string { return cmp.Or(podID(), "default/fingerpost") }

func checkNodeID(id string) error {
	if ns, name, ok := strings.Cut(id, "/"); !ok || ns == "" || name == "" || strings.Contains(name, "/") {
		return usageError("--node-id %q: say NAMESPACE/NAME of a pod", id)
	}
	return nil
}
