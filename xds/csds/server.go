// Package csds serves the client status discovery service (xDS protocol,
// envoy/service/status/v3): what each connected client of an ADS server has
// accepted, for standard tools.
package csds

import (
	"context"
	"errors"
	"io"

	adminv3 "github.com/envoyproxy/go-control-plane/envoy/admin/v3"
	statusv3 "github.com/envoyproxy/go-control-plane/envoy/service/status/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fingerpost/fingerpost/xds/ads"
)

// MaxResources bounds the resources in one answer, summed over clients. An
// answer of that size is about 5 MB.
const MaxResources = 32 << 10

// server answers from what an ADS server knows.
type server struct {
	statusv3.UnimplementedClientStatusDiscoveryServiceServer
	ads *ads.Server
}

// Register adds the service to g, answering for the clients of s. A request is
// answered with one ClientConfig for each stream whose node one of its matchers
// accepts (all, if it has none), ordered by node id and time of connection, and
// in it one entry for each resource that the client asked for. Bodies are not
// given: the server knows what it sends, not what a client goes on with. An
// answer of more than [MaxResources] is refused with RESOURCE_EXHAUSTED, a
// matcher that makes no sense with INVALID_ARGUMENT.
func Register(g grpc.ServiceRegistrar, s *ads.Server) {
	statusv3.RegisterClientStatusDiscoveryServiceServer(g, server{ads: s})
}

// FetchClientStatus answers once.
func (s server) FetchClientStatus(_ context.Context, req *statusv3.ClientStatusRequest) (*statusv3.ClientStatusResponse, error) {
	return s.answer(req)
}

// StreamClientStatus answers each request.
func (s server) StreamClientStatus(g statusv3.ClientStatusDiscoveryService_StreamClientStatusServer) error {
	for {
		req, err := g.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		resp, err := s.answer(req)
		if err != nil {
			return err
		}
		if err := g.Send(resp); err != nil {
			return err
		}
	}
}

func (s server) answer(req *statusv3.ClientStatusRequest) (*statusv3.ClientStatusResponse, error) {
	want, err := nodes(req.GetNodeMatchers())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	all, ok := s.ads.Inventories(want, MaxResources)
	if !ok {
		return nil, status.Errorf(codes.ResourceExhausted,
			"these clients have more than %d resources together; name fewer clients in node_matchers", MaxResources)
	}
	resp := &statusv3.ClientStatusResponse{}
	for _, inv := range all {
		c := &statusv3.ClientConfig{Node: inv.Node}
		for i := range inv.Items {
			c.GenericXdsConfigs = append(c.GenericXdsConfigs, describe(&inv.Items[i]))
		}
		resp.Config = append(resp.Config, c)
	}
	return resp, nil
}

// describe says both what the server did (config_status) and how the client
// stands (client_status).
func describe(i *ads.Item) *statusv3.ClientConfig_GenericXdsConfig {
	c := &statusv3.ClientConfig_GenericXdsConfig{TypeUrl: i.Type.URL(), Name: i.Name, VersionInfo: i.Accepted}
	c.ClientStatus = adminv3.ClientResourceStatus_REQUESTED
	if i.Earlier {
		c.ClientStatus = adminv3.ClientResourceStatus_ACKED // goes on with what it has
	}
	switch i.State {
	case ads.Missing:
		c.ConfigStatus, c.ClientStatus = statusv3.ConfigStatus_NOT_SENT, adminv3.ClientResourceStatus_DOES_NOT_EXIST
	case ads.Waiting:
		c.ConfigStatus = statusv3.ConfigStatus_NOT_SENT
	case ads.Sent:
		c.ConfigStatus = statusv3.ConfigStatus_STALE
	case ads.Acked:
		c.ConfigStatus, c.ClientStatus = statusv3.ConfigStatus_SYNCED, adminv3.ClientResourceStatus_ACKED
		c.LastUpdated = timestamppb.New(i.Since)
	case ads.Rejected, ads.Suspect:
		c.ConfigStatus, c.ClientStatus = statusv3.ConfigStatus_ERROR, adminv3.ClientResourceStatus_NACKED
		c.ErrorState = &adminv3.UpdateFailureState{
			LastUpdateAttempt: timestamppb.New(i.Since), Details: i.Error, VersionInfo: i.Version,
		}
	}
	return c
}
