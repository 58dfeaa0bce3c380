package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/nodecache"
)

// recollectBound is how long a recollect is waited for.
const recollectBound = 30 * time.Second

// Recollected is one row of the answer to a POST to /recollect: an owner as it
// is now, and what came out of asking it.
type Recollected struct {
	Owner  OwnerView      `json:"owner"`
	Report collect.Report `json:"report"`
}

// serveRecollect asks the owners that the form value owner names at once.
func (a *Agent) serveRecollect(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), recollectBound)
	defer cancel()
	owners, err := a.ownersNamed(r.FormValue("owner"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	rows := make([]Recollected, len(owners))
	var asking sync.WaitGroup
	for i, o := range owners {
		asking.Go(func() { rows[i] = a.recollect(ctx, o) })
	}
	asking.Wait()
	writeJSON(w, http.StatusOK, rows)
}

func (a *Agent) recollect(ctx context.Context, o *nodecache.Owner) Recollected {
	report, err := a.collector.Recollect(ctx, o.Key)
	if now := a.dir.Owner(o.Key); now != nil {
		o = now
	}
	switch {
	case errors.Is(err, collect.ErrNotAsked):
		report = collect.Report{Result: "failed", Detail: "it has no pod that this agent may ask"}
		if o.Reason != "" {
			report.Detail += ": " + o.Reason
		}
	case errors.Is(err, context.DeadlineExceeded):
		report = collect.Report{Result: "failed", Detail: fmt.Sprintf("no answer within %s; it goes on", recollectBound)}
	case err != nil:
		report = collect.Report{Result: "failed", Detail: err.Error()}
	}
	return Recollected{Owner: viewOwner(o, a.only), Report: report}
}

// ownersNamed returns the owners with pods that a key names, uid/revision, or
// namespace and name of an owner or its workload, with or without the kind.
func (a *Agent) ownersNamed(name string) ([]*nodecache.Owner, error) {
	if key, err := nodecache.ParseOwnerKey(name); err == nil {
		if o := a.dir.Owner(key); o != nil && len(o.Pods) > 0 {
			return []*nodecache.Owner{o}, nil
		}
	}
	namespace, rest, _ := strings.Cut(name, "/")
	var found []*nodecache.Owner
	for _, o := range a.dir.Owners() {
		_, own, _ := strings.Cut(o.Name, "/")
		switch rest {
		case o.Name, own, o.Workload.String(), o.Workload.Name:
			if o.Workload.Namespace == namespace {
				found = append(found, o)
			}
		}
	}
	if len(found) > 0 {
		return found, nil
	}
	if !a.source.Status().Synced {
		return nil, fmt.Errorf("owner %s is not known, and the source has not synced yet", name)
	}
	return nil, fmt.Errorf("there is no owner %s with pods; fingerpost owners -o json lists keys and names", name)
}
