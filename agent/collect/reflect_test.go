package collect_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/reflection"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/nodecache"
)

func ask(t testing.TB, l *counter, b collect.Budget) (collect.Result, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r, err := collect.Reflect(ctx, l.addr(), b, nil)
	if ctx.Err() != nil {
		t.Fatal("Reflect went on until the test's own bound")
	}
	return r, err
}

func mustAsk(t testing.TB, l *counter) collect.Result {
	t.Helper()
	r, err := ask(t, l, collect.Budget{})
	if err != nil {
		t.Fatal(err)
	}
	if n := l.accepted.Load(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
	return r
}

// services writes a result as "name: methods", undescribed ones with "?".
func services(r collect.Result) []string {
	var out []string
	for _, s := range r.Services {
		line := s.Name + ": " + strings.Join(s.Methods, " ")
		if s.Undescribed {
			line = s.Name + "?"
		}
		out = append(out, line)
	}
	return out
}

func want(t *testing.T, r collect.Result, state nodecache.PortState, names ...string) {
	t.Helper()
	if r.State != state {
		t.Errorf("state %s (%s), want %s", r.State, r.Detail, state)
	}
	if got := services(r); !reflect.DeepEqual(got, names) {
		t.Errorf("services %q, want %q", got, names)
	}
}

func wantFailure(t *testing.T, err error, class collect.Class) {
	t.Helper()
	var f *collect.Failure
	if !errors.As(err, &f) || f.Class != class {
		t.Errorf("error %v, want class %s", err, class)
	}
}

// app is a real server of grpc-go with the versions of reflection it is told.
func app(versions ...string) func(*grpc.Server) {
	return func(s *grpc.Server) {
		testpb.RegisterTestServiceServer(s, testpb.UnimplementedTestServiceServer{})
		testpb.RegisterReconnectServiceServer(s, testpb.UnimplementedReconnectServiceServer{})
		healthpb.RegisterHealthServer(s, health.NewServer())
		for _, v := range versions {
			registerReflection(s, v, reflection.NewServerV1(reflection.ServerOptions{Services: s}).ServerReflectionInfo)
		}
	}
}

var appServices = []string{
	"grpc.testing.ReconnectService: Start Stop",
	"grpc.testing.TestService: CacheableUnaryCall EmptyCall FullDuplexCall HalfDuplexCall StreamingInputCall StreamingOutputCall UnaryCall UnimplementedCall",
}

// Both versions, and every way in which a server may not know v1, give the
// same result over one connection.
func TestServersOfEitherVersionGiveEqualResults(t *testing.T) {
	h2c := func(handle func(g *grpc.Server, w http.ResponseWriter, r *http.Request)) func(t *testing.T) *counter {
		return func(t *testing.T) *counter {
			g := grpc.NewServer()
			app(v1alpha)(g)
			return serveHTTP(t, func(w http.ResponseWriter, r *http.Request) { handle(g, w, r) })
		}
	}
	isV1 := func(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/"+v1+"/") }
	var hash string
	for _, tc := range []struct {
		name  string
		start func(t *testing.T) *counter
	}{
		{"both", func(t *testing.T) *counter { return serve(t, app(v1, v1alpha)) }},
		{"as registered by the library", func(t *testing.T) *counter {
			return serve(t, func(s *grpc.Server) { app()(s); reflection.Register(s) })
		}},
		{"v1 only", func(t *testing.T) *counter { return serve(t, app(v1)) }},
		{"v1alpha only", func(t *testing.T) *counter { return serve(t, app(v1alpha)) }},
		{"v1 unimplemented after headers", func(t *testing.T) *counter {
			return serve(t, func(s *grpc.Server) {
				app(v1alpha)(s)
				registerReflection(s, v1, func(st stream) error {
					if err := st.SendHeader(nil); err != nil {
						return err
					}
					return status.Error(codes.Unimplemented, "no")
				})
			})
		}},
		{"v1 unimplemented in band", func(t *testing.T) *counter {
			return serve(t, func(s *grpc.Server) {
				app(v1alpha)(s)
				registerReflection(s, v1, func(st stream) error {
					return st.Send(&reflectionpb.ServerReflectionResponse{MessageResponse: &reflectionpb.ServerReflectionResponse_ErrorResponse{
						ErrorResponse: &reflectionpb.ErrorResponse{ErrorCode: int32(codes.Unimplemented)},
					}})
				})
			})
		}},
		{"v1 is HTTP 405", h2c(func(g *grpc.Server, w http.ResponseWriter, r *http.Request) {
			if isV1(r) {
				w.WriteHeader(http.StatusMethodNotAllowed)
				return
			}
			g.ServeHTTP(w, r)
		})},
		{"v1 is HTTP 404", h2c(func(g *grpc.Server, w http.ResponseWriter, r *http.Request) {
			if isV1(r) {
				http.NotFound(w, r)
				return
			}
			g.ServeHTTP(w, r)
		})},
		{"v1 is reset", h2c(func(g *grpc.Server, w http.ResponseWriter, r *http.Request) {
			if isV1(r) {
				panic(http.ErrAbortHandler)
			}
			g.ServeHTTP(w, r)
		})},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := mustAsk(t, tc.start(t))
			want(t, r, nodecache.PortServes, appServices...)
			if hash == "" {
				hash = r.Hash
			}
			if r.Hash != hash || len(r.Files) == 0 {
				t.Errorf("hash %s with %d files, want that of the first server, %s", r.Hash, len(r.Files), hash)
			}
		})
	}
}

