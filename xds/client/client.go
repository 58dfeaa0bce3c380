// Package client is a small raw client of the aggregated discovery service,
// SotW and delta, for the command line and for tests. It keeps what it was
// sent and answers each response as it is told; it interprets no resource.
package client

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fingerpost/fingerpost/xds"
)

// maxResponse is the largest response in bytes that is accepted: SotW CDS and
// LDS are whole by protocol.
const maxResponse = 64 << 20

// Dial returns a connection to the unix socket at path. It connects when it is
// first used.
func Dial(path string, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+path, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxResponse)),
	}, opts...)...)
}

// Memory is what a client carries from one stream to the next. The zero Memory
// is that of a new client.
type Memory struct {
	// Resources holds, by type and name, what the client has.
	Resources [xds.NumTypes]map[string]Resource
	// Versions are the last accepted SotW versions.
	Versions [xds.NumTypes]string
}

// Resource is one resource as it came.
type Resource struct {
	Name string
	// Version is that of the resource on delta, that of the response on SotW.
	Version string
	Body    *anypb.Any
}

// Response is one response as it came.
type Response struct {
	Type      xds.Type
	Version   string // version_info or system_version_info
	Nonce     string
	Resources []Resource
	Removed   []string
	// Identifier is control_plane.identifier.
	Identifier string
}

// Names are the names of the resources in the order they came in.
func (r Response) Names() []string {
	names := make([]string, len(r.Resources))
	for i := range r.Resources {
		names[i] = r.Resources[i].Name
	}
	return names
}

// Reply says how a response is answered. The zero Reply accepts.
type Reply struct {
	Nack   string // refuse with this text
	Silent bool   // do not answer
}

// Options configure a [Stream].
type Options struct {
	Delta bool
	// Node introduces the client; nil means one without an id.
	Node *corev3.Node
	// Memory is what an earlier stream left: the first request of each type
	// names its versions.
	Memory Memory
	// Reply decides how each response is answered; nil accepts all. It runs
	// on the receiving goroutine.
	Reply func(Response) Reply
}

// Stream is one aggregated stream. Its methods are safe for concurrent use.
type Stream struct {
	opts      Options
	responses chan Response
	cancel    context.CancelFunc
	delta     discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
	sotw      discovery.AggregatedDiscoveryService_StreamAggregatedResourcesClient

	// mu guards the state below and the order of requests.
	mu     sync.Mutex
	begun  bool
	types  [xds.NumTypes]typeState
	memory Memory
	err    error
}

type typeState struct {
	begun bool
	names map[string]struct{}
	nonce string
}

// Open opens a stream, which ends with ctx or by Close.
func Open(ctx context.Context, cc grpc.ClientConnInterface, opts Options) (*Stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &Stream{opts: opts, responses: make(chan Response), cancel: cancel}
	for t := range s.memory.Resources {
		s.memory.Resources[t] = maps.Clone(opts.Memory.Resources[t])
		if s.memory.Resources[t] == nil {
			s.memory.Resources[t] = map[string]Resource{}
		}
		s.types[t].names = map[string]struct{}{}
	}
	s.memory.Versions = opts.Memory.Versions
	if s.opts.Node == nil {
		s.opts.Node = &corev3.Node{}
	}
	var err error
	if c := discovery.NewAggregatedDiscoveryServiceClient(cc); opts.Delta {
		s.delta, err = c.DeltaAggregatedResources(ctx)
	} else {
		s.sotw, err = c.StreamAggregatedResources(ctx)
	}
	if err != nil {
		cancel()
		return nil, err
	}
	go s.receive(ctx)
	return s, nil
}

// Close ends the stream and waits until no response comes any more.
func (s *Stream) Close() {
	s.cancel()
	for range s.responses {
	}
}

// Responses delivers what comes, after it was answered; it is closed when the
// stream ends. Nobody receiving holds the stream up.
func (s *Stream) Responses() <-chan Response { return s.responses }

// Next returns the next response, or why there is none.
func (s *Stream) Next(ctx context.Context) (Response, error) {
	select {
	case r, ok := <-s.responses:
		if !ok {
			return Response{}, s.Err()
		}
		return r, nil
	case <-ctx.Done():
		return Response{}, ctx.Err()
	}
}

