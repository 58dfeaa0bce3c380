package report

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/agent/gateway"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

// reasonConflicted is that of a route which lost a Service's port to one of
// another kind (GEP-1294); the module has no name for it.
const reasonConflicted gatewayv1.RouteConditionReason = "Conflicted"

// maxCondition bounds a condition's message, in bytes. The API takes 32 KiB.
const maxCondition = 4096

// World is what the status of a route depends on; [nodecache.Directory] is
// one.
type World interface {
	// Front returns the Service of the name, nil if there is none.
	Front(nodecache.Name) *nodecache.FrontView
	// RoutesOf returns the routes of which the Service is a parent.
	RoutesOf(parent nodecache.Name) []*nodecache.Route
}

// Judge says how a route stands under each of its parents that is a Service, in
// the order of its spec. Gateways are judged by their own controllers. It is
// pure; equal worlds give equal words.
func Judge(r *nodecache.Route, w World) []gateway.ParentStatus {
	var out []gateway.ParentStatus
	var faults []fault
	refs := metav1.Condition{}
	for _, p := range r.Parents {
		if !p.Service() {
			continue
		}
		if out == nil { // what all parents share
			faults, refs = faultsOf(r), resolved(r, w)
		}
		conditions := []metav1.Condition{accepted(r, p, w, faults), refs}
		if conditions[0].Status == metav1.ConditionTrue && len(faults) > 0 {
			conditions = append(conditions, condition(gatewayv1.RouteConditionPartiallyInvalid, true, faults[0].reason, dropped(faults)))
		}
		for i := range conditions {
			conditions[i].ObservedGeneration = r.Generation
		}
		out = append(out, gateway.ParentStatus{Parent: p, Conditions: conditions})
	}
	return out
}

func condition(t gatewayv1.RouteConditionType, holds bool, reason gatewayv1.RouteConditionReason, message string) metav1.Condition {
	c := metav1.Condition{Type: string(t), Status: metav1.ConditionFalse, Reason: string(reason), Message: clip(message, maxCondition)}
	if holds {
		c.Status = metav1.ConditionTrue
	}
	return c
}

// fault is why a rule is not served.
type fault struct {
	rule, detail string
	reason       gatewayv1.RouteConditionReason
}

// faultsOf returns the faults of a route's rules, of each rule one.
func faultsOf(r *nodecache.Route) []fault {
	var out []fault
	envoy := resources.Unservable(r)
	for i := range r.Rules {
		if rule := &r.Rules[i]; rule.Refused != "" {
			out = append(out, fault{ruleName(r, i), rule.Detail, gatewayv1.RouteConditionReason(rule.Refused)})
		} else if err := envoy[i]; err != nil {
			out = append(out, fault{ruleName(r, i), oneLine(err), gatewayv1.RouteReasonUnsupportedValue})
		}
	}
	return out
}

// dropped begins as the API wants it of PartiallyInvalid.
func dropped(faults []fault) string {
	var texts []string
	for _, f := range faults {
		texts = append(texts, "Dropped Rule "+f.rule+": "+f.detail)
	}
	return strings.Join(texts, "; ") + ". The other rules are served; correct or remove these"
}

// ruleName is the index of a rule, and its name if it has one.
func ruleName(r *nodecache.Route, i int) string {
	if name := r.Rules[i].Name; name != "" {
		return fmt.Sprintf("%d (%s)", i, name)
	}
	return fmt.Sprint(i)
}

func accepted(r *nodecache.Route, p nodecache.RouteParent, w World, faults []fault) metav1.Condition {
	no := func(reason gatewayv1.RouteConditionReason, format string, args ...any) metav1.Condition {
		return condition(gatewayv1.RouteConditionAccepted, false, reason, fmt.Sprintf(format, args...))
	}
	v := w.Front(p.Name)
	if v == nil {
		return no(gatewayv1.RouteReasonNoMatchingParent, "there is no Service %s: create it, or correct parentRefs", p.Name)
	}
	alone := &nodecache.Route{Parents: []nodecache.RouteParent{p}}
	var ports []nodecache.FrontPort
	for _, port := range v.Ports {
		if routetable.Attached(alone, p.Name, port) {
			ports = append(ports, port)
		}
	}
	switch {
	case len(ports) == 0:
		return no(gatewayv1.RouteReasonNoMatchingParent, "Service %s has no TCP port%s (it has %s): correct parentRefs, or the Service", p.Name, wanted(p), portsOf(v.Front))
	case len(r.Rules) == 0:
		return no(gatewayv1.RouteReasonUnsupportedValue, "the route has no rule: add one")
	case len(faults) == len(r.Rules):
		var texts []string
		for _, f := range faults {
			texts = append(texts, "rule "+f.rule+": "+f.detail)
		}
		return no(faults[0].reason, "no rule can be served: %s: correct them", strings.Join(texts, "; "))
	}
	lost, to := lost(r, p.Name, ports, w)
	switch {
	case len(lost) == len(ports):
		return no(reasonConflicted, "GRPCRoute %s has port %s of Service %s, and a GRPCRoute goes before an HTTPRoute: attach the routes to different ports, or put all calls into GRPCRoutes", to.Key(), strings.Join(lost, ", "), p.Name)
	case len(lost) > 0:
		return condition(gatewayv1.RouteConditionAccepted, true, gatewayv1.RouteReasonAccepted, fmt.Sprintf("The route is served, but not on port %s, which GRPCRoute %s has", strings.Join(lost, ", "), to.Key()))
	}
	return condition(gatewayv1.RouteConditionAccepted, true, gatewayv1.RouteReasonAccepted, "The route is served")
}