func serveHTTP(t *testing.T, h http.HandlerFunc) *counter {
	l := listen(t, "127.0.0.1:0")
	s := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close(); <-done })
	return l
}

func TestRefusalIsFinal(t *testing.T) {
	for _, code := range []codes.Code{codes.Unauthenticated, codes.PermissionDenied} {
		t.Run(code.String(), func(t *testing.T) {
			alpha := &script{services: []string{"a.B"}}
			r := mustAsk(t, serve(t, func(s *grpc.Server) {
				registerReflection(s, v1, func(stream) error { return status.Error(code, "not\nyou") })
				registerReflection(s, v1alpha, alpha.handle)
			}))
			want(t, r, nodecache.PortDenied)
			if strings.Contains(r.Detail, "\n") || !strings.Contains(r.Detail, "not you") {
				t.Errorf("detail %q", r.Detail)
			}
			if alpha.opened.Load() != 0 {
				t.Error("v1alpha was tried after the refusal")
			}
		})
	}
}

func TestServerWithoutReflection(t *testing.T) {
	want(t, mustAsk(t, serve(t, app())), nodecache.PortNoReflection)
}

func TestHTTP2WithoutGRPC(t *testing.T) {
	for _, code := range []int{http.StatusOK, http.StatusNotFound, http.StatusMethodNotAllowed} {
		l := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) })
		want(t, mustAsk(t, l), nodecache.PortNotGRPC)
	}
	// A server that is in trouble may be another one tomorrow.
	l := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	_, err := ask(t, l, collect.Budget{})
	wantFailure(t, err, collect.Unavailable)
}

