// Package demo shows the agent's main job on loopback, without a cluster:
// sample gRPC services, the agent, a gRPC client and, where it is found, Envoy.
package demo

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"
	v1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Sample is a gRPC server that serves the named services, each with the
// methods Say (unary), Watch (a stream from the server) and Chat (a stream
// both ways) of google.protobuf.StringValue. It answers with its own name, and
// it serves reflection.
type Sample struct {
	Name string

	lis   net.Listener
	grpc  *grpc.Server
	files *protoregistry.Files

	// mu guards calls, by service.
	mu    sync.Mutex
	calls map[string]int
}

// StartSample serves at the address (as 127.0.0.2:0) until Stop.
func StartSample(name, addr string, services []string, opts ...grpc.ServerOption) (*Sample, error) {
	lis, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("sample %s: %w", name, err)
	}
	s := &Sample{Name: name, lis: lis, files: &protoregistry.Files{}, calls: map[string]int{}, grpc: grpc.NewServer(opts...)}
	wrappers := wrapperspb.File_google_protobuf_wrappers_proto
	if err := s.files.RegisterFile(wrappers); err != nil {
		return nil, err
	}
	for _, name := range services {
		file, err := protodesc.NewFile(describe(name), s.files)
		if err == nil {
			err = s.files.RegisterFile(file)
		}
		if err != nil {
			return nil, fmt.Errorf("sample service %s: %w", name, err)
		}
		s.grpc.RegisterService(s.service(name), s)
	}
	v1.RegisterServerReflectionServer(s.grpc, reflection.NewServerV1(reflection.ServerOptions{
		Services: s.grpc, DescriptorResolver: s.files, ExtensionResolver: protoregistry.GlobalTypes,
	}))
	go func() { _ = s.grpc.Serve(lis) }() // ends with Stop
	return s, nil
}

// Addr is where the sample serves.
func (s *Sample) Addr() string { return s.lis.Addr().String() }

// Port is the port of Addr.
func (s *Sample) Port() int { return s.lis.Addr().(*net.TCPAddr).Port }

// IP is the address of Addr without the port.
func (s *Sample) IP() string { return s.lis.Addr().(*net.TCPAddr).IP.String() }

// Stop ends the sample at once, with all its calls.
func (s *Sample) Stop() { s.grpc.Stop() }

// GracefulStop ends the sample when its running calls have ended.
func (s *Sample) GracefulStop() { s.grpc.GracefulStop() }

// Calls returns how many calls of the service began.
func (s *Sample) Calls(service string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[service]
}

// describe writes the file of one service, as protoc would.
func describe(service string) *descriptorpb.FileDescriptorProto {
	dot := strings.LastIndexByte(service, '.')
	message := proto.String(".google.protobuf.StringValue")
	method := func(name string, client, server bool) *descriptorpb.MethodDescriptorProto {
		return &descriptorpb.MethodDescriptorProto{
			Name: proto.String(name), InputType: message, OutputType: message,
			ClientStreaming: proto.Bool(client), ServerStreaming: proto.Bool(server),
		}
	}
	return &descriptorpb.FileDescriptorProto{
		Name:       proto.String(strings.ReplaceAll(service, ".", "/") + ".proto"),
		Package:    proto.String(service[:max(dot, 0)]),
		Dependency: []string{"google/protobuf/wrappers.proto"},
		Syntax:     proto.String("proto3"),
		Service: []*descriptorpb.ServiceDescriptorProto{{
			Name: proto.String(service[dot+1:]),
			Method: []*descriptorpb.MethodDescriptorProto{
				method("Say", false, false), method("Watch", false, true), method("Chat", true, true),
			},
		}},
	}
}

func (s *Sample) service(name string) *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: name,
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Say", Handler: func(_ any, _ context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			var in wrapperspb.StringValue
			if err := dec(&in); err != nil {
				return nil, err
			}
			s.count(name)
			return s.answer(in.Value), nil
		}}},
		Streams: []grpc.StreamDesc{
			{StreamName: "Watch", ServerStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
				var in wrapperspb.StringValue
				if err := stream.RecvMsg(&in); err != nil {
					return err
				}
				s.count(name)
				// The caller ends the stream: it may last as long as a test needs.
				if err := stream.SendMsg(s.answer(in.Value)); err != nil {
					return err
				}
				<-stream.Context().Done()
				return nil
			}},
			{StreamName: "Chat", ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
				s.count(name)
				for {
					var in wrapperspb.StringValue
					if err := stream.RecvMsg(&in); err != nil {
						return nil // the caller has ended its side, or is gone
					}
					if err := stream.SendMsg(s.answer(in.Value)); err != nil {
						return err
					}
				}
			}},
		},
		Metadata: strings.ReplaceAll(name, ".", "/") + ".proto",
	}
}

func (s *Sample) count(service string) {
	s.mu.Lock()
	s.calls[service]++
	s.mu.Unlock()
}

func (s *Sample) answer(said string) *wrapperspb.StringValue {
	if said == "" {
		return wrapperspb.String(s.Name)
	}
	return wrapperspb.String(s.Name + ": " + said)
}

// Say calls the unary method of a sample service and returns who answered.
func Say(ctx context.Context, conn grpc.ClientConnInterface, service string, opts ...grpc.CallOption) (string, error) {
	var out wrapperspb.StringValue
	err := conn.Invoke(ctx, "/"+service+"/Say", wrapperspb.String(""), &out, opts...)
	return out.Value, err
}

// Stream is an open call of the method Chat.
type Stream struct{ grpc.ClientStream }

// Chat opens a stream both ways.
func Chat(ctx context.Context, conn grpc.ClientConnInterface, service string) (*Stream, error) {
	cs, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/"+service+"/Chat")
	return &Stream{cs}, err
}

// Ask says something on the stream and returns the answer, which names who
// answered.
func (s *Stream) Ask(text string) (string, error) {
	if err := s.SendMsg(wrapperspb.String(text)); err != nil {
		return "", err
	}
	var out wrapperspb.StringValue
	err := s.RecvMsg(&out)
	return out.Value, err
}