// lost returns those of the ports which the route has lost to routes of another
// kind, and the first of these routes.
func lost(r *nodecache.Route, service nodecache.Name, of []nodecache.FrontPort, w World) (ports []string, to *nodecache.Route) {
	routes := w.RoutesOf(service)
	for _, port := range of {
		t := routetable.New(r.Namespace, service, port, routes)
		if !slices.ContainsFunc(t.Conflicted, func(o *nodecache.Route) bool { return o.UID == r.UID }) {
			continue
		}
		ports = append(ports, fmt.Sprint(port.Port))
		for _, e := range t.Entries {
			if to == nil || strings.Compare(e.Route.Key().String(), to.Key().String()) < 0 {
				to = e.Route
			}
		}
	}
	return ports, to
}

// resolved is the same under all parents: a route has one list of backends.
func resolved(r *nodecache.Route, w World) metav1.Condition {
	var reason gatewayv1.RouteConditionReason
	var texts []string
	for i := range r.Rules {
		for j := range r.Rules[i].Backends {
			why, text := unresolved(&r.Rules[i].Backends[j], w)
			if why == "" {
				continue
			}
			if reason == "" {
				reason = why
			}
			texts = append(texts, fmt.Sprintf("rule %s, backend %d: %s", ruleName(r, i), j, text))
		}
	}
	if reason == "" {
		return condition(gatewayv1.RouteConditionResolvedRefs, true, gatewayv1.RouteReasonResolvedRefs, "All backends are there")
	}
	return condition(gatewayv1.RouteConditionResolvedRefs, false, reason, strings.Join(texts, "; ")+". Their share of the calls fails")
}

// inTLS are the application protocols of which the port's Service says itself
// that they begin with TLS, and calls go out in plaintext.
var inTLS = []string{"https", "tls", "kubernetes.io/wss"}

// unresolved says why calls cannot reach a backend; an empty reason if they
// can.
func unresolved(b *nodecache.RouteBackend, w World) (gatewayv1.RouteConditionReason, string) {
	switch reason := gatewayv1.RouteConditionReason(b.Refused); {
	case reason == gatewayv1.RouteReasonInvalidKind:
		return reason, "only Services are called: name one"
	case reason == gatewayv1.RouteReasonRefNotPermitted:
		return reason, fmt.Sprintf("no ReferenceGrant in namespace %s permits the reference to Service %s: create one", b.Service.Namespace, b.Service.Name)
	case b.Port == 0:
		return gatewayv1.RouteReasonBackendNotFound, fmt.Sprintf("the reference to Service %s names no port: add it", b.Service)
	case reason != "":
		return reason, fmt.Sprintf("Service %s cannot be called", b.Service)
	}
	v := w.Front(b.Service)
	if v == nil {
		return gatewayv1.RouteReasonBackendNotFound, fmt.Sprintf("there is no Service %s: create it, or correct backendRefs", b.Service)
	}
	if !resources.Callable(v.Front, b.Port) {
		if v.External != "" {
			return gatewayv1.RouteReasonInvalidKind, fmt.Sprintf("Service %s is of type ExternalName, to which no call goes: name a Service with pods", b.Service)
		}
		return gatewayv1.RouteReasonBackendNotFound, fmt.Sprintf("Service %s has no TCP port %d (it has %s): correct backendRefs, or the Service", b.Service, b.Port, portsOf(v.Front))
	}
	for _, p := range v.Ports {
		if p.Port == b.Port && slices.Contains(inTLS, strings.ToLower(p.AppProtocol)) {
			return gatewayv1.RouteReasonUnsupportedProtocol, fmt.Sprintf("port %d of Service %s has appProtocol %s, and calls are sent in plaintext: name a port without TLS", p.Port, b.Service, p.AppProtocol)
		}
	}
	return "", ""
}

// wanted is what a parent asks of a port.
func wanted(p nodecache.RouteParent) string {
	text := ""
	if p.Port != 0 {
		text += fmt.Sprintf(" %d", p.Port)
	}
	if p.Section != "" {
		text += fmt.Sprintf(" named %s", p.Section)
	}
	return text
}

func portsOf(f *nodecache.Front) string {
	var ports []string
	for _, p := range f.Ports {
		text := fmt.Sprint(p.Port)
		if p.Name != "" {
			text += " " + p.Name
		}
		ports = append(ports, text)
	}
	if len(ports) == 0 {
		return "none"
	}
	return strings.Join(ports, ", ")
}

// clip is text in at most so many bytes and an ellipsis.
func clip(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