// Faults of descriptors seen in the field; none of them loses a name.
func TestBrokenDescriptorsLoseNoNames(t *testing.T) {
	a := file{name: "a.proto", pkg: "a", services: [][]string{{"A", "Two", "One"}}}
	with := func(f func(*file)) []byte { g := a; f(&g); return g.raw() }
	b := file{name: "a.proto", pkg: "a", services: [][]string{{"B", "Do"}}}
	for _, tc := range []struct {
		name  string
		s     *script
		want  []string
		files int
	}{
		{"missing import", &script{
			services: []string{"a.A"},
			symbols:  map[string][][]byte{"a.A": {with(func(f *file) { f.imports = []string{"gone.proto"} })}},
		}, []string{"a.A: One Two"}, 1},
		{"junk syntax", &script{
			services: []string{"a.A"},
			symbols: map[string][][]byte{"a.A": {
				with(func(f *file) { f.syntax = "<unknown:0>"; f.imports = []string{"x.proto"} }),
				file{name: "x.proto", syntax: "<unknown:0>"}.raw(),
			}},
		}, []string{"a.A: One Two"}, 2},
		{"import cycle", &script{
			services: []string{"a.A"},
			symbols:  map[string][][]byte{"a.A": {with(func(f *file) { f.imports = []string{"b.proto"} })}},
			files:    map[string][][]byte{"b.proto": {file{name: "b.proto", imports: []string{"a.proto", "b.proto"}}.raw()}},
		}, []string{"a.A: One Two"}, 2},
		{"unresolved type", &script{
			services: []string{"a.A"},
			symbols:  map[string][][]byte{"a.A": {with(func(f *file) { f.input = ".nowhere.Message" })}},
		}, []string{"a.A: One Two"}, 1},
		{"two contents under one file name", &script{
			services: []string{"a.A", "a.B"},
			symbols:  map[string][][]byte{"a.A": {a.raw()}, "a.B": {b.raw()}},
		}, []string{"a.A: One Two", "a.B: Do"}, 2},
		{"one file at a time", &script{
			services: []string{"a.A"},
			symbols:  map[string][][]byte{"a.A": {with(func(f *file) { f.imports = []string{"b.proto"} })}},
			files: map[string][][]byte{
				"b.proto": {file{name: "b.proto", imports: []string{"c.proto"}}.raw()},
				"c.proto": {file{name: "c.proto"}.raw()},
			},
		}, []string{"a.A: One Two"}, 3},
		{"earlier files again and again", &script{
			services: []string{"a.A", "a.B"},
			symbols:  map[string][][]byte{"a.A": {a.raw(), a.raw()}, "a.B": {a.raw(), b.raw(), a.raw()}},
		}, []string{"a.A: One Two", "a.B: Do"}, 2},
		{"a file that is no descriptor", &script{
			services: []string{"a.A"},
			symbols:  map[string][][]byte{"a.A": {[]byte("\xff\xff"), a.raw()}},
		}, []string{"a.A: One Two"}, 1},
		{"a service without descriptor", &script{
			services: []string{"a.A", "a.Ghost"},
			symbols:  map[string][][]byte{"a.A": {a.raw()}},
		}, []string{"a.A: One Two", "a.Ghost?"}, 1},
		{"names that are none", &script{
			services: []string{"", "a.A", ".a.A", "a.A.", "a..A", "a/A", "a.A b", "1.A", "a.Ä", strings.Repeat("x", 600), "a.A"},
			symbols:  map[string][][]byte{"a.A": {a.raw()}},
		}, []string{"a.A: One Two"}, 1},
		{"names without a package", &script{services: []string{"A"}}, []string{"A?"}, 0},
		{"method names that are none", &script{
			services: []string{"a.A"},
			symbols:  map[string][][]byte{"a.A": {with(func(f *file) { f.services = [][]string{{"A", "Ok", "a.b", "", "no/"}} })}},
		}, []string{"a.A: Ok"}, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := mustAsk(t, serve(t, func(s *grpc.Server) { registerReflection(s, v1, tc.s.handle) }))
			want(t, r, nodecache.PortServes, tc.want...)
			if len(r.Files) != tc.files {
				t.Errorf("%d files, want %d", len(r.Files), tc.files)
			}
			if n := tc.s.opened.Load(); n != 1 {
				t.Errorf("%d streams, want 1", n)
			}
		})
	}
}

