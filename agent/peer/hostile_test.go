package peer_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/agent/peer"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/nodecache"
)

type syncStream = grpc.BidiStreamingServer[peerv1.SyncRequest, peerv1.SyncResponse]

// liar is an agent that has a key of its own and says what it likes.
type liar struct {
	peerv1.UnimplementedPeerServiceServer
	node    string
	private ed25519.PrivateKey
	config  *tls.Config
	address netip.AddrPort
	sync    func(syncStream) error
	fetch   func(context.Context, *peerv1.FetchRequest) (*peerv1.FetchResponse, error)
}

func (l *liar) Sync(st syncStream) error {
	if _, err := st.Recv(); err != nil {
		return err
	}
	if l.sync == nil {
		return silence(st)
	}
	return l.sync(st)
}

func (l *liar) Fetch(ctx context.Context, req *peerv1.FetchRequest) (*peerv1.FetchResponse, error) {
	if l.fetch == nil {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return l.fetch(ctx, req)
}

// silence says nothing, and reads on.
func silence(st syncStream) error {
	for {
		if _, err := st.Recv(); err != nil {
			return err
		}
	}
}

// says sends the messages and is silent then.
func says(msgs ...*peerv1.SyncResponse) func(syncStream) error {
	return func(st syncStream) error {
		for _, m := range msgs {
			if err := st.Send(m); err != nil {
				return err
			}
		}
		return silence(st)
	}
}

func certificate(t *testing.T, private ed25519.PrivateKey) tls.Certificate {
	t.Helper()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}
}

// newLiar makes one that does not listen yet.
func newLiar(t *testing.T, node string) *liar {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &liar{node: node, private: private, config: &tls.Config{
		Certificates: []tls.Certificate{certificate(t, private)}, ClientAuth: tls.RequireAnyClientCert,
	}}
}

func (l *liar) listen(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.address = ln.Addr().(*net.TCPAddr).AddrPort()
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(l.config)), grpc.WaitForHandlers(true))
	peerv1.RegisterPeerServiceServer(s, l)
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(ln) })
	t.Cleanup(func() { s.Stop(); serving.Wait() })
}

func (l *liar) key() peer.Fingerprint {
	return peer.FingerprintOf(l.private.Public().(ed25519.PublicKey))
}

func (l *liar) member() peer.Member {
	return peer.Member{Node: l.node, Address: l.address, Keys: []peer.Fingerprint{l.key()}}
}

// evil is a statement that the owner serves evil.Service.
func evil(owner nodecache.OwnerKey, node string) *peerv1.Statement {
	now := time.Now().UnixMilli()
	return &peerv1.Statement{
		Owner: &peerv1.OwnerKey{Uid: owner.UID, Revision: owner.Revision}, Node: node, CollectedMs: now, SignedMs: now,
		Ports: []*peerv1.Port{{Port: 50051, State: "grpc", Services: []*peerv1.Service{{Name: "evil.Service"}}}},
	}
}

func (l *liar) sign(st *peerv1.Statement) *peerv1.Record {
	raw, err := proto.Marshal(st)
	if err != nil {
		panic(err)
	}
	return &peerv1.Record{
		Statement: raw, PublicKey: l.private.Public().(ed25519.PublicKey),
		Signature: ed25519.Sign(l.private, append([]byte("fingerpost.peer.v1.Statement\x00"), raw...)),
	}
}

func records(rs ...*peerv1.Record) *peerv1.SyncResponse {
	return &peerv1.SyncResponse{Records: rs, Complete: true}
}

