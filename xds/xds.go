// Package xds holds what the compiler and the ADS server speak about: xDS
// resources that are typed, scoped, validated and encoded once for every
// client that may see them.
//
//	xds/resources ──xds.Update──▶ xds/ads ──▶ Envoy, gRPC clients
package xds

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// Type is one of the four resource types that the agent serves. Its order is
// the order in which additions are sent: CDS, EDS, LDS, RDS (xDS protocol,
// "Eventual consistency considerations").
type Type uint8

// The resource types, in sending order.
const (
	Cluster Type = iota
	Endpoint
	Listener
	Route
	NumTypes = 4
)

var (
	typeURLs = [NumTypes]string{
		Cluster:  "type.googleapis.com/envoy.config.cluster.v3.Cluster",
		Endpoint: "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
		Listener: "type.googleapis.com/envoy.config.listener.v3.Listener",
		Route:    "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
	}
	shortNames = [NumTypes]string{Cluster: "cds", Endpoint: "eds", Listener: "lds", Route: "rds"}
)

// URL is the type URL as it stands in requests and responses.
func (t Type) URL() string { return typeURLs[t] }

// String is the short name: cds, eds, lds or rds.
func (t Type) String() string { return shortNames[t] }

// HasWildcard tells whether a subscription without names means everything
// (xDS protocol, "How the client specifies what resources to return": LDS and
// CDS only).
func (t Type) HasWildcard() bool { return t == Cluster || t == Listener }

// TypeOf returns the type of a type URL; false for one the agent does not
// serve.
func TypeOf(url string) (Type, bool) {
	for t, u := range typeURLs {
		if u == url {
			return Type(t), true
		}
	}
	return 0, false
}

// Scope says which clients may see a resource: a client has an ordered list
// of scopes, and of several resources with one type and name it sees that of
// the first scope in its list. The zero Scope is shared by all clients.
type Scope string

// Shared is the scope of every client.
const Shared Scope = ""

// NamespaceScope is the scope of the clients of one Kubernetes namespace.
func NamespaceScope(namespace string) Scope { return Scope("ns/" + namespace) }

// NamedOnly tells whether resources of the scope stay outside wildcard
// subscriptions: gRPC's API listeners are reachable by name only, since Envoy
// warns about each one that comes in its wildcard (Envoy listener manager).
func (s Scope) NamedOnly() bool { return len(s) > 4 && s[:4] == "api/" }

// OnDemand tells whether clients that fetch their clusters on demand ask for the
// clusters and CLAs of the scope by name: their wildcard leaves them out.
func (s Scope) OnDemand() bool {
	return strings.HasPrefix(string(s), "ns/") || strings.HasPrefix(string(s), "demand/") || strings.HasPrefix(string(s), "fallback/")
}

// APIScope is the scope of the API listeners of one Kubernetes namespace; see
// [Scope.NamedOnly].
func APIScope(namespace string) Scope { return Scope("api/" + namespace) }

// DialScope is the scope of what gRPC programs of one Kubernetes namespace have
// asked for by the name of a Service: API listeners, and clusters. A name in it
// is that of a Service first; see [Scope.NamedOnly].
func DialScope(namespace string) Scope { return Scope("api/dial/" + namespace) }

// AliasScope is the scope of the clusters by Service names, of the clients of
// one Kubernetes namespace that have all clusters.
func AliasScope(namespace string) Scope { return Scope("alias/" + namespace) }

// TableScope is the scope of one form of the route table of the clients of one
// Kubernetes namespace.
func TableScope(namespace, form string) Scope { return Scope("table/" + form + "/" + namespace) }

// BackendScope is the scope of the clusters that the route tables of the clients
// of one Kubernetes namespace name.
func BackendScope(namespace string) Scope { return Scope("backend/" + namespace) }

// DemandScope is the scope of the clusters that clients of one Kubernetes
// namespace have asked for by the name of a Service or a pod.
func DemandScope(namespace string) Scope { return Scope("demand/" + namespace) }

