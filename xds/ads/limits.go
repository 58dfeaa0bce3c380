package ads

import (
	"maps"
	"time"

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
	// maxPerID bounds the streams of one pod, or of clients with one id where
	// no pod is proved: those of an Envoy and its successor, and of every gRPC
	// program of the pod.
	maxPerID = 512
	// maxOpens is how many streams it may open at once, and openEvery how often
	// one more: each of them may be sent all there is.
	maxOpens  = 2 * maxPerID
	openEvery = 20 * time.Millisecond
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

// share is what a client uses of what it may.
type share struct {
	streams int
	// spent is when all that it opened would have been opened at its pace (the
	// "theoretical arrival time" of the generic cell rate algorithm).
	spent time.Time
}

// enter counts a stream by the key of its client.
func (s *Server) enter(st *stream, key, client string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, running := s.streams[st]; !running {
		return errStopping // its first request came too late to be counted
	}
	now := time.Now()
	if len(s.ids) >= s.idsAt {
		maps.DeleteFunc(s.ids, func(_ string, u *share) bool { return u.idle(now) })
		s.idsAt = max(minSweep, 2*len(s.ids))
	}
	u := s.ids[key]
	if u == nil {
		u = &share{}
	}
	if u.streams >= maxPerID {
		return status.Errorf(codes.ResourceExhausted,
			"client %q has %d streams already; a client needs one", client, maxPerID)
	}
	if u.spent.Sub(now) > (maxOpens-1)*openEvery {
		return status.Errorf(codes.ResourceExhausted,
			"client %q opens more than %d streams a second; a client needs one, and keeps it", client, time.Second/openEvery)
	}
	if u.spent.Before(now) {
		u.spent = now
	}
	u.spent = u.spent.Add(openEvery)
	u.streams++
	s.ids[key] = u
	st.counted, st.countedBy = true, key
	return nil
}

// leave gives a stream back. Called with mu held.
func (s *Server) leave(key string) {
	u := s.ids[key]
	if u.streams--; u.idle(time.Now()) {
		delete(s.ids, key)
	}
}

// idle tells that a share says nothing that none would not.
func (u *share) idle(now time.Time) bool { return u.streams == 0 && !u.spent.After(now) }

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

// proved is the node of the pod that was proved, whatever it says of itself.
func proved(node *corev3.Node, who *Caller) *corev3.Node {
	if who.Pod == "" || who.Pod == node.GetId() {
		return node
	}
	pods := kept(node)
	pods.Id, pods.Extensions = who.Pod, node.GetExtensions()
	return pods
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
