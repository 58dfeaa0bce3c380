// Package bootstrap writes the first configuration of the agent's clients:
// Envoy sidecars and proxyless gRPC programs.
package bootstrap

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"

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
	// NodeID is <namespace>/<pod name>, or [PodNodeID]. It must be given.
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
	// serves its admin pages, or the name of an abstract one behind an @ sign,
	// which every container of the pod can reach; empty: it serves none.
	AdminSocket string
	// ReadyAddress is an IP address, or [PodAddress], at whose port ReadyPort
	// Envoy answers every request with 200 once the agent has told it all that
	// it starts with. Until then nobody listens there: Envoy listens when its
	// first clusters and listeners have come. Empty: there is no such port. gRPC
	// programs take no notice of it.
	ReadyAddress string
	// ReadyPort is a TCP port; it must be given with a ReadyAddress.
	ReadyPort uint16
	// Redirect lets Envoy listen for redirected connections, where the agent of
	// its node redirects some. It needs clusters on demand. gRPC programs take no
	// notice of it.
	Redirect bool
}

// The environment variables from which a bootstrap that stands in the spec of a
// pod has what is known only once the pod runs: $(NAME) in a container's
// arguments, and in the value of a variable behind it, is replaced by the kubelet
// (Kubernetes, "Define Dependent Environment Variables").
const (
	EnvPodNamespace = "FINGERPOST_POD_NAMESPACE"
	EnvPodName      = "FINGERPOST_POD_NAME"
	EnvPodAddress   = "FINGERPOST_POD_IP"
)

const (
	podNamespace = "$(" + EnvPodNamespace + ")"

	// PodNodeID is the node id of whatever pod the bootstrap is in.
	PodNodeID = podNamespace + "/$(" + EnvPodName + ")"
	// PodAddress is the address of that pod, in the family of its first one.
	PodAddress = "$(" + EnvPodAddress + ")"
)

// check fills what is left out and returns the namespace of the node.
func (o *Options) check() (namespace string, err error) {
	if o.NodeID == PodNodeID {
		namespace = podNamespace
	} else if namespace, _, err = resources.ParseNodeID(o.NodeID); err != nil {
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
	case o.Redirect && o.Clusters != "on-demand":
		return "", errors.New("redirected connections need clusters on demand")
	case o.ReadyAddress != "" && o.ReadyPort == 0:
		return "", errors.New("a ready address needs a ready port")
	}
	if a := o.ReadyAddress; a != "" && a != PodAddress {
		if _, err := netip.ParseAddr(a); err != nil {
			return "", fmt.Errorf("ready address %q is not an IP address", a)
		}
	}
	for _, path := range []string{o.ADSSocket, o.unknownSocket(), o.AdminSocket} {
		if path == "" {
			continue
		}
		if !filepath.IsAbs(path) && (path != o.AdminSocket || !strings.HasPrefix(path, "@")) {
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
	if o.Redirect {
		meta[resources.MetaRedirect] = structpb.NewStringValue("true")
	}
	return &corev3.Node{
		Id: o.NodeID,
		// Envoy refuses ADS without a cluster of its own.
		Cluster:  namespace,
		Metadata: &structpb.Struct{Fields: meta},
	}
}
