package collect_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

// closing tells whether a connection was closed.
type closing struct {
	net.Conn
	closed atomic.Bool
}

func (c *closing) Close() error { c.closed.Store(true); return c.Conn.Close() }

// A graceful stop waits for streams and for connections. Once a collect has
// returned, the server has none of either from it: every handler has returned,
// and the connection was closed. So a stop that begins then takes as long as
// one of a server that was never asked.
func TestNothingOfACollectHoldsUpAGracefulStop(t *testing.T) {
	for _, versions := range [][]string{{v1}, {v1alpha}, {v1, v1alpha}} {
		t.Run(fmt.Sprint(versions), func(t *testing.T) {
			var running atomic.Int32
			l := listen(t, "127.0.0.1:0")
			s := serveOn(t, l, app(versions...), grpc.StreamInterceptor(
				func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
					running.Add(1)
					defer running.Add(-1)
					return handle(srv, ss)
				}))
			var conns []*closing
			r, err := collect.Reflect(t.Context(), l.addr(), collect.Budget{}, func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
				c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr.String())
				if err != nil {
					return nil, err
				}
				conns = append(conns, &closing{Conn: c})
				return conns[len(conns)-1], nil
			})
			if n := running.Load(); n != 0 {
				t.Errorf("%d streams run after the collect", n)
			}
			if len(conns) != 1 || !conns[0].closed.Load() {
				t.Errorf("connections after the collect: %+v", conns)
			}
			if err != nil {
				t.Fatal(err)
			}
			want(t, r, nodecache.PortServes, appServices...)
			s.GracefulStop()
		})
	}
}

// behindProxy makes the test binary ask a server in a network namespace of its
// own, where the server has an address for which a proxy would be used: one of
// loopback never is.
const behindProxy = "COLLECT_TEST_BEHIND_PROXY"

func init() {
	if os.Getenv(behindProxy) == "" {
		return
	}
	if err := askBehindProxy(); err != nil {
		fmt.Println(err)
	}
	os.Exit(0)
}

func askBehindProxy() error {
	const addr = "192.0.2.1"
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	up, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	up.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, up); err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	alias, err := unix.NewIfreq("lo:1")
	if err != nil {
		return err
	}
	ip := netip.MustParseAddr(addr).As4()
	if err := alias.SetInet4Addr(ip[:]); err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFADDR, alias); err != nil {
		return fmt.Errorf("address of lo: %w", err)
	}
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer proxy.Close()
	var proxied atomic.Int32
	go func() {
		for {
			c, err := proxy.Accept()
			if err != nil {
				return
			}
			proxied.Add(1)
			_ = c.Close()
		}
	}()
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"} {
		_ = os.Setenv(name, "http://"+proxy.Addr().String())
	}
	l, err := net.Listen("tcp", addr+":0")
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	app(v1)(s)
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(l) })
	defer serving.Wait()
	defer s.Stop()
	r, err := collect.Reflect(context.Background(), l.Addr().(*net.TCPAddr).AddrPort(), collect.Budget{}, nil)
	if err != nil || r.State != nodecache.PortServes || proxied.Load() != 0 {
		return fmt.Errorf("%+v, %w, %d connections to the proxy", r, err, proxied.Load())
	}
	return nil
}

func TestProxyOfTheEnvironmentIsNotUsed(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), behindProxy+"=1")
	cmd.SysProcAttr = harness.OwnNetwork()
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		t.Skipf("no network namespace can be made here: %v", err)
	}
	if text := strings.TrimSpace(string(out)); err != nil || text != "" {
		t.Errorf("%v: %s", err, text)
	}
}
