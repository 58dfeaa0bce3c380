package resources

import (
	"regexp"
	"strings"
)

// Call is what a call says of where it wants to go.
type Call struct {
	Namespace string // of the caller
	Authority string // with or without a port
	Path      string // as /pkg.Service/Method
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
	// Cluster is what the call goes to where the sidecar has it, and else to
	// [UnknownCluster]; empty where it goes there in any case.
	Cluster string
}

// callPath is what the route table takes for the path of a gRPC call.
var callPath = regexp.MustCompile(`^/([A-Za-z_][A-Za-z0-9_.]*)/([A-Za-z_][A-Za-z0-9_]*)$`)

// ByName is the constant rule, which every call meets for which no route speaks
// (see [Compiler.Choose]): what route.lua computes.
func ByName(call Call) Rule {
	r := Rule{VirtualHost: egressName, Route: byNameRoute, Why: "it takes every call for which no route speaks"}
	m := callPath.FindStringSubmatch(call.Path)
	if m == nil {
		return r
	}
	r.Service, r.Method = m[1], m[2]
	host, port := strings.ToLower(call.Authority), ""
	if i := strings.LastIndexByte(host, ':'); i >= 0 && i < len(host)-1 && strings.Trim(host[i+1:], "0123456789") == "" {
		host, port = host[:i], host[i:]
	}
	host = strings.TrimSuffix(host, ".")
	switch host {
	case "127.0.0.1", "localhost", "[::1]":
		r.ByPath = true
		r.Cluster = clusterName(call.Namespace, r.Service)
	default:
		r.Cluster = "at/" + host + port + "/" + r.Service
	}
	return r
}
