package main

import (
	"cmp"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/bpf/redirect"
)

// gcPercent is what GOGC is where the environment does not set it.
const gcPercent = 40

var limitFlags = []string{"collect-limit", "peer-fetch-limit", "transcode-limit", "work-limit"}

func newAgent() *cobra.Command {
	c := agent.Defaults()
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Run the agent of this node",
		Long: `Run the agent of this node: watch pods, learn what they serve, and serve ADS on
a unix socket. The agent runs until it gets SIGTERM or SIGINT.

With --takeover an agent that runs already hands its sockets over, and its
clients lose nothing. It stays until it is stopped, and serves again if this one
ends before.

Which pod connects is proved by the kernel, where the agent has CAP_NET_ADMIN and
the host's network; elsewhere node.id is believed. fingerpost proxies shows it.

What calls the agent's clients make to pods is plaintext HTTP/2.`,
		Example: `  fingerpost agent --node-name "$NODE_NAME"
  fingerpost agent --source file:pods.yaml --ads-socket /tmp/fp/ads.sock --admin-socket /tmp/fp-admin/admin.sock`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range limitFlags {
				// An empty one would pass for one that was not given.
				if f := cmd.Flags().Lookup(name); f.Changed && f.Value.String() == "" {
					return usageError("--%s \"\" is not a positive integer", name)
				}
			}
			if os.Getenv("GOGC") == "" {
				// There is one agent for each node: its memory costs more
				// than the time that its collector takes.
				debug.SetGCPercent(gcPercent)
			}
			c.NodeName = cmp.Or(c.NodeName, os.Getenv("NODE_NAME"))
			c.PodName = os.Getenv("POD_NAME")
			c.LeaseNamespace = cmp.Or(os.Getenv("POD_NAMESPACE"), c.LeaseNamespace)
			c.Version = buildVersion()
			if strings.HasPrefix(c.Source, "file:") && !cmd.Flags().Changed("state-dir") {
				// Files repeat one another's UIDs: what was learned with one must
				// not be believed with another.
				c.StateDir = ""
			}
			return agent.Run(cmd.Context(), c)
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.NodeName, "node-name", c.NodeName, "name of this node, also from NODE_NAME (default: the host's name with a file source)")
	f.StringVar(&c.Source, "source", c.Source, "where pods come from: kube, or file:PATH of Kubernetes objects as YAML or JSON (a file or a directory)")
	f.StringVar(&c.Kubeconfig, "kubeconfig", c.Kubeconfig, "kubeconfig `file` (default: in-cluster, then KUBECONFIG and ~/.kube/config)")
	f.StringVar(&c.ADSSocket, "ads-socket", c.ADSSocket, "`path` of the ADS socket; mount its directory, read-only, into pods")
	f.StringVar(&c.AdminSocket, "admin-socket", c.AdminSocket, "`path` of the admin socket; in a directory that no pod mounts")
	f.BoolVar(&c.Takeover, "takeover", c.Takeover, "take the sockets over from a running agent, once this one knows as much")
	f.BoolVar(&c.LiftTaint, "lift-taint", c.LiftTaint, "take the taint "+kube.StartupTaint+" off this node once this agent is ready; needs a right on nodes")
	f.StringVar(&c.HTTPAddress, "http-address", c.HTTPAddress, "`address` of /live, /ready and /metrics; empty: off")
	f.StringVar(&c.PeerAddress, "peer-address", c.PeerAddress, "`address` at which this agent answers those of other nodes; empty: off, and it asks all pods itself")
	f.StringVar(&c.PeerCertDir, "peer-cert-dir", c.PeerCertDir, "`directory` of tls.crt, tls.key and ca.crt, which say whom other agents are believed; without it their keys are read off their pods")
	f.StringVar(&c.StateDir, "state-dir", c.StateDir, "`directory` of the checkpoint; empty: off; with a file source off unless it is given")
	f.IntVar(&c.EgressPort, "egress-port", c.EgressPort, "port on 127.0.0.1 at which a sidecar takes calls")
	f.StringVar(&c.CollectScope, "collect-scope", c.CollectScope, "whose pods to ask what they serve: node or cluster (default: node, and as a last resort any whose node has no agent)")
	f.StringVar(&c.Limits.Collect, "collect-limit", "", "most collects at a time: `N` (default 16, at most 64)")
	f.StringVar(&c.Limits.PeerFetch, "peer-fetch-limit", "", "most questions to peers at a time: `N` (default 16, at most 64)")
	f.StringVar(&c.Limits.Transcode, "transcode-limit", "", "most descriptor sets linked at a time: `N` (default 2, at most 64)")
	f.StringVar(&c.Limits.Work, "work-limit", "", "most of all of these at a time: `N` (default 32, at most 64)")
	for _, name := range limitFlags {
		_ = f.SetAnnotation(name, ownEnvironment, []string{""})
	}
	f.StringVar(&c.Locality, "locality", c.Locality, "whom to call first where the pods do not say: even (nobody), zone or node; see docs/locality.md")
	f.StringVar(&c.Tracing, "tracing", c.Tracing, "send the sidecars' spans to otlp:`ADDR`; empty: off")
	f.StringVar(&c.ExportDefault, "export-default", c.ExportDefault, "namespaces that see a service without an annotation: none or all")
	f.BoolVar(&c.RequireIdentity, "require-identity", c.RequireIdentity, "refuse clients whose pod the kernel does not prove; needs CAP_NET_ADMIN, see part identity of fingerpost status")
	f.BoolVar(&c.Redirect, "redirect", c.Redirect, "send connections of pods to gRPC services to their sidecar, where that listens for them; needs CAP_BPF, CAP_NET_ADMIN, cgroup2 and a bpf file system, see part redirect of fingerpost status")
	f.StringVar(&c.RedirectCgroup, "redirect-cgroup", c.RedirectCgroup, "`directory` of the cgroup2 whose processes are redirected (default: the one that holds the node's pods)")
	f.StringVar(&c.RedirectDir, "redirect-dir", c.RedirectDir, "`directory` on a bpf file system where programs and maps are pinned (default "+redirect.DefaultDir+")")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	f.StringVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
	complete(cmd, "source", "kube", "file:")
	complete(cmd, "collect-scope", "node", "cluster")
	complete(cmd, "locality", "even", "zone", "node")
	complete(cmd, "export-default", "none", "all")
	complete(cmd, "log-format", "text", "json")
	complete(cmd, "log-level", "debug", "info", "warn", "error")
	return cmd
}

// complete makes the shell offer the values of a flag.
func complete(cmd *cobra.Command, flag string, values ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}
