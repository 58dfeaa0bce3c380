package agent

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fingerpost/fingerpost/agent/journal"
	"github.com/fingerpost/fingerpost/nodecache"
)

// explainWorkload says what the revisions of a workload serve, and how its pods
// stand. The name is namespace/name, or namespace/kind/name.
func (a *Agent) explainWorkload(id string) (*Explanation, error) {
	namespace, name, _ := strings.Cut(id, "/")
	owners := map[nodecache.Workload][]*nodecache.Owner{}
	for _, o := range append(a.dir.Retained(namespace), a.dir.Owners()...) {
		if o.Workload.Namespace == namespace && names(o.Workload, name) {
			owners[o.Workload] = append(owners[o.Workload], o)
		}
	}
	for _, r := range a.store.InNamespace(namespace) {
		if names(r.Workload, name) && owners[r.Workload] == nil {
			owners[r.Workload] = []*nodecache.Owner{}
		}
	}
	var found []string
	for w := range owners {
		found = append(found, w.String())
	}
	slices.Sort(found)
	switch {
	case len(found) == 0 && !a.source.Status().Synced:
		return nil, fmt.Errorf("workload %s is not known, and the source has not synced yet", id)
	case len(found) == 0:
		return nil, fmt.Errorf("there is no workload %s that has pods, or had some in the last minutes", id)
	case len(found) > 1:
		return nil, fmt.Errorf("several workloads are named %s: say which of %s", id, strings.Join(found, ", "))
	}
	a.feed.flush()
	for w, os := range owners {
		return a.explainOwners(w, os), nil
	}
	return nil, nil
}

// names tells whether a name, with or without the kind, is that of a workload.
// A Deployment's is known by its ReplicaSets.
func names(w nodecache.Workload, name string) bool {
	if kind, rest, ok := strings.Cut(name, "/"); ok {
		return rest == w.Name && (strings.EqualFold(kind, w.Kind) || strings.EqualFold(kind, "Deployment") && w.Kind == "ReplicaSet")
	}
	return name == w.Name
}

func (a *Agent) explainOwners(w nodecache.Workload, owners []*nodecache.Owner) *Explanation {
	e := &Explanation{Facts: []Fact{}}
	var services, routed []string
	said := map[string]bool{} // one at most: it is the workload's
	for _, o := range owners {
		services = append(services, o.Names()...)
		for _, p := range o.Presumed {
			e.fact("presumed", "%s serves %s, %s", o.Name, p.Service, a.whyPresumed(o, &p))
		}
		e.fact("revision", "%s (%s) with %s, %s", o.Name, o.Key, count(len(o.Pods), "pod"), a.learned(o))
		if d := a.follower.Change(o.Key); len(d.Added)+len(d.Dropped) > 0 {
			e.fact("contract", "%s adds %s and drops %s, compared with %s", o.Name, orNothing(d.Added), orNothing(d.Dropped), d.Previous)
		}
		for _, st := range o.Behind {
			e.fact("service", "%s stands behind %s, %s", o.Name, st.Front, ledTo(st))
		}
		if o.Info != nil {
			for p := range o.Info.All() {
				e.fact(fmt.Sprintf("port %d", p.Port), "%s: %s", o.Name, saysPort(p))
			}
		}
		a.explainRoutes(e, o)
		routed = append(routed, a.routed(o)...)
		if o.Policy != nil {
			said[o.Policy.String()] = true
		}
		for _, text := range o.Ignored {
			e.fact("note", "%s: %s", o.Name, text)
		}
		if len(o.Export) > 0 {
			e.fact("export", "%s exports to %s", o.Name, strings.Join(o.Export, ", "))
		}
	}
	for text := range said {
		e.fact("policy", "its last revision says of calls: %s", text)
	}
	slices.Sort(services)
	slices.Sort(routed)
	routed = slices.Compact(routed)
	var provides, claims []string
	for _, s := range slices.Compact(services) {
		b, ok := a.compiler.Behind(w.Namespace, s)
		switch {
		case !ok:
			e.fact(s, "has no cluster: it could not be made, or is infrastructure")
		case slices.ContainsFunc(b.Provider, func(o *nodecache.Owner) bool { return o.Workload == w }):
			provides = append(provides, s)
			e.fact(s, "provided, with %s in all", count(len(b.Endpoints), "endpoint"))
		default:
			claims = append(claims, s)
			e.fact(s, "claimed; %s provides it, and gets the calls by the name alone", b.Provider[0].Workload)
		}
	}
	for _, n := range a.upstreams.Of(w, time.Now()) {
		e.fact("upstream", "calls %s, last asked for or held by a sidecar that asked for it at %s (to the hour): the sidecars of its later pods are given it", n.Cluster, n.Used.UTC().Format(time.RFC3339))
	}
	serving, absent := 0, []string{}
	declared := map[nodecache.Upstream]bool{}
	for _, r := range a.store.OfWorkload(w) {
		for _, u := range r.Upstreams {
			if !declared[u] {
				e.fact("upstream", "%s", a.saysUpstream(w.Namespace, u))
				declared[u] = true
			}
		}
		why := a.whyAbsent(r, "")
		if why == "" {
			serving++
			e.fact("pod", "%s on node %q, %s, %s", r, r.Node, r.Addr, r.State)
			continue
		}
		absent = append(absent, fmt.Sprintf("pod %s (%s)", r, why))
		e.fact("absent", "pod %s on node %q: %s", r, r.Node, why)
	}
	says := "serves nothing that is known"
	switch {
	case len(provides) > 0:
		says = fmt.Sprintf("serves %s with %s", strings.Join(provides, ", "), count(serving, "pod"))
	case len(claims) > 0:
		says = "gets no calls"
	}
	if len(claims) > 0 {
		says += "; another workload provides " + strings.Join(claims, ", ")
	}
	if len(routed) > 0 {
		says += "; calls may come by " + some(routed, 2)
	}
	if len(absent) > 0 {
		says += "; absent: " + some(absent, 2)
	}
	e.Verdict = fmt.Sprintf("%s of namespace %s %s", w, w.Namespace, says)
	e.decided(a.decisions(2*shownDecisions, func(j *journal.Entry) bool { return j.Workload == w }))
	return e
}

