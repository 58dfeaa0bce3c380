package gateway

import (
	"slices"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Grant is what a ReferenceGrant permits to routes: references to Services of
// its namespace. It is immutable.
type Grant struct {
	namespace string
	from      []grantFrom
	// services are the names that may be referred to; all may if one is empty.
	services []string
}

type grantFrom struct {
	kind      nodecache.RouteKind
	namespace string
}

func newGrant(namespace string, spec *gatewayv1.ReferenceGrantSpec) *Grant {
	g := &Grant{namespace: namespace}
	for _, from := range spec.From {
		if from.Group != Group {
			continue
		}
		switch from.Kind {
		case HTTPRoute:
			g.from = append(g.from, grantFrom{nodecache.HTTPRoute, string(from.Namespace)})
		case GRPCRoute:
			g.from = append(g.from, grantFrom{nodecache.GRPCRoute, string(from.Namespace)})
		}
	}
	for _, to := range spec.To {
		if to.Group == "" && to.Kind == "Service" {
			g.services = append(g.services, string(or(to.Name, "")))
		}
	}
	return g
}

// permits tells whether the route may refer to the Service. Any pair of a from
// and a to will do.
func (g *Grant) permits(r *nodecache.Route, service nodecache.Name) bool {
	return g.namespace == service.Namespace && slices.Contains(g.from, grantFrom{r.Kind, r.Namespace}) &&
		(slices.Contains(g.services, "") || slices.Contains(g.services, service.Name))
}
