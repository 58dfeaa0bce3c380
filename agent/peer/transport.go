package peer

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
)

// A connection on which nothing comes is asked after pingAfter whether it is
// there still, and closed if it says nothing for pingWait: half-open ones are
// found in less than a minute.
const (
	pingAfter = 20 * time.Second
	pingWait  = 10 * time.Second
	// pingMost is how often others may ask.
	pingMost = 10 * time.Second
	// idleAfter is when a connection without a stream is closed.
	idleAfter = time.Minute
	// maxRequest bounds what others ask, in bytes.
	maxRequest = 256 << 10
)

// Transport is the real [Network]: gRPC over mutual TLS 1.3. Nobody signs the
// certificates; each side looks whether the other's key speaks for a node, and
// for the node that it meant. It is safe for concurrent use.
type Transport struct {
	traffic traffic

	id    *Identity                                       // read-only
	trust Trust                                           // read-only; nil: by keys
	dial  func(context.Context, string) (net.Conn, error) // read-only; nil: TCP

	// mu guards what follows.
	mu    sync.Mutex
	keys  map[Fingerprint]string
	conns map[string]*conn // by node
}

type conn struct {
	*grpc.ClientConn
	to Member
}

// NewTransport returns a transport that shows the identity to others. Without
// trust, keys speak for the nodes of the members that were last given to Retain.
func NewTransport(id *Identity, trust Trust) *Transport {
	return &Transport{id: id, trust: trust, conns: map[string]*conn{}}
}

// speaksFor returns the node for which a certificate speaks.
func (t *Transport) speaksFor(c *x509.Certificate) (string, error) {
	key, ok := c.PublicKey.(ed25519.PublicKey)
	if !ok {
		return "", fmt.Errorf("its key is a %T, not an Ed25519 key", c.PublicKey)
	}
	print := FingerprintOf(key)
	if t.trust != nil {
		if node, ok := t.trust(print, c.Raw); ok {
			return node, nil
		}
	} else {
		t.mu.Lock()
		node, ok := t.keys[print]
		t.mu.Unlock()
		if ok {
			return node, nil
		}
	}
	return "", fmt.Errorf("key %s is not that of any agent", print)
}

func (t *Transport) tls() *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return t.id.Certificate(), nil },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return t.id.Certificate(), nil },
	}
}

// Retain is that of [Network].
func (t *Transport) Retain(ms []Member) {
	keys := make(map[Fingerprint]string, len(ms))
	by := make(map[string]Member, len(ms))
	for _, m := range ms {
		by[m.Node] = m
		for _, k := range m.Keys {
			keys[k] = m.Node
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keys = keys
	for node, c := range t.conns {
		if m, ok := by[node]; !ok || m.Address != c.to.Address {
			delete(t.conns, node)
			_ = c.Close()
		}
	}
}

// conn returns the connection to a member.
func (t *Transport) conn(to Member) (*grpc.ClientConn, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.conns[to.Node]; c != nil {
		if c.to.Address == to.Address {
			return c.ClientConn, nil
		}
		delete(t.conns, to.Node)
		_ = c.Close()
	}
	config := t.tls()
	config.InsecureSkipVerify = true // VerifyConnection does it
	config.VerifyConnection = func(cs tls.ConnectionState) error {
		if node, err := t.speaksFor(cs.PeerCertificates[0]); err != nil || node != to.Node {
			return errStranger
		}
		return nil
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(credentials.NewTLS(config)),
		grpc.WithNoProxy(),
		grpc.WithStatsHandler(&t.traffic),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(idleAfter),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingAfter, Timeout: pingWait}),
		// How long a peer is left alone is the exchange's to say.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, MaxDelay: time.Second}, MinConnectTimeout: 5 * time.Second,
		}),
	}
	if t.dial != nil {
		options = append(options, grpc.WithContextDialer(t.dial))
	}
	c, err := grpc.NewClient("passthrough:///"+to.Address.String(), options...)
	if err != nil {
		return nil, err
	}
	t.conns[to.Node] = &conn{c, to}
	return c, nil
}

