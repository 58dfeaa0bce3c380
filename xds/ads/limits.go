package ads

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/xds"
)

// What one client can make the server keep or do. A client that goes beyond is
// ended with a status that says so; the others do not notice it. Requests are
// bounded by maxRequest, responses by maxResponse.
const (
	// maxNode bounds the bytes of the node that introduces a client. Envoy
	// lists its extensions there, about 100 kB, which are not kept.
	maxNode = 1 << 20
	// maxNodeID bounds node.id: a Kubernetes namespace and pod name have at
	// most 317 bytes.
	maxNodeID = 1 << 10
	// maxPerID bounds the streams of clients with one id: those of an Envoy
	// and its successor, and of every gRPC program of the pod.
	maxPerID = 512
	// maxStreams bounds the streams of one connection.
	maxStreams = 1 << 10
	// maxDeltaNames and maxSotWNames bound the names in one request. A SotW
	// request is read under the lock of the tables in one piece.
	maxDeltaNames = 1 << 17
	maxSotWNames  = 1 << 15
	// maxAbsent bounds the bytes that a stream keeps of names that nobody has;
	// known names cost some bits.
	maxAbsent = 16 << 20
	// perAbsent is what a kept name costs beside its text.
	perAbsent = 64
	// portion is the number of names that are handled under one hold of the
	// locks, so that a long request does not hold up the publisher.
	portion = 4 << 10
)

// checkNode refuses an introduction that is too large to be one.
func checkNode(node *corev3.Node) error {
	if n := len(node.GetId()); n > maxNodeID {
		return status.Errorf(codes.InvalidArgument, "node.id has %d bytes, at most %d are possible", n, maxNodeID)
	}
	if n := proto.Size(node); n > maxNode {
		return status.Errorf(codes.InvalidArgument, "node has %d bytes, at most %d are possible", n, maxNode)
	}
	return nil
}

// kept returns what is kept of a node for the life of its stream.
func kept(node *corev3.Node) *corev3.Node {
	return &corev3.Node{
		Id: node.GetId(), Cluster: node.GetCluster(), Metadata: node.GetMetadata(), Locality: node.GetLocality(),
		UserAgentName: node.GetUserAgentName(), UserAgentVersionType: node.GetUserAgentVersionType(),
	}
}

// checkNames refuses a request that names too much at once.
func checkNames(t xds.Type, n, limit int) error {
	if n <= limit {
		return nil
	}
	return status.Errorf(codes.ResourceExhausted,
		"a request for %s names %d resources, at most %d are possible", t, n, limit)
}

// checkAbsent refuses a stream that holds too many names which nobody has.
func (st *stream) checkAbsent() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	total := 0
	for t := range st.types {
		ts := &st.types[t]
		total += perAbsent * (len(ts.missing) + len(ts.owed) + len(ts.brought))
		for name := range ts.missing {
			total += len(name)
		}
		for name := range ts.owed {
			if _, ok := ts.missing[name]; !ok {
				total += len(name)
			}
		}
		for name, version := range ts.brought {
			total += len(name) + len(version)
		}
	}
	if total <= maxAbsent {
		return nil
	}
	return status.Errorf(codes.ResourceExhausted,
		"the client asks for more names that do not exist than the agent keeps (%d MiB); name what is there, or \"*\"", maxAbsent>>20)
}

// breathe lets go of both locks for a moment after each portion.
func (st *stream) breathe(i int) {
	if i%portion == portion-1 {
		st.mu.Unlock()
		st.s.mu.RUnlock()
		st.s.mu.RLock()
		st.mu.Lock()
	}
}
