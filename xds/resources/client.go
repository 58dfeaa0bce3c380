package resources

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/xds"
)

// Shape is the number of the form in which listeners, routes and clusters are
// written. A change of their bytes is a new shape: a running client goes on
// with the shape that its bootstrap named, and two shapes are served side by
// side, each in scopes of its own. The one before it is shape 1, whose route
// table takes authorities as they are written, and has no clusters for them.
const Shape = 2

// The keys of a client's node metadata, all with string values.
const (
	MetaShape    = "fingerpost.dev/shape"    // number of the shape
	MetaClusters = "fingerpost.dev/clusters" // all or on-demand
	MetaUnknown  = "fingerpost.dev/unknown"  // path of unknown.sock, with on-demand
	MetaIPv6     = "fingerpost.dev/ipv6"     // true: listen on ::1 too
)

// scopeIPv6 holds egress6. Where IPv6 is off, that listener would be a
// permanent rejection; so only clients that ask for it see it.
const scopeIPv6 xds.Scope = "ipv6"

// These hold the listeners of clients that fetch their clusters on demand.
const (
	scopeOnDemand     xds.Scope = "on-demand"
	scopeOnDemandIPv6 xds.Scope = "on-demand/ipv6"
)

// Client is what a client says of itself in its node.
type Client struct {
	Namespace string
	Pod       string
	// Shape is the shape that the client is served.
	Shape int
	// OnDemand is set where the client fetches clusters at their first call.
	OnDemand bool
	// UnknownSocket is where the client has unknown.sock; empty where it does
	// not say.
	UnknownSocket string
	IPv6          bool
	// Warnings says, one line each, what of the client's wishes is not met.
	Warnings []string
}

// maxSocketPath is the longest path that fits sockaddr_un on Linux (unix(7)).
const maxSocketPath = 107

// label is a DNS label (RFC 1123), as Kubernetes wants it of a namespace and of
// a Service. It also makes a namespace safe as a Lua string.
var label = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// ParseNodeID splits a node id into namespace and pod name, or says which form
// a node id must have.
func ParseNodeID(id string) (namespace, pod string, err error) {
	namespace, pod, ok := strings.Cut(id, "/")
	if !ok || !label.MatchString(namespace) || pod == "" || len(pod) > 253 || strings.ContainsFunc(pod, unfit) {
		return "", "", fmt.Errorf("node id %.300q is not <namespace>/<pod name>; set node.id in the client's bootstrap", id)
	}
	return namespace, pod, nil
}

// unfit characters would make one name look like several, or like something
// else where it is printed.
func unfit(r rune) bool { return r == '/' || unicode.IsSpace(r) || !unicode.IsPrint(r) }

// ParseClient reads a node. It returns an error that tells the client's owner
// what to correct if the node does not say which namespace it belongs to.
//
// A client that names no shape, or one that this agent does not know (an agent
// that was rolled back), is served the current one; the latter with a warning.
func ParseClient(node *corev3.Node) (Client, error) {
	var c Client
	var err error
	if c.Namespace, c.Pod, err = ParseNodeID(node.GetId()); err != nil {
		return Client{}, err
	}
	meta := node.GetMetadata().GetFields()
	c.IPv6 = meta[MetaIPv6].GetStringValue() == "true"
	c.OnDemand = meta[MetaClusters].GetStringValue() == "on-demand"
	if path := meta[MetaUnknown].GetStringValue(); path != "" && c.OnDemand {
		if filepath.IsAbs(path) && len(path) <= maxSocketPath && !strings.ContainsFunc(path, unicode.IsControl) {
			c.UnknownSocket = path
		} else {
			c.Warnings = append(c.Warnings, fmt.Sprintf("%s %.120q is no absolute path of at most %d bytes", MetaUnknown, path, maxSocketPath))
		}
	}
	c.Shape = Shape
	switch s := meta[MetaShape].GetStringValue(); s {
	case "", strconv.Itoa(Shape):
	case strconv.Itoa(Shape - 1):
		c.Shape = Shape - 1
	default:
		c.Warnings = append(c.Warnings, fmt.Sprintf("shape %.20q is not known to this agent; it serves shape %d", s, Shape))
	}
	return c, nil
}

// Form is that of the client's route table.
func (c Client) Form() Form {
	switch {
	case c.Shape < Shape:
		return ShapeOne
	case c.OnDemand:
		return OnDemand
	}
	return AllClusters
}

// Scopes returns what the client may see, the most specific first: as written
// for its form, then as for every client.
func (c Client) Scopes() []xds.Scope {
	return c.scopes(c.Form())
}

// AskingScopes are the scopes of a client that has asked for many names which
// nobody has.
func (c Client) AskingScopes() []xds.Scope { return c.scopes(Asking) }

func (c Client) scopes(form Form) []xds.Scope {
	scopes := []xds.Scope{xds.NamespaceScope(c.Namespace), xds.BackendScope(c.Namespace), xds.DialScope(c.Namespace), xds.APIScope(c.Namespace), xds.Shared}
	ipv6 := scopeIPv6
	// In front of the namespace's, which has the table of shape 1.
	switch {
	case form.OnDemand():
		scopes = append([]xds.Scope{form.scope(c.Namespace), scopeOnDemand, xds.DemandScope(c.Namespace)}, scopes...)
		ipv6 = scopeOnDemandIPv6
	case form == AllClusters:
		scopes = append([]xds.Scope{form.scope(c.Namespace), xds.AliasScope(c.Namespace)}, scopes...)
	}
	if c.IPv6 {
		scopes = append(scopes, ipv6)
	}
	return scopes
}

// Scopes returns the scopes of a node, or the error of [ParseClient].
func Scopes(node *corev3.Node) ([]xds.Scope, error) {
	c, err := ParseClient(node)
	if err != nil {
		return nil, err
	}
	return c.Scopes(), nil
}
