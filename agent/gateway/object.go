package gateway

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "k8s.io/apimachinery/pkg/util/json"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Group is the API group of the objects.
const Group = gatewayv1.GroupName

// The kinds of objects that are read.
const (
	HTTPRoute      = "HTTPRoute"
	GRPCRoute      = "GRPCRoute"
	ReferenceGrant = "ReferenceGrant"
)

// Kinds are the kinds that are read.
var Kinds = []string{HTTPRoute, GRPCRoute, ReferenceGrant}

// Resource is the name of a kind's resource.
func Resource(kind string) string { return strings.ToLower(kind) + "s" }

// Versions are those that are read, the preferred one first. All have the form
// of v1, as far as it is read; v1alpha1 had another one.
var Versions = []string{"v1", "v1beta1", "v1alpha2"}

// Reads tells whether objects of the kind and version are read.
func Reads(kind, version string) bool {
	return slices.Contains(Kinds, kind) && slices.Contains(Versions, version)
}

// Object is what is kept of one object. It is immutable, and nothing in it
// refers to what it was decoded from.
type Object struct {
	Kind string
	nodecache.Name
	UID string
	// Version is metadata.resourceVersion.
	Version string
	// Annotations are those of a bookmark.
	Annotations map[string]string
	// Route is set of routes; what grants decide is not in it.
	Route *nodecache.Route
	// APIVersion is the version in which it was read, as v1.
	APIVersion string
	// Said is the digest of what agents said in the status of a route, as of
	// [StatusDigest].
	Said string
	// Grant is set of ReferenceGrants.
	Grant *Grant
	// Err says why the rest cannot be read; nil where it can.
	Err error
}

// meta is what is read of an object's metadata.
type meta struct {
	Namespace         string            `json:"namespace"`
	Name              string            `json:"name"`
	UID               string            `json:"uid"`
	Generation        int64             `json:"generation"`
	ResourceVersion   string            `json:"resourceVersion"`
	CreationTimestamp metav1.Time       `json:"creationTimestamp"`
	Annotations       map[string]string `json:"annotations"`
}

// Decode reads one object of the kind from JSON. Without a namespace it is in
// default, and without a UID, as in a file written by hand, it is known by its
// name. An object of which only the
// spec cannot be read is returned with Err set. The error is one line.
func Decode(kind string, data []byte) (*Object, error) {
	var head struct {
		APIVersion string          `json:"apiVersion"`
		Metadata   meta            `json:"metadata"`
		Status     json.RawMessage `json:"status"`
	}
	if err := kjson.Unmarshal(data, &head); err != nil {
		return nil, fmt.Errorf("is not a %s: %s", kind, line(err))
	}
	m := head.Metadata
	m.Namespace = cmp.Or(m.Namespace, metav1.NamespaceDefault)
	m.UID = cmp.Or(m.UID, kind+"/"+m.Namespace+"/"+m.Name)
	o := &Object{
		Kind: kind, Name: nodecache.Name{Namespace: m.Namespace, Name: m.Name}, UID: m.UID, Version: m.ResourceVersion,
		APIVersion: Versions[0],
	}
	for _, v := range Versions {
		if head.APIVersion == Group+"/"+v {
			o.APIVersion = v
		}
	}
	if end, ok := m.Annotations[metav1.InitialEventsAnnotationKey]; ok {
		o.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: end}
	}
	switch kind {
	case HTTPRoute:
		var spec gatewayv1.HTTPRouteSpec
		if o.Err = decodeSpec(data, &spec); o.Err == nil {
			o.Route = m.route(nodecache.HTTPRoute, &spec.CommonRouteSpec, spec.Hostnames)
			for i := range spec.Rules {
				o.Route.Rules = append(o.Route.Rules, httpRule(m.Namespace, &spec.Rules[i]))
			}
		}
	case GRPCRoute:
		var spec gatewayv1.GRPCRouteSpec
		if o.Err = decodeSpec(data, &spec); o.Err == nil {
			o.Route = m.route(nodecache.GRPCRoute, &spec.CommonRouteSpec, spec.Hostnames)
			for i := range spec.Rules {
				o.Route.Rules = append(o.Route.Rules, grpcRule(m.Namespace, &spec.Rules[i]))
			}
		}
	case ReferenceGrant:
		var spec gatewayv1.ReferenceGrantSpec
		if o.Err = decodeSpec(data, &spec); o.Err == nil {
			o.Grant = newGrant(m.Namespace, &spec)
		}
	default:
		o.Err = fmt.Errorf("no kind that is read: %q", kind)
	}
	if o.Err != nil {
		o.Err = fmt.Errorf("cannot be read: %s", line(o.Err))
	} else if o.Route != nil {
		o.Said = said(m.Namespace, head.Status)
	}
	return o, nil
}

func decodeSpec[T any](data []byte, spec *T) error {
	return kjson.Unmarshal(data, &struct {
		Spec *T `json:"spec"`
	}{spec})
}

func (m *meta) route(kind nodecache.RouteKind, spec *gatewayv1.CommonRouteSpec, hostnames []gatewayv1.Hostname) *nodecache.Route {
	r := &nodecache.Route{
		UID: m.UID, Generation: m.Generation, Kind: kind, Namespace: m.Namespace, Name: m.Name,
		Created: m.CreationTimestamp.UTC(),
	}
	for i := range spec.ParentRefs {
		r.Parents = append(r.Parents, ParentOf(m.Namespace, &spec.ParentRefs[i]))
	}
	for _, h := range hostnames {
		r.Hostnames = append(r.Hostnames, strings.ToLower(string(h)))
	}
	return r
}

// or is what p points at, and fallback where it is nil.
func or[T any](p *T, fallback T) T {
	if p == nil {
		return fallback
	}
	return *p
}

// port is 0 for one that is none.
func port(p *gatewayv1.PortNumber) uint16 {
	if n := or(p, 0); n > 0 && n <= 65535 {
		return uint16(n)
	}
	return 0
}

// backend reads a reference that a rule of the namespace makes. Whether it may
// leave the namespace is for the grants to say.
func backend(namespace string, ref *gatewayv1.BackendRef) nodecache.RouteBackend {
	b := nodecache.RouteBackend{Port: port(ref.Port), Weight: uint32(max(0, or(ref.Weight, 1)))}
	if or(ref.Group, "") != "" || cmp.Or(or(ref.Kind, ""), "Service") != "Service" {
		b.Refused = string(gatewayv1.RouteReasonInvalidKind)
		return b
	}
	b.Service = nodecache.Name{Namespace: string(or(ref.Namespace, gatewayv1.Namespace(namespace))), Name: string(ref.Name)}
	if b.Port == 0 { // which a Service needs
		b.Refused = string(gatewayv1.RouteReasonBackendNotFound)
	}
	return b
}

func line(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
