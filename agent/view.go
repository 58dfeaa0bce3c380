package agent

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Status is the answer to /status.
type Status struct {
	Node    string `json:"node"`
	Version string `json:"version"`
	Source  Source `json:"source"`
	// Gate is open or closed; Reason says why it is closed, or what is still
	// missing behind an open one.
	Gate   string         `json:"gate"`
	Reason string         `json:"reason"`
	Owners map[string]int `json:"owners"` // by knowledge
	Pods   int            `json:"pods"`   // serving and draining
	// Proxies counts the connected clients, Nacks the types that one of them
	// has rejected and not accepted since.
	Proxies int `json:"proxies"`
	Nacks   int `json:"nacks"`
	// Withheld counts the resources that are not sent to a client which
	// refused them, Slow the clients that do not read or acknowledge.
	Withheld int `json:"withheld,omitempty"`
	Slow     int `json:"slow,omitempty"`
	// Limited counts the clients that do not have all that they ask for, or
	// cannot do all that they are to; see fingerpost proxies.
	Limited int `json:"limited,omitempty"`
	// Parts says of each part whether it is "on" or "off: reason".
	Parts map[string]string `json:"parts"`
}

// Source is how the source of pods is.
type Source struct {
	Kind   string `json:"kind"` // kube or file
	Synced bool   `json:"synced"`
	// StaleSeconds is how long the source has been cut off or broken; 0 while
	// it is well.
	StaleSeconds int64  `json:"stale_seconds"`
	Error        string `json:"error"`
}

// Trouble says in one line what is not well; empty if all is.
func (s *Status) Trouble() string {
	switch {
	case !s.Source.Synced:
		return "the source is not synced: " + s.Source.Error
	case s.Gate != gateOpen:
		return "the gate is closed: " + s.Reason
	case strings.HasPrefix(s.Parts[partSockets], "off: "):
		return "sockets are " + s.Parts[partSockets]
	case s.Source.Error != "":
		return fmt.Sprintf("the source is stale for %s: %s", time.Duration(s.Source.StaleSeconds)*time.Second, s.Source.Error)
	case s.Nacks > 0:
		return fmt.Sprintf("%d rejected by clients; see fingerpost proxies", s.Nacks)
	}
	return ""
}

// Readiness is the answer to /ready.
type Readiness struct {
	Ready bool `json:"ready"`
	// Reason says why the agent is not ready, or what is still missing.
	Reason string `json:"reason"`
}

// OwnerView is one row of the answer to /owners.
type OwnerView struct {
	Key       string `json:"key"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Workload  string `json:"workload"`
	Knowledge string `json:"knowledge"`
	Origin    string `json:"origin"`
	// Peer is the node whose agent told it, Collected when it was learned; absent
	// where Origin is another one, or nothing is known.
	Peer      string     `json:"peer,omitempty"`
	Collected *time.Time `json:"collected,omitempty"`
	Services  []string   `json:"services"`
	Pods      []string   `json:"pods"`
	Reason    string     `json:"reason"`
	// Presumed is there only where pods are presumed to serve something: Services
	// and Origin are of what is known.
	Presumed []PresumedView `json:"presumed,omitempty"`
	// Variants is there only where pods of the owner serve different things.
	Variants []VariantView `json:"variants,omitempty"`
	// Added and Dropped are the services that the owner serves and the previous
	// revision of its workload did not, and the other way; Previous is that
	// revision's key, empty where nothing differs.
	Added    []string `json:"added"`
	Dropped  []string `json:"dropped"`
	Previous string   `json:"previous"`
}

// PresumedView says which services pods of an owner are presumed to serve, since
// another owner, by its key, does or did.
type PresumedView struct {
	From     string   `json:"from"`
	Services []string `json:"services"`
}

// VariantView says what some pods of an owner serve where it differs from the
// rest.
type VariantView struct {
	Images   string   `json:"images"`
	Pods     []string `json:"pods"`
	Services []string `json:"services"`
}

// viewOwner shows an owner to an agent that asks pods of one node alone, or of
// all if node is empty.
func viewOwner(o *nodecache.Owner, node string) OwnerView {
	v := OwnerView{
		Key:       o.Key.String(),
		Namespace: o.Workload.Namespace,
		Name:      o.Name,
		Workload:  o.Workload.String(),
		Knowledge: o.Knowledge.String(),
		Origin:    string(o.Origin),
		Services:  o.Services(),
		Pods:      []string{},
		Reason:    o.Reason,
		Added:     []string{},
		Dropped:   []string{},
	}
	if v.Services == nil {
		v.Services = []string{}
	}
	for _, m := range o.Pods {
		v.Pods = append(v.Pods, m.String())
	}
	v.Presumed = viewPresumed(o)
	if o.Info != nil {
		v.Variants = viewVariants(o)
	}
	if o.Knowledge == nodecache.Unknown && len(o.Pods) > 0 {
		v.Reason = o.WhyNotAsked(node)
	}
	if o.Knowledge == nodecache.Failed && !o.NextTry.IsZero() {
		v.Reason += fmt.Sprintf("; next try in %s", max(0, time.Until(o.NextTry)).Round(time.Second))
	}
	return v
}

func viewPresumed(o *nodecache.Owner) []PresumedView {
	var views []PresumedView
	for _, p := range o.Presumed {
		from := p.From.String()
		i := slices.IndexFunc(views, func(v PresumedView) bool { return v.From == from })
		if i < 0 {
			i = len(views)
			views = append(views, PresumedView{From: from})
		}
		views[i].Services = append(views[i].Services, p.Service)
	}
	return views
}

func viewVariants(o *nodecache.Owner) []VariantView {
	var views []VariantView
	for i := range o.Info.Variants {
		variant := &o.Info.Variants[i]
		v := VariantView{Images: variant.Images, Pods: []string{}, Services: []string{}}
		for _, m := range o.Pods {
			if o.Info.Variant(m.Pod) == variant {
				v.Pods = append(v.Pods, m.String())
			}
		}
		for _, p := range variant.Ports {
			for _, s := range p.Services {
				v.Services = append(v.Services, s.Name)
			}
		}
		views = append(views, v)
	}
	return views
}

// Explanation is the answer to /explain.
type Explanation struct {
	// Verdict is one line.
	Verdict string `json:"verdict"`
	Facts   []Fact `json:"facts"`
}

// Fact is one line of an explanation.
type Fact struct {
	What string `json:"what"`
	Says string `json:"says"`
}

func (e *Explanation) fact(what, format string, args ...any) {
	e.Facts = append(e.Facts, Fact{What: what, Says: fmt.Sprintf(format, args...)})
}
