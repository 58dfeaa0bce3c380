package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/agent/peer"
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

func statusTable(w *table, s agent.Status) {
	w.row("node", s.Node)
	w.row("version", s.Version)
	source := s.Source.Kind
	switch {
	case !s.Source.Synced:
		source += ", not synced"
	case s.Source.StaleSeconds > 0:
		source += fmt.Sprintf(", stale for %s", (time.Duration(s.Source.StaleSeconds) * time.Second))
	default:
		source += ", synced"
	}
	w.row("source", source)
	if s.Source.Error != "" {
		w.row("", s.Source.Error)
	}
	gate := s.Gate
	if s.Reason != "" {
		gate += ": " + s.Reason
	}
	w.row("gate", gate)
	var owners []string
	for _, k := range []string{"known", "none", "collecting", "unknown", "failed"} {
		if n := s.Owners[k]; n > 0 {
			owners = append(owners, fmt.Sprintf("%d %s", n, k))
		}
	}
	w.row("owners", cmp.Or(strings.Join(owners, ", "), "0"))
	w.row("pods", s.Pods)
	w.row("proxies", s.Proxies)
	w.row("nacks", s.Nacks)
	w.row("withheld", s.Withheld)
	if s.Limited > 0 {
		w.row("limited", fmt.Sprintf("%d; see fingerpost proxies", s.Limited))
	}
	parts := make([]string, 0, len(s.Parts))
	for name := range s.Parts {
		parts = append(parts, name)
	}
	slices.Sort(parts)
	for _, name := range parts {
		w.row(name, s.Parts[name])
	}
}

// newListing makes the command that lists what the agent has under its name.
func newListing[T any](name, short string, rows func(*table, T)) *cobra.Command {
	var a adminFlags
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := show(cmd, &a, "/"+name, nil, rows)
			return err
		},
	}
	a.add(cmd)
	return cmd
}

func newServices() *cobra.Command {
	return newListing("services", "List the gRPC services that are served, and where", servicesTable)
}

func servicesTable(w *table, services []resources.ServiceView) {
	w.row("NAMESPACE", "SERVICE", "ENDPOINTS", "OWNERS", "CLAIMANTS")
	for _, s := range services {
		var eps []string
		for _, e := range s.Endpoints {
			ep := e.Address
			if e.State != "serving" {
				ep += " (" + e.State + ")"
			}
			eps = append(eps, ep)
		}
		w.row(s.Namespace, s.Name, cmp.Or(some(eps), "none"), some(s.Owners), some(s.Claimants))
	}
}

func newOwners() *cobra.Command {
	return newListing("owners", "List the owners of pods and what is known of them", ownersTable)
}

func ownersTable(w *table, owners []agent.OwnerView) {
	w.row("NAMESPACE", "OWNER", "PODS", "KNOWLEDGE", "ORIGIN", "SERVICES", "CHANGE", "REASON")
	for _, o := range owners {
		services := o.Services
		for _, p := range o.Presumed {
			for _, name := range p.Services {
				services = append(services, name+" (presumed)")
			}
		}
		var change []string
		for _, name := range o.Added {
			change = append(change, "+"+name)
		}
		for _, name := range o.Dropped {
			change = append(change, "-"+name)
		}
		origin := o.Origin
		if o.Peer != "" && o.Collected != nil {
			origin = fmt.Sprintf("peer %s, %s ago", o.Peer, time.Since(*o.Collected).Round(time.Second))
		}
		w.row(o.Namespace, o.Name, len(o.Pods), o.Knowledge, origin, some(services), some(change), o.Reason)
	}
}

func newProxies() *cobra.Command {
	return newListing("proxies", "List the connected Envoys and gRPC clients, and what they accepted", proxiesTable)
}

