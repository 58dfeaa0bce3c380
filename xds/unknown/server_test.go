package unknown_test

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unique"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is knowledge made by hand.
type fake struct {
	mu        sync.Mutex
	answer    resources.Answer
	changed   chan struct{}
	names     []string
	named     resources.Named
	providers map[string][]*nodecache.Owner
}

func newFake(owners ...*nodecache.Owner) *fake {
	f := &fake{changed: make(chan struct{})}
	f.answer = resources.Answer{Suspects: owners, Changed: f.changed}
	return f
}

var users = nodecache.Name{Namespace: "prod", Name: "users"}

func named(n resources.Named) *fake { return &fake{named: n} }

func (f *fake) Resolve(string, string, string) resources.Named { return f.named }

func (f *fake) Lookup(string, string) resources.Answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.answer
}

func (f *fake) change(a resources.Answer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.changed
	f.changed = make(chan struct{})
	a.Changed = f.changed
	f.answer = a
	close(old)
}

func (f *fake) Names(string) []string { return f.names }

func (f *fake) Providers(_, service string) []*nodecache.Owner { return f.providers[service] }

func serve(t *testing.T, k unknown.Knowledge, o unknown.Options, authority string) *grpc.ClientConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "unknown.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := unknown.New(k, o)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithAuthority(authority), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return conn
}

func caller(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return metadata.AppendToOutgoingContext(ctx, unknown.NodeHeader, "prod/caller")
}

func suspect(k nodecache.Knowledge, name, reason string, next time.Time) *nodecache.Owner {
	return &nodecache.Owner{Key: nodecache.OwnerKey{UID: name}, Name: "ReplicaSet/" + name, Knowledge: k, Reason: reason, NextTry: next}
}

