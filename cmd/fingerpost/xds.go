package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// quiet is how long a get waits for more after an answer: one set of resources
// may come in several responses.
const quiet = 300 * time.Millisecond

type xdsFlags struct {
	kind, socket, node, nack, output string
	delta                            bool
	names                            []string
	timeout                          time.Duration
}

func newXDS() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "xds",
		Short: "Ask the ADS socket as a sidecar or gRPC client would",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newXDSGet(), newXDSWatch())
	return cmd
}

func (f *xdsFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.kind, "type", "", "clusters, endpoints, listeners or routes")
	fs.StringVar(&f.socket, "ads-socket", agent.Defaults().ADSSocket, "`path` of the ADS socket")
	fs.BoolVar(&f.delta, "delta", false, "speak the incremental protocol (default: state of the world)")
	fs.StringVar(&f.node, "node-id", defaultNodeID(), "`NAMESPACE/NAME` of the client to stand for")
	fs.StringSliceVar(&f.names, "names", nil, "names to subscribe to (default: all that the client can see)")
	fs.StringVar(&f.nack, "nack", "", "reject each response with this `text`")
	fs.StringVarP(&f.output, "output", "o", "table", "table or json")
	complete(cmd, "type", "clusters", "endpoints", "listeners", "routes")
	complete(cmd, "output", "table", "json")
}

func newXDSGet() *cobra.Command {
	var f xdsFlags
	cmd := &cobra.Command{
		Use:   "get",
		Short: "Print the resources of a type that a client has now",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, err := f.check()
			if err != nil {
				return err
			}
			if f.timeout <= 0 {
				return usageError("--timeout %s: it must be longer than 0", f.timeout)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), f.timeout)
			defer cancel()
			return f.run(ctx, t, func(s *client.Stream) error { return f.get(ctx, cmd.OutOrStdout(), t, s) })
		},
	}
	f.add(cmd)
	cmd.Flags().DurationVar(&f.timeout, "timeout", 15*time.Second, "give up after this long")
	return cmd
}

func newXDSWatch() *cobra.Command {
	var f xdsFlags
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Print each response of a type as it comes, until Ctrl-C",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, err := f.check()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			if f.timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, f.timeout)
				defer cancel()
			}
			return f.run(ctx, t, func(s *client.Stream) error { return f.watch(ctx, cmd.OutOrStdout(), s, t) })
		},
	}
	f.add(cmd)
	cmd.Flags().DurationVar(&f.timeout, "timeout", 0, "end after this long; 0: never")
	return cmd
}

func (f *xdsFlags) check() (xds.Type, error) {
	types := map[string]xds.Type{"clusters": xds.Cluster, "endpoints": xds.Endpoint, "listeners": xds.Listener, "routes": xds.Route}
	t, ok := types[f.kind]
	if !ok {
		return 0, usageError("--type %q: say clusters, endpoints, listeners or routes", f.kind)
	}
	if f.output != "table" && f.output != "json" {
		return 0, usageError("--output %q: say table or json", f.output)
	}
	if err := checkNodeID(f.node); err != nil {
		return 0, err
	}
	return t, nil
}

