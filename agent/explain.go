package agent

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fingerpost/fingerpost/agent/journal"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// explainPod says why a pod, by namespace/name, is or is not served.
func (a *Agent) explainPod(id string) (*Explanation, error) {
	ns, name, _ := strings.Cut(id, "/")
	r := a.store.Pod(ns, name)
	if r == nil {
		if !a.source.Status().Synced {
			return nil, fmt.Errorf("pod %s is not known, and the source has not synced yet", id)
		}
		return nil, fmt.Errorf("there is no pod %s", id)
	}
	e := &Explanation{Facts: []Fact{}}
	e.fact("state", "%s", strings.TrimSuffix(r.State.String()+": "+r.Reason, ": "))
	if r.Unready {
		e.fact("ready", "no; it serves all the same, since every Service in front of it publishes pods that are not ready")
	}
	address := "none"
	if r.Addr.IsValid() {
		address = r.Addr.String()
	}
	e.fact("address", "%s on node %q", address, r.Node)
	a.paths.explain(e, "", r.Addr, r.Node)
	e.fact("owner", "%s (%s), of workload %s", r.OwnerName, r.Owner, r.Workload)
	m, ok := a.dir.Member(r.UID)
	if !ok {
		m = nodecache.Member{Pod: &r.Pod}
	}
	for _, h := range m.AllHints() {
		e.fact("hint", "port %d by %s", h.Port, h.Why)
	}
	for _, st := range m.Behind {
		e.fact("service", "stands behind %s, %s", st.Front, ledTo(st))
	}
	for _, d := range r.Declared {
		e.fact("declared", "port %d serves %s", d.Port, strings.Join(d.Services, ", "))
	}
	for _, u := range r.Upstreams {
		e.fact("upstream", "%s", a.saysUpstream(ns, u))
	}
	for _, note := range r.Notes() {
		e.fact("note", "%s", note)
	}
	if r.Policy != nil {
		e.fact("says", "of calls to its workload: %s", r.Policy)
	}
	defer func() {
		e.decided(a.decisions(shownDecisions, func(j *journal.Entry) bool { return j.Owner == r.Owner }))
	}()
	if r.State == nodecache.Absent {
		e.Verdict = fmt.Sprintf("%s is not served: %s", id, r.Reason)
		return e, nil
	}
	o := a.dir.Owner(r.Owner)
	if o == nil {
		e.Verdict = fmt.Sprintf("%s is not served yet: its event is being handled", id)
		return e, nil
	}
	a.explainOwner(e, o, &r.Pod)
	var served, others []string
	for _, m := range o.Pods {
		if m.UID == r.UID && m.Shadowed {
			e.Verdict = fmt.Sprintf("%s is not served: another pod that is alive has its address", id)
			return e, nil
		}
	}
	for _, s := range o.Names() {
		i := slices.IndexFunc(o.Targets(s), func(t nodecache.Target) bool { return t.Pod.UID == r.UID })
		if i < 0 {
			continue
		}
		served = append(served, s)
		if t := o.Targets(s)[i]; t.Presumed != nil {
			e.fact("presumed", "%s on port %d, %s", s, t.Addr.Port(), a.whyPresumed(o, t.Presumed))
		}
	}
	switch {
	case len(served) == 0 && o.Knowledge == nodecache.Known:
		e.Verdict = fmt.Sprintf("%s is not served: it serves nothing itself, only other pods of its owner do", id)
	case len(served) == 0 && o.Knowledge.Settled():
		e.Verdict = fmt.Sprintf("%s is not served: its owner has no service: %s", id, o.Reason)
	case len(served) == 0:
		e.Verdict = strings.TrimSuffix(fmt.Sprintf("%s is not served yet: what its owner serves is %s: %s", id, o.Knowledge, o.Reason), ": ")
	default:
		for _, s := range a.services() {
			if slices.Contains(served, s.Name) && s.Namespace == ns && slices.Contains(s.Claimants, o.Key.String()) {
				e.fact("claimant", "%s goes to %s, which provides it", s.Name, strings.Join(s.Owners, ", "))
				served = slices.DeleteFunc(served, func(name string) bool { return name == s.Name })
				others = append(others, s.Name)
			}
		}
		e.Verdict = fmt.Sprintf("%s is served: %s", id, strings.Join(served, ", "))
		if len(served) == 0 {
			e.Verdict = fmt.Sprintf("%s gets no calls: another workload provides %s", id, strings.Join(others, ", "))
		} else if len(others) > 0 {
			e.Verdict += "; another workload provides " + strings.Join(others, ", ")
		}
	}
	if routed := a.routed(o); len(routed) > 0 && r.State == nodecache.Serving {
		e.Verdict += "; calls may come by " + some(routed, 2)
	}
	return e, nil
}

// saysUpstream says where what a pod of the namespace declares leads.
func (a *Agent) saysUpstream(ns string, u nodecache.Upstream) string {
	clusters, reason := a.compiler.Upstream(a.dir, ns, u)
	says := fmt.Sprintf("declares that it calls %s", u)
	if len(clusters) > 0 {
		says += ", by " + some(clusters, 5)
	}
	return strings.TrimSuffix(says+": "+reason, ": ")
}

// whyPresumed says by whom an owner's pods are presumed to serve something, and
// what their own word is.
func (a *Agent) whyPresumed(o *nodecache.Owner, p *nodecache.Presumption) string {
	return fmt.Sprintf("presumed from %s (%s), since its own collect does not disprove it: %s", p.Name, p.From, a.knowledge(o))
}

