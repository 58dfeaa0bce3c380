package resources

import (
	"fmt"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// pack is anypb.New with a deterministic encoding: equal content must give
// equal bytes, in every process.
func pack(m proto.Message) *anypb.Any {
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		// Only a string that is not UTF-8 or a missing required field can do
		// this, and no input reaches a packed message.
		panic(fmt.Sprintf("encode %T: %v", m, err))
	}
	return &anypb.Any{TypeUrl: "type.googleapis.com/" + string(m.ProtoReflect().Descriptor().FullName()), Value: value}
}

func duration(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

func number(n uint32) *wrapperspb.UInt32Value { return wrapperspb.UInt32(n) }

func no() *wrapperspb.BoolValue { return wrapperspb.Bool(false) }

// overADS says that a resource comes over the client's own ADS stream. The
// timeout must stay finite: past it a cluster or listener goes on without the
// resource, else one lost answer would hold it for ever.
func overADS(initialFetch time.Duration) *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ResourceApiVersion:    corev3.ApiVersion_V3,
		InitialFetchTimeout:   duration(initialFetch),
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
	}
}

func tcpAddress(host string, port uint16) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address:       host,
		PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(port)},
	}}}
}
