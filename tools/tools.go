// Package tools names the programs that building and testing Fingerpost need
// beside the Go toolchain, with their pinned versions, and says where in the
// cache each one stands. The program tools/bring puts them there.
//
// A Go program is pinned by the go.mod and go.sum of its own module below
// tools/, so that users of Fingerpost's module inherit none of it; Envoy by
// the checksums of its wheel and of the binary within. The gRPC servers and
// clients of other languages are pinned by the lock files
// of those languages; grpcio is Debian's.
package tools

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// DirEnv is the environment variable that replaces the cache directory.
const DirEnv = "FINGERPOST_TOOLS"

// EnvoyEnv is the environment variable that names an Envoy binary to use
// instead of the pinned one. It is taken as it is: no checksum is compared.
const EnvoyEnv = "ENVOY"

// ErrUnknown indicates that a name is not that of a pinned tool.
var ErrUnknown = errors.New("unknown tool")

// Group says what a tool is for.
type Group string

// The groups in which tools are brought.
const (
	Test    Group = "test"    // run by tests
	Lint    Group = "lint"    // reads the source
	Cluster Group = "cluster" // run by cluster tests only
	Node    Group = "node"    // what the node image of cluster tests is made of, beside etcd and kube-apiserver
)

// Tool is one pinned program. The zero value names none.
type Tool struct {
	Name    string
	Version string
	Group   Group
	// Module is the directory below tools/ whose go.mod pins the program.
	Module string
	// Package is the Go main package, "." if it is in the module itself; empty
	// for what is no Go program.
	Package string
}

// What stands at the [Path] of a tool without a Package.
const (
	GrpcJS    = "grpc-js"     // a directory with node_modules
	GrpcJSXDS = "grpc-js-xds" // another one
	GrpcJava  = "grpc-java"   // a directory of jars
	Tonic     = "tonic"       // a program
	Grpcio    = "grpcio"      // the directory of Debian's package
)

const (
	kubeVersion  = "v1.37.2"
	etcdVersion  = "v3.7.3"
	envoyVersion = "1.40.0"
	lintVersion  = "v2.15.0"
	sumVersion   = "v1.13.0"
	echoVersion  = "v1.6.3"
	curlVersion  = "v1.9.4"
	jsVersion    = "1.14.7"
	jsXDSVersion = "1.14.1"
	javaVersion  = "1.85.1"
	tonicVersion = "0.14.9+2" // of the library, and a number for main.rs

	kindVersion       = "v0.33.0"
	containerdVersion = "v2.3.7"
	runcVersion       = "v1.4.3"
	cniVersion        = "v1.9.1"
	crictlVersion     = "v1.37.0"
	corednsVersion    = "v1.14.6"
	// As in the pinned kubectl, so that what tests read is what kubectl apply -k applies.
	kustomizeVersion = "v5.8.1"
)

// EnvoySHA256 is the checksum of the Envoy binary within the pinned wheel, by
// GOARCH.
var EnvoySHA256 = map[string]string{
	"amd64": "8aa137a7d00994ce43f613556f5a120709229f63bedb86eedde5ccbc402c2b80",
	"arm64": "03cacc952561635c0b7d2a829291f341dadbebc32050475efbe7321b1bbe18c2",
}