func TestAnswerFollowsWhatIsKnown(t *testing.T) {
	next := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	failed := suspect(nodecache.Failed, "f", "connection refused", next)
	for _, c := range []struct {
		name      string
		authority string
		path      string
		know      *fake
		unsynced  bool
		anonymous bool
		old       bool
		want      codes.Code
		text      string
	}{
		{name: "served by now", know: &fake{answer: resources.Answer{Served: true}}, want: codes.Unavailable, text: "pkg.S is known, your sidecar is being updated"},
		{name: "nobody has it", know: newFake(), want: codes.Unimplemented, text: "unknown service pkg.S in namespace prod"},
		{name: "failed", know: newFake(failed), want: codes.Unavailable, text: "ReplicaSet/f could not be asked what it serves: connection refused; next try at 2030-01-02T03:04:05Z"},
		{name: "unknown stays so", know: newFake(failed, suspect(nodecache.Unknown, "u", "", time.Time{})), want: codes.Unavailable, text: "ReplicaSet/u has not been asked yet what it serves (and 1 more owners)"},
		{name: "collecting stays so", know: newFake(suspect(nodecache.Collecting, "c", "", time.Time{})), want: codes.Unavailable, text: "ReplicaSet/c is being asked"},
		{name: "not synced", know: newFake(), unsynced: true, want: codes.Unavailable, text: "has not read the cluster yet"},
		{name: "infrastructure", path: "/grpc.health.v1.Health/Check", know: newFake(failed), want: codes.Unimplemented, text: "unknown service grpc.health.v1.Health"},
		{name: "other reflection method", path: "/grpc.reflection.v1.ServerReflection/Other", know: newFake(), want: codes.Unimplemented, text: "unknown service"},
		{name: "names nothing", authority: "users.prod:50051", know: named(resources.Named{Reason: "no Service has the name"}), want: codes.Unavailable, text: `authority "users.prod:50051": no Service has the name`},
		{name: "nobody there", authority: "users.prod:50051", know: named(resources.Named{Service: users, Port: 80, Refused: true}), want: codes.Unimplemented, text: "unknown service pkg.S: nobody at port 80 of Service prod/users serves it"},
		{name: "other namespace", authority: "users.shop", know: named(resources.Named{Service: users, Port: 80}), want: codes.Unavailable, text: "needs clusters on demand"},
		{name: "other form", authority: "10.0.0.1:80", know: named(resources.Named{Service: users, Port: 80, Alias: "users.prod:80", Known: true}), want: codes.Unavailable, text: "call it as users.prod:80"},
		{name: "no word of the port", authority: "users", know: named(resources.Named{Service: users, Port: 80, Alias: "users.prod:80", Silent: "nothing says so"}), want: codes.Unavailable, text: "nothing says so"},
		{name: "Service by now", authority: "users", know: named(resources.Named{Service: users, Port: 80, Alias: "users.prod:80", Known: true}), want: codes.Unavailable, text: "port 80 of Service prod/users is known, your sidecar is being updated"},
		{name: "pods of the Service are asked", authority: "users", know: named(resources.Named{Service: users, Port: 80, Alias: "users.prod:80", Pending: []nodecache.OwnerKey{{UID: "u"}}}), want: codes.Unavailable, text: "its pods are being asked"},
		{name: "old sidecar", authority: "users", old: true, know: named(resources.Named{Service: users, Port: 80, Alias: "users.prod:80", Known: true}), want: codes.Unavailable, text: "the sidecar's bootstrap is of a release that does not know"},
		{name: "loopback in other words", authority: "LOCALHOST.:1", know: newFake(), want: codes.Unimplemented, text: "unknown service pkg.S"},
		{name: "path too long", path: "/a/pkg.S/Do", know: newFake(), want: codes.Unimplemented, text: "malformed"},
		{name: "path with odd letters", path: "/pkg.S/D-o", know: newFake(), want: codes.Unimplemented, text: "malformed"},
		{name: "no header", anonymous: true, know: newFake(), want: codes.Unavailable, text: "fingerpost-node"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.authority == "" {
				c.authority = "127.0.0.1:15001"
			}
			if c.path == "" {
				c.path = "/pkg.S/Do"
			}
			conn := serve(t, c.know, unknown.Options{
				Synced: func() bool { return !c.unsynced }, Patience: 30 * time.Millisecond,
				Form: func(string, string) resources.Form {
					if c.old {
						return resources.ShapeOne
					}
					return resources.AllClusters
				},
			}, c.authority)
			ctx := caller(t)
			if c.anonymous {
				ctx = t.Context()
			}
			st := status.Convert(conn.Invoke(ctx, c.path, &emptypb.Empty{}, &emptypb.Empty{}))
			if st.Code() != c.want || !strings.Contains(st.Message(), c.text) {
				t.Errorf("%v, want %v %q", st, c.want, c.text)
			}
		})
	}
}

