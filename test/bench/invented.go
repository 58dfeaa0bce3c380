package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/bootstrap"
	"github.com/fingerpost/fingerpost/xds/client"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

// inventor is a client that calls names which nobody has: as a sidecar does for
// its application it has asked for as many of them as it may, and makes every
// further call at unknown.sock.
type inventor struct {
	stream *client.Stream
	conn   *grpc.ClientConn
	calls  int
}

const inventorID = "prod/inventor"

func newInventor(ctx context.Context, ads string) (*inventor, error) {
	meta, err := structpb.NewStruct(map[string]any{"fingerpost.dev/clusters": "on-demand"})
	if err != nil {
		return nil, err
	}
	conn, err := client.Dial(ads)
	if err != nil {
		return nil, err
	}
	v := &inventor{}
	if v.stream, err = client.Open(ctx, conn, client.Options{Delta: true, Node: &corev3.Node{Id: inventorID, Metadata: meta}}); err != nil {
		return nil, err
	}
	go func() {
		for range v.stream.Responses() { // until it ends
		}
		_ = conn.Close()
	}()
	names := []string{"*"}
	for i := range 64 {
		names = append(names, fmt.Sprintf("prod/company.inventor.v1.First%d", i))
	}
	if err := v.stream.Subscribe(xds.Cluster, names...); err != nil {
		return nil, errors.Join(err, v.close())
	}
	v.conn, err = grpc.NewClient("unix:"+filepath.Join(filepath.Dir(ads), bootstrap.UnknownSocket),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("127.0.0.1:15001"))
	return v, err
}

func (v *inventor) close() error {
	v.stream.Close()
	if v.conn == nil {
		return nil
	}
	return v.conn.Close()
}

// invent calls until ctx ends. It tells when the first answer is there.
func (v *inventor) invent(ctx context.Context, began func()) error {
	ctx = metadata.AppendToOutgoingContext(ctx, unknown.NodeHeader, inventorID)
	for first := true; ctx.Err() == nil; first = false {
		v.calls++
		err := v.conn.Invoke(ctx, fmt.Sprintf("/company.inventor.v1.Name%d/Say", v.calls), wrapperspb.String("x"), &emptypb.Empty{})
		if code := status.Code(err); code != codes.Unimplemented && ctx.Err() == nil {
			return fmt.Errorf("an invented name gives %w", err)
		}
		if first {
			began()
		}
	}
	return nil
}

// beside is how long calls through a sidecar take that the agent answers: while
// nobody else calls, and while another client invents names as fast as it has its
// answers. They take turns.
func (s *sidecarSite) beside(ctx context.Context, e *sidecar, rounds int) (alone, flooded []time.Duration, err error) {
	v, err := newInventor(ctx, s.ads())
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, v.close()) }()
	const turn = 25 // calls
	calls := func(all *[]time.Duration) error {
		for i := range turn {
			d, err := e.call(ctx, fmt.Sprintf("company.invented.v1.Name%d", i%invented), codes.Unimplemented)
			if err != nil {
				return err
			}
			*all = append(*all, d)
		}
		return nil
	}
	for len(alone) < rounds {
		if err := calls(&alone); err != nil {
			return nil, nil, err
		}
		flood, stop := context.WithCancel(ctx)
		began, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			ended <- v.invent(flood, func() { close(began) })
		}()
		select {
		case <-began:
			err = calls(&flooded)
		case err = <-ended:
			stop()
			return nil, nil, errors.Join(err, errors.New("the other client stopped"))
		}
		stop()
		if err = errors.Join(err, <-ended); err != nil {
			return nil, nil, err
		}
	}
	s.r.progress("sidecar: the other client invented %d names meanwhile", v.calls)
	return alone, flooded, nil
}