// Check 45, and those of check 46 that a peer can send: what a peer may not say
// changes nothing and is counted, and who lies is left alone. What others say
// arrives all the same.
func TestForgedAnswersChangeNothingAndAreCounted(t *testing.T) {
	stranger := newLiar(t, "n2")
	for name, tc := range map[string]struct {
		// send is what the agent of n1 sends; n2 is the honest one's member.
		send   func(l *liar, n2 peer.Member) []*peerv1.SyncResponse
		reason string
		// shunned: the peer itself is to blame, and is left alone.
		shunned bool
	}{
		"key of nobody": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			return []*peerv1.SyncResponse{records(stranger.sign(evil(key("onlyn2"), "n2")))}
		}, "unknown-key", false},
		"own key for another node": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			return []*peerv1.SyncResponse{records(l.sign(evil(key("onlyn2"), "n2")))}
		}, "unknown-key", false},
		"owner not on its node": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			return []*peerv1.SyncResponse{records(l.sign(evil(key("onlyn2"), "n1")))}
		}, "not-hosted", false},
		"owner that is not there": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			return []*peerv1.SyncResponse{records(l.sign(evil(key("nowhere"), "n1")))}
		}, "unknown-owner", false},
		"another revision": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			return []*peerv1.SyncResponse{records(l.sign(evil(nodecache.OwnerKey{UID: "shared", Revision: "0"}, "n1")))}
		}, "unknown-owner", false},
		"older than what is known": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			st := evil(key("shared"), "n1")
			st.CollectedMs -= time.Hour.Milliseconds()
			return []*peerv1.SyncResponse{records(l.sign(st))}
		}, "stale", false},
		"failure of what is known": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			st := evil(key("shared"), "n1")
			st.Ports, st.Failure = nil, &peerv1.Failure{Reason: "evil", NextMs: time.Now().Add(time.Hour).UnixMilli()}
			return []*peerv1.SyncResponse{records(l.sign(st))}
		}, "stale", false},
		"from the future": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			st := evil(key("shared"), "n1")
			st.CollectedMs += time.Hour.Milliseconds()
			return []*peerv1.SyncResponse{records(l.sign(st))}
		}, "future", false},
		"another's key without its signature": {nil, "bad-signature", true},
		"not a statement": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			r := l.sign(evil(key("shared"), "n1"))
			r.Statement = []byte("\xff\xff\xff\xff")
			return []*peerv1.SyncResponse{records(r)}
		}, "malformed", true},
		"service that is no name": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			st := evil(key("shared"), "n1")
			st.Ports[0].Services[0].Name = "evil/../Service"
			return []*peerv1.SyncResponse{records(l.sign(st))}
		}, "malformed", true},
		"record beyond its bound": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			st := evil(key("shared"), "n1")
			st.Pod = string(make([]byte, 2<<20))
			return []*peerv1.SyncResponse{records(l.sign(st))}
		}, "malformed", true},
		"message of 100 MB": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			return []*peerv1.SyncResponse{{Files: []*peerv1.File{{Content: make([]byte, 100<<20)}}}}
		}, "too-much", true},
		"100 MB in small messages": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			msgs := make([]*peerv1.SyncResponse, 100)
			for i := range msgs {
				msgs[i] = &peerv1.SyncResponse{Files: []*peerv1.File{{Content: make([]byte, 1<<20)}}}
			}
			return msgs
		}, "too-much", true},
		"file that nobody wants": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
			return []*peerv1.SyncResponse{{Files: []*peerv1.File{{Content: []byte("evil")}}}}
		}, "unasked", false},
		"nothing, ever": {func(l *liar, _ peer.Member) []*peerv1.SyncResponse { return nil }, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			victim, good := start(t, "n0"), start(t, "n2")
			l := newLiar(t, "n1")
			may := make(chan struct{}) // the liar speaks once there is something to lie about
			l.sync = func(st syncStream) error {
				select {
				case <-may:
				case <-st.Context().Done():
					return nil
				}
				send := tc.send
				if send == nil {
					// The key is public: it stands in every record.
					send = func(l *liar, _ peer.Member) []*peerv1.SyncResponse {
						r := l.sign(evil(key("onlyn2"), "n2"))
						r.PublicKey = good.public()
						return []*peerv1.SyncResponse{records(r)}
					}
				}
				return says(send(l, good.member())...)(st)
			}
			l.listen(t)
			a, b := serve(t, "pkg.A"), serve(t, "pkg.B")
			see([]*agent{victim, good}, pod("onlyn2", "n2", a), pod("shared", "n0", b), pod("shared", "n1", b), pod("shared", "n2", b))
			ms := []peer.Member{victim.member(), l.member(), good.member()}
			victim.exchange.SetMembers(ms)
			good.exchange.SetMembers(ms)
			// What the liar could say holds first, from the others.
			victim.await(t, "onlyn2", knows(nodecache.Known))
			victim.await(t, "shared", knows(nodecache.Known))
			close(may)
			if tc.reason != "" {
				eventually(t, "rejected as "+tc.reason, func() bool { return victim.rejected(t, tc.reason) > 0 })
			}
			if tc.shunned {
				eventually(t, "the liar is left alone", func() bool {
					for _, p := range victim.exchange.Status() {
						if p.Node == "n1" && p.State == peer.StateBackoff && time.Until(p.Until) > 10*time.Second {
							return true
						}
					}
					return false
				})
			}
			// The honest agent's word still comes.
			c := serve(t, "pkg.C")
			see([]*agent{victim, good}, pod("late", "n2", c))
			victim.await(t, "late", knows(nodecache.Known))
			for owner, want := range map[string]string{"onlyn2": "pkg.A", "shared": "pkg.B", "late": "pkg.C"} {
				if got := victim.dir.Owner(key(owner)).Services(); !slices.Contains(got, want) || slices.Contains(got, "evil.Service") {
					t.Errorf("services of %s: %v", owner, got)
				}
			}
		})
	}
}
