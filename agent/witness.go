package agent

import (
	"cmp"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/fingerpost/fingerpost/agent/journal"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/ads"
)

// witness writes into the journal what the rooms tell of their decisions.
type witness struct{ *journal.Journal }

func (w witness) ServiceAdded(ns, service string, by nodecache.Workload) {
	w.Add(journal.Entry{Kind: journal.ServiceAdded, Namespace: ns, Service: service, Workload: by, Text: "provided by " + in(by, ns)})
}

func (w witness) ServiceRemoved(ns, service string, by nodecache.Workload) {
	w.Add(journal.Entry{Kind: journal.ServiceRemoved, Namespace: ns, Service: service, Workload: by, Text: in(by, ns) + " was the last to have it"})
}

func (w witness) ProviderChanged(ns, service string, from, to nodecache.Workload) {
	w.Add(journal.Entry{Kind: journal.Provider, Namespace: ns, Service: service, Workload: to, Text: fmt.Sprintf("from %s to %s", in(from, ns), in(to, ns))})
}

func (w witness) PodsMoved(o *nodecache.Owner, joined, left int, last *nodecache.Pod) {
	e := ownerEntry(journal.Pods, o)
	e.Joined, e.Left, e.Pod = joined, left, last.Name
	w.Add(e)
}

func (w witness) CollectBegun(o *nodecache.Owner) { w.Add(ownerEntry(journal.CollectBegun, o)) }

func (w witness) CollectEnded(o *nodecache.Owner, result, detail string) {
	e := ownerEntry(journal.CollectEnded, o)
	e.Text = strings.TrimSuffix(result+": "+detail, ": ")
	w.Add(e)
}

func (w witness) refused(r ads.Refusal) {
	e := journal.Entry{Kind: journal.Nack, Client: r.Node.GetId(), Resource: r.Type.String(), Text: r.Error}
	e.Namespace, _, _ = strings.Cut(e.Client, "/")
	w.Add(e)
	e.Kind = journal.Quarantine
	for _, name := range r.Withheld {
		e.Resource = r.Type.String() + " " + name
		w.Add(e)
	}
}

func ownerEntry(k journal.Kind, o *nodecache.Owner) journal.Entry {
	return journal.Entry{Kind: k, Namespace: o.Workload.Namespace, Owner: o.Key, OwnerName: o.Name, Workload: o.Workload}
}

// in names a workload to somebody of a namespace.
func in(w nodecache.Workload, namespace string) string {
	if w.Namespace == namespace {
		return w.String()
	}
	return w.String() + " of namespace " + w.Namespace
}

// Decision is one row of the answer to /decisions.
type Decision struct {
	At   time.Time `json:"at"`
	Kind string    `json:"kind"`
	Says string    `json:"says"`
	// What it is about; what does not apply is left out.
	Namespace string `json:"namespace,omitempty"`
	Service   string `json:"service,omitempty"`
	Owner     string `json:"owner,omitempty"`    // uid/revision
	Workload  string `json:"workload,omitempty"` // Kind/name
	Client    string `json:"client,omitempty"`
}

// decisions returns the last decisions that the function keeps, the oldest
// first.
func (a *Agent) decisions(most int, keep func(*journal.Entry) bool) []Decision {
	out := []Decision{}
	for _, e := range a.journal.Last(most, keep) {
		d := Decision{At: e.At.UTC(), Kind: string(e.Kind), Says: e.Says(), Namespace: e.Namespace, Service: e.Service, Client: e.Client}
		if e.Owner != (nodecache.OwnerKey{}) {
			d.Owner = e.Owner.String()
		}
		if e.Workload != (nodecache.Workload{}) {
			d.Workload = e.Workload.String()
		}
		out = append(out, d)
	}
	return out
}

// serveDecisions answers /decisions: the last ones, at most the form value last
// (0 or none: all that are kept), with the namespace, service, client, and
// owner (its key or name, or its workload's) that the form values name.
func (a *Agent) serveDecisions(r *http.Request) (any, error) {
	last, err := strconv.Atoi(cmp.Or(r.FormValue("last"), "0"))
	if err != nil || last < 0 {
		return nil, fmt.Errorf("last=%q is not a number", r.FormValue("last"))
	}
	is := func(key, value string) bool { want := r.FormValue(key); return want == "" || want == value }
	return a.decisions(cmp.Or(last, journal.DefaultSize), func(e *journal.Entry) bool {
		owner := is("owner", e.Owner.String()) || is("owner", e.OwnerName) || is("owner", e.Workload.String()) || is("owner", e.Workload.Name)
		return owner && is("namespace", e.Namespace) && is("service", e.Service) && is("client", e.Client)
	}), nil
}
