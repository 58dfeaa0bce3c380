package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/daemonset/injection"
)

// maxManifests bounds what inject reads, in bytes.
const maxManifests = 256 << 20

func newInject() *cobra.Command {
	var o injection.Options
	var file string
	var policies bool
	cmd := &cobra.Command{
		Use:   "inject -f FILE|-",
		Short: "Add to manifests what pods need to reach the agent",
		Long: `Add to manifests what their pods need to reach the agent of their node, and
print them; what became of each workload goes to standard error.

  fingerpost inject -f web.yaml | kubectl apply -f -
  kubectl kustomize . | fingerpost inject -f - | kubectl apply -f -

A pod gets an Envoy sidecar, which its application calls at 127.0.0.1:15001, or
with the mode grpc the bootstrap of gRPC's own xDS client. The label
` + injection.Label + ` of the pod, or of the template of pods, decides: envoy,
grpc, or "false" for neither; without it the flag --mode does, and the label is
added. Pods are found in Pods, Deployments, StatefulSets, DaemonSets,
ReplicaSets, ReplicationControllers, Jobs, CronJobs, PodTemplates and lists of
them. Everything else is printed byte for byte, as is what is injected already.

Annotations of the pod: fingerpost.dev/sidecar-image, -cpu-request,
-memory-request, -cpu-limit and -memory-limit.

A workload that must not be injected (another mesh has injected it or would, it
is on the host's network, it uses the sidecar's ports or its user) is an error,
and then nothing is printed. The admission policies in
daemonset/components/injection do the same in the API server; --policies prints
them for the image and the port of the flags.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case o.Mode != injection.Envoy && o.Mode != injection.GRPC:
				return usageError("--mode %q: say envoy or grpc", o.Mode)
			case policies && file != "":
				return usageError("--policies reads no file: leave --filename out")
			case policies:
				text, err := injection.Policies(o)
				if err != nil {
					return &agent.UsageError{Err: err}
				}
				_, err = cmd.OutOrStdout().Write(text)
				return err
			case file == "":
				return usageError("--filename is needed: say -f FILE, or -f - for standard input; see %s --help", cmd.CommandPath())
			case o.Image == "" || o.EgressPort == 0:
				return usageError("--image and --egress-port must not be empty")
			}
			return inject(cmd, file, o)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&file, "filename", "f", "", "`FILE` with the manifests, YAML or JSON; - is standard input")
	f.StringVar(&o.Mode, "mode", injection.Envoy, "what pods without the label get: envoy or grpc")
	f.StringVar(&o.Image, "image", injection.DefaultImage, "`IMAGE` of the sidecar, whose /usr/local/bin/envoy is run")
	f.Uint16Var(&o.EgressPort, "egress-port", injection.DefaultEgressPort, "the agent's --egress-port, which no other container may have")
	f.BoolVar(&policies, "policies", false, "print the admission policies that do the same in the API server")
	complete(cmd, "mode", injection.Envoy, injection.GRPC)
	return cmd
}

func inject(cmd *cobra.Command, file string, o injection.Options) error {
	name, in := file, cmd.InOrStdin()
	if file == "-" {
		name = "standard input"
	} else {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxManifests+1))
	if err == nil && len(text) > maxManifests {
		err = fmt.Errorf("more than %d MiB", maxManifests>>20)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return errors.New(name + ": there is nothing in it")
	}
	out, outcomes, err := injection.Manifests(text, o)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if _, err := cmd.OutOrStdout().Write(out); err != nil {
		return err
	}
	for _, w := range outcomes {
		if w.Mode != "" {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: injected, mode %s\n", plain(w.Object), w.Mode)
		} else {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: left as it is: %s\n", plain(w.Object), w.Reason)
		}
	}
	if len(outcomes) == 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: no workload in it\n", name)
	}
	return nil
}