// explainRoutes says which rules of routes lead to the owner, and what is
// refused of those that would.
func (a *Agent) explainRoutes(e *Explanation, o *nodecache.Owner) {
	const most = 50 // rows of each
	shown := 0
	for _, entry := range o.Routes {
		r := a.dir.Route(entry.Route)
		if r == nil || entry.Rule >= len(r.Rules) || entry.Match >= len(r.Rules[entry.Rule].Matches) {
			continue
		}
		if shown++; shown > most {
			e.fact("route", "and %d more", len(o.Routes)-most)
			break
		}
		e.fact("route", "rule %d of %s %s leads to %s%s: %s", entry.Rule, r.Kind, r.Key(), o.Name, a.unreached(r), saysMatch(&r.Rules[entry.Rule].Matches[entry.Match]))
	}
	shown = 0
	for _, st := range o.Behind {
		for _, r := range a.dir.RoutesTo(st.Key()) {
			for _, text := range refused(r) {
				if f := (Fact{What: "refused", Says: text}); shown < most && !slices.Contains(e.Facts, f) { // once for all revisions
					e.Facts = append(e.Facts, f)
					shown++
				}
			}
		}
	}
}

// unreached says of a route that no call of this node takes why, empty where
// one may.
func (a *Agent) unreached(r *nodecache.Route) string {
	why := ", for Gateways alone"
	for _, p := range r.Parents {
		if !p.Service() {
			continue
		}
		if a.dir.Front(p.Name) != nil {
			return ""
		}
		why = fmt.Sprintf(", if there were a Service %s", p.Name)
	}
	return why
}

// routed names the routes by which calls come to an owner, each once.
func (a *Agent) routed(o *nodecache.Owner) []string {
	var names []string
	for _, entry := range o.Routes {
		if r := a.dir.Route(entry.Route); r != nil && a.unreached(r) == "" {
			names = append(names, fmt.Sprintf("%s %s", r.Kind, r.Key()))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// orNothing is a list in one line.
func orNothing(items []string) string {
	if len(items) == 0 {
		return "nothing"
	}
	return strings.Join(items, ", ")
}
