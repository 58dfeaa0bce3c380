package agent

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

// whyAbsent says why no call of the service may go to the pod; empty if one
// may. Without a service any one will do.
func (a *Agent) whyAbsent(r *kube.Record, service string) string {
	if r.State == nodecache.Absent {
		return r.Reason
	}
	o := a.dir.Owner(r.Owner)
	if o == nil {
		return "its event is being handled"
	}
	i := slices.IndexFunc(o.Pods, func(m nodecache.Member) bool { return m.UID == r.UID })
	if i < 0 {
		return "its event is being handled"
	}
	if o.Pods[i].Shadowed {
		if other := a.dir.PodAt(r.Addr); other != nil {
			return fmt.Sprintf("another pod that is alive has its address: %s", other)
		}
		return "another pod that is alive has its address"
	}
	services := []string{service}
	if service == "" {
		services = o.Names()
	}
	for _, s := range services {
		if slices.ContainsFunc(o.Targets(s), func(t nodecache.Target) bool { return t.Pod.UID == r.UID }) {
			return ""
		}
	}
	return a.whyNotHere(o, o.Pods[i], service)
}

// whyNotHere says why a pod that gets calls does not get those of a service.
func (a *Agent) whyNotHere(o *nodecache.Owner, m nodecache.Member, service string) string {
	without := "was collected without a service"
	if service != "" {
		without = "was collected without " + service
	}
	switch {
	case !o.Knowledge.Settled():
		return "what its owner serves is " + a.knowledge(o)
	case o.Knowledge == nodecache.None:
		return o.Reason
	case o.Info == nil:
		return "it declares no such service, and " + m.WhyNotAsked(a.only)
	}
	if v := o.Info.Variant(m.Pod); v != nil && v.Pod != "" {
		return "it was asked itself and " + without
	} else if len(o.Info.Variants) > 0 {
		return "the owner's pods run different images; with its own it " + without
	}
	if len(m.Declared) > 0 {
		without += ", and does not declare it"
	}
	return "its owner " + without
}

// reason is why a name is not known, and what to do about that.
type reason struct {
	text, do string
	rank     int
}

// whyUnknown says why nobody is known to serve a service to callers of a
// namespace: the likeliest reason first.
func (a *Agent) whyUnknown(namespace, service string) []reason {
	reasons := a.unheard(namespace, service)
	var elsewhere []string
	for _, s := range a.compiler.Services() {
		if s.Name == service && s.Namespace != namespace {
			elsewhere = append(elsewhere, s.Namespace)
		}
	}
	if len(elsewhere) > 0 {
		text := "namespace %s has it and does not export it to %s"
		if len(elsewhere) > 1 {
			text = "namespaces %s have it and do not export it to %s"
		}
		reasons = append(reasons, reason{rank: 2, text: fmt.Sprintf(text, some(elsewhere, 3), namespace),
			do: fmt.Sprintf("export it: annotation %s: %q on the pods there", kube.ExportAnnotation, namespace)})
	}
	if near := nearest(service, a.compiler.Names(namespace)); near != "" {
		reasons = append(reasons, reason{rank: 2, text: fmt.Sprintf("did you mean %s?", near), do: "call " + near})
	}
	slices.SortStableFunc(reasons, func(a, b reason) int { return cmp.Or(cmp.Compare(b.rank, a.rank), cmp.Compare(a.text, b.text)) })
	return reasons
}

// unheard says of each workload of a namespace of which no service is known why
// that is so. Those that are named as the service is rank higher.
func (a *Agent) unheard(namespace, service string) []reason {
	var reasons []reason
	add := func(workload, text, do string) {
		reasons = append(reasons, reason{text: text, do: do, rank: min(1, affinity(workload, service)) * 3})
	}
	absent := map[nodecache.OwnerKey][]*kube.Record{}
	seen := map[nodecache.OwnerKey]bool{}
	for _, r := range a.store.InNamespace(namespace) {
		o := a.dir.Owner(r.Owner)
		switch {
		case o == nil || len(o.Pods) == 0 && len(o.Services()) == 0:
			absent[r.Owner] = append(absent[r.Owner], r)
		case !seen[r.Owner] && len(o.Services()) == 0:
			add(o.Workload.Name, strings.TrimSuffix(fmt.Sprintf("%s: %s", o.Name, viewOwner(o, a.only).Reason), ": "), remedy(o))
		}
		seen[r.Owner] = true
	}
	for _, rs := range absent {
		r := slices.MinFunc(rs, func(a, b *kube.Record) int { return a.Compare(&b.Pod) })
		text := fmt.Sprintf("%s was never asked: pod %s (%s)", r.OwnerName, r, cmp.Or(r.Reason, "its event is being handled"))
		if n := len(rs) - 1; n > 0 {
			text += fmt.Sprintf(" and %d more", n)
		}
		add(r.Workload.Name, text, "make a pod Ready")
	}
	return reasons
}

// remedy says what to do about an owner without services.
func remedy(o *nodecache.Owner) string {
	if o.Info != nil {
		for p := range o.Info.All() {
			switch p.State {
			case nodecache.PortTLS:
				return "let a port speak plaintext HTTP/2: TLS is not called"
			case nodecache.PortNotGRPC:
				return "correct the hint: the port does not speak gRPC"
			case nodecache.PortDenied, nodecache.PortNoReflection:
				return fmt.Sprintf("declare what the port serves: annotation %s", kube.ServicesAnnotation)
			}
		}
	}
	if len(o.Pods) == 0 {
		return "make a pod Ready"
	}
	switch m := o.Pods[0]; {
	case m.CollectOff:
		return fmt.Sprintf("declare what it serves (annotation %s), or let it be asked", kube.ServicesAnnotation)
	case len(m.AllHints()) == 0:
		return fmt.Sprintf("name the port grpc, or set annotation %s", kube.GRPCPortAnnotation)
	case m.HostNetwork && !m.CollectOn:
		return fmt.Sprintf("opt in: annotation %s: \"true\"", kube.CollectAnnotation)
	}
	return "see fingerpost owners, column REASON"
}

// affinity is higher where a workload's name shares a word with a service's.
func affinity(workload, service string) int {
	n := 0
	for part := range strings.SplitSeq(strings.ToLower(service), ".") {
		if len(part) > 2 && strings.Contains(strings.ToLower(workload), part) {
			n++
		}
	}
	return n
}

// nearest is the name that was most likely meant; empty if none is near.
func nearest(name string, names []string) string {
	last := func(s string) string { return strings.ToLower(s[strings.LastIndexByte(s, '.')+1:]) }
	best, least := "", max(2, len(name)/6)+1
	for _, n := range names {
		d := distance(strings.ToLower(name), strings.ToLower(n))
		if last(n) == last(name) {
			d = min(d, 1) // another package, or a version
		}
		if n != name && d < least {
			best, least = n, d
		}
	}
	return best
}

// distance is how many bytes are added, dropped or changed to make one name the
// other (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := before
			if a[i] != b[j] {
				change++
			}
			before = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// some joins the first few of a list and counts the others.
func some(items []string, shown int) string {
	if len(items) <= shown {
		return strings.Join(items, "; ")
	}
	return fmt.Sprintf("%s (and %d more)", strings.Join(items[:shown], "; "), len(items)-shown)
}

// ago is a time with its age.
func ago(t time.Time) string {
	return fmt.Sprintf("%s (%s ago)", t.UTC().Format(time.RFC3339), max(0, time.Since(t)).Round(time.Second))
}