// Fetch is that of [Network].
func (t *Transport) Fetch(ctx context.Context, to Member, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	c, err := t.conn(to)
	if err != nil {
		return nil, err
	}
	resp, err := peerv1.NewPeerServiceClient(c).Fetch(ctx, req)
	return resp, known(err)
}

// Sync is that of [Network].
func (t *Transport) Sync(ctx context.Context, to Member) (ClientStream, error) {
	c, err := t.conn(to)
	if err != nil {
		return nil, err
	}
	s, err := peerv1.NewPeerServiceClient(c).Sync(ctx)
	return clientStream{s}, known(err)
}

type clientStream struct {
	grpc.BidiStreamingClient[peerv1.SyncRequest, peerv1.SyncResponse]
}

func (s clientStream) Recv() (*peerv1.SyncResponse, error) {
	resp, err := s.BidiStreamingClient.Recv()
	return resp, known(err)
}

// known tells by its text what an error is for which gRPC has no code of its
// own: a message that is too large is not a peer that is busy, nor a key that
// does not fit a peer that is away.
func known(err error) error {
	switch {
	case err == nil:
		return nil
	case status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max"):
		return fmt.Errorf("%w: %w", errTooMuch, err)
	case strings.Contains(err.Error(), errStranger.Error()):
		return fmt.Errorf("%w: %w", errStranger, err)
	}
	return err
}

// Serve serves the exchange to others until ctx ends, and then closes the
// listener, every connection, and those to others. Its error is that of the
// listener.
func (t *Transport) Serve(ctx context.Context, l net.Listener, x *Exchange) error {
	config := t.tls()
	config.ClientAuth = tls.RequireAnyClientCert
	config.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := t.speaksFor(cs.PeerCertificates[0])
		if err != nil {
			x.metrics.rejected.WithLabelValues(string(unknownKey)).Inc()
		}
		return err
	}
	s := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(config)),
		grpc.StatsHandler(&t.traffic),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxConcurrentStreams(32),
		grpc.ConnectionTimeout(5*time.Second),
		grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: pingAfter, Timeout: pingWait, MaxConnectionIdle: 2 * idleAfter,
			// Who reads nothing is got rid of, too.
			MaxConnectionAge: 2 * syncAge, MaxConnectionAgeGrace: time.Second,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingMost, PermitWithoutStream: true}),
	)
	peerv1.RegisterPeerServiceServer(s, &service{t: t, x: x})
	stopped := context.AfterFunc(ctx, s.Stop)
	err := s.Serve(l)
	if !stopped() {
		s.Stop() // waits for the one that runs
	}
	t.mu.Lock()
	for node, c := range t.conns {
		delete(t.conns, node)
		_ = c.Close()
	}
	t.mu.Unlock()
	if ctx.Err() != nil || errors.Is(err, grpc.ErrServerStopped) || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// service is the exchange as gRPC calls it.
type service struct {
	peerv1.UnsafePeerServiceServer
	t *Transport
	x *Exchange
}

// from is the node for which the caller speaks, by now.
func (s *service) from(ctx context.Context) (string, error) {
	if p, ok := grpcpeer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.PeerCertificates) > 0 {
			node, err := s.t.speaksFor(info.State.PeerCertificates[0])
			if err == nil {
				return node, nil
			}
			s.x.metrics.rejected.WithLabelValues(string(unknownKey)).Inc()
			return "", status.Error(codes.PermissionDenied, err.Error())
		}
	}
	return "", status.Error(codes.Unauthenticated, "no certificate")
}

func (s *service) Fetch(ctx context.Context, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	from, err := s.from(ctx)
	if err != nil {
		return nil, err
	}
	return s.x.ServeFetch(ctx, from, req)
}

func (s *service) Sync(stream grpc.BidiStreamingServer[peerv1.SyncRequest, peerv1.SyncResponse]) error {
	from, err := s.from(stream.Context())
	if err != nil {
		return err
	}
	return s.x.ServeSync(from, stream)
}