func proxiesTable(w *table, proxies []ads.Client) {
	w.row("ID", "PROVED", "CONNECTED", "PROTOCOL", "CLUSTERS", "CDS", "EDS", "LDS", "RDS", "LAST ERROR")
	for _, p := range proxies {
		protocol := "sotw"
		if p.Delta {
			protocol = "delta"
		}
		proved := "no"
		if p.Identity.Pod != "" {
			proved = p.Identity.Method
			if p.Identity.Pod != p.ID {
				proved += ": " + p.Identity.Pod
			}
		}
		given := map[string]int{}
		for _, u := range p.Upstreams {
			given[u.Origin]++
		}
		var counts []string
		for _, origin := range slices.Sorted(maps.Keys(given)) {
			counts = append(counts, fmt.Sprintf("%d %s", given[origin], origin))
		}
		clusters := p.Clusters
		if len(counts) > 0 {
			clusters += " (" + strings.Join(counts, ", ") + ")"
		}
		row := []any{p.ID, proved, time.Since(p.Connected).Round(time.Second).String(), protocol, clusters}
		last := strings.Join(append(slices.DeleteFunc([]string{p.State}, func(s string) bool { return s == "" }), p.Warnings...), "; ")
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
		w.row(append(row, last)...)
	}
}

func newPaths() *cobra.Command {
	cmd := newListing("paths", "List the ways to the endpoints of services, and what was seen of connections", pathsTable)
	cmd.Long = `List the ways from this node to the endpoints of services and to whatever else
somebody on this node has connected to, and what became of these connections.

CLASS is host (the node's own address), local (a pod of this node, as spec.nodeName
says; "not wired" where no route leads to it), same-l2 (no router between), gateway,
tunnel, unknown (the route does not tell), or unreachable. COST is the round trip
that was seen lately, else what is usual for the class. OK and FAILED count the
connections since the agent began to observe; RTT is the last round trip of a SYN,
and RETRANSMITS counts segments that were sent again. Parts path and observe of
fingerpost status say whether the kernel tells all this here.`
	return cmd
}

func pathsTable(w *table, paths []agent.PathView) {
	w.row("ADDRESS", "POD", "NODE", "CLASS", "LINK", "COST", "OK", "FAILED", "RTT", "RETRANSMITS", "REASON")
	us := func(n int64) string { return (time.Duration(n) * time.Microsecond).String() }
	for _, p := range paths {
		class, link, cost := p.Class, p.Link, "none"
		if p.Wired != nil && !*p.Wired {
			class += ", not wired"
		}
		if p.Via != "" {
			link += " via " + p.Via
		}
		if p.CostUS != nil {
			cost = us(*p.CostUS)
		}
		row := []any{p.Address, p.Pod, p.Node, class, link, cost}
		if o := p.Observed; o != nil {
			var failed []string
			for _, f := range []struct {
				n    uint64
				what string
			}{{o.Refused, "refused"}, {o.TimedOut, "timed out"}, {o.Unreachable, "unreachable"}, {o.GivenUp, "given up"}} {
				if f.n > 0 {
					failed = append(failed, fmt.Sprintf("%d %s", f.n, f.what))
				}
			}
			rtt := ""
			if o.RTTLastUS > 0 {
				rtt = us(o.RTTLastUS)
			}
			row = append(row, o.OK, cmp.Or(strings.Join(failed, ", "), "0"), rtt, o.Retransmits)
		} else {
			row = append(row, "", "", "", "")
		}
		w.row(append(row, p.Reason)...)
	}
}

func newPeers() *cobra.Command {
	cmd := newListing("peers", "List the agents of other nodes, and how it stands with them", peersTable)
	cmd.Long = `List the agents of the cluster that this one knows, and how it stands with them.

An agent talks to few of the others: idle is one that it has no reason to talk
to. RECORDS counts the owners of which what is known is the word of that agent,
by whichever way it came. Part peers of fingerpost status says whether this agent
shares at all.`
	return cmd
}

func peersTable(w *table, peers []agent.PeerView) {
	w.row("NODE", "ZONE", "ADDRESS", "STATE", "RECORDS", "LAST CONTACT", "LAST ERROR")
	for _, p := range peers {
		last := "never"
		switch {
		case p.State == string(peer.StateSelf):
			last = ""
		case p.LastContact != nil:
			last = time.Since(*p.LastContact).Round(time.Second).String() + " ago"
		}
		w.row(p.Node, p.Zone, p.Address, p.State, p.Records, last, p.LastError)
	}
}
