package collect_test

import (
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/nodecache"
)

// What a port is where no HTTP/2 connection comes about, over one connection.
func TestPortsThatSpeakSomethingElse(t *testing.T) {
	say := func(text string) func(t *testing.T) *counter {
		return func(t *testing.T) *counter {
			return acceptEach(t, func(c net.Conn) {
				_, _ = io.WriteString(c, text)
				_, _ = io.Copy(io.Discard, c)
			})
		}
	}
	cert := certificate(t)
	for _, tc := range []struct {
		name   string
		start  func(t *testing.T) *counter
		state  nodecache.PortState
		unsure bool
	}{
		{"TLS alert", say("\x15\x03\x01\x00\x02\x02\x46"), nodecache.PortTLS, false},
		{"TLS gRPC", func(t *testing.T) *counter {
			return serve(t, app(v1), grpc.Creds(credentials.NewServerTLSFromCert(&cert)))
		}, nodecache.PortTLS, true},
		{"mTLS gRPC", func(t *testing.T) *counter {
			return serve(t, app(v1), grpc.Creds(credentials.NewTLS(&tls.Config{
				Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAnyClientCert,
			})))
		}, nodecache.PortTLS, true},
		{"HTTPS", func(t *testing.T) *counter { return serveHTTP1(t, &cert) }, nodecache.PortTLS, true},
		{"hang-up", func(t *testing.T) *counter { return acceptEach(t, func(c net.Conn) { c.Close() }) }, nodecache.PortTLS, true},
		{"HTTP/1", func(t *testing.T) *counter { return serveHTTP1(t, nil) }, nodecache.PortNotGRPC, false},
		{"a greeting", say("220 mail.example ESMTP ready\r\n"), nodecache.PortNotGRPC, false},
		{"garbage", say("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b"), nodecache.PortNotGRPC, false},
		{"a few bytes and then nothing", say("hi"), nodecache.PortNotGRPC, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := mustAsk(t, tc.start(t))
			want(t, r, tc.state)
			if r.Unsure != tc.unsure {
				t.Errorf("unsure %v, want %v", r.Unsure, tc.unsure)
			}
		})
	}
}

func TestPortsThatDoNotAnswer(t *testing.T) {
	t.Run("silent", func(t *testing.T) {
		l := acceptEach(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
		_, err := ask(t, l, collect.Budget{Wall: patience})
		wantFailure(t, err, collect.Silent)
		if n := l.accepted.Load(); n != 1 {
			t.Errorf("%d connections, want 1", n)
		}
	})
	t.Run("refused", func(t *testing.T) {
		l := listen(t, "127.0.0.1:0")
		l.Close()
		_, err := ask(t, l, collect.Budget{})
		wantFailure(t, err, collect.Refused)
	})
	t.Run("HTTP/2 that ends at once", func(t *testing.T) {
		l := acceptEach(t, func(c net.Conn) {
			_, _ = c.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0})
			_, _ = io.ReadFull(c, make([]byte, 24)) // the preface
			c.Close()
		})
		_, err := ask(t, l, collect.Budget{})
		wantFailure(t, err, collect.Unavailable)
		if n := l.accepted.Load(); n != 1 {
			t.Errorf("%d connections, want 1", n)
		}
	})
}

// A connection that breaks is not made again, neither for the question nor for
// the other version.
func TestConnectionThatBreaksIsNotMadeAgain(t *testing.T) {
	var l *counter
	l = serve(t, func(s *grpc.Server) {
		registerReflection(s, v1, func(stream) error { return (*l.last.Load()).Close() })
		registerReflection(s, v1alpha, (&script{services: []string{"a.B"}}).handle)
	})
	_, err := ask(t, l, collect.Budget{})
	wantFailure(t, err, collect.Unavailable)
	if n := l.accepted.Load(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}

// certificate borrows that of httptest.
func certificate(t *testing.T) tls.Certificate {
	s := httptest.NewTLSServer(http.NotFoundHandler())
	defer s.Close()
	return s.TLS.Certificates[0]
}

func serveHTTP1(t *testing.T, cert *tls.Certificate) *counter {
	l := listen(t, "127.0.0.1:0")
	s := &http.Server{Handler: http.NotFoundHandler(), ErrorLog: log.New(io.Discard, "", 0)}
	var on net.Listener = l
	if cert != nil {
		on = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{*cert}})
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(on) }()
	t.Cleanup(func() { s.Close(); <-done })
	return l
}