// Err is why the stream ended; nil while it runs.
func (s *Stream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Memory is what the client has now.
func (s *Stream) Memory() Memory {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.memory
	for t := range m.Resources {
		m.Resources[t] = maps.Clone(m.Resources[t])
	}
	return m
}

// Subscribe asks for names of a type in one request, beside those asked for
// already. On a type that was never asked for, no name means everything; "*"
// always does.
func (s *Stream) Subscribe(t xds.Type, names ...string) error {
	return s.change(t, names, nil)
}

// Unsubscribe gives names back in one request.
func (s *Stream) Unsubscribe(t xds.Type, names ...string) error {
	return s.change(t, nil, names)
}

func (s *Stream) change(t xds.Type, add, remove []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	ts := &s.types[t]
	for _, n := range add {
		ts.names[n] = struct{}{}
	}
	for _, n := range remove {
		delete(ts.names, n)
		delete(s.memory.Resources[t], n)
	}
	if s.delta == nil {
		return s.sendSotW(t, "")
	}
	req := &discovery.DeltaDiscoveryRequest{ResourceNamesSubscribe: add, ResourceNamesUnsubscribe: remove}
	if !ts.begun {
		req.InitialResourceVersions = map[string]string{}
		for name, r := range s.memory.Resources[t] {
			req.InitialResourceVersions[name] = r.Version
		}
	}
	return s.sendDelta(t, req)
}

// Send sends a delta request as it is, but for its type and node.
func (s *Stream) Send(t xds.Type, req *discovery.DeltaDiscoveryRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sendDelta(t, req)
}

// SendSotW sends a SotW request as it is, but for its type and node.
func (s *Stream) SendSotW(t xds.Type, req *discovery.DiscoveryRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	req.TypeUrl = t.URL()
	req.Node = s.introduction()
	s.types[t].begun = true
	return s.sotw.Send(req)
}

// Ack answers the last response of a type, which Reply left unanswered. An
// empty text accepts it.
func (s *Stream) Ack(t xds.Type, nack string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answer(t, nack)
}

func (s *Stream) answer(t xds.Type, nack string) error {
	if s.delta == nil {
		return s.sendSotW(t, nack)
	}
	return s.sendDelta(t, &discovery.DeltaDiscoveryRequest{
		ResponseNonce: s.types[t].nonce, ErrorDetail: detail(nack),
	})
}

func detail(text string) *rpcstatus.Status {
	if text == "" {
		return nil
	}
	return &rpcstatus.Status{Code: int32(codes.InvalidArgument), Message: text}
}

func (s *Stream) introduction() *corev3.Node {
	if s.begun {
		return nil
	}
	s.begun = true
	return s.opts.Node
}

func (s *Stream) sendDelta(t xds.Type, req *discovery.DeltaDiscoveryRequest) error {
	req.TypeUrl = t.URL()
	req.Node = s.introduction()
	s.types[t].begun = true
	return s.delta.Send(req)
}

func (s *Stream) sendSotW(t xds.Type, nack string) error {
	ts := &s.types[t]
	ts.begun = true
	return s.sotw.Send(&discovery.DiscoveryRequest{
		TypeUrl:       t.URL(),
		Node:          s.introduction(),
		VersionInfo:   s.memory.Versions[t],
		ResponseNonce: ts.nonce,
		ResourceNames: slices.Sorted(maps.Keys(ts.names)),
		ErrorDetail:   detail(nack),
	})
}

func (s *Stream) receive(ctx context.Context) {
	defer close(s.responses)
	for {
		r, err := s.read()
		if err == nil {
			err = s.take(r)
		}
		if err != nil {
			s.mu.Lock()
			s.err = err
			s.mu.Unlock()
			s.cancel()
			return
		}
		select {
		case s.responses <- r:
		case <-ctx.Done():
			s.mu.Lock()
			s.err = ctx.Err()
			s.mu.Unlock()
			return
		}
	}
}

// take answers a response and, if it is accepted, keeps what it holds.
func (s *Stream) take(r Response) error {
	var reply Reply
	if s.opts.Reply != nil {
		reply = s.opts.Reply(r)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.types[r.Type].nonce = r.Nonce
	if reply.Nack == "" {
		s.memory.Versions[r.Type] = r.Version
		have := s.memory.Resources[r.Type]
		if s.delta == nil && r.Type.HasWildcard() {
			clear(have)
		}
		for _, res := range r.Resources {
			have[res.Name] = res
		}
		for _, name := range r.Removed {
			delete(have, name)
		}
	}
	if reply.Silent {
		return nil
	}
	// A send that fails says EOF; the reason comes with the next receive.
	_ = s.answer(r.Type, reply.Nack)
	return nil
}

func (s *Stream) read() (Response, error) {
	if s.delta != nil {
		m, err := s.delta.Recv()
		if err != nil {
			return Response{}, err
		}
		t, ok := xds.TypeOf(m.GetTypeUrl())
		if !ok {
			return Response{}, fmt.Errorf("response of type %q was not asked for", m.GetTypeUrl())
		}
		r := Response{Type: t, Version: m.GetSystemVersionInfo(), Nonce: m.GetNonce(), Removed: m.GetRemovedResources(), Identifier: m.GetControlPlane().GetIdentifier()}
		for _, res := range m.GetResources() {
			r.Resources = append(r.Resources, Resource{Name: res.GetName(), Version: res.GetVersion(), Body: res.GetResource()})
		}
		return r, nil
	}
	m, err := s.sotw.Recv()
	if err != nil {
		return Response{}, err
	}
	t, ok := xds.TypeOf(m.GetTypeUrl())
	if !ok {
		return Response{}, fmt.Errorf("response of type %q was not asked for", m.GetTypeUrl())
	}
	r := Response{Type: t, Version: m.GetVersionInfo(), Nonce: m.GetNonce(), Identifier: m.GetControlPlane().GetIdentifier()}
	for _, body := range m.GetResources() {
		name, err := nameOf(t, body)
		if err != nil {
			return Response{}, err
		}
		r.Resources = append(r.Resources, Resource{Name: name, Version: r.Version, Body: body})
	}
	return r, nil
}
