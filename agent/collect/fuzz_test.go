package collect

import (
	"context"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
)

// The reader of descriptors takes whatever a server sends, and where the bytes
// are a descriptor it finds the names that the protobuf library finds.
func FuzzDescriptor(f *testing.F) {
	good, err := proto.Marshal(protodesc.ToFileDescriptorProto(reflectionpb.File_grpc_reflection_v1_reflection_proto))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte{})
	f.Add([]byte("\x0a\x03a.b\x12\x01p\x32\x09\x0a\x01S\x12\x04\x0a\x02Do"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		b := Budget{Files: 8, Methods: 8}.orDefault()
		if s := newFileSet(b); s.add(raw) == nil {
			_ = s.linkable()
		}
		d, err := parseDescriptor(raw, b)
		if err != nil {
			return
		}
		if len(d.imports) > b.Files || len(d.services) > b.Files {
			t.Errorf("%d imports and %d services cross the budget", len(d.imports), len(d.services))
		}
		for _, s := range d.services {
			if !ValidName(s.name) || len(s.methods) > b.Methods {
				t.Errorf("service %q with %d methods", s.name, len(s.methods))
			}
		}
		fd := &descriptorpb.FileDescriptorProto{}
		if (proto.UnmarshalOptions{Merge: true}).Unmarshal(raw, fd) == nil && fd.GetName() != d.name {
			t.Errorf("name %q, the library says %q", d.name, fd.GetName())
		}
	})
}

// rawCodec sends bytes as they are, and reads nothing.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }
func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}
func (rawCodec) Unmarshal(mem.BufferSlice, any) error { return nil }

// Whatever a server answers, the attempt ends within its budgets.
func FuzzAnswers(f *testing.F) {
	var current atomic.Pointer[[]byte]
	s := grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}), grpc.UnknownServiceHandler(func(_ any, st grpc.ServerStream) error {
		var in []byte
		rest := *current.Load()
		for st.RecvMsg(&in) == nil {
			// Each answer is a length byte and as many bytes.
			if len(rest) == 0 {
				return nil
			}
			n := min(int(rest[0]), len(rest)-1)
			msg := rest[1 : 1+n]
			rest = rest[1+n:]
			if err := st.SendMsg(&msg); err != nil {
				return err
			}
		}
		return nil
	}))
	l := bufconn.Listen(1 << 16)
	served := make(chan struct{})
	go func() { defer close(served); _ = s.Serve(l) }()
	f.Cleanup(func() { s.Stop(); <-served })

	answer := func(m *reflectionpb.ServerReflectionResponse) string {
		b, err := proto.Marshal(m)
		if err != nil || len(b) > 255 {
			f.Fatal(len(b), err)
		}
		return string([]byte{byte(len(b))}) + string(b)
	}
	list := answer(&reflectionpb.ServerReflectionResponse{MessageResponse: &reflectionpb.ServerReflectionResponse_ListServicesResponse{
		ListServicesResponse: &reflectionpb.ListServiceResponse{Service: []*reflectionpb.ServiceResponse{{Name: "p.S"}, {Name: "p.T"}}},
	}})
	files := answer(&reflectionpb.ServerReflectionResponse{MessageResponse: &reflectionpb.ServerReflectionResponse_FileDescriptorResponse{
		FileDescriptorResponse: &reflectionpb.FileDescriptorResponse{FileDescriptorProto: [][]byte{
			[]byte("\x0a\x03a.b\x12\x01p\x1a\x03c.d\x32\x09\x0a\x01S\x12\x04\x0a\x02Do"),
		}},
	}})
	miss := answer(&reflectionpb.ServerReflectionResponse{MessageResponse: &reflectionpb.ServerReflectionResponse_ErrorResponse{
		ErrorResponse: &reflectionpb.ErrorResponse{ErrorCode: 5},
	}})
	f.Add([]byte(list + files + miss + files))
	f.Add([]byte(miss + list + list + files))
	f.Add([]byte("\x02\xff\xff"))
	f.Add([]byte("\x04"))
	f.Fuzz(func(t *testing.T, answers []byte) {
		current.Store(&answers)
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		b := Budget{Files: 16, Services: 4, Methods: 16, Bytes: 1 << 12, Connect: 10 * time.Second, Wall: 100 * time.Millisecond}
		r, err := Reflect(ctx, netip.MustParseAddrPort("192.0.2.1:1"), b, func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) {
			return l.DialContext(ctx)
		})
		if ctx.Err() != nil {
			t.Fatal("the attempt did not end")
		}
		if err == nil && (len(r.Services) > 4 || len(r.Files) > 16) {
			t.Errorf("%d services and %d files cross the budget", len(r.Services), len(r.Files))
		}
	})
}
