package bootstrap

import (
	"encoding/json"
)

// GRPC returns the bootstrap of a proxyless gRPC program as JSON, to be named
// by the environment variable GRPC_XDS_BOOTSTRAP (gRFC A27). Options.Clusters
// and Options.API other than their zero values are checked and not used: gRPC
// names what it wants.
func GRPC(o Options) ([]byte, error) {
	namespace, err := o.check()
	if err != nil {
		return nil, err
	}
	o.Clusters = "all"
	type object = map[string]any
	text, err := json.MarshalIndent(object{
		"xds_servers": []object{{
			"server_uri":    "unix://" + o.ADSSocket,
			"channel_creds": []object{{"type": "insecure"}},
			// An agent that restarts must not take a program's listeners away
			// (gRFC A53).
			"server_features": []string{"xds_v3", "ignore_resource_deletion"},
		}},
		"node": object{
			"id":       o.NodeID,
			"cluster":  namespace,
			"metadata": o.node(namespace).GetMetadata().AsMap(),
			// grpc-js refuses a node without one, be it empty.
			"locality": object{},
		},
	}, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(text, '\n'), nil
}