// run opens a stream, subscribes, and leaves the rest to the function.
func (f *xdsFlags) run(ctx context.Context, t xds.Type, then func(*client.Stream) error) error {
	conn, err := client.Dial(f.socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	s, err := client.Open(ctx, conn, client.Options{
		Delta: f.delta,
		Node:  &corev3.Node{Id: f.node, UserAgentName: "fingerpost"},
		Reply: func(r client.Response) client.Reply {
			if r.Type != t {
				return client.Reply{} // which names to ask for
			}
			return client.Reply{Nack: f.nack}
		},
	})
	if err != nil {
		return f.explain(err)
	}
	defer s.Close()
	names := f.names
	switch {
	case len(names) > 0:
	case t == xds.Route:
		names = []string{resources.RouteName}
	case t == xds.Endpoint:
		if names, err = f.clusters(ctx, s); err != nil {
			return err
		}
	}
	if len(names) > 0 || t.HasWildcard() {
		if err := s.Subscribe(t, names...); err != nil {
			return f.explain(s.Err())
		}
	}
	f.names = names
	return then(s)
}

// clusters returns the names of the clusters that have endpoints: EDS has no
// wildcard, so the clusters say what to ask for, as they do for Envoy.
func (f *xdsFlags) clusters(ctx context.Context, s *client.Stream) ([]string, error) {
	if err := s.Subscribe(xds.Cluster); err != nil {
		return nil, f.explain(s.Err())
	}
	if err := f.settle(ctx, s, nil); err != nil {
		return nil, err
	}
	var names []string
	for name, r := range s.Memory().Resources[xds.Cluster] {
		var c clusterv3.Cluster
		if err := r.Body.UnmarshalTo(&c); err != nil {
			return nil, fmt.Errorf("cluster %q does not parse: %w", name, err)
		}
		if c.GetType() == clusterv3.Cluster_EDS {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// settle waits for an answer and then until none has come for a while.
func (f *xdsFlags) settle(ctx context.Context, s *client.Stream, each func(client.Response)) error {
	wait := ctx
	for first := true; ; first = false {
		r, err := s.Next(wait)
		switch {
		case err == nil:
			if each != nil {
				each(r)
			}
			var cancel context.CancelFunc
			wait, cancel = context.WithTimeout(ctx, quiet)
			defer cancel()
		case !first && errors.Is(err, context.DeadlineExceeded):
			return nil
		default:
			return f.explain(err)
		}
	}
}

func (f *xdsFlags) get(ctx context.Context, out io.Writer, t xds.Type, s *client.Stream) error {
	refused := map[string]client.Resource{} // what comes is not kept
	if len(f.names) > 0 || t.HasWildcard() {
		if err := f.settle(ctx, s, func(r client.Response) {
			if r.Type == t {
				for _, one := range r.Resources {
					refused[one.Name] = one
				}
			}
		}); err != nil {
			return err
		}
	}
	have := s.Memory().Resources[t]
	if f.nack != "" {
		have = refused
	}
	rows := make([]client.Resource, 0, len(have))
	for _, name := range slices.Sorted(maps.Keys(have)) {
		rows = append(rows, have[name])
	}
	if f.output == "json" {
		return writeResources(out, rows, "  ")
	}
	w := newTable(out)
	w.row("NAME", "VERSION", "BYTES")
	for _, r := range rows {
		w.row(r.Name, r.Version, len(r.Body.GetValue()))
	}
	return w.flush()
}

func (f *xdsFlags) watch(ctx context.Context, out io.Writer, s *client.Stream, t xds.Type) error {
	for {
		r, err := s.Next(ctx)
		if ctx.Err() != nil {
			return nil // told to end
		}
		if err != nil {
			return f.explain(err)
		}
		if r.Type != t {
			continue
		}
		if f.output == "json" {
			err = writeResources(out, r.Resources, "")
		} else {
			_, err = fmt.Fprintf(out, "%s %s version=%s resources=%v removed=%v\n", time.Now().UTC().Format(time.RFC3339), r.Type, r.Version, r.Names(), r.Removed)
		}
		if err != nil {
			return err
		}
	}
}

// explain turns the error of a stream into one that says what to do.
func (f *xdsFlags) explain(err error) error {
	if code := status.Code(err); errors.Is(err, context.DeadlineExceeded) || code == codes.DeadlineExceeded || code == codes.Canceled {
		return errors.New("no answer in time: the agent's gate may be closed (see fingerpost status), or none of the names exists, which the state-of-the-world protocol does not answer (try --delta)")
	}
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	if _, statErr := os.Stat(f.socket); errors.Is(statErr, fs.ErrNotExist) {
		return fmt.Errorf("no agent at %s: there is no such socket; is the agent running, and is --ads-socket right?", f.socket)
	}
	return fmt.Errorf("ADS at %s: %s; is the agent running? see fingerpost status", f.socket, status.Convert(err).Message())
}

func writeResources(out io.Writer, rs []client.Resource, indent string) error {
	type row struct {
		Name     string          `json:"name"`
		Version  string          `json:"version"`
		Resource json.RawMessage `json:"resource"`
	}
	rows := make([]row, 0, len(rs))
	for _, r := range rs {
		m, err := r.Body.UnmarshalNew()
		if err != nil {
			return fmt.Errorf("resource %q does not parse: %w", r.Name, err)
		}
		body, err := protojson.Marshal(m)
		if err != nil {
			return fmt.Errorf("resource %q: %w", r.Name, err)
		}
		rows = append(rows, row{Name: r.Name, Version: r.Version, Resource: body})
	}
	e := json.NewEncoder(out)
	e.SetIndent("", indent)
	return e.Encode(rows)
}
