package unknown

import (
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// Call is a call for which a sidecar has no cluster.
type Call struct {
	Node      string // the sidecar's node id
	Authority string
	Path      string
	// Form is that of the sidecar's route table.
	Form resources.Form
}

// Decision is what is said of a call at one moment.
type Decision struct {
	// Status is what the caller gets; nil where Reflection is set.
	Status *status.Status
	// Reflection is set where the call is answered from the descriptors of what
	// the caller can reach.
	Reflection bool
	// Pending are the owners that have not been asked to the end: a call waits
	// a while for them before it gets Status.
	Pending []nodecache.OwnerKey
	// Deliver is the cluster that the caller's sidecar is to be given, since it
	// does not ask for it again; empty for none.
	Deliver string

	namespace string
	changed   <-chan struct{} // closed at the next change; set where Pending has entries
}

// Decide says what a call gets, by the rules of the package comment; synced
// tells whether the agent has read the cluster. It does not wait.
func Decide(k Knowledge, synced bool, c Call) Decision {
	says := func(code codes.Code, format string, args ...any) Decision {
		return Decision{Status: status.Newf(code, format, args...)}
	}
	namespace, _, err := resources.ParseNodeID(c.Node)
	rule := resources.ByName(resources.Call{Namespace: namespace, Authority: c.Authority, Path: c.Path, Form: c.Form})
	service := rule.Service
	switch {
	case service == "":
		return says(codes.Unimplemented, "malformed path %q: not /package.Service/Method", c.Path)
	case err != nil:
		return says(codes.Unavailable, "the sidecar does not say whose it is in header %q (write its bootstrap anew): %v", NodeHeader, err)
	case !synced:
		return says(codes.Unavailable, "the agent has not read the cluster yet; it cannot tell where %s is", service)
	case !rule.ByPath:
		return decideNamed(k, namespace, service, c)
	case nodecache.Infrastructure(service) && reflection(service, rule.Method):
		return Decision{Reflection: true, namespace: namespace}
	}
	var answer resources.Answer
	if !nodecache.Infrastructure(service) {
		answer = k.Lookup(namespace, service)
	}
	switch {
	case answer.Served:
		d := says(codes.Unavailable, "%s is known, your sidecar is being updated", service)
		if c.Form == resources.Asking {
			d.Deliver = rule.Cluster
		}
		return d
	case len(answer.Suspects) > 0:
		d := says(codes.Unavailable, "%s in namespace %s: %s", service, namespace, describe(answer.Suspects))
		d.Pending, d.changed = pending(answer), answer.Changed
		return d
	default:
		return says(codes.Unimplemented, "unknown service %s in namespace %s", service, namespace)
	}
}

// decideNamed says what a call gets that names a Service or a pod.
func decideNamed(k Knowledge, namespace, service string, c Call) Decision {
	n := k.Resolve(namespace, c.Authority, service)
	rule := resources.ByName(resources.Call{Namespace: namespace, Authority: c.Authority, Path: c.Path, Form: c.Form})
	says := func(code codes.Code, format string, args ...any) Decision {
		return Decision{Status: status.Newf(code, "authority %.300q: "+format, append([]any{c.Authority}, args...)...)}
	}
	switch {
	case n.Reason != "":
		return says(codes.Unavailable, "%s", n.Reason)
	case n.Refused:
		return says(codes.Unimplemented, "unknown service %s: nobody at %s serves it", service, &n)
	case c.Form == resources.ShapeOne:
		return says(codes.Unavailable, "the sidecar's bootstrap is of a release that does not know %s; write it anew", &n)
	case c.Form.OnDemand():
		d := says(codes.Unavailable, "%s is known, your sidecar is being updated", &n)
		if c.Form == resources.Asking {
			d.Deliver = rule.Cluster
		}
		return d
	case n.Silent != "":
		return says(codes.Unavailable, "%s, and the sidecar has all clusters from the start; name the port grpc, or write its bootstrap with --clusters on-demand", n.Silent)
	case n.Alias == "":
		return says(codes.Unavailable, "%s needs clusters on demand; write the sidecar's bootstrap with --clusters on-demand", &n)
	case n.Alias != rule.Authority():
		return says(codes.Unavailable, "it is %s, which needs clusters on demand by this name; call it as %s", &n, n.Alias)
	case len(n.Pending) > 0:
		d := says(codes.Unavailable, "%s: its pods are being asked what they serve", &n)
		d.Pending = n.Pending
		return d
	}
	return says(codes.Unavailable, "%s is known, your sidecar is being updated", &n)
}

// pending returns the owners that have not been asked to the end.
func pending(a resources.Answer) []nodecache.OwnerKey {
	var keys []nodecache.OwnerKey
	for _, o := range a.Suspects {
		if o.Knowledge != nodecache.Failed && unasked(o) == "" {
			keys = append(keys, o.Key)
		}
	}
	return keys
}

// unasked says why an owner that nobody has asked will not be asked soon, empty
// if it will.
func unasked(o *nodecache.Owner) string {
	if o.Knowledge != nodecache.Unknown || len(o.Pods) == 0 {
		return ""
	}
	return o.WhyNotAsked("")
}

// describe names the owner that most likely decides, and how many more there
// are: one that is pending before one that failed.
func describe(suspects []*nodecache.Owner) string {
	o := suspects[0]
	for _, other := range suspects {
		if o.Knowledge == nodecache.Failed && other.Knowledge != nodecache.Failed {
			o = other
		}
	}
	var text string
	switch o.Knowledge {
	case nodecache.Failed:
		text = fmt.Sprintf("%s could not be asked what it serves: %s", o.Name, o.Reason)
		if !o.NextTry.IsZero() {
			text += "; next try at " + o.NextTry.UTC().Format(time.RFC3339)
		}
	case nodecache.Collecting:
		text = o.Name + " is being asked what it serves"
	default:
		text = o.Name + " has not been asked yet what it serves"
		if why := unasked(o); why != "" {
			text = o.Name + " cannot be asked what it serves: " + why
		}
	}
	if n := len(suspects) - 1; n > 0 {
		text += fmt.Sprintf(" (and %d more owners)", n)
	}
	return text
}
