package resources

import (
	"regexp"
	"strings"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Call is what a call says of where it wants to go.
type Call struct {
	Namespace string // of the caller
	Authority string // with or without a port
	Path      string // as /pkg.Service/Method
	// Form is that of the sidecar's route table.
	Form Form
}

// Rule is what the constant rule of a sidecar's route table makes of a call.
type Rule struct {
	VirtualHost string
	Route       string
	// Why says in one phrase why it is this rule.
	Why string
	// Service and Method are those of the path; empty where that is not one of
	// gRPC.
	Service, Method string
	// ByPath is set where the call names nothing but the gRPC service.
	ByPath bool
	// Cluster is what the call goes to where the sidecar has it, else to Rest,
	// where that is not empty and the sidecar has it, and else to
	// [UnknownCluster]; empty where it goes there in any case. A sidecar with
	// clusters on demand asks for one that it does not have.
	Cluster, Rest string
}

// Authority is the one in the name of the cluster; empty where the call names
// nothing but the gRPC service.
func (r *Rule) Authority() string {
	if r.ByPath || r.Cluster == "" {
		return ""
	}
	return strings.TrimSuffix(strings.TrimPrefix(r.Cluster, atPrefix), "/"+r.Service)
}

// callPath is what the route table takes for the path of a gRPC call.
var callPath = regexp.MustCompile(`^/([A-Za-z_][A-Za-z0-9_.]*)/([A-Za-z_][A-Za-z0-9_]*)$`)

// What is longer than any name that DNS knows is looked for nowhere.
const (
	longestService   = 255
	longestAuthority = 300
)

// ByName is the constant rule, which every call meets for which no route speaks
// (see [Compiler.Choose]): what the table's Lua code computes.
func ByName(call Call) Rule {
	r := Rule{VirtualHost: egressName, Route: byNameRoute, Why: "it takes every call for which no route speaks"}
	m := callPath.FindStringSubmatch(call.Path)
	if m == nil {
		return r
	}
	r.Service, r.Method = m[1], m[2]
	host, port := splitAuthority(call.Authority)
	switch host {
	case "127.0.0.1", "localhost", "[::1]":
		r.ByPath = true
	}
	if call.Form != ShapeOne {
		if len(r.Service) > longestService || len(call.Authority) > longestAuthority || r.ByPath && nodecache.Infrastructure(r.Service) {
			return r
		}
	}
	switch {
	case r.ByPath:
		r.Cluster = clusterName(call.Namespace, r.Service)
	case call.Form == AllClusters:
		authority := aliasOf(call.Namespace, host, port)
		r.Cluster, r.Rest = atName(authority, r.Service), atPrefix+authority
	default:
		r.Cluster = atName(host+port, r.Service)
	}
	return r
}

var (
	serviceHost = regexp.MustCompile(`^([^.]+\.[^.]+)\.svc(\.cluster\.local)?$`)
)

// aliasOf writes a host and port in the form of [alias].
func aliasOf(namespace, host, port string) string {
	if m := serviceHost.FindStringSubmatch(host); m != nil {
		host = m[1]
	}
	if !strings.Contains(host, ".") {
		host += "." + namespace
	}
	if port == "" {
		port = ":80"
	}
	return host + port
}
