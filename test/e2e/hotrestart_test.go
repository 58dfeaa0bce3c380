package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// epochs is an Envoy that is replaced by its own hot restart.
type epochs struct {
	t       *testing.T
	config  string
	dir     string
	current *sidecar
	number  int
	address string           // of the egress
	network *harness.Network // nil: this process's own
}

// hotRestarting starts the first Envoy of a pod, and waits until it is ready.
func (s *site) hotRestarting(t *testing.T, api, id string) *epochs {
	t.Helper()
	return s.hotRestartingIn(t, nil, api, id)
}

// hotRestartingIn does so in a network; nil is this process's own.
func (s *site) hotRestartingIn(t *testing.T, in *harness.Network, api, id string) *epochs {
	t.Helper()
	conf, errs, code := run(t, "bootstrap", "--format", "envoy", "--ads-socket", s.ads, "--node-id", id, "--api", api)
	if code != 0 || errs != "" {
		t.Fatalf("fingerpost bootstrap: exit %d, %s", code, errs)
	}
	e := &epochs{t: t, config: conf, dir: t.TempDir(), number: -1, network: in, address: fmt.Sprintf("passthrough:127.0.0.1:%d", s.egress)}
	e.next()
	e.current.WaitReady(t, soon)
	return e
}

// next starts the Envoy of the next epoch, and returns that of the last one.
func (e *epochs) next() (parent *sidecar) {
	e.t.Helper()
	file := filepath.Join(e.dir, "base-id")
	args := []string{"--use-dynamic-base-id", "--base-id-path", file}
	if e.number++; e.number > 0 {
		id, err := os.ReadFile(file)
		if err != nil {
			e.t.Fatal(err)
		}
		args = []string{"--base-id", strings.TrimSpace(string(id)), "--restart-epoch", strconv.Itoa(e.number)}
	}
	args = append(args, "--drain-time-s", "2", "--parent-shutdown-time-s", "4")
	parent = e.current
	e.current = &sidecar{Envoy: harness.StartEnvoy(e.t, e.config, harness.EnvoyOptions{HotRestart: true, Args: args, Network: e.network}), t: e.t}
	e.current.conn = dial(e.t, e.address, e.from())
	return parent
}

// from makes connections those of the application.
func (e *epochs) from() grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return e.network.Dial(ctx, "tcp", addr) })
}

// streams opens one stream after the other, has some answers on each, and ends
// it, until stop; the test fails where one is cut.
func (e *epochs) streams(service string) (ended func() int64, stop func()) {
	e.t.Helper()
	var n atomic.Int64
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	conn := dial(e.t, e.address, e.from())
	one := func() error {
		stream, err := demo.Chat(context.Background(), conn, service)
		if err != nil {
			return err
		}
		for i := range 15 {
			if _, err := stream.Ask(fmt.Sprint(i)); err != nil {
				return fmt.Errorf("answer %d: %w", i, err)
			}
		}
		if err := stream.CloseSend(); err != nil {
			return err
		}
		if err := stream.RecvMsg(&wrapperspb.StringValue{}); !errors.Is(err, io.EOF) {
			return fmt.Errorf("its end: %w", err)
		}
		return nil
	}
	done.Go(func() {
		for ctx.Err() == nil {
			if err := one(); err != nil {
				e.t.Errorf("stream %d of %s: %v", n.Load(), service, err)
				return
			}
			n.Add(1)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); done.Wait() })
	e.t.Cleanup(stop)
	return n.Load, stop
}

// fresh makes each call on a connection of its own, until stop.
func (e *epochs) fresh(service string) (answered func() int64, stop func()) {
	e.t.Helper()
	var n atomic.Int64
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			conn, err := grpc.NewClient(e.address, e.from(), grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err == nil {
				_, err = say(e.t, conn, service)
				_ = conn.Close()
			}
			if err != nil {
				e.t.Errorf("call %d of %s on a new connection: %v", n.Load(), service, err)
				return
			}
			n.Add(1)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); done.Wait() })
	e.t.Cleanup(stop)
	return n.Load, stop
}

// Envoy restarts itself: the child gets everything from the agent before the
// parent drains, whatever becomes of the agent meanwhile, and no call of a name
// that was known fails.
func TestEnvoysOwnHotRestartLosesNoCall(t *testing.T) {
	harness.Tool(t, "envoy")
	eachAPI(t, func(t *testing.T, api string) {
		t.Parallel()
		w, s := shop(t), newSite(t)
		agent := func() *agentProcess { return s.instance(t, "--source", w.source()) }
		a := agent().ready()
		e := s.hotRestarting(t, api, "prod/web")
		reaches(t, e.current.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
		reaches(t, e.current.conn, "shop.v1.Stock", "stock-1-a")
		a.connected("prod/web", "cds", "eds", "lds", "rds")
		unary, stopUnary := load(t, e.current.conn, "shop.v1.Cart")
		fresh, stopFresh := e.fresh("shop.v1.Stock")
		streams, stopStreams := e.streams("shop.v1.Cart")
		for _, c := range []struct {
			name      string
			meanwhile func()
		}{
			{"the agent stays", func() {}},
			{"the agent is away when the child begins", func() {
				proceeds(t, fresh)
				a = agent().ready()
			}},
			{"the agent hands over", func() {
				b := agent().ready()
				a.stop()
				a = b
			}},
			{"the agent's successor dies", func() {
				agent().ready().kill()
				a.ready()
			}},
		} {
			if strings.Contains(c.name, "away") {
				a.kill()
			}
			parent := e.next()
			c.meanwhile()
			e.current.WaitReady(t, soon)
			e.current.content()
			proceeds(t, unary)
			proceeds(t, fresh)
			parent.Ended(t, soon)
			before := streams()
			proceeds(t, unary)
			proceeds(t, fresh)
			harness.Eventually(t, soon, func() error {
				if streams() == before {
					return errors.New("no stream has ended well")
				}
				return nil
			})
			if got := e.current.dump(); got["dynamic_active_clusters prod/shop.v1.Cart"] == "" || got["dynamic_route_configs egress"] == "" {
				t.Errorf("%s: the child has %d resources", c.name, len(got))
			}
			// One client is left, and it has accepted everything.
			harness.Eventually(t, soon, func() error {
				if n := len(a.proxies()); n != 1 {
					return fmt.Errorf("%s: %d clients", c.name, n)
				}
				return nil
			})
			a.connected("prod/web", "cds", "eds", "lds", "rds")
			if t.Failed() {
				t.Fatalf("that was: %s", c.name)
			}
		}
		// The last one is heard as the first was.
		w.serve("cart-1-c", []string{"shop.v1.Cart"})
		w.write()
		reaches(t, e.current.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b", "cart-1-c")
		stopUnary()
		stopFresh()
		stopStreams()
	})
}
