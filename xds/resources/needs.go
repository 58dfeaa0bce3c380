package resources

import (
	"fmt"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
)

// The oldest Envoy on which the tests of this program pass. The one before it
// takes no notice of a cluster's retry policy.
const (
	MinEnvoyMajor = 1
	MinEnvoyMinor = 37
)

// onDemandExtension is what a client needs to fetch clusters.
var onDemandExtension = extension{"envoy.filters.http", onDemandName}

// extension is one of Envoy, as it lists them in its node.
type extension struct{ category, name string }

// extensions are those that a shape uses, and what cannot be without one. Those of
// the bootstrap are not among them: an Envoy that lacks one does not start.
var extensions = []struct {
	extension
	part string
}{
	{extension{"envoy.router.cluster_specifier_plugin", "envoy.router.cluster_specifier_plugin.lua"}, "routes"},
	{extension{"envoy.retry_host_predicates", "envoy.retry_host_predicates.previous_hosts"}, "routes"},
	{extension{"envoy.filters.network", hcmName}, "listeners"},
	{extension{"envoy.filters.http", "envoy.filters.http.grpc_json_transcoder"}, "listeners"},
	{extension{"envoy.filters.http", "envoy.filters.http.grpc_stats"}, "listeners"},
	{extension{"envoy.filters.http", "envoy.filters.http.router"}, "listeners"},
	{extension{"envoy.access_loggers", "envoy.access_loggers.stdout"}, "listeners"},
	{extension{"envoy.upstream_options", httpProtocolOptions}, "clusters"},
}

// checkNeeds notes what of the client's Envoy cannot do what it is to do. A client
// that lists no extensions is taken at its word: gRPC lists none, nor does an
// Envoy whose build leaves the list away.
func (c *Client) checkNeeds(node *corev3.Node) {
	if v := node.GetUserAgentBuildVersion().GetVersion(); node.GetUserAgentName() == "envoy" && v != nil &&
		(v.GetMajorNumber() < MinEnvoyMajor || v.GetMajorNumber() == MinEnvoyMajor && v.GetMinorNumber() < MinEnvoyMinor) {
		c.Warnings = append(c.Warnings, fmt.Sprintf("its Envoy is %d.%d.%d, and %d.%d is the oldest that is tested; it is served all the same",
			v.GetMajorNumber(), v.GetMinorNumber(), v.GetPatch(), MinEnvoyMajor, MinEnvoyMinor))
	}
	if len(node.GetExtensions()) == 0 {
		return
	}
	has := map[extension]bool{}
	for _, e := range node.GetExtensions() {
		if !e.GetDisabled() {
			has[extension{e.GetCategory(), e.GetName()}] = true
		}
	}
	var lacks []string
	for _, e := range extensions {
		if !has[e.extension] {
			lacks = append(lacks, fmt.Sprintf("%s (%s)", e.name, e.part))
		}
	}
	if len(lacks) > 0 {
		c.Warnings = append(c.Warnings, fmt.Sprintf("its Envoy was built without %s: it rejects these, and its calls fail; take an Envoy that has them", strings.Join(lacks, ", ")))
	}
	if c.OnDemand && !has[onDemandExtension] {
		c.OnDemand = false
		c.Warnings = append(c.Warnings, fmt.Sprintf("its Envoy was built without %s, which clusters on demand need; it has all clusters", onDemandName))
	}
}