// A call that waits is answered as soon as the owner is known, whatever that
// means for the call, and hurries the owner.
func TestWaitingCallIsAnsweredAtChange(t *testing.T) {
	for want, then := range map[string]resources.Answer{
		"pkg.S is known":        {Served: true},
		"unknown service pkg.S": {},
		"no route to host":      {Suspects: []*nodecache.Owner{suspect(nodecache.Failed, "f", "no route to host", time.Time{})}},
	} {
		k := newFake(suspect(nodecache.Unknown, "u", "", time.Time{}), suspect(nodecache.Failed, "f", "", time.Time{}))
		hurried := make(chan []nodecache.OwnerKey, 1)
		conn := serve(t, k, unknown.Options{Patience: time.Hour, Hurry: func(keys []nodecache.OwnerKey) { hurried <- keys }}, "localhost")
		result := make(chan error, 1)
		ctx := caller(t)
		go func() { result <- conn.Invoke(ctx, "/pkg.S/Do", &emptypb.Empty{}, &emptypb.Empty{}) }()
		if keys := <-hurried; !slices.Equal(keys, []nodecache.OwnerKey{{UID: "u"}}) {
			t.Errorf("hurried %v, want u alone", keys)
		}
		k.change(resources.Answer{Suspects: []*nodecache.Owner{suspect(nodecache.Collecting, "u", "", time.Time{})}})
		k.change(then)
		if err := <-result; !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestOneCallTooManyDoesNotWait(t *testing.T) {
	k := newFake(suspect(nodecache.Unknown, "u", "", time.Time{}))
	hurried := make(chan []nodecache.OwnerKey, 2)
	conn := serve(t, k, unknown.Options{Patience: time.Hour, MaxWaiting: 1, Hurry: func(keys []nodecache.OwnerKey) { hurried <- keys }}, "localhost")
	ctx := caller(t)
	results := make(chan error, 2)
	for range 2 {
		go func() { results <- conn.Invoke(ctx, "/pkg.S/Do", &emptypb.Empty{}, &emptypb.Empty{}) }()
	}
	if err := <-results; status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "ReplicaSet/u") {
		t.Errorf("%v, want UNAVAILABLE at once", err)
	}
	k.change(resources.Answer{})
	if err := <-results; status.Code(err) != codes.Unimplemented {
		t.Errorf("%v, want the other one to have waited", err)
	}
}

func TestCallerThatLeavesOrSendsOnIsNotHeld(t *testing.T) {
	conn := serve(t, newFake(suspect(nodecache.Unknown, "u", "", time.Time{})), unknown.Options{Patience: time.Hour}, "localhost")
	ctx, cancel := context.WithTimeout(caller(t), 50*time.Millisecond)
	defer cancel()
	if err := conn.Invoke(ctx, "/pkg.S/Do", &emptypb.Empty{}, &emptypb.Empty{}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("%v, want DEADLINE_EXCEEDED", err)
	}
	conn = serve(t, newFake(), unknown.Options{}, "localhost")
	s, err := conn.NewStream(caller(t), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/pkg.S/Do")
	for err == nil {
		err = s.SendMsg(wrapperspb.Bytes(make([]byte, 64<<10)))
	}
	if err := s.RecvMsg(&emptypb.Empty{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("%v, want UNIMPLEMENTED", err)
	}
}

// What a call says of its sidecar counts only where the kernel proves no pod.
func TestProvedPodCountsInsteadOfTheHeader(t *testing.T) {
	for name, test := range map[string]struct {
		pod  string
		err  error
		want string
	}{
		"proved":   {"test/b", nil, "unknown service pkg.S in namespace test"},
		"unproved": {"", nil, "unknown service pkg.S in namespace prod"},
		"refused":  {"", status.Error(codes.Unauthenticated, "no link"), "no link"},
	} {
		conn := serve(t, newFake(), unknown.Options{Caller: func(context.Context) (string, error) { return test.pod, test.err }}, "localhost")
		err := conn.Invoke(caller(t), "/pkg.S/Do", &emptypb.Empty{}, &emptypb.Empty{})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}

func fileOf(name, pkg string, deps []string, services ...string) unique.Handle[string] {
	fd := &descriptorpb.FileDescriptorProto{Name: proto.String(name), Package: proto.String(pkg), Dependency: deps}
	for _, s := range services {
		fd.Service = append(fd.Service, &descriptorpb.ServiceDescriptorProto{
			Name: proto.String(s), Method: []*descriptorpb.MethodDescriptorProto{{Name: proto.String("Do")}},
		})
	}
	fd.MessageType = []*descriptorpb.DescriptorProto{{Name: proto.String("M" + pkg), NestedType: []*descriptorpb.DescriptorProto{{Name: proto.String("In")}}}}
	b, err := proto.Marshal(fd)
	if err != nil {
		panic(err)
	}
	return unique.Make(string(b))
}

func program(hash string, files ...unique.Handle[string]) []*nodecache.Owner {
	return []*nodecache.Owner{{Info: &nodecache.Info{Ports: []nodecache.PortInfo{{Port: 1, Hash: hash, Files: files}}}}}
}

// Two programs with different files of one name both are described, each by
// its own; imports that go deep and meet again come once.
func TestReflectionAnswersFromTheCallersView(t *testing.T) {
	deep := []unique.Handle[string]{fileOf("a.proto", "a", []string{"l0.proto", "r0.proto", "gone.proto"}, "A")}
	for i := range 30 {
		next := []string{fmt.Sprintf("l%d.proto", i+1), fmt.Sprintf("r%d.proto", i+1)}
		deep = append(deep, fileOf(fmt.Sprintf("l%d.proto", i), "deep", next), fileOf(fmt.Sprintf("r%d.proto", i), "deep", next))
	}
	k := &fake{names: []string{"a.A", "b.B", "c.C"}, providers: map[string][]*nodecache.Owner{
		"a.A": program("1", append(deep, fileOf("common.proto", "va", nil), unique.Make("\xff not a file"))...),
		"b.B": program("2", fileOf("b.proto", "b", []string{"common.proto"}, "B"), fileOf("common.proto", "vb", nil)),
		"c.C": {{}}, // declared: no descriptor
	}}
	conn := serve(t, k, unknown.Options{}, "127.0.0.1:15001")
	stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(caller(t))
	if err != nil {
		t.Fatal(err)
	}
	ask := func(req *reflectionv1.ServerReflectionRequest) *reflectionv1.ServerReflectionResponse {
		t.Helper()
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		resp, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	names := func(resp *reflectionv1.ServerReflectionResponse) (out []string) {
		for _, b := range resp.GetFileDescriptorResponse().GetFileDescriptorProto() {
			var fd descriptorpb.FileDescriptorProto
			if err := proto.Unmarshal(b, &fd); err != nil {
				t.Fatal(err)
			}
			out = append(out, fd.GetPackage()+":"+fd.GetName())
		}
		return out
	}
	symbol := func(s string) *reflectionv1.ServerReflectionResponse {
		return ask(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: s}})
	}
	file := func(s string) *reflectionv1.ServerReflectionResponse {
		return ask(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_FileByFilename{FileByFilename: s}})
	}
	list := ask(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}})
	if got := list.GetListServicesResponse().GetService(); len(got) != 3 || got[0].GetName() != "a.A" {
		t.Errorf("services %v", got)
	}
	if got := names(symbol("a.A")); len(got) != 61 || got[0] != "a:a.proto" {
		t.Errorf("%d files, %v, want each of 61 once", len(got), got)
	}
	if got := names(file("common.proto")); !slices.Equal(got, []string{"va:common.proto"}) {
		t.Errorf("%v, want that of program a", got)
	}
	for _, s := range []string{"b.B", "b.B.Do", "b.Mb", "b.Mb.In"} {
		if got := names(symbol(s)); !slices.Equal(got, []string{"b:b.proto", "vb:common.proto"}) {
			t.Errorf("%s: %v", s, got)
		}
	}
	if got := names(file("common.proto")); !slices.Equal(got, []string{"vb:common.proto"}) {
		t.Errorf("%v, want that of program b", got)
	}
	for _, resp := range []*reflectionv1.ServerReflectionResponse{symbol("c.C"), symbol("x"), symbol(""), file("x.proto")} {
		if resp.GetErrorResponse().GetErrorCode() != int32(codes.NotFound) {
			t.Errorf("%v, want NOT_FOUND", resp)
		}
	}
	if resp := ask(&reflectionv1.ServerReflectionRequest{}); resp.GetErrorResponse().GetErrorCode() != int32(codes.Unimplemented) {
		t.Errorf("%v, want UNIMPLEMENTED", resp)
	}
	// The messages of v1alpha are those of v1.
	alpha, err := conn.NewStream(caller(t), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
		"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
	if err != nil {
		t.Fatal(err)
	}
	if err := alpha.SendMsg(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	var resp reflectionv1.ServerReflectionResponse
	if err := alpha.RecvMsg(&resp); err != nil || len(resp.GetListServicesResponse().GetService()) != 3 {
		t.Errorf("v1alpha: %v, %v", &resp, err)
	}
}
