// Package bootstrap writes the first configuration of the agent's clients:
// Envoy sidecars and proxyless gRPC programs.
package bootstrap

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/xds/resources"
)

// DefaultADSSocket is where the agent serves ADS.
const DefaultADSSocket = "/run/fingerpost/ads.sock"

// UnknownSocket is the file name of the socket for calls that no cluster is
// there for. It stands beside the ADS socket.
const UnknownSocket = "unknown.sock"

// maxSocketPath is the longest path that fits sockaddr_un on Linux (unix(7)).
const maxSocketPath = 107

var (
	// ErrSotWOnDemand indicates a pair of options that cannot work: Envoy
	// fetches clusters on demand over delta streams only.
	ErrSotWOnDemand = errors.New("--clusters on-demand needs --api delta: Envoy fetches no clusters on demand over sotw")
)

// Options configures a bootstrap.
type Options struct {
	// NodeID is <namespace>/<pod name>. It must be given.
	NodeID string
	// ADSSocket is the absolute path of the agent's socket, at most 107 bytes;
	// empty is [DefaultADSSocket].
	ADSSocket string
	// Clusters is all or on-demand; empty is on-demand with delta, else all. gRPC
	// programs have no clusters on demand, and take no notice of it.
	Clusters string
	// API is delta or sotw; empty is delta. gRPC programs speak sotw only.
	API string
	// AdminSocket is the absolute path of the unix socket on which Envoy
	// serves its admin pages; empty: it serves none.
	AdminSocket string
}

// check fills what is left out and returns the namespace of the node.
func (o *Options) check() (namespace string, err error) {
	if namespace, _, err = resources.ParseNodeID(o.NodeID); err != nil {
		return "", err
	}
	o.ADSSocket = cmp.Or(o.ADSSocket, DefaultADSSocket)
	o.API = cmp.Or(o.API, "delta")
	if o.Clusters == "" && o.API == "delta" {
		o.Clusters = "on-demand"
	}
	o.Clusters = cmp.Or(o.Clusters, "all")
	switch {
	case o.Clusters != "all" && o.Clusters != "on-demand":
		return "", fmt.Errorf("clusters %q is not all or on-demand", o.Clusters)
	case o.API != "delta" && o.API != "sotw":
		return "", fmt.Errorf("api %q is not delta or sotw", o.API)
	case o.Clusters == "on-demand" && o.API == "sotw":
		return "", ErrSotWOnDemand
	}
	for _, path := range []string{o.ADSSocket, o.unknownSocket(), o.AdminSocket} {
		if path == "" {
			continue
		}
		if !filepath.IsAbs(path) {
			return "", fmt.Errorf("socket path %q is not absolute", path)
		}
		if len(path) > maxSocketPath {
			return "", fmt.Errorf("socket path %q has %d bytes, at most %d are possible", path, len(path), maxSocketPath)
		}
	}
	return namespace, nil
}

func (o *Options) unknownSocket() string {
	return filepath.Join(filepath.Dir(o.ADSSocket), UnknownSocket)
}

func (o *Options) node(namespace string) *corev3.Node {
	meta := map[string]*structpb.Value{
		resources.MetaClusters: structpb.NewStringValue(o.Clusters),
		resources.MetaShape:    structpb.NewStringValue(strconv.Itoa(resources.Shape)),
	}
	if o.Clusters == "on-demand" {
		meta[resources.MetaUnknown] = structpb.NewStringValue(o.unknownSocket())
	}
	return &corev3.Node{
		Id: o.NodeID,
		// Envoy refuses ADS without a cluster of its own.
		Cluster:  namespace,
		Metadata: &structpb.Struct{Fields: meta},
	}
}
