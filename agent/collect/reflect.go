package collect

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Budget bounds one attempt on one port. A zero field is its default; crossing
// one ends the attempt with a [Failure] of class Exhausted, or Deadline.
type Budget struct {
	Files    int           // distinct files, and entries of one answer; 4,096
	Answer   int           // bytes of one answer; 16 MiB
	Bytes    int           // bytes of all answers; 32 MiB
	Services int           // 1,024
	Methods  int           // 16,384
	Streams  int           // streams opened, of each reflection version; 8
	Wall     time.Duration // of the whole attempt; 5 s
	Connect  time.Duration // until the HTTP/2 connection can be used; 500 ms
}

func (b Budget) orDefault() Budget {
	return Budget{
		Files:    cmp.Or(b.Files, 4096),
		Answer:   cmp.Or(b.Answer, 16<<20),
		Bytes:    cmp.Or(b.Bytes, 32<<20),
		Services: cmp.Or(b.Services, 1024),
		Methods:  cmp.Or(b.Methods, 16384),
		Streams:  cmp.Or(b.Streams, 8),
		Wall:     cmp.Or(b.Wall, 5*time.Second),
		Connect:  cmp.Or(b.Connect, 500*time.Millisecond),
	}
}

// drainBound is how long a half-closed stream may take to end. An open stream
// delays the graceful stop of the server, so it is not long.
const drainBound = 50 * time.Millisecond

// errWall is the cause of a context that ended by the wall bound.
var errWall = errors.New("wall bound")

// Result is what one port turned out to be.
type Result struct {
	nodecache.PortInfo
	// Unsure is set where the state is a good guess that a passing condition
	// could have caused too: worth one confirmation.
	Unsure bool
	// Junk counts listed names that are no service names, and files that are
	// no descriptors. They are left out.
	Junk int
}

// Reflect asks the server at addr over gRPC server reflection (v1, else
// v1alpha) what it serves, with one TCP connection that is closed before it
// returns. That a port speaks TLS or no gRPC, or refuses or lacks reflection,
// is a result. The error is a *Failure, or the error of ctx.
//
// Equal servers give equal results: everything is sorted.
func Reflect(ctx context.Context, addr netip.AddrPort, b Budget, dial DialFunc) (Result, error) {
	b = b.orDefault()
	if dial == nil {
		dial = dialTCP
	}
	// A cancel and no deadline: the transport would tell the server of a
	// deadline, and a server that ends the stream at that moment would look as
	// if it had no answer.
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer time.AfterFunc(b.Wall, func() { cancel(errWall) }).Stop()

	w := &wire{dial: dial, addr: addr}
	cc, err := grpc.NewClient("passthrough:///"+addr.String(),
		grpc.WithContextDialer(w.connect),
		grpc.WithNoProxy(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableHealthCheck(),
		grpc.WithIdleTimeout(0),
		grpc.WithUserAgent("fingerpost-collect"),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: b.Wall, MaxDelay: b.Wall},
			MinConnectTimeout: b.Wall,
		}),
	)
	if err != nil {
		return Result{}, &Failure{Class: Unreachable, Detail: err.Error()}
	}
	defer cc.Close()

	ready, timeout := connect(ctx, cc, b.Connect)
	if err := outer.Err(); err != nil {
		return Result{}, err
	}
	if !ready {
		return w.verdict(timeout)
	}
	s := &session{
		ctx: ctx, cc: cc, budget: b,
		codec: &codec{budget: b}, files: newFileSet(b),
	}
	defer s.close()
	r, err := s.run(addr.Port())
	if err != nil && outer.Err() != nil {
		return Result{}, outer.Err()
	}
	return r, err
}

// connect waits until the connection is ready, has failed, or the bound is
// over.
func connect(ctx context.Context, cc *grpc.ClientConn, bound time.Duration) (ready, timeout bool) {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	cc.Connect()
	left := false
	for {
		st := cc.GetState()
		switch {
		case st == connectivity.Ready:
			return true, false
		case st == connectivity.TransientFailure, st == connectivity.Shutdown, st == connectivity.Idle && left:
			return false, false
		}
		left = left || st != connectivity.Idle
		if !cc.WaitForStateChange(ctx, st) {
			return false, true
		}
	}
}

// run lists, describes and completes.
func (s *session) run(port uint16) (Result, error) {
	r := Result{PortInfo: nodecache.PortInfo{Port: port}}
	listed, err := s.list()
	if err != nil {
		var refusal *refusal
		if !errors.As(err, &refusal) {
			return Result{}, err
		}
		r.State, r.Detail = refusal.state, refusal.detail
		return r, nil
	}
	names, junk := serviceNames(listed)
	if len(names) > s.budget.Services {
		return Result{}, exhausted("services")
	}
	err = s.describe(names)
	if err == nil {
		err = s.complete()
	}
	// The names are known by now: where only the descriptors are slow, the
	// services without one are routed all the same.
	var f *Failure
	late := errors.As(err, &f) && f.Class == Deadline && len(names) > 0
	if err != nil && !late {
		return Result{}, err
	}
	r.Junk = junk + s.files.junk
	fill(&r.PortInfo, names, s.files)
	if late {
		r.Detail = "descriptors did not come in time: " + f.Detail
	}
	if r.State == nodecache.PortEmpty {
		r.Detail = "lists no service but infrastructure"
		if junk > 0 {
			r.Detail = "lists no valid service name"
		}
	}
	return r, nil
}

// refusal is the end of an attempt at the first question: a result.
type refusal struct {
	state  nodecache.PortState
	detail string
}

func (r *refusal) Error() string { return string(r.state) + ": " + r.detail }

func exhausted(what string) error {
	return &Failure{Class: Exhausted, Detail: "the answers cross the budget of " + what}
}

// denied tells whether a code means that reflection is there and not for us.
func denied(c codes.Code) bool { return c == codes.Unauthenticated || c == codes.PermissionDenied }
