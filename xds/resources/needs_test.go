package resources_test

import (
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/xds/resources"
)

// envoyNode is the node of an Envoy with what the shape needs and more.
func envoyNode(minor uint32, without ...string) *corev3.Node {
	n := &corev3.Node{
		Id: "prod/a-1", UserAgentName: "envoy",
		UserAgentVersionType: &corev3.Node_UserAgentBuildVersion{UserAgentBuildVersion: &corev3.BuildVersion{Version: &typev3.SemanticVersion{MajorNumber: 1, MinorNumber: minor}}},
		Metadata:             &structpb.Struct{Fields: map[string]*structpb.Value{resources.MetaClusters: structpb.NewStringValue("on-demand")}},
	}
	for _, name := range []string{
		"envoy.router.cluster_specifier_plugin/envoy.router.cluster_specifier_plugin.lua",
		"envoy.retry_host_predicates/envoy.retry_host_predicates.previous_hosts",
		"envoy.filters.network/envoy.filters.network.http_connection_manager",
		"envoy.filters.http/envoy.filters.http.grpc_json_transcoder",
		"envoy.filters.http/envoy.filters.http.grpc_stats",
		"envoy.filters.http/envoy.filters.http.on_demand",
		"envoy.filters.http/envoy.filters.http.router",
		"envoy.access_loggers/envoy.access_loggers.stdout",
		"envoy.upstream_options/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
		"envoy.filters.http/envoy.filters.http.lua",
	} {
		category, name, _ := strings.Cut(name, "/")
		e := &corev3.Extension{Category: category, Name: name}
		if slices.Contains(without, name) {
			if len(n.Extensions)%2 == 0 {
				continue
			}
			e.Disabled = true
		}
		n.Extensions = append(n.Extensions, e)
	}
	return n
}

func TestClientThatLacksWhatTheShapeNeedsIsTold(t *testing.T) {
	bare := envoyNode(40)
	bare.Extensions = nil
	grpc := &corev3.Node{Id: "prod/a-1", UserAgentName: "gRPC Go", UserAgentVersionType: &corev3.Node_UserAgentVersion{UserAgentVersion: "1.2.3"}}
	for _, c := range []struct {
		node     *corev3.Node
		onDemand bool
		warnings []string // one part of each
	}{
		{envoyNode(40), true, nil},
		{envoyNode(37), true, nil},
		{bare, true, nil},
		{grpc, false, nil},
		{envoyNode(36), true, []string{"its Envoy is 1.36.0, and 1.37 is the oldest"}},
		{envoyNode(40, "envoy.filters.http.on_demand"), false, []string{"without envoy.filters.http.on_demand, which clusters on demand need; it has all clusters"}},
		{envoyNode(40, "envoy.router.cluster_specifier_plugin.lua", "envoy.filters.http.grpc_stats"), true,
			[]string{"without envoy.router.cluster_specifier_plugin.lua (routes), envoy.filters.http.grpc_stats (listeners): it rejects these"}},
		{envoyNode(20, "envoy.access_loggers.stdout", "envoy.filters.http.on_demand"), false,
			[]string{"1.20.0", "envoy.access_loggers.stdout (listeners)", "it has all clusters"}},
	} {
		got, err := resources.ParseClient(c.node)
		if err != nil {
			t.Fatal(err)
		}
		ok := got.OnDemand == c.onDemand && len(got.Warnings) == len(c.warnings)
		for i := range c.warnings {
			ok = ok && strings.Contains(got.Warnings[i], c.warnings[i])
		}
		if !ok {
			t.Errorf("on demand %t, %q; want %t, %q", got.OnDemand, got.Warnings, c.onDemand, c.warnings)
		}
	}
}
