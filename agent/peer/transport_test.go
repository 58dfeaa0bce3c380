package peer_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/fingerpost/fingerpost/agent/peer"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// Check 45: who has no key of an agent is told nothing.
func TestStrangerIsToldNothing(t *testing.T) {
	a := start(t, "n0")
	a.exchange.SetMembers(members([]*agent{a}))
	l := newLiar(t, "n0") // the name is free to choose
	for name, config := range map[string]*tls.Config{
		"another key":    {Certificates: l.config.Certificates, InsecureSkipVerify: true},
		"no certificate": {InsecureSkipVerify: true},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := grpc.NewClient(a.address.String(), grpc.WithTransportCredentials(credentials.NewTLS(config)))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			resp, err := peerv1.NewPeerServiceClient(c).Fetch(t.Context(), &peerv1.FetchRequest{Owners: []*peerv1.OwnerKey{{Uid: "a"}}})
			if err == nil {
				t.Errorf("answer %v", resp)
			}
		})
	}
	if a.rejected(t, "unknown-key") == 0 {
		t.Error("nobody was counted")
	}
}

// A key that an agent has no more is good for nothing, on an open connection
// either.
func TestKeyThatIsTakenBackIsTakenBackAtOnce(t *testing.T) {
	a := start(t, "n0")
	l := newLiar(t, "n1")
	a.exchange.SetMembers([]peer.Member{a.member(), l.member()})
	c, err := grpc.NewClient(a.address.String(), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		Certificates: l.config.Certificates, InsecureSkipVerify: true,
	})))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ask := func() error {
		_, err := peerv1.NewPeerServiceClient(c).Fetch(t.Context(), &peerv1.FetchRequest{Owners: []*peerv1.OwnerKey{{Uid: "a"}}})
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	a.exchange.SetMembers([]peer.Member{a.member()})
	if err := ask(); err == nil {
		t.Error("it was answered")
	}
}

// Where another than the agent of a node listens at its address, nothing that it
// says counts.
func TestImpostorAtTheAddressOfAnAgentIsNotHeard(t *testing.T) {
	a := start(t, "n0")
	l := newLiar(t, "n1")
	l.sync = func(st syncStream) error {
		t.Error("the impostor was asked")
		return says(records(l.sign(evil(key("a"), "n1"))))(st)
	}
	l.listen(t)
	m := l.member()
	m.Keys = []peer.Fingerprint{newLiar(t, "n1").key()}
	see([]*agent{a}, pod("a", "n1", serve(t, "pkg.A")))
	a.exchange.SetMembers([]peer.Member{a.member(), m})
	eventually(t, "the impostor is counted", func() bool { return a.rejected(t, "unknown-key") > 0 })
	if o := a.dir.Owner(key("a")); o.Info != nil {
		t.Errorf("owner %+v", o)
	}
}

// What a peer answers to a Fetch is looked at as closely as what it tells
// unasked.
func TestForgedAnswersToAFetchChangeNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		fetch  func(*liar) (*peerv1.FetchResponse, error)
		reason string
	}{
		"another owner": {func(l *liar) (*peerv1.FetchResponse, error) {
			return &peerv1.FetchResponse{Results: []*peerv1.FetchResult{{
				Owner: &peerv1.OwnerKey{Uid: "b", Revision: "1"}, Verdict: peerv1.Verdict_VERDICT_RECORD, Record: l.sign(evil(key("b"), "n1")),
			}}}, nil
		}, "unasked"},
		"record of another owner": {func(l *liar) (*peerv1.FetchResponse, error) {
			return &peerv1.FetchResponse{Results: []*peerv1.FetchResult{{
				Owner: &peerv1.OwnerKey{Uid: "a", Revision: "1"}, Verdict: peerv1.Verdict_VERDICT_RECORD, Record: l.sign(evil(key("b"), "n1")),
			}}}, nil
		}, "not-hosted"},
		"8 MB": {func(*liar) (*peerv1.FetchResponse, error) {
			return &peerv1.FetchResponse{Files: []*peerv1.File{{Content: make([]byte, 8<<20)}}}, nil
		}, "too-much"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := start(t, "n0")
			l := newLiar(t, "n1")
			l.fetch = func(context.Context, *peerv1.FetchRequest) (*peerv1.FetchResponse, error) { return tc.fetch(l) }
			l.sync = says(&peerv1.SyncResponse{Complete: true})
			l.listen(t)
			see([]*agent{a}, pod("a", "n1", serve(t, "pkg.A")), pod("b", "n2", serve(t, "pkg.B")))
			a.exchange.SetMembers([]peer.Member{a.member(), l.member()})
			eventually(t, "rejected as "+tc.reason, func() bool {
				a.exchange.Want(key("a"))
				return a.rejected(t, tc.reason) > 0
			})
			for _, owner := range []string{"a", "b"} {
				if o := a.dir.Owner(key(owner)); o.Info != nil {
					t.Errorf("owner %+v", o)
				}
			}
		})
	}
}

