package collect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"github.com/fingerpost/fingerpost/nodecache"
)

// DialFunc opens one TCP connection. The default is that of a net.Dialer, which
// no environment variable redirects.
type DialFunc func(ctx context.Context, addr netip.AddrPort) (net.Conn, error)

func dialTCP(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr.String())
}

var errOneConnection = errors.New("one connection per attempt")

// wire is the single connection of one attempt. It remembers what the other
// side did first, since the text of a failed handshake does not tell a TLS
// port from a dead one.
type wire struct {
	// Read-only.
	dial DialFunc
	addr netip.AddrPort

	// mu guards what follows: the transport reads, writes and dials in
	// goroutines of its own. Nothing is called under it.
	mu      sync.Mutex
	dialled bool
	open    bool // the TCP connection was established
	dialErr error
	first   []byte // the first bytes received, at most firstBytes
	ioErr   error  // the first error of reading or writing
}

const firstBytes = 16

// connect dials at the first call and fails at every other, so that a client
// that would reconnect cannot.
func (w *wire) connect(ctx context.Context, _ string) (net.Conn, error) {
	w.mu.Lock()
	again := w.dialled
	w.dialled = true
	w.mu.Unlock()
	if again {
		return nil, errOneConnection
	}
	c, err := w.dial(ctx, w.addr)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.dialErr = err
		return nil, err
	}
	w.open = true
	return &wireConn{Conn: c, w: w}, nil
}

type wireConn struct {
	net.Conn
	w *wire
}

func (c *wireConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.w.note(p[:n], err)
	return n, err
}

func (c *wireConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.w.note(nil, err)
	return n, err
}

func (w *wire) note(got []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if room := firstBytes - len(w.first); room > 0 {
		w.first = append(w.first, got[:min(room, len(got))]...)
	}
	if err != nil && w.ioErr == nil {
		w.ioErr = err
	}
}

// verdict says what a port is whose connection never became usable. timeout
// tells that nobody failed before the bound.
func (w *wire) verdict(timeout bool) (Result, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	result := func(s nodecache.PortState, detail string) (Result, error) {
		return Result{PortInfo: nodecache.PortInfo{Port: w.addr.Port(), State: s, Detail: detail}}, nil
	}
	switch {
	case errors.Is(w.dialErr, syscall.ECONNREFUSED):
		return Result{}, &Failure{Class: Refused, Detail: "nobody listens"}
	case timeout && !w.open:
		return Result{}, &Failure{Class: Silent, Detail: "no answer to the connect"}
	case w.dialErr != nil:
		return Result{}, &Failure{Class: Unreachable, Detail: w.dialErr.Error()}
	case isTLS(w.first):
		return result(nodecache.PortTLS, "answers with a TLS record")
	case len(w.first) >= 7 && string(w.first[:7]) == "HTTP/1.":
		return result(nodecache.PortNotGRPC, "answers HTTP/1")
	case isSettings(w.first):
		return Result{}, &Failure{Class: Unavailable, Detail: "the HTTP/2 connection ended before it could be used"}
	case len(w.first) > 0:
		return result(nodecache.PortNotGRPC, fmt.Sprintf("does not speak HTTP/2: first bytes %q", w.first))
	case timeout:
		return Result{}, &Failure{Class: Silent, Detail: "accepts the connection and says nothing"}
	case errors.Is(w.ioErr, io.EOF), errors.Is(w.ioErr, syscall.ECONNRESET), errors.Is(w.ioErr, syscall.EPIPE):
		// Most TLS servers hang up without a word on a client that does not
		// speak TLS. So does a proxy whose application is not there yet.
		r, err := result(nodecache.PortTLS, "hangs up at the first plaintext bytes, as TLS servers do")
		r.Unsure = true
		return r, err
	case w.ioErr != nil:
		return Result{}, &Failure{Class: Unavailable, Detail: w.ioErr.Error()}
	}
	return Result{}, &Failure{Class: Unavailable, Detail: "the connection could not be used"}
}

// isTLS tells whether bytes start with a TLS record: an alert or a handshake,
// of any version (RFC 8446 section 5.1).
func isTLS(b []byte) bool {
	return len(b) >= 2 && (b[0] == 0x15 || b[0] == 0x16) && b[1] == 0x03
}

// isSettings tells whether bytes start with the header of a SETTINGS frame on
// stream 0, the only way an HTTP/2 server may begin (RFC 9113 section 3.4).
func isSettings(b []byte) bool {
	return len(b) >= 9 && b[3] == 0x04 && string(b[5:9]) == "\x00\x00\x00\x00"
}