// grpc-rust#1323: tonic ends the stream where others answer that a name is not
// there.
func TestStreamThatEndsOnAMissIsReopened(t *testing.T) {
	s := &script{missEnds: true, symbols: map[string][][]byte{}}
	var names []string
	for i := range 20 {
		name := fmt.Sprintf("a.S%02d", i)
		s.services = append(s.services, name)
		if i%2 == 1 {
			names = append(names, name+": Do")
			s.symbols[name] = [][]byte{file{name: name, pkg: "a", services: [][]string{{name[2:], "Do"}}}.raw()}
		} else {
			names = append(names, name+"?")
		}
	}
	l := serve(t, func(g *grpc.Server) { registerReflection(g, v1, s.handle) })
	r, err := ask(t, l, collect.Budget{Streams: 100})
	if err != nil {
		t.Fatal(err)
	}
	want(t, r, nodecache.PortServes, names...)
	if n := s.opened.Load(); n > 11 {
		t.Errorf("%d streams for 10 misses", n)
	}

	s.opened.Store(0)
	if r, err = ask(t, l, collect.Budget{}); err != nil {
		t.Fatal(err)
	}
	if n := s.opened.Load(); n != 8 || len(r.Services) != 20 {
		t.Errorf("%d streams and %d services, want 8 and all 20", n, len(r.Services))
	}
}

func TestInfrastructureIsNeitherServedNorAskedFor(t *testing.T) {
	s := &script{services: []string{v1, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"}, asked: make(chan string, 10)}
	r := mustAsk(t, serve(t, func(g *grpc.Server) { registerReflection(g, v1, s.handle) }))
	want(t, r, nodecache.PortEmpty)
	if len(s.asked) != 0 {
		t.Errorf("asked for %q", <-s.asked)
	}
}

func TestDescriptorsOfSeveralMegabytes(t *testing.T) {
	f := file{name: "a.proto", pkg: "a", services: [][]string{{"A", "Do"}}, imports: []string{strings.Repeat("x", 5<<20)}}
	s := &script{services: []string{"a.A"}, symbols: map[string][][]byte{"a.A": {f.raw()}}}
	r := mustAsk(t, serve(t, func(g *grpc.Server) { registerReflection(g, v1, s.handle) }))
	want(t, r, nodecache.PortServes, "a.A: Do")
}

// kgateway#6171, yab#247: an open reflection stream holds up the graceful stop
// of the server. The stream has to be half-closed, and gone.
func TestStreamIsHalfClosedAndServerStopsGracefully(t *testing.T) {
	ends := make(chan error, 1)
	l := listen(t, "127.0.0.1:0")
	s := serveOn(t, l, func(g *grpc.Server) {
		registerReflection(g, v1, func(st stream) error {
			if _, err := st.Recv(); err != nil {
				return err
			}
			if err := st.Send(listOf("grpc.health.v1.Health")); err != nil {
				return err
			}
			_, err := st.Recv()
			ends <- err
			return nil
		})
	})
	mustAsk(t, l)
	if err := <-ends; !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v, want a half-close", err)
	}
	stopped := make(chan struct{})
	go func() { s.GracefulStop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(patience):
		t.Error("the server cannot stop gracefully")
	}
}

func TestStreamThatNeverEndsIsLeft(t *testing.T) {
	left := make(chan struct{})
	l := serve(t, func(g *grpc.Server) {
		registerReflection(g, v1, func(st stream) error {
			if err := st.Send(listOf("grpc.health.v1.Health")); err != nil {
				return err
			}
			<-st.Context().Done()
			close(left)
			return nil
		})
	})
	want(t, mustAsk(t, l), nodecache.PortEmpty)
	select {
	case <-left:
	case <-time.After(patience):
		t.Error("the stream was not left")
	}
}

func TestCallerThatLeavesEndsTheAttempt(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	l := serve(t, func(g *grpc.Server) {
		registerReflection(g, v1, func(st stream) error { cancel(); <-st.Context().Done(); return nil })
	})
	if _, err := collect.Reflect(ctx, l.addr(), collect.Budget{Wall: patience}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of the context", err)
	}
}

// grpc-go#3399: a proxy of the environment must not get between.
func TestIPv6(t *testing.T) {
	l := listen(t, "[::1]:0")
	serveOn(t, l, app(v1))
	want(t, mustAsk(t, l), nodecache.PortServes, appServices...)
}
