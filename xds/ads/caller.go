package ads

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// DefaultIdentityWait is how long a client waits for its pod to be known, which
// the kernel's proof speaks of: a kubelet reports a pod's address about a second
// after the pod has it.
const DefaultIdentityWait = 5 * time.Second

// Callers proves who is at the other end of connections. It must be safe for
// concurrent use and return at once.
type Callers interface {
	Prove(net.Conn) Caller
}

// Caller is what is known of who is at the other end of a connection.
type Caller struct {
	// Identity names the pod if it is proved, else the reason.
	Identity
	// Network is the cookie of the caller's network namespace (SO_NETNS_COOKIE,
	// Linux 5.14), and User the uid of its process, as the host counts it
	// (SO_PEERCRED, unix(7)); Network 0: neither is known.
	Network uint64
	User    uint32
	// Pending is set where nothing is proved because the pod is not known: it
	// may soon.
	Pending bool
}

func unproved(reason string) Caller {
	return Caller{Identity: Identity{Method: "none", Reason: reason}}
}

// Credentials let the server of [NewGRPCServer] know who is at the other end of
// each connection. They change nothing on the wire and refuse no connection:
// what is not proved at first is tried again for each stream.
func Credentials(c Callers) credentials.TransportCredentials { return callerCredentials{c} }

type callerCredentials struct{ callers Callers }

// connection is what is known of one, beside it.
type connection struct {
	credentials.CommonAuthInfo
	callers Callers
	conn    net.Conn
	last    atomic.Pointer[Caller]
}

func (*connection) AuthType() string { return "kernel" }

// prove says who is at the other end. A pod that was proved stays: the socket
// is of its network for as long as it is open.
func (c *connection) prove() Caller {
	if last := c.last.Load(); last != nil && last.Pod != "" {
		return *last
	}
	who := c.callers.Prove(c.conn)
	c.last.Store(&who)
	return who
}

func (c callerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	info := &connection{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}, callers: c.callers, conn: conn}
	// Now, since the caller may be gone when it is asked for.
	info.prove()
	return conn, info, nil
}

func (callerCredentials) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, nil, nil
}

func (callerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "kernel"}
}

func (c callerCredentials) Clone() credentials.TransportCredentials { return c }

func (callerCredentials) OverrideServerName(string) error { return nil }

// CallerOf says who is at the other end of the connection of a call. It does not
// wait.
func CallerOf(ctx context.Context) Caller {
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(*connection); ok {
			return c.prove()
		}
	}
	return unproved("callers are not identified")
}

// identify says whose stream it is. It waits for a pod that is not known yet: as
// long as the gate is closed, when nobody is answered anyway, and a while.
func (st *stream) identify(ctx context.Context) (Caller, error) {
	o := &st.s.opts
	begin, pause := time.Now(), 10*time.Millisecond
	for {
		who := CallerOf(ctx)
		waited := time.Since(begin)
		switch {
		case who.Pod != "", !who.Pending && !o.RequireIdentity:
			return who, nil
		case !who.Pending:
			st.s.metrics.unproved.Inc()
			return who, required(&who)
		case waited >= o.HoldLimit && !st.s.isOpen():
			return who, st.heldError()
		case waited >= o.IdentityWait && st.s.isOpen() && o.RequireIdentity:
			st.s.metrics.unproved.Inc()
			return who, required(&who)
		case waited >= o.IdentityWait && st.s.isOpen():
			return who, nil
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, 200*time.Millisecond)
		case <-ctx.Done():
			return who, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// Caller returns "namespace/name" of the pod that is proved to be at the other
// end of a call's connection, empty where none is, and an error where the server
// would refuse a stream for that.
func (s *Server) Caller(ctx context.Context) (pod string, err error) {
	who := CallerOf(ctx)
	if who.Pod == "" && s.opts.RequireIdentity {
		s.metrics.unproved.Inc()
		return "", required(&who)
	}
	return who.Pod, nil
}

// required refuses one who is not proved where one must be.
func required(who *Caller) error {
	code := codes.Unauthenticated
	if who.Pending {
		code = codes.Unavailable
	}
	return status.Errorf(code, "the agent serves callers alone whose pod the kernel proves (--require-identity), and not this one: %s", who.Reason)
}

func (s *Server) isOpen() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.open
}

// key is what limits and refusals of a client go by: its pod if that is proved,
// else what it says. Nobody who merely claims to be a pod uses up what is the
// pod's.
func (c *Caller) key(id string) string {
	if c.Pod != "" {
		return "\x00" + c.Pod
	}
	return id
}

// shown is the identity of a client that says what its id is.
func (c *Caller) shown(id string) Identity {
	i := c.Identity
	if i.Pod != "" && i.Pod != id {
		i.Reason = fmt.Sprintf("node.id %.300q is not the pod's", id)
	}
	return i
}

// told counts whose a stream is, and says where its client is another than it
// says.
func (s *Server) told(who *Caller, id string) {
	s.metrics.callers.WithLabelValues(who.Method).Inc()
	if who.Pod != "" && who.Pod != id {
		s.metrics.mismatches.Inc()
		s.logOnce("identity\x00"+who.Pod+"\x00"+id, func() {
			s.log.Warn("node.id is not that of the client's pod, which the kernel proves; it gets what is the pod's", "client", id, "pod", who.Pod)
		})
	}
}
