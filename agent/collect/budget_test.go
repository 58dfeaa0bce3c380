package collect_test

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/agent/collect"
	"github.com/fingerpost/fingerpost/nodecache"
)

// Crossing any bound ends the attempt as a failure, over one connection.
func TestBudgets(t *testing.T) {
	answer := func(resps ...*reflectionpb.ServerReflectionResponse) func(stream) error {
		return func(st stream) error {
			for _, resp := range resps {
				if _, err := st.Recv(); err != nil {
					return err
				}
				if err := st.Send(resp); err != nil {
					return err
				}
			}
			_, err := st.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
	many := func(n int, f func(i int) []byte) (raw [][]byte) {
		for i := range n {
			raw = append(raw, f(i))
		}
		return raw
	}
	var names []string
	for i := range 1025 {
		names = append(names, fmt.Sprint("a.S", i))
	}
	methods := []string{"A"}
	for i := range 16385 {
		methods = append(methods, fmt.Sprint("M", i))
	}
	big := file{name: "big", pkg: strings.Repeat("p", 1<<20)}.raw()
	for _, tc := range []struct {
		name   string
		handle func(stream) error
		budget collect.Budget
		class  collect.Class
	}{
		{"services", answer(listOf(names...)), collect.Budget{}, collect.Exhausted},
		{"files of one answer", answer(listOf("a.A"), filesOf(many(10000, func(int) []byte { return nil })...)), collect.Budget{}, collect.Exhausted},
		{"methods of one file", answer(listOf("a.A"), filesOf(file{pkg: "a", services: [][]string{methods}}.raw())), collect.Budget{}, collect.Exhausted},
		{"bytes of one answer", answer(listOf("a.A"), filesOf(big)), collect.Budget{Answer: 1 << 20}, collect.Exhausted},
		{"bytes of all answers", answer(listOf("a.A", "a.B"), filesOf(big), filesOf(big)), collect.Budget{Bytes: 3 << 19}, collect.Exhausted},
		{"files of a crawl", func(st stream) error {
			if _, err := st.Recv(); err != nil {
				return err
			}
			if err := st.Send(listOf("a.A")); err != nil {
				return err
			}
			for i := range 1 << 20 {
				if _, err := st.Recv(); err != nil {
					return nil
				}
				if err := st.Send(filesOf(file{name: fmt.Sprint(i), imports: []string{fmt.Sprint(i + 1)}}.raw())); err != nil {
					return err
				}
			}
			return nil
		}, collect.Budget{Wall: patience / 2, Files: 300}, collect.Exhausted},
		{"the server's own exhaustion", func(stream) error { return status.Error(codes.ResourceExhausted, "busy") }, collect.Budget{}, collect.Exhausted},
		{"wall, before the list", func(st stream) error { <-st.Context().Done(); return nil }, collect.Budget{Wall: 300 * time.Millisecond}, collect.Deadline},
		{"answers never asked for", func(st stream) error {
			for range 1 << 20 {
				if err := st.Send(filesOf()); err != nil {
					return err
				}
			}
			return nil
		}, collect.Budget{}, collect.Nonsense},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := serve(t, func(s *grpc.Server) { registerReflection(s, v1, tc.handle) })
			_, err := ask(t, l, tc.budget)
			wantFailure(t, err, tc.class)
			if n := l.accepted.Load(); n != 1 {
				t.Errorf("%d connections, want 1", n)
			}
		})
	}
}

// What a server serves is known from its list: slow descriptors must not keep
// its services from being routed.
func TestServicesAreKnownThoughDescriptorsAreSlow(t *testing.T) {
	l := serve(t, func(s *grpc.Server) {
		registerReflection(s, v1, func(st stream) error {
			if err := st.Send(listOf("a.A", "a.B")); err != nil {
				return err
			}
			<-st.Context().Done()
			return nil
		})
	})
	r, err := ask(t, l, collect.Budget{Wall: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if r.State != nodecache.PortServes || len(r.Services) != 2 || !r.Services[0].Undescribed || !r.Services[1].Undescribed || r.Linkable {
		t.Errorf("got %+v, want two services without descriptors", r.PortInfo)
	}
	if n := l.accepted.Load(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}
