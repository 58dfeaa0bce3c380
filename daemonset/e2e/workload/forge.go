package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/agent/peer"
	peerv1 "github.com/fingerpost/fingerpost/agent/peer/fingerpost/peer/v1"
)

// forge asks an agent as another agent would, with a key that it made itself.
// It returns nil if the agent refuses it.
func forge(ctx context.Context, target string) error {
	id, err := peer.NewIdentity("forged")
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("passthrough:"+target, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		Certificates:       []tls.Certificate{*id.Certificate()},
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // who answers is not what is asked here
	})))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	client := peerv1.NewPeerServiceClient(conn)
	_, err = client.Fetch(ctx, &peerv1.FetchRequest{})
	if err == nil {
		return fmt.Errorf("%s answers whoever asks", target)
	}
	fmt.Printf("Fetch: %s: %s\n", status.Code(err), status.Convert(err).Message())
	stream, err := client.Sync(ctx)
	if err == nil {
		if err = stream.Send(&peerv1.SyncRequest{}); err == nil {
			_, err = stream.Recv()
		}
	}
	if err == nil {
		return fmt.Errorf("%s tells whoever asks", target)
	}
	fmt.Printf("Sync: %s: %s\n", status.Code(err), status.Convert(err).Message())
	return nil
}
