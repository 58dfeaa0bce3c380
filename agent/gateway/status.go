package gateway

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "k8s.io/apimachinery/pkg/util/json"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Controller is the name under which agents write into status.parents.
const Controller gatewayv1.GatewayController = "fingerpost.dev/agent"

// Conditions are the types of conditions that agents write, and no others.
var Conditions = []string{
	string(gatewayv1.RouteConditionAccepted),
	string(gatewayv1.RouteConditionResolvedRefs),
	string(gatewayv1.RouteConditionPartiallyInvalid),
}

// ParentStatus is what agents say of a route under one of its parents.
type ParentStatus struct {
	Parent nodecache.RouteParent
	// Conditions are of the types in [Conditions], each once; their times count
	// for nothing.
	Conditions []metav1.Condition
}

// StatusDigest is the same for the same statements, in any order, whenever they
// were made. It is empty for none.
func StatusDigest(said []ParentStatus) string {
	if len(said) == 0 {
		return ""
	}
	var lines []string
	for _, s := range said {
		p := &s.Parent
		parent := fmt.Sprintf("%q %q %q %q %q %d", p.Group, p.Kind, p.Name.Namespace, p.Name.Name, p.Section, p.Port)
		lines = append(lines, parent)
		for _, c := range s.Conditions {
			if slices.Contains(Conditions, c.Type) {
				lines = append(lines, fmt.Sprintf("%s %q %q %q %q %d", parent, c.Type, c.Status, c.Reason, c.Message, c.ObservedGeneration))
			}
		}
	}
	slices.Sort(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	return string(sum[:16])
}

// ParentOf reads a reference to a parent that stands in a route of the
// namespace, with the API's defaults.
func ParentOf(namespace string, p *gatewayv1.ParentReference) nodecache.RouteParent {
	return nodecache.RouteParent{
		Group:   string(or(p.Group, Group)),
		Kind:    string(or(p.Kind, "Gateway")),
		Name:    nodecache.Name{Namespace: string(or(p.Namespace, gatewayv1.Namespace(namespace))), Name: string(p.Name)},
		Section: string(or(p.SectionName, "")),
		Port:    port(p.Port),
	}
}

// unreadable is the digest of a status that cannot be read.
const unreadable = "unreadable"

// said returns the digest of what agents said in the status of a route.
func said(namespace string, status []byte) string {
	if len(status) == 0 {
		return ""
	}
	var in gatewayv1.RouteStatus
	if err := kjson.Unmarshal(status, &in); err != nil {
		return unreadable
	}
	var own []ParentStatus
	for i := range in.Parents {
		if p := &in.Parents[i]; p.ControllerName == Controller {
			own = append(own, ParentStatus{ParentOf(namespace, &p.ParentRef), p.Conditions})
		}
	}
	return StatusDigest(own)
}
