package agent

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
)

// Waited is the answer to /wait: how far a service has come.
type Waited struct {
	// Done is set once the service has an endpoint and every connected client
	// that asked for it has acknowledged it.
	Done bool `json:"done"`
	// Failed is set where waiting is of no use, or what is known may be old: a
	// client refuses, or the source is stale.
	Failed bool `json:"failed"`
	// Reason says in one line what is failed or lacks.
	Reason string `json:"reason"`
}

// waited says how far a service has come, by its name or NAMESPACE/NAME.
func (a *Agent) waited(name string) Waited {
	lacks := func(format string, args ...any) Waited { return Waited{Reason: fmt.Sprintf(format, args...)} }
	s := a.Status()
	switch {
	case !s.Source.Synced || s.Gate != gateOpen:
		return lacks("%s", s.Trouble())
	case s.Source.Error != "":
		return Waited{Failed: true, Reason: s.Trouble()}
	}
	// What the directory has by now is published after it.
	a.feed.flush()
	namespace, service, named := strings.Cut(name, "/")
	if !named {
		namespace, service = "", name
	}
	served := false
	for _, v := range a.services() {
		if v.Name == service && (namespace == "" || v.Namespace == namespace || slices.Contains(v.Exported, namespace)) && len(v.Endpoints) > 0 {
			served = true
		}
	}
	if !served {
		return lacks("%s is not served: %s", name, strings.TrimPrefix(a.explainService(service).Verdict, service+" is not served: "))
	}
	waiting := ""
	for _, c := range a.server.Clients() {
		ns, _, _ := strings.Cut(c.ID, "/")
		if namespace != "" && ns != namespace {
			continue
		}
		asked := false
		for _, r := range []struct {
			t    xds.Type
			name string
		}{{xds.Cluster, ns + "/" + service}, {xds.Endpoint, ns + "/" + service}, {xds.Listener, service}} {
			for _, h := range a.server.Holdings(c.ID, r.t, r.name) {
				switch h.State {
				case ads.Unasked, ads.Missing:
					continue
				case ads.Rejected, ads.Suspect:
					return Waited{Failed: true, Reason: fmt.Sprintf("%s rejects %s %s: %s", c.ID, r.t, r.name, h.Error)}
				case ads.Waiting, ads.Sent:
					waiting = cmp.Or(waiting, fmt.Sprintf("%s has not acknowledged %s %s", c.ID, r.t, r.name))
				}
				asked = true
			}
		}
		for t, s := range c.Types {
			if asked && s.Nack != nil {
				return Waited{Failed: true, Reason: fmt.Sprintf("%s, which has asked for %s, rejects %s: %s", c.ID, service, t, s.Nack.Error)}
			}
		}
	}
	if waiting != "" {
		return lacks("%s", waiting)
	}
	return Waited{Done: true}
}
