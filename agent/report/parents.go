package report

import (
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
)

// maxParents is the number of entries that the API takes.
const maxParents = 32

// routeObject is what is read of a route to write its status. What belongs to
// others stays as it came.
type routeObject struct {
	Metadata struct {
		UID             string `json:"uid"`
		Generation      int64  `json:"generation"`
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Spec struct {
		ParentRefs []json.RawMessage `json:"parentRefs"`
	} `json:"spec"`
	Status struct {
		Parents []json.RawMessage `json:"parents"`
	} `json:"status"`
}

// entry is one of status.parents, of which the reference is that of the spec.
type entry struct {
	ParentRef      json.RawMessage             `json:"parentRef"`
	ControllerName gatewayv1.GatewayController `json:"controllerName"`
	Conditions     []metav1.Condition          `json:"conditions"`
}

// merge returns status.parents with what agents have to say in place of what
// they said, and which conditions are news. It returns nil for parents if they
// said just that. The object is of the route's generation.
func merge(o *routeObject, r *nodecache.Route, say []gateway.ParentStatus, now metav1.Time) (parents []json.RawMessage, news []change, err error) {
	parents = []json.RawMessage{} // null would be refused
	var said []gateway.ParentStatus
	for _, raw := range o.Status.Parents {
		var e gatewayv1.RouteParentStatus
		if err := json.Unmarshal(raw, &e); err != nil || e.ControllerName != gateway.Controller {
			parents = append(parents, raw)
			continue
		}
		said = append(said, gateway.ParentStatus{Parent: gateway.ParentOf(r.Namespace, &e.ParentRef), Conditions: e.Conditions})
	}
	if gateway.StatusDigest(said) == gateway.StatusDigest(say) {
		return nil, nil, nil
	}
	if len(o.Spec.ParentRefs) != len(r.Parents) {
		return nil, nil, fmt.Errorf("%s %s has %d parents in one generation, and %d", r.Kind, r.Key(), len(o.Spec.ParentRefs), len(r.Parents))
	}
	for i, p := range r.Parents {
		at := slices.IndexFunc(say, func(s gateway.ParentStatus) bool { return s.Parent == p })
		if at < 0 || len(parents) == maxParents {
			continue
		}
		var before []metav1.Condition
		if j := slices.IndexFunc(said, func(s gateway.ParentStatus) bool { return s.Parent == p }); j >= 0 {
			before = said[j].Conditions
		}
		conditions, changes := successors(before, say[at].Conditions, now)
		for _, c := range changes {
			news = append(news, change{p, c})
		}
		raw, err := json.Marshal(entry{ParentRef: o.Spec.ParentRefs[i], ControllerName: gateway.Controller, Conditions: conditions})
		if err != nil {
			return nil, nil, err
		}
		parents = append(parents, raw)
	}
	return parents, news, nil
}

// change is a condition that is news under a parent.
type change struct {
	parent nodecache.RouteParent
	metav1.Condition
}

// successors returns the conditions of an entry after those that it had, and
// which of them say something new, be it of an older generation. A condition of
// which the status stays keeps its time; those of types that agents do not
// write stay where they are.
func successors(before, say []metav1.Condition, now metav1.Time) (after, news []metav1.Condition) {
	left := slices.Clone(say)
	for _, old := range before {
		i := slices.IndexFunc(left, func(c metav1.Condition) bool { return c.Type == old.Type })
		switch {
		case i >= 0:
			c := left[i]
			left = slices.Delete(left, i, i+1)
			if c.Status == old.Status {
				c.LastTransitionTime = old.LastTransitionTime
			} else {
				c.LastTransitionTime = now
			}
			if c.Status != old.Status || c.Reason != old.Reason || c.Message != old.Message {
				news = append(news, c)
			}
			after = append(after, c)
		case !slices.Contains(gateway.Conditions, old.Type):
			after = append(after, old)
		}
	}
	for _, c := range left {
		c.LastTransitionTime = now
		after, news = append(after, c), append(news, c)
	}
	return after, news
}

// eventsOf is what to tell of news: what does not hold and should. Backends are
// the same under every parent.
func eventsOf(r *nodecache.Route, version string, news []change) []Event {
	object := corev1.ObjectReference{
		APIVersion: gateway.Group + "/" + version, Kind: r.Kind.String(), Namespace: r.Namespace, Name: r.Name, UID: types.UID(r.UID),
	}
	var out []Event
	for _, c := range news {
		if c.Status != metav1.ConditionFalse {
			continue
		}
		// Who wrote the status writes the Event, so that it is one.
		e := Event{Object: object, Warning: true, Own: true, Reason: ReasonUnresolved, Message: clip(c.Reason+": "+c.Message, maxText)}
		if c.Type == string(gatewayv1.RouteConditionAccepted) {
			e.Reason = ReasonNotAccepted
			e.Message = clip(fmt.Sprintf("under Service %s%s: %s: %s", c.parent.Name, wanted(c.parent), c.Reason, c.Message), maxText)
		}
		if !slices.Contains(out, e) {
			out = append(out, e)
		}
	}
	return out
}
