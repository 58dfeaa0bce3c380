package harness

import (
	_ "embed"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"

	"github.com/fingerpost/fingerpost/tools"
)

//go:embed golden.txtpb
var golden string

// Golden returns the proto set that the servers of every language serve, with
// all that it imports. Its services are golden.admin.v1.Admin, golden.v1.Cart
// and golden.v1.Stock.
func Golden(t testing.TB) *descriptorpb.FileDescriptorSet {
	t.Helper()
	set := &descriptorpb.FileDescriptorSet{}
	if err := prototext.Unmarshal([]byte(golden), set); err != nil {
		t.Fatal(err)
	}
	for _, fd := range []protoreflect.FileDescriptor{timestamppb.File_google_protobuf_timestamp_proto, wrapperspb.File_google_protobuf_wrappers_proto} {
		set.File = append(set.File, protodesc.ToFileDescriptorProto(fd))
	}
	return set
}

// Server is a kind of gRPC server of another language or project.
type Server string

// The servers. All but EchoBasic serve the proto set of [Golden], and answer
// unary methods with their own name as a StringValue; Tonic reflects the set
// and serves Get and Watch of golden.v1.Cart, EchoBasic serves a set of its own at every address of
// the host.
const (
	EchoBasic    Server = "echo-basic"
	Grpcio       Server = tools.Grpcio
	GrpcJS       Server = tools.GrpcJS
	GrpcJava     Server = tools.GrpcJava
	Tonic        Server = tools.Tonic
	TonicV1Alpha Server = "tonic-v1alpha"
)

// startBound is how long a server may take to say where it listens. A JVM that
// compiles its source takes seconds where the CPU is shared.
const startBound = 2 * time.Minute

// StartServer starts a server that ends with the test, at the IP address where
// it can be told, and returns where it listens. Without reflection it serves
// all the same; that is for Grpcio, GrpcJS and GrpcJava.
func StartServer(t testing.TB, kind Server, ip string, reflection bool) netip.AddrPort {
	t.Helper()
	name, _ := strings.CutSuffix(string(kind), "-v1alpha")
	tool, dir := Tool(t, name), t.TempDir()
	write := func(file string, m proto.Message) string {
		b, err := proto.Marshal(m)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, file), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, file)
	}
	set, addr := write("golden.binpb", Golden(t)), ip+":0"
	var command []string
	switch kind {
	case EchoBasic:
		command = []string{"GRPC_ECHO_SERVER=1", "HTTP_PORT=0", tool}
	case Grpcio:
		own := write("reflection.binpb", &descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{
			protodesc.ToFileDescriptorProto(reflectionpb.File_grpc_reflection_v1_reflection_proto),
		}})
		command = []string{"/usr/bin/python3", source(t, name, "server.py"), set, addr, own}
	case GrpcJS:
		command = []string{"NODE_PATH=" + filepath.Join(tool, "node_modules"), "node", source(t, name, "server.js"), set, addr}
	case GrpcJava:
		command = []string{"java", "-XX:TieredStopAtLevel=1", "-cp", filepath.Join(tool, "*"), source(t, name, "Server.java"), set, addr}
	case Tonic:
		command = []string{tool, set, addr, "v1"}
	case TonicV1Alpha:
		command = []string{tool, set, addr, "v1alpha"}
	}
	if !reflection {
		command = append(command, "without")
	}
	p, err := start(dir, string(kind), "/usr/bin/env", command...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	var at netip.AddrPort
	Eventually(t, startBound, func() error {
		if err := p.exited(); err != nil {
			return fmt.Errorf("%w: %w", errGiveUp, err)
		}
		at, err = listening(p.tail())
		return err
	})
	if at.Addr().IsUnspecified() {
		at = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
	}
	return at
}

// listening reads where a server says that it listens.
func listening(log string) (netip.AddrPort, error) {
	for line := range strings.Lines(log) {
		_, rest, ok := strings.Cut(strings.TrimSpace(line), "listening ")
		if !ok {
			continue
		}
		if at, err := netip.ParseAddrPort(strings.TrimPrefix(rest, "at ")); err == nil {
			return at, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("it has not said where it listens; its log:\n%s", log)
}

// source is the path of a file below tools/, of the repository in which the
// test runs.
func source(t testing.TB, module, file string) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		path := filepath.Join(dir, "tools", module, file)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	t.Fatalf("tools/%s/%s is not above the working directory", module, file)
	return ""
}
