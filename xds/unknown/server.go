// Package unknown is the server behind unknown.sock, where a sidecar sends the
// calls for which it has no cluster. It looks the name up when the call
// arrives and says what is known of it:
//
//	the path is no method                        UNIMPLEMENTED
//	the authority names nothing                  UNAVAILABLE  why
//	it names pods that a sidecar has to ask for  UNAVAILABLE  clusters on demand are needed
//	the agent has not read the cluster yet       UNAVAILABLE
//	the service is known by now                  UNAVAILABLE  the sidecar is being updated
//	an owner that may have it was not asked yet  wait up to a second, then UNAVAILABLE
//	such an owner was asked in vain              UNAVAILABLE  with reason and next try
//	else                                         UNIMPLEMENTED
//
// A gRPC client takes UNIMPLEMENTED for permanent, so it is only said where
// everything is known. Server reflection is answered from what the services of
// the caller's namespace were found to have.
//
// It is a socket of its own that serves nothing else: an application can make
// its sidecar send any path here.
package unknown

import (
	"cmp"
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// NodeHeader is the request header in which a sidecar says its node id. The
// bootstrap makes it overwrite what the application sent. A pod that the kernel
// proves counts instead of it ([Options.Caller]).
const NodeHeader = resources.NodeHeader

// pace is how often a waiting call looks again while much changes.
const pace = 20 * time.Millisecond

// Knowledge is what the server asks; [resources.Compiler] is one. All methods
// must be safe for concurrent use and return at once.
type Knowledge interface {
	// Lookup says what is known of a service in a namespace now.
	Lookup(namespace, service string) resources.Answer
	// Names returns the services of a namespace, sorted.
	Names(namespace string) []string
	// Providers returns the owners behind a service.
	Providers(namespace, service string) []*nodecache.Owner
	// Resolve says what an authority names for callers of a namespace, and who
	// there may get calls of a service.
	Resolve(namespace, authority, service string) resources.Named
}

// Options configures a [Server]. The zero Options works.
type Options struct {
	// Synced tells whether the agent has read the cluster. Nil: it has.
	Synced func() bool
	// Form is that of the route table of the sidecar that says a node id, by the
	// pod that is proved to call, empty where none is. Nil: all have
	// [resources.AllClusters].
	Form func(says, pod string) resources.Form
	// Hurry asks that the owners be collected before others, since a call
	// waits for them. It must not block. Nil: nobody is asked.
	Hurry func([]nodecache.OwnerKey)
	// Credentials let Caller know who is at the other end; nil: nobody does.
	Credentials credentials.TransportCredentials
	// Caller returns "namespace/name" of the pod that is proved to call, which
	// then counts instead of [NodeHeader]; empty where none is. An error is the
	// answer to the call. Nil: no pod is proved.
	Caller func(context.Context) (pod string, err error)
	// Deliver lets a sidecar have a cluster that it does not ask for by itself. It
	// must not block. Nil: no sidecar gets one.
	Deliver func(node, cluster string)
	// Patience is how long a call waits for owners that were not asked yet; 0
	// is 1 second.
	Patience time.Duration
	// MaxWaiting bounds the calls that wait at a time; one more is answered
	// as if it had waited. 0 is 256.
	MaxWaiting int
	// MaxReflection bounds the reflection streams that are open at a time; one
	// more gets RESOURCE_EXHAUSTED. 0 is 64.
	MaxReflection int
}

// Server answers calls for which there is no cluster. All methods are safe for
// concurrent use.
type Server struct {
	know       Knowledge
	opts       Options
	grpc       *grpc.Server
	waiting    chan struct{} // one token for each call that waits
	reflecting chan struct{} // one token for each reflection stream
}

// New returns a server that is not serving yet.
func New(k Knowledge, o Options) *Server {
	if o.Synced == nil {
		o.Synced = func() bool { return true }
	}
	if o.Form == nil {
		o.Form = func(string, string) resources.Form { return resources.AllClusters }
	}
	if o.Deliver == nil {
		o.Deliver = func(string, string) {}
	}
	if o.Hurry == nil {
		o.Hurry = func([]nodecache.OwnerKey) {}
	}
	if o.Caller == nil {
		o.Caller = func(context.Context) (string, error) { return "", nil }
	}
	if o.Patience <= 0 {
		o.Patience = time.Second
	}
	if o.MaxWaiting <= 0 {
		o.MaxWaiting = 256
	}
	if o.MaxReflection <= 0 {
		o.MaxReflection = 64
	}
	s := &Server{
		know: k, opts: o,
		waiting:    make(chan struct{}, o.MaxWaiting),
		reflecting: make(chan struct{}, o.MaxReflection),
	}
	grpcOptions := []grpc.ServerOption{grpc.UnknownServiceHandler(s.handle)}
	if o.Credentials != nil {
		grpcOptions = append(grpcOptions, grpc.Creds(o.Credentials))
	}
	s.grpc = grpc.NewServer(grpcOptions...)
	return s
}

// Serve answers calls on the listener until [Server.Stop], and then returns
// nil. It closes the listener.
func (s *Server) Serve(l net.Listener) error { return s.grpc.Serve(l) }

// Stop ends all calls, with UNAVAILABLE, and every Serve.
func (s *Server) Stop() { s.grpc.Stop() }

// Drain lets running calls end, asks clients to connect anew and takes no more.
// It returns when no connection is left; Stop ends it.
func (s *Server) Drain() { s.grpc.GracefulStop() }

// handle never reads what the caller sends, but for reflection: an answer is
// owed at once, however much is coming.
func (s *Server) handle(_ any, stream grpc.ServerStream) error {
	ctx := stream.Context()
	path, _ := grpc.Method(ctx)
	md, _ := metadata.FromIncomingContext(ctx)
	pod, err := s.opts.Caller(ctx)
	if err != nil {
		return err
	}
	says := first(md, NodeHeader)
	call := Call{Node: cmp.Or(pod, says), Authority: first(md, ":authority"), Path: path, Form: s.opts.Form(says, pod)}
	d := Decide(s.know, s.opts.Synced(), call)
	if d.Reflection {
		return s.reflect(d.namespace, stream)
	}
	if len(d.Pending) > 0 {
		s.opts.Hurry(d.Pending)
		select {
		case s.waiting <- struct{}{}:
			var err error
			d, err = s.wait(ctx, call, d)
			<-s.waiting
			if err != nil {
				return status.FromContextError(err).Err()
			}
		default:
		}
	}
	if d.Deliver != "" {
		s.opts.Deliver(call.Node, d.Deliver)
	}
	return d.Status.Err()
}

// wait looks again at each change until no owner is pending, or patience ends.
func (s *Server) wait(ctx context.Context, call Call, d Decision) (Decision, error) {
	end := time.NewTimer(s.opts.Patience)
	defer end.Stop()
	for {
		if d.changed == nil { // nobody tells
			now := make(chan struct{})
			close(now)
			d.changed = now
		}
		select {
		case <-d.changed:
		case <-end.C:
			return Decide(s.know, s.opts.Synced(), call), nil
		case <-ctx.Done():
			return d, ctx.Err()
		}
		d = Decide(s.know, s.opts.Synced(), call)
		if len(d.Pending) == 0 {
			return d, nil
		}
		select {
		case <-time.After(pace):
		case <-ctx.Done():
			return d, ctx.Err()
		}
	}
}

func first(md metadata.MD, key string) string {
	if v := md.Get(key); len(v) > 0 {
		return v[0]
	}
	return ""
}