var all = []Tool{
	{"etcd", etcdVersion, Test, "etcd", "go.etcd.io/etcd/server/v3"},
	{"kube-apiserver", kubeVersion, Test, "kube", "k8s.io/kubernetes/cmd/kube-apiserver"},
	{"envoy", envoyVersion, Test, "envoy", ""},
	{"kustomize", kustomizeVersion, Test, "kustomize", "sigs.k8s.io/kustomize/kustomize/v5"},
	{"gotestsum", sumVersion, Test, "gotestsum", "gotest.tools/gotestsum"},
	{"echo-basic", echoVersion, Test, "echo", "sigs.k8s.io/gateway-api/conformance/echo-basic"},
	{"grpcurl", curlVersion, Test, "grpcurl", "github.com/fullstorydev/grpcurl/cmd/grpcurl"},
	{Grpcio, "", Test, "grpcio", ""},
	{GrpcJS, jsVersion, Test, "grpc-js", ""},
	{GrpcJSXDS, jsXDSVersion, Test, "grpc-js-xds", ""},
	{GrpcJava, javaVersion, Test, "grpc-java", ""},
	{Tonic, tonicVersion, Test, "tonic", ""},
	{"golangci-lint", lintVersion, Lint, "lint", "github.com/golangci/golangci-lint/v2/cmd/golangci-lint"},
	{"kubectl", kubeVersion, Cluster, "kube", "k8s.io/kubernetes/cmd/kubectl"},
	{"kind", kindVersion, Cluster, "kind", "sigs.k8s.io/kind"},
	{"kube-controller-manager", kubeVersion, Node, "kube", "k8s.io/kubernetes/cmd/kube-controller-manager"},
	{"kube-scheduler", kubeVersion, Node, "kube", "k8s.io/kubernetes/cmd/kube-scheduler"},
	{"kube-proxy", kubeVersion, Node, "kube", "k8s.io/kubernetes/cmd/kube-proxy"},
	{"kubelet", kubeVersion, Node, "kube", "k8s.io/kubernetes/cmd/kubelet"},
	{"kubeadm", kubeVersion, Node, "kube", "k8s.io/kubernetes/cmd/kubeadm"},
	{"containerd", containerdVersion, Node, "containerd", "github.com/containerd/containerd/v2/cmd/containerd"},
	{"ctr", containerdVersion, Node, "containerd", "github.com/containerd/containerd/v2/cmd/ctr"},
	{"containerd-shim-runc-v2", containerdVersion, Node, "containerd", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"},
	{"runc", runcVersion, Node, "runc", "github.com/opencontainers/runc"},
	{"host-local", cniVersion, Node, "cni", "github.com/containernetworking/plugins/plugins/ipam/host-local"},
	{"loopback", cniVersion, Node, "cni", "github.com/containernetworking/plugins/plugins/main/loopback"},
	{"ptp", cniVersion, Node, "cni", "github.com/containernetworking/plugins/plugins/main/ptp"},
	{"portmap", cniVersion, Node, "cni", "github.com/containernetworking/plugins/plugins/meta/portmap"},
	{"crictl", crictlVersion, Node, "crictl", "sigs.k8s.io/cri-tools/cmd/crictl"},
	{"coredns", corednsVersion, Node, "coredns", "."},
}

// All returns every pinned tool, in the order in which they are brought.
func All() []Tool { return append([]Tool(nil), all...) }

// Find returns the tool with the given name, or ErrUnknown.
func Find(name string) (Tool, error) {
	for _, t := range all {
		if t.Name == name {
			return t, nil
		}
	}
	return Tool{}, fmt.Errorf("%w: %q", ErrUnknown, name)
}

// Dir is the directory that holds the tools: $FINGERPOST_TOOLS, else
// $XDG_CACHE_HOME/fingerpost, else ~/.cache/fingerpost. It need not exist.
func Dir() (string, error) {
	if dir := os.Getenv(DirEnv); dir != "" {
		return filepath.Abs(dir)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no place for tools, set %s: %w", DirEnv, err)
	}
	return filepath.Join(cache, "fingerpost"), nil
}

// grpcioDir is where Debian's python3-grpcio stands, for Debian's Python.
const grpcioDir = "/usr/lib/python3/dist-packages/grpc"

// Path is where the named tool stands, or will stand once it is brought:
// <Dir>/<name>-<version>/<name>, and for Envoy $ENVOY where that is set. The
// file need not exist.
func Path(name string) (string, error) {
	t, err := Find(name)
	if err != nil {
		return "", err
	}
	if name == Grpcio {
		return grpcioDir, nil
	}
	if p := os.Getenv(EnvoyEnv); name == "envoy" && p != "" {
		return filepath.Abs(p)
	}
	dir, err := Dir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, t.Name+"-"+t.Version, t.Name), nil
}