// saysState is the state of an endpoint, and why where that is presumed.
func (a *Agent) saysState(ep *resources.EndpointView, service string) string {
	if o := a.dir.Owner(ep.Owner); o != nil && o.Presumption(service) != nil && ep.State == resources.StatePresumed {
		return a.whyPresumed(o, o.Presumption(service))
	}
	return ep.State
}

// knowledge says what is known of an owner, and why not more.
func (a *Agent) knowledge(o *nodecache.Owner) string {
	return strings.TrimSuffix(o.Knowledge.String()+": "+viewOwner(o, a.only).Reason, ": ")
}

// ledTo says to which ports a Service leads.
func ledTo(st *nodecache.Standing) string {
	switch {
	case st.AnyPort:
		return "which leads to every port"
	case len(st.Ports) == 0:
		return "which leads to no TCP port"
	}
	return "which leads to port " + strings.Trim(strings.ReplaceAll(fmt.Sprint(st.Ports), " ", ", "), "[]")
}

// explainOwner says what is known of the owner, and of that what holds for the
// pod.
func (a *Agent) explainOwner(e *Explanation, o *nodecache.Owner, pod *nodecache.Pod) {
	e.fact("knowledge", "%s", a.knowledge(o))
	if o.Policy != nil {
		e.fact("policy", "the last revision of %s says of calls: %s", o.Workload, o.Policy)
	}
	if o.Info == nil {
		return
	}
	from, at := o.Info.Pod, o.Info.Collected
	if v := o.Info.Variant(pod); v != nil {
		from, at = v.From, v.Collected
		e.fact("variant", "other pods of its owner serve something else; this holds for %s",
			map[bool]string{true: "pods with its images", false: "this pod alone"}[v.Pod == ""])
	}
	asked := ""
	if from != "" {
		asked = ", from pod " + from
	}
	e.fact("learned", "by %s at %s%s", a.by(o), at.UTC().Format("2006-01-02T15:04:05Z"), asked)
	for _, p := range o.Info.For(pod) {
		e.fact(fmt.Sprintf("port %d", p.Port), "%s", saysPort(&p))
	}
}

// by says who learned what is known of the owner, which has an Info: for a peer
// with the node that it is the agent of.
func (a *Agent) by(o *nodecache.Owner) string {
	if o.Info.Origin == nodecache.OriginPeer && a.peers != nil {
		if node := a.peers.exchange.Author(o.Key); node != "" {
			return fmt.Sprintf("peer, the agent of node %s,", node)
		}
	}
	return string(o.Info.Origin)
}

// saysPort says what a port turned out to be.
func saysPort(p *nodecache.PortInfo) string {
	var names []string
	for _, s := range p.Services {
		names = append(names, s.Name)
	}
	says := strings.Join(names, ", ")
	if says == "" {
		says = p.Detail
	}
	return strings.TrimSuffix(string(p.State)+": "+says, ": ")
}

func (a *Agent) services() []resources.ServiceView {
	a.feed.flush()
	return a.compiler.Services()
}

// explainService says where a gRPC service is served, in every namespace, and
// which owners might have it.
func (a *Agent) explainService(name string) *Explanation {
	e := &Explanation{Facts: []Fact{}}
	found := 0
	for _, s := range a.services() {
		if s.Name != name {
			continue
		}
		found++
		e.fact(s.Namespace, "cluster %s/%s, provided by %s", s.Namespace, s.Name, strings.Join(s.Owners, ", "))
		for _, ep := range s.Endpoints {
			e.fact(s.Namespace, "%s, %s", ep.String(), a.saysState(&ep, name))
		}
		e.spread(a.compiler, s.Namespace, s.Endpoints)
		if len(s.Endpoints) == 0 {
			e.fact(s.Namespace, "no endpoint: no pod of the provider is serving")
		}
		if s.Policy != "" {
			e.fact(s.Namespace, "policy of its cluster: %s", s.Policy)
		}
		for _, c := range s.Claimants {
			e.fact(s.Namespace, "claimed by %s as well, which gets no calls", c)
		}
		if len(s.Exported) > 0 {
			e.fact(s.Namespace, "exported to the clients of %s", strings.Join(s.Exported, ", "))
		}
		if len(s.Claimants) > 0 {
			for i, w := range s.Order {
				e.fact(s.Namespace, "order %d: %s", i+1, w)
			}
		}
	}
	if nodecache.Infrastructure(name) {
		e.Verdict = name + " is infrastructure, which is never served by its name alone"
		return e
	}
	for _, o := range a.dir.Owners() {
		if found == 0 && !o.Knowledge.Settled() {
			e.fact(o.Workload.Namespace, "%s might have it: %s", o.Name, a.knowledge(o))
		}
	}
	switch {
	case found == 0 && !a.source.Status().Synced:
		e.Verdict = name + " is not known, and the source has not synced yet"
	case found == 0 && len(e.Facts) == 0:
		e.Verdict = name + " is not served: no owner has it"
	case found == 0:
		e.Verdict = name + " is not served: no owner is known to have it, and some are not known yet"
	default:
		e.Verdict = fmt.Sprintf("%s is served in %d namespace(s)", name, found)
	}
	e.decided(a.decisions(shownDecisions, func(j *journal.Entry) bool { return j.Service == name }))
	return e
}
