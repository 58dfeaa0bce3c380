package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"

	"github.com/fingerpost/fingerpost/demo"
)

// grace is how long running calls may last once the server was told to stop.
const grace = 5 * time.Second

// serve runs the server until ctx ends, lingers, and then does as any gRPC server
// should: it takes no new calls and lets the running ones end.
func serve(ctx context.Context, o *out, name string, port int, services []string, linger time.Duration) error {
	count := grpc.ChainStreamInterceptor(func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if strings.HasPrefix(info.FullMethod, "/grpc.reflection.") {
			from := ""
			if p, ok := peer.FromContext(s.Context()); ok {
				from = p.Addr.String()
			}
			o.write(Line{Kind: "collected", Server: from})
		}
		return next(srv, s)
	})
	// For fingerpost.dev/keepalive-interval; nobody is made to ping.
	permits := grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true})
	s, err := demo.StartSample(name, fmt.Sprintf("0.0.0.0:%d", port), services, count, permits)
	if err != nil {
		return err
	}
	o.write(Line{Kind: "serving", Server: s.Addr()})
	<-ctx.Done()
	time.Sleep(linger)
	ended := make(chan struct{})
	go func() { s.GracefulStop(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(grace):
		s.Stop()
	}
	return nil
}
