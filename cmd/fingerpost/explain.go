package main

import (
	"encoding/json"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

func newExplain() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Say where a call goes, and why a pod, a service or a workload is, or is not, served",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newExplainCall(),
		newExplainOne("pod NAMESPACE/NAME", "Say why a pod is, or is not, served", "", "pod", func(arg string) error {
			if !isPod(arg) {
				return usageError("%q is not NAMESPACE/NAME of a pod", arg)
			}
			return nil
		}, func(owners []agent.OwnerView) (pods []string) {
			for _, o := range owners {
				pods = append(pods, o.Pods...)
			}
			return pods
		}, "/owners"),
		newExplainOne("service NAME", "Say why a gRPC service is, or is not, served, in every namespace", "", "service", func(arg string) error {
			if arg == "" || strings.ContainsAny(arg, "/ ") {
				return usageError("%q is not the name of a gRPC service, as pkg.Service", arg)
			}
			return nil
		}, func(services []resources.ServiceView) (names []string) {
			for _, s := range services {
				names = append(names, s.Name)
			}
			return names
		}, "/services"),
		newExplainOne("workload NAMESPACE/NAME", "Say what the revisions of a workload serve, and why its pods are, or are not, served", `
NAME is that of the Deployment, StatefulSet, DaemonSet, Job or whatever controls
the pods, or KIND/NAME where several kinds have it. A Deployment is known by its
ReplicaSets.`, "workload", func(arg string) error {
			ns, name, ok := strings.Cut(arg, "/")
			if !ok || ns == "" || name == "" || strings.HasPrefix(name, "/") || strings.HasSuffix(name, "/") || strings.Count(name, "/") > 1 {
				return usageError("%q is neither NAMESPACE/NAME nor NAMESPACE/KIND/NAME of a workload", arg)
			}
			return nil
		}, func(owners []agent.OwnerView) (names []string) {
			for _, o := range owners {
				names = append(names, o.Namespace+"/"+o.Workload)
			}
			return names
		}, "/owners"),
	)
	return cmd
}

// token is what the name of an HTTP method or header may be (RFC 9110, section
// 5.6.2).
var token = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+\\-.^_`|~]+$")

func isPod(arg string) bool {
	_, _, err := resources.ParseNodeID(arg)
	return err == nil
}

func newExplainCall() *cobra.Command {
	var a adminFlags
	var from, authority, method string
	var headers []string
	cmd := &cobra.Command{
		Use:   "call --from NAMESPACE/POD /PACKAGE.SERVICE/METHOD",
		Short: "Say where a call goes and why, to the last step",
		Long: `Say where a call that a pod makes through its sidecar goes and why, to the last
step: who calls and how that is known, the rule that the call meets, the cluster
and why it is that one, whether the client has acknowledged it and since when,
each endpoint, and why each other pod of the provider gets no call; what is known
from where and since when; and what was decided lately that concerns it. Where
routes of the Gateway API speak for the Service that the authority names: which
route takes the call, by which rule and match, and what becomes of each share.

The first line names the answer, with the gRPC code that the caller gets (the
HTTP status where the call is not of gRPC: with --method, or with another path
than /PACKAGE.SERVICE/METHOD that HTTPRoutes speak for), and where that is not OK
the cause. OK means that the call reaches a pod, which may say otherwise. Nothing
is called.

Ask the agent of the calling pod's node: it alone knows the pod's sidecar.`,
		Example: `  fingerpost explain call --from shop/web-7d9c5-a /shop.v1.Cart/Get
  fingerpost explain call --from shop/web-7d9c5-a --authority cart.shop --method GET --header x-canary=yes /v1/carts/7`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if from == "" {
				return usageError("--from is needed: NAMESPACE/NAME of the pod that calls")
			}
			if !isPod(from) {
				return usageError("--from %q is not NAMESPACE/NAME of a pod", from)
			}
			if method != "" && !token.MatchString(method) {
				return usageError("--method %q is not an HTTP method", method)
			}
			for _, h := range headers {
				if name, _, ok := strings.Cut(h, "="); !ok || !token.MatchString(name) {
					return usageError("--header %q is not NAME=VALUE", h)
				}
			}
			query := url.Values{"from": {from}, "authority": {authority}, "path": args, "method": {method}, "header": headers}
			_, err := show(cmd, &a, "/explain/call", query, func(w *table, e agent.CallExplanation) { explainTable(w, e.Explanation) })
			return err
		},
		ValidArgsFunction: offer(&a, "/services", func(services []resources.ServiceView) (paths []string) {
			for _, s := range services {
				paths = append(paths, "/"+s.Name+"/")
			}
			return paths
		}),
	}
	a.add(cmd)
	cmd.Flags().StringVar(&from, "from", "", "`NAMESPACE/NAME` of the pod that calls")
	cmd.Flags().StringVar(&authority, "authority", "127.0.0.1", "what the application dials or sets as the authority; 127.0.0.1, localhost and [::1] name nothing but the gRPC service")
	cmd.Flags().StringVar(&method, "method", "", "HTTP `METHOD` of a call that is not of gRPC, as GET")
	cmd.Flags().StringArrayVar(&headers, "header", nil, "`NAME=VALUE` of a header that the call has, for rules that look at it; give it for each")
	_ = cmd.RegisterFlagCompletionFunc("from", offer(&a, "/proxies", func(clients []ads.Client) (ids []string) {
		for _, c := range clients {
			ids = append(ids, c.ID)
		}
		return ids
	}))
	return cmd
}

func newExplainOne[T any](use, short, long, kind string, check func(string) error, pick func(T) []string, path string) *cobra.Command {
	var a adminFlags
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Long:  strings.TrimSuffix(short+".\n"+long, "\n"),
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := check(args[0]); err != nil {
				return err
			}
			_, err := show(cmd, &a, "/explain/"+kind, url.Values{"name": args}, explainTable)
			return err
		},
		ValidArgsFunction: offer(&a, path, pick),
	}
	a.add(cmd)
	return cmd
}

// offer makes the shell offer what is picked of the agent's answer to path, as
// the one argument; nothing where there is no agent.
func offer[T any](a *adminFlags, path string, pick func(T) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		var v T
		if err := fromEnvironment(cmd.Flags()); err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		body, err := ask(cmd.Context(), a.socket, path, nil)
		if err != nil || json.Unmarshal(body, &v) != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names := pick(v)
		names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasPrefix(n, begun) || plain(n) != n })
		slices.Sort(names)
		return slices.Compact(names), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}
}

func explainTable(w *table, e agent.Explanation) {
	w.row(e.Verdict)
	for _, f := range e.Facts {
		w.row("  "+f.What, f.Says)
	}
}
