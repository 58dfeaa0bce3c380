package collect_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test; nothing is expected to take as long.
const patience = 30 * time.Second

const (
	v1      = "grpc.reflection.v1.ServerReflection"
	v1alpha = "grpc.reflection.v1alpha.ServerReflection"
)

// counter is a listener that counts the connections it gave out.
type counter struct {
	net.Listener
	accepted atomic.Int32
	last     atomic.Pointer[net.Conn]
}

func (c *counter) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err == nil {
		c.accepted.Add(1)
		c.last.Store(&conn)
	}
	return conn, err
}

func (c *counter) addr() netip.AddrPort { return c.Addr().(*net.TCPAddr).AddrPort() }

func listen(t testing.TB, addr string) *counter {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return &counter{Listener: l}
}

// serve runs a gRPC server on a loopback port until the test ends.
func serve(t testing.TB, register func(*grpc.Server), opts ...grpc.ServerOption) *counter {
	t.Helper()
	l := listen(t, "127.0.0.1:0")
	serveOn(t, l, register, opts...)
	return l
}

func serveOn(t testing.TB, l net.Listener, register func(*grpc.Server), opts ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(opts...)
	register(s)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return s
}

// acceptEach runs f for every connection until the test ends.
func acceptEach(t testing.TB, f func(net.Conn)) *counter {
	t.Helper()
	return acceptEachOn(t, "127.0.0.1:0", f)
}

func acceptEachOn(t testing.TB, addr string, f func(net.Conn)) *counter {
	t.Helper()
	l := listen(t, addr)
	var conns []net.Conn
	handlers := make(chan struct{}, 64)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, c)
			go func() { f(c); handlers <- struct{}{} }()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		for _, c := range conns {
			c.Close()
		}
		for range conns {
			<-handlers
		}
	})
	return l
}

// stream is the server's end of a reflection stream of either version.
type stream = grpc.BidiStreamingServer[reflectionpb.ServerReflectionRequest, reflectionpb.ServerReflectionResponse]

// registerReflection registers a handler as one version of reflection.
func registerReflection(s *grpc.Server, version string, handle func(stream) error) {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: version,
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: "ServerReflectionInfo", ClientStreams: true, ServerStreams: true,
			Handler: func(_ any, ss grpc.ServerStream) error {
				return handle(&grpc.GenericServerStream[reflectionpb.ServerReflectionRequest, reflectionpb.ServerReflectionResponse]{ServerStream: ss})
			},
		}},
	}, struct{}{})
}

// script is a reflection server that answers what it was told to.
type script struct {
	services []string
	symbols  map[string][][]byte // files by symbol
	files    map[string][][]byte // files by name
	// missEnds ends the stream with NOT_FOUND where a symbol or file is not
	// there, instead of an answer.
	missEnds bool

	opened atomic.Int32
	asked  chan string // if not nil, gets every symbol and file asked for
}

func (s *script) handle(st stream) error {
	s.opened.Add(1)
	for {
		req, err := st.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		resp := &reflectionpb.ServerReflectionResponse{}
		var files [][]byte
		switch r := req.MessageRequest.(type) {
		case *reflectionpb.ServerReflectionRequest_ListServices:
			resp = listOf(s.services...)
		case *reflectionpb.ServerReflectionRequest_FileContainingSymbol:
			s.note(r.FileContainingSymbol)
			files = s.symbols[r.FileContainingSymbol]
		case *reflectionpb.ServerReflectionRequest_FileByFilename:
			s.note(r.FileByFilename)
			files = s.files[r.FileByFilename]
		}
		switch {
		case resp.MessageResponse != nil:
		case files != nil:
			resp = filesOf(files...)
		case s.missEnds:
			return status.Error(codes.NotFound, "not here")
		default:
			resp.MessageResponse = &reflectionpb.ServerReflectionResponse_ErrorResponse{ErrorResponse: &reflectionpb.ErrorResponse{
				ErrorCode: int32(codes.NotFound), ErrorMessage: "not here",
			}}
		}
		if err := st.Send(resp); err != nil {
			return err
		}
	}
}

func (s *script) note(what string) {
	if s.asked != nil {
		s.asked <- what
	}
}

func listOf(names ...string) *reflectionpb.ServerReflectionResponse {
	l := &reflectionpb.ListServiceResponse{}
	for _, n := range names {
		l.Service = append(l.Service, &reflectionpb.ServiceResponse{Name: n})
	}
	return &reflectionpb.ServerReflectionResponse{MessageResponse: &reflectionpb.ServerReflectionResponse_ListServicesResponse{ListServicesResponse: l}}
}

func filesOf(files ...[]byte) *reflectionpb.ServerReflectionResponse {
	return &reflectionpb.ServerReflectionResponse{MessageResponse: &reflectionpb.ServerReflectionResponse_FileDescriptorResponse{
		FileDescriptorResponse: &reflectionpb.FileDescriptorResponse{FileDescriptorProto: files},
	}}
}

// file is a FileDescriptorProto; a service is its name and its methods.
type file struct {
	name, pkg, syntax string
	imports           []string
	services          [][]string
	input             string // of all methods
}

func (f file) raw() []byte {
	fd := &descriptorpb.FileDescriptorProto{Name: &f.name, Package: &f.pkg, Dependency: f.imports}
	if f.syntax != "" {
		fd.Syntax = &f.syntax
	}
	for _, s := range f.services {
		sd := &descriptorpb.ServiceDescriptorProto{Name: &s[0]}
		for _, m := range s[1:] {
			sd.Method = append(sd.Method, &descriptorpb.MethodDescriptorProto{Name: &m, InputType: &f.input})
		}
		fd.Service = append(fd.Service, sd)
	}
	b, err := proto.Marshal(fd)
	if err != nil {
		panic(err)
	}
	return b
}
