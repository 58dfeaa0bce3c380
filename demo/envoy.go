package demo

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/xds/bootstrap"
)

// FindEnvoy returns the path of an Envoy binary: the one asked for, that of
// the environment variable ENVOY, or one on the PATH; empty if there is none.
// It returns an error if the one asked for, or named by ENVOY, cannot be run.
func FindEnvoy(asked string) (string, error) {
	if asked = cmp.Or(asked, os.Getenv("ENVOY")); asked != "" {
		return exec.LookPath(asked)
	}
	path, err := exec.LookPath("envoy")
	if err != nil {
		return "", nil // the demo does without
	}
	return path, nil
}

// envoy starts a sidecar with the bootstrap that fingerpost bootstrap writes,
// and calls through it. The connection is nil where there is no Envoy.
func (s *story) envoy(ctx context.Context) (*grpc.ClientConn, func(), error) {
	if s.Envoy == "" {
		s.say("No Envoy was found (say --envoy PATH): the sidecar's part is left out.")
		return nil, func() {}, nil
	}
	s.say("An Envoy starts as a sidecar, with the configuration that \"fingerpost bootstrap\" prints.")
	conf, err := bootstrap.Envoy(bootstrap.Options{ADSSocket: s.config.ADSSocket, NodeID: Namespace + "/web"})
	if err != nil {
		return nil, nil, err
	}
	file := filepath.Join(s.dir, "envoy.yaml")
	if err := os.WriteFile(file, conf, 0o644); err != nil {
		return nil, nil, err
	}
	cmd := exec.Command(s.Envoy, "-c", file, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warn", "--log-path", filepath.Join(s.dir, "envoy.log"))
	if err := cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("start Envoy: %w", err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	stop := func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-done:
		case <-time.After(3 * time.Second):
			_ = cmd.Process.Kill()
			<-done
		}
	}
	conn, err := grpc.NewClient(fmt.Sprintf("127.0.0.1:%d", s.config.EgressPort), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err == nil {
		err = s.throughEnvoy(ctx, conn)
	}
	if err != nil {
		if conn != nil {
			conn.Close()
		}
		stop()
		return nil, nil, err
	}
	return conn, func() { conn.Close(); stop() }, nil
}

func (s *story) throughEnvoy(ctx context.Context, conn *grpc.ClientConn) error {
	if err := s.calls(ctx, conn, "shop.v1.Cart", "cart-7d9c5-a", "cart-7d9c5-b"); err != nil {
		return err
	}
	if err := s.calls(ctx, conn, "shop.v1.Stock", "stock-7d9c5-a"); err != nil {
		return err
	}
	stream, err := Chat(ctx, conn, "shop.v1.Stock")
	if err != nil {
		return err
	}
	answer, err := stream.Ask("a stream works as well")
	if err != nil {
		return err
	}
	s.note("a stream of shop.v1.Stock: %q", answer)
	_, err = Say(ctx, conn, "shop.v1.Nobody")
	if status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("a call of a service that nobody has: %w, want UNIMPLEMENTED", err)
	}
	s.note("a call of shop.v1.Nobody: %s: %s", status.Code(err), status.Convert(err).Message())
	return nil
}