// wire is a network of pipes that can be cut so that neither side hears of it.
type wire struct {
	l *pipeListener

	// mu guards what follows.
	mu  sync.Mutex
	cut chan struct{} // closed: nothing comes through any more
}

func (w *wire) dial(ctx context.Context, _ string) (net.Conn, error) {
	w.mu.Lock()
	cut := w.cut
	w.mu.Unlock()
	select {
	case <-cut:
		<-ctx.Done()
		return nil, ctx.Err()
	default:
	}
	a, b := net.Pipe()
	select {
	case w.l.conns <- &hose{Conn: b, cut: cut, closed: make(chan struct{})}:
		return &hose{Conn: a, cut: cut, closed: make(chan struct{})}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// hose swallows what is written once it is cut, and brings nothing, not even that
// the other side was closed.
type hose struct {
	net.Conn
	cut    chan struct{}
	closed chan struct{} // on this side
	once   sync.Once
}

func (h *hose) Close() error {
	h.once.Do(func() { close(h.closed) })
	return h.Conn.Close()
}

func (h *hose) Write(b []byte) (int, error) {
	select {
	case <-h.cut:
		return len(b), nil
	default:
		return h.Conn.Write(b)
	}
}

func (h *hose) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	select {
	case <-h.cut:
		<-h.closed
		return 0, net.ErrClosed
	default:
		return n, err
	}
}

type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

// istio#57064, gateway#1746: a link of which both ends think that it is open,
// and over which nothing comes, stood for days. Here it is found in less than a
// minute, on both sides.
func TestHalfOpenLinkIsClosedWithinAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &wire{l: &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}, cut: make(chan struct{})}
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		var xs []*peer.Exchange
		var ms []peer.Member
		for n := range 2 {
			node := fmt.Sprint("n", n)
			id, err := peer.NewIdentity(node)
			if err != nil {
				t.Fatal(err)
			}
			tr := peer.NewTransport(id, nil)
			tr.DialBy(w.dial)
			sched := schedule.New(schedule.Options{})
			x := peer.New(peer.Options{
				Node: node, Directory: peer.Over(nodecache.New(nodecache.Options{})), Identity: id, Network: tr, Scheduler: sched,
			})
			x.Attach(&collector{m: &member{}})
			running.Go(func() { sched.Run(ctx) })
			xs = append(xs, x)
			ms = append(ms, peer.Member{Node: node, Keys: []peer.Fingerprint{id.Fingerprint()}})
			if n == 0 {
				running.Go(func() { _ = tr.Serve(ctx, w.l, x) })
			} else {
				running.Go(func() { x.Run(ctx) }) // it alone opens a stream
				defer func() { _ = tr.Serve(ctx, &pipeListener{closed: make(chan struct{})}, x) }()
			}
		}
		for _, x := range xs {
			x.SetMembers(ms)
		}
		time.Sleep(5 * time.Second)
		open := func() (client, server bool) {
			return xs[1].Status()[0].State == peer.StateConnected, xs[0].Status()[1].Serving
		}
		if c, s := open(); !c || !s {
			t.Fatalf("open: %v, %v", c, s)
		}
		time.Sleep(3 * time.Minute) // a quiet link is left alone
		if c, s := open(); !c || !s {
			t.Fatalf("still open: %v, %v", c, s)
		}
		close(w.cut)
		time.Sleep(time.Minute)
		if c, s := open(); c || s {
			t.Errorf("after a minute without a word: open at the client %v, at the server %v", c, s)
		}
		cancel()
		running.Wait()
	})
}