// FallbackScope is the scope of what stands in for clusters that nobody has, for
// clients of one Kubernetes namespace that have unknown.sock at the path.
func FallbackScope(namespace, socket string) Scope {
	return Scope("fallback/" + namespace + "#" + socket)
}

// ID names one resource.
type ID struct {
	Type  Type
	Name  string
	Scope Scope
}

// Resource is an immutable, encoded resource.
type Resource struct {
	ID
	// Version is derived from the content alone, so that an agent that
	// restarts, or another agent, gives equal content an equal version.
	Version string
	// Body, Delta and SotW share their bytes, with each other and with all
	// responses that carry the resource; nobody may change them.
	Body *anypb.Any
	// Delta is the resource as it stands in a DeltaDiscoveryResponse, tag and
	// length included; SotW, its end, as it stands in a DiscoveryResponse.
	Delta, SotW []byte
}

// NewResource validates and encodes m. It returns an error if m breaks its
// own proto constraints (protoc-gen-validate) or cannot be encoded; such a
// resource must not be published.
func NewResource(id ID, m proto.Message) (*Resource, error) {
	if v, ok := m.(interface{ ValidateAll() error }); ok {
		if err := v.ValidateAll(); err != nil {
			return nil, fmt.Errorf("%s %q is not valid: %w", id.Type, id.Name, err)
		}
	}
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode %s %q: %w", id.Type, id.Name, err)
	}
	sum := sha256.Sum256(value)
	r := &Resource{ID: id, Version: base64.RawURLEncoding.EncodeToString(sum[:8])}
	r.frame(value)
	return r, nil
}

// frame writes the resource as responses hold it. In both kinds of response
// resources are field 2; in the Resource of a delta response the body is field
// 2 again, and so, written last, is what a SotW response holds.
func (r *Resource) frame(value []byte) {
	const versionField, listField, bodyField, nameField = 1, 2, 2, 3
	url := r.Type.URL()
	text := func(n protowire.Number, size int) int { return protowire.SizeTag(n) + protowire.SizeBytes(size) }
	body := text(1, len(url)) + text(2, len(value))
	size := text(nameField, len(r.Name)) + text(versionField, len(r.Version)) + text(bodyField, body)
	b := make([]byte, 0, text(listField, size))
	b = protowire.AppendTag(b, listField, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	b = protowire.AppendTag(b, nameField, protowire.BytesType)
	b = protowire.AppendString(b, r.Name)
	b = protowire.AppendTag(b, versionField, protowire.BytesType)
	b = protowire.AppendString(b, r.Version)
	head := len(b)
	b = protowire.AppendTag(b, bodyField, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(body))
	b = protowire.AppendTag(b, 1, protowire.BytesType)
	b = protowire.AppendString(b, url)
	b = protowire.AppendTag(b, 2, protowire.BytesType)
	b = protowire.AppendBytes(b, value)
	r.Delta, r.SotW = b, b[head:]
	r.Body = &anypb.Any{TypeUrl: url, Value: b[len(b)-len(value):]}
}

// Evidence says how much is known of the owners that could serve a name in a
// scope. It decides what the absence of a name means.
type Evidence uint8

// The order matters: the worst of several scopes counts.
const (
	// Complete: every owner is known to have services or none. A name that
	// is not published does not exist. It is the zero value.
	Complete Evidence = iota
	// Failed: some owner was asked in vain and will be asked again. A name
	// that a client holds is not removed for want of evidence.
	Failed
	// Pending: some owner has not been asked to the end, or its server took
	// the question and has given no answer yet. As Failed, and a
	// SotW client that holds something is not answered.
	Pending
)

// Update is a set of changes that belong together. The zero Update changes
// nothing.
type Update struct {
	Set    []*Resource
	Remove []ID
	// Evidence holds the scopes whose evidence changed.
	Evidence map[Scope]Evidence
}

// Empty tells whether the update changes nothing.
func (u *Update) Empty() bool {
	return len(u.Set) == 0 && len(u.Remove) == 0 && len(u.Evidence) == 0
}
