package client

import (
	"fmt"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fingerpost/fingerpost/xds"
)

// nameOf reads the name of a resource out of its body, which is the only place
// where SotW has it.
func nameOf(t xds.Type, body *anypb.Any) (string, error) {
	var m proto.Message
	var name func() string
	switch t {
	case xds.Cluster:
		c := &clusterv3.Cluster{}
		m, name = c, c.GetName
	case xds.Endpoint:
		c := &endpointv3.ClusterLoadAssignment{}
		m, name = c, c.GetClusterName
	case xds.Listener:
		l := &listenerv3.Listener{}
		m, name = l, l.GetName
	default:
		r := &routev3.RouteConfiguration{}
		m, name = r, r.GetName
	}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(body.GetValue(), m); err != nil {
		return "", fmt.Errorf("a %s resource does not parse: %w", t, err)
	}
	return name(), nil
}
