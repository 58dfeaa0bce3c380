package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/xds"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// patience bounds every wait of the demo: a step that takes longer has failed.
const patience = 10 * time.Second

// Options says how to run the demo.
type Options struct {
	// Envoy is the path of an Envoy binary; empty: the demo does without.
	Envoy string
	// Keep leaves everything running until the context ends.
	Keep bool
	Out  io.Writer
	// Command runs a fingerpost command and returns what it printed.
	Command func(ctx context.Context, args ...string) (string, error)
	Version string
}

// story is one run of the demo.
type story struct {
	Options
	dir       string
	world     world
	config    agent.Config
	agentDone chan error
	step      int
}

// Run tells the story: pods in, ADS out, calls that follow the pods. It
// returns an error at the first step that does not come out.
func Run(ctx context.Context, o Options) (err error) {
	dir, err := os.MkdirTemp("", "fingerpost-demo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	port, err := freePort()
	if err != nil {
		return err
	}
	s := &story{Options: o, dir: dir, world: world{file: filepath.Join(dir, "pods", "pods.yaml")}}
	s.config = agent.Defaults()
	s.config.NodeName, s.config.Version = "demo", o.Version
	s.config.Source = "file:" + s.world.file
	s.config.ADSSocket = filepath.Join(dir, "run", "ads.sock")
	s.config.AdminSocket = filepath.Join(dir, "admin", "admin.sock")
	s.config.HTTPAddress, s.config.PeerAddress, s.config.StateDir = "", "", ""
	s.config.EgressPort = port
	defer s.world.stop()

	log, err := os.Create(filepath.Join(dir, "agent.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	s.config.LogTo = log
	defer func() {
		if err != nil && !errors.Is(err, context.Canceled) {
			if lines, _ := os.ReadFile(log.Name()); len(lines) > 0 {
				fmt.Fprintf(o.Out, "\nthe agent's log:\n%s", lines)
			}
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		if s.agentDone == nil {
			return // it was not started
		}
		if end := <-s.agentDone; err == nil && end != nil {
			err = fmt.Errorf("the agent ended: %w", end)
		}
	}()
	if err := s.begin(ctx); err != nil {
		return err
	}
	return s.tell(ctx)
}

// begin starts the first pods and the agent.
func (s *story) begin(ctx context.Context) error {
	s.say("Three pods of two workloads start on loopback, with gRPC reflection.")
	for _, p := range []struct{ workload, service string }{
		{"cart", "shop.v1.Cart"}, {"cart", "shop.v1.Cart"}, {"stock", "shop.v1.Stock"},
	} {
		m, err := s.world.start(p.workload, p.service)
		if err != nil {
			return err
		}
		s.note("pod %s/%s at %s", Namespace, m.Name, m.Addr())
	}
	if err := os.MkdirAll(filepath.Dir(s.world.file), 0o755); err != nil {
		return err
	}
	if err := s.world.write(); err != nil {
		return err
	}
	s.say("The agent starts, with a file in place of an API server, and asks each workload what it serves.")
	s.agentDone = make(chan error, 1)
	go func() { s.agentDone <- agent.Run(ctx, s.config) }()
	err := s.until(ctx, "the agent is ready", func(ctx context.Context) error {
		select {
		case err := <-s.agentDone:
			s.agentDone <- err
			return fmt.Errorf("the agent ended: %w", err)
		default:
		}
		_, err := s.Command(ctx, "status", "--check", "--admin-socket", s.config.AdminSocket)
		return err
	})
	if err != nil {
		return err
	}
	if err := s.show(ctx, "owners"); err != nil {
		return err
	}
	return s.routes(ctx)
}

// routes prints where a call of each service goes.
func (s *story) routes(ctx context.Context) error {
	out, err := s.Command(ctx, "services", "-o", "json", "--admin-socket", s.config.AdminSocket)
	if err != nil {
		return err
	}
	var services []resources.ServiceView
	if err := json.Unmarshal([]byte(out), &services); err != nil {
		return err
	}
	s.note("the routes of namespace %s:", Namespace)
	for _, v := range services {
		var to []string
		for _, e := range v.Endpoints {
			to = append(to, e.Address)
		}
		s.note("  /%s/* goes to cluster %s/%s: %s", v.Name, v.Namespace, v.Name, strings.Join(to, ", "))
	}
	return nil
}

func (s *story) tell(ctx context.Context) error {
	client, err := s.proxyless("shop.v1.Cart")
	if err != nil {
		return err
	}
	defer client.Close()
	s.say("A gRPC client without a proxy calls xds:///shop.v1.Cart: it asks the agent by the socket where that is.")
	if err := s.calls(ctx, client, "shop.v1.Cart", "cart-7d9c5-a", "cart-7d9c5-b"); err != nil {
		return err
	}
	sidecar, stop, err := s.envoy(ctx)
	if err != nil {
		return err
	}
	defer stop()

	s.say("Pod %s/cart-7d9c5-b is deleted: calls move to the other one.", Namespace)
	gone := s.world.members[1]
	s.world.remove(gone)
	if err := s.world.write(); err != nil {
		return err
	}
	for _, conn := range []*grpc.ClientConn{client, sidecar} {
		if err := s.calls(ctx, conn, "shop.v1.Cart", "cart-7d9c5-a"); err != nil {
			return err
		}
	}
	gone.GracefulStop()

	s.say("A new workload with a new service appears: its clients can call it.")
	pay, err := s.world.start("pay", "shop.v1.Payments")
	if err != nil {
		return err
	}
	if err := s.world.write(); err != nil {
		return err
	}
	s.note("pod %s/%s at %s", Namespace, pay.Name, pay.Addr())
	payments, err := s.proxyless("shop.v1.Payments")
	if err != nil {
		return err
	}
	defer payments.Close()
	for _, conn := range []*grpc.ClientConn{payments, sidecar} {
		if err := s.calls(ctx, conn, "shop.v1.Payments", "pay-7d9c5-a"); err != nil {
			return err
		}
	}
	if err := s.routes(ctx); err != nil {
		return err
	}
	if err := s.show(ctx, "services", "proxies"); err != nil {
		return err
	}
	if s.Keep {
		s.keep(ctx, sidecar != nil)
		return nil
	}
	s.say("Done.")
	return nil
}

// proxyless dials a service as an application with gRPC's own xDS client does.
func (s *story) proxyless(service string) (*grpc.ClientConn, error) {
	conf, err := bootstrap.GRPC(bootstrap.Options{ADSSocket: s.config.ADSSocket, NodeID: Namespace + "/client"})
	if err != nil {
		return nil, err
	}
	// The name says testing; it is how a bootstrap is given without the
	// environment, which gRPC reads only when the process starts.
	resolver, err := xds.NewXDSResolverWithConfigForTesting(conf)
	if err != nil {
		return nil, err
	}
	return grpc.NewClient("xds:///"+service, grpc.WithResolvers(resolver), grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// calls makes calls until exactly the wanted pods answer. A nil conn is that
// of a demo without Envoy.
func (s *story) calls(ctx context.Context, conn *grpc.ClientConn, service string, want ...string) error {
	if conn == nil {
		return nil
	}
	by := map[string]int{}
	err := s.until(ctx, "calls of "+service+" reach "+strings.Join(want, " and "), func(ctx context.Context) error {
		clear(by)
		for range 12 {
			who, err := Say(ctx, conn, service)
			if err != nil {
				return err
			}
			by[who]++
		}
		if len(by) != len(want) {
			return fmt.Errorf("answered: %s", answers(by))
		}
		for _, w := range want {
			if by[w] == 0 {
				return fmt.Errorf("answered: %s", answers(by))
			}
		}
		return nil
	})
	if err == nil {
		s.note("12 calls of %s to %s: answered by %s", service, conn.Target(), answers(by))
	}
	return err
}

func answers(by map[string]int) string {
	var parts []string
	for who, n := range by {
		parts = append(parts, fmt.Sprintf("%s (%d)", who, n))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

// show runs commands and prints what a user would see.
func (s *story) show(ctx context.Context, commands ...string) error {
	for _, c := range commands {
		out, err := s.Command(ctx, c, "--admin-socket", s.config.AdminSocket)
		if err != nil {
			return fmt.Errorf("fingerpost %s: %w", c, err)
		}
		s.note("$ fingerpost %s", c)
		for line := range strings.Lines(out) {
			s.note("  %s", strings.TrimRight(line, " \n"))
		}
	}
	return nil
}

// keep tells what there is to try, and waits.
func (s *story) keep(ctx context.Context, sidecar bool) {
	s.say("Everything goes on until you press Ctrl-C. To try:")
	s.note("fingerpost status --admin-socket %s", s.config.AdminSocket)
	s.note("fingerpost xds get --type clusters --node-id %s/me --ads-socket %s", Namespace, s.config.ADSSocket)
	s.note("edit %s", s.world.file)
	if sidecar {
		s.note("grpcurl -plaintext 127.0.0.1:%d list", s.config.EgressPort)
	}
	<-ctx.Done()
}

// until repeats try until it succeeds, and says what it waited for if that
// takes too long.
func (s *story) until(ctx context.Context, what string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited in vain until %s: %s", what, status.Convert(err).Message())
		case <-tick.C:
		}
	}
}

func (s *story) say(format string, args ...any) {
	s.step++
	fmt.Fprintf(s.Out, "\n%d. %s\n", s.step, fmt.Sprintf(format, args...))
}

func (s *story) note(format string, args ...any) {
	fmt.Fprintf(s.Out, "   %s\n", fmt.Sprintf(format, args...))
}

func freePort() (int, error) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer lis.Close()
	return lis.Addr().(*net.TCPAddr).Port, nil
}
