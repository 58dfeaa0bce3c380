// Package unknown is the server behind unknown.sock, where a sidecar sends the
// calls for which it has no cluster. It looks the name up when the call
// arrives and says what is known of it:
//
//	the path is no method                        UNIMPLEMENTED
//	the authority names a Service                UNAVAILABLE
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
	"context"
	"fmt"
	"net"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// NodeHeader is the request header in which a sidecar says its node id. The
// bootstrap makes it overwrite what the application sent.
const NodeHeader = "fingerpost-node"

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
}

// Options configures a [Server]. The zero Options works.
type Options struct {
	// Synced tells whether the agent has read the cluster. Nil: it has.
	Synced func() bool
	// Hurry asks that the owners be collected before others, since a call
	// waits for them. It must not block. Nil: nobody is asked.
	Hurry func([]nodecache.OwnerKey)
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
	if o.Hurry == nil {
		o.Hurry = func([]nodecache.OwnerKey) {}
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
	s.grpc = grpc.NewServer(grpc.UnknownServiceHandler(s.handle))
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

// method is what the route table takes for the path of a gRPC call.
var method = regexp.MustCompile(`^/([A-Za-z_][A-Za-z0-9_.]*)/([A-Za-z_][A-Za-z0-9_]*)$`)

// handle never reads what the caller sends, but for reflection: an answer is
// owed at once, however much is coming.
func (s *Server) handle(_ any, stream grpc.ServerStream) error {
	ctx := stream.Context()
	path, _ := grpc.Method(ctx)
	m := method.FindStringSubmatch(path)
	if m == nil {
		return status.Errorf(codes.Unimplemented, "malformed path %q: not /package.Service/Method", path)
	}
	service := m[1]
	md, _ := metadata.FromIncomingContext(ctx)
	if authority := first(md, ":authority"); !loopback(authority) {
		return status.Errorf(codes.Unavailable, "authority %q names a Service; calls by Service name are not built yet", authority)
	}
	namespace, _, err := resources.ParseNodeID(first(md, NodeHeader))
	if err != nil {
		return status.Errorf(codes.Unavailable, "the sidecar does not say whose it is in header %q (write its bootstrap anew): %v", NodeHeader, err)
	}
	if !s.opts.Synced() {
		return status.Errorf(codes.Unavailable, "the agent has not read the cluster yet; it cannot tell where %s is", service)
	}
	if nodecache.Infrastructure(service) {
		if reflection(service, m[2]) {
			return s.reflect(namespace, stream)
		}
		return unimplemented(namespace, service)
	}
	return s.judge(ctx, namespace, service)
}

// judge says what is known of a service, as soon as it is known or patience
// ends.
func (s *Server) judge(ctx context.Context, namespace, service string) error {
	answer := s.know.Lookup(namespace, service)
	if keys := pending(answer); !answer.Served && len(keys) > 0 {
		s.opts.Hurry(keys)
		select {
		case s.waiting <- struct{}{}:
			var err error
			answer, err = s.wait(ctx, namespace, service, answer)
			<-s.waiting
			if err != nil {
				return status.FromContextError(err).Err()
			}
		default:
		}
	}
	switch {
	case answer.Served:
		return status.Errorf(codes.Unavailable, "%s is known, your sidecar is being updated", service)
	case len(answer.Suspects) > 0:
		return status.Errorf(codes.Unavailable, "%s in namespace %s: %s", service, namespace, describe(answer.Suspects))
	default:
		return unimplemented(namespace, service)
	}
}

// wait looks again at each change until no owner is pending.
func (s *Server) wait(ctx context.Context, namespace, service string, answer resources.Answer) (resources.Answer, error) {
	end := time.NewTimer(s.opts.Patience)
	defer end.Stop()
	for {
		select {
		case <-answer.Changed:
		case <-end.C:
			return s.know.Lookup(namespace, service), nil
		case <-ctx.Done():
			return answer, ctx.Err()
		}
		answer = s.know.Lookup(namespace, service)
		if answer.Served || len(pending(answer)) == 0 {
			return answer, nil
		}
		select {
		case <-time.After(pace):
		case <-ctx.Done():
			return answer, ctx.Err()
		}
	}
}

// pending returns the owners that have not been asked to the end.
func pending(a resources.Answer) []nodecache.OwnerKey {
	var keys []nodecache.OwnerKey
	for _, o := range a.Suspects {
		if o.Knowledge != nodecache.Failed && unasked(o) == "" {
			keys = append(keys, o.Key)
		}
	}
	return keys
}

// unasked says why an owner that nobody has asked will not be asked soon, empty
// if it will.
func unasked(o *nodecache.Owner) string {
	if o.Knowledge != nodecache.Unknown || len(o.Pods) == 0 {
		return ""
	}
	return o.WhyNotAsked("")
}

// describe names the owner that most likely decides, and how many more there
// are: one that is pending before one that failed.
func describe(suspects []*nodecache.Owner) string {
	o := suspects[0]
	for _, other := range suspects {
		if o.Knowledge == nodecache.Failed && other.Knowledge != nodecache.Failed {
			o = other
		}
	}
	var text string
	switch o.Knowledge {
	case nodecache.Failed:
		text = fmt.Sprintf("%s could not be asked what it serves: %s", o.Name, o.Reason)
		if !o.NextTry.IsZero() {
			text += "; next try at " + o.NextTry.UTC().Format(time.RFC3339)
		}
	case nodecache.Collecting:
		text = o.Name + " is being asked what it serves"
	default:
		text = o.Name + " has not been asked yet what it serves"
		if why := unasked(o); why != "" {
			text = o.Name + " cannot be asked what it serves: " + why
		}
	}
	if n := len(suspects) - 1; n > 0 {
		text += fmt.Sprintf(" (and %d more owners)", n)
	}
	return text
}

func unimplemented(namespace, service string) error {
	return status.Errorf(codes.Unimplemented, "unknown service %s in namespace %s", service, namespace)
}

func first(md metadata.MD, key string) string {
	if v := md.Get(key); len(v) > 0 {
		return v[0]
	}
	return ""
}

// loopback tells whether an authority names nothing but the sidecar itself, by
// the rule of the route table.
func loopback(authority string) bool {
	host := strings.ToLower(authority)
	if i := strings.LastIndexByte(host, ':'); i >= 0 && i < len(host)-1 && strings.Trim(host[i+1:], "0123456789") == "" {
		host = host[:i]
	}
	switch strings.TrimSuffix(host, ".") {
	case "127.0.0.1", "localhost", "[::1]":
		return true
	}
	return false
}
