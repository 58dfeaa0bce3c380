package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// clusters are the names of those that Envoy got from the agent.
func (e *sidecar) clusters() []string {
	var names []string
	for key := range e.dump() {
		if name, ok := strings.CutPrefix(key, "dynamic_active_clusters "); ok {
			names = append(names, name)
		}
	}
	return names
}

// numbered are services pre.S0, pre.S1 and so on.
func numbered(pre string, n int) []string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("%s.S%d", pre, i))
	}
	return names
}

func TestFirstCallsOnDemandNeverFail(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	names := numbered("first", 60)
	big := grpc.MaxRecvMsgSize(8 << 20)
	w.serve("web-1-a", names, big)
	w.serve("web-1-b", names, big)
	a := s.start(t, "--source", w.write().source()).ready()
	e := s.sidecar(t, "delta", "prod/me")
	if got := e.clusters(); len(got) != 0 {
		t.Errorf("before the first call the sidecar has %v", got)
	}
	next := 0
	fresh := func() string { next++; return names[next-1] }
	for _, size := range []int{0, 1, 1 << 10, 64 << 10, 1 << 20, 3 << 20} {
		said := strings.Repeat("x", size)
		var out wrapperspb.StringValue
		err := e.conn.Invoke(deadline(t), "/"+fresh()+"/Say", wrapperspb.String(said), &out, grpc.MaxCallRecvMsgSize(8<<20))
		if err != nil || !strings.HasSuffix(out.GetValue(), said) {
			t.Errorf("first call with %d bytes: %d bytes come back, %v", size, len(out.GetValue()), err)
		}
	}
	for range 3 {
		stream, err := demo.Chat(deadline(t), e.conn, fresh())
		if err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			if answer, err := stream.Ask(strconv.Itoa(i)); err != nil || !strings.HasSuffix(answer, ": "+strconv.Itoa(i)) {
				t.Fatalf("answer %d of a stream that is a first call: %q, %v", i, answer, err)
			}
		}
		if err := stream.CloseSend(); err != nil {
			t.Error(err)
		}
		if err := stream.RecvMsg(&wrapperspb.StringValue{}); !errors.Is(err, io.EOF) {
			t.Errorf("end of a stream: %v", err)
		}
	}
	var calls sync.WaitGroup
	failed := make(chan error, 400)
	for i := range 400 {
		name := names[next+i%40]
		calls.Go(func() {
			if _, err := say(t, e.conn, name); err != nil {
				failed <- fmt.Errorf("%s: %w", name, err)
			}
		})
	}
	calls.Wait()
	close(failed)
	for err := range failed {
		t.Errorf("one of 400 first calls at once: %v", err)
	}
	if got, want := len(e.clusters()), next+40; got != want {
		t.Errorf("the sidecar has %d clusters, want those of the %d services that were called", got, want)
	}
	e.content()
	a.connected("prod/me", "cds", "eds", "lds", "rds")
	if p := a.proxies(); len(p) != 1 || p[0].Clusters != "on-demand" {
		t.Errorf("proxies: %+v", p)
	}
	if st := a.status(); st.Parts["on-demand"] != "on" {
		t.Errorf("status: %v", st.Parts)
	}
}

func TestUnknownServiceOnDemandIsUnimplementedByNameAlsoTheSecondTime(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	p, _ := m.serve("web-1-a", []string{"shop.Web"})
	m.front("web", p)
	m.put()
	e := m.sidecar(t, "delta", "prod/me")
	for range 3 {
		for _, c := range []struct {
			conn *grpc.ClientConn
			path string
			code codes.Code
			says string
		}{
			{e.conn, "/shop.Nobody/Say", codes.Unimplemented, "unknown service shop.Nobody in namespace prod"},
			{e.conn, "/grpc.health.v1.Health/Check", codes.Unimplemented, "unknown service grpc.health.v1.Health in namespace prod"},
			{e.conn, "/a/b/c", codes.Unimplemented, "malformed path"},
			{m.at("web"), "/shop.Nobody/Say", codes.Unimplemented, "unknown service shop.Nobody: nobody at port 80 of Service prod/web serves it"},
			{m.at("nobody.prod"), "/shop.Web/Say", codes.Unavailable, "no Service and no pod of a headless Service has the name"},
			{m.at("web:81"), "/shop.Web/Say", codes.Unavailable, "Service prod/web has no TCP port 81"},
		} {
			err := c.conn.Invoke(deadline(t), c.path, &wrapperspb.StringValue{}, &emptypb.Empty{})
			if st := status.Convert(err); st.Code() != c.code || !strings.Contains(st.Message(), c.says) {
				t.Errorf("%s: %v, want %v with %q", c.path, err, c.code, c.says)
			}
		}
	}
	for _, key := range []string{"cluster_manager.cluster_removed"} {
		if n, _ := e.Stat(key); n != 0 {
			t.Errorf("%s is %d", key, n)
		}
	}
	e.content()
}

// outcomes calls a service all the time and notes each change of what it gets.
func outcomes(t *testing.T, conn *grpc.ClientConn, service string) (seen func() []codes.Code, stop func()) {
	t.Helper()
	var mu sync.Mutex
	var all []codes.Code
	end := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
			}
			_, err := say(t, conn, service)
			mu.Lock()
			if c := status.Code(err); len(all) == 0 || all[len(all)-1] != c {
				all = append(all, c)
			}
			mu.Unlock()
		}
	})
	stop = sync.OnceFunc(func() { close(end); done.Wait() })
	t.Cleanup(stop)
	return func() []codes.Code {
		mu.Lock()
		defer mu.Unlock()
		return append([]codes.Code(nil), all...)
	}, stop
}

func TestServiceThatAppearsWhileItIsCalled(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	p, _ := m.serve("web-1-a", []string{"shop.Web"})
	m.front("web", p)
	m.put()
	e := m.sidecar(t, "delta", "prod/me")
	type watched struct {
		seen func() []codes.Code
		stop func()
	}
	last := func(w watched, want codes.Code) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			if got := w.seen(); len(got) == 0 || got[len(got)-1] != want {
				return fmt.Errorf("calls get %v, want %v at last", got, want)
			}
			return nil
		})
	}
	var ws []watched
	for conn, first := range map[*grpc.ClientConn]codes.Code{e.conn: codes.Unimplemented, m.at("late"): codes.Unavailable, m.at("10.96.0.2:80"): codes.Unavailable} {
		seen, stop := outcomes(t, conn, "shop.Late")
		ws = append(ws, watched{seen, stop})
		last(ws[len(ws)-1], first)
	}
	late, _ := m.serve("late-1-a", []string{"shop.Late"})
	m.front("late", late)
	m.put()
	for _, w := range ws {
		last(w, codes.OK)
		w.stop()
		got := w.seen()
		for i, c := range got {
			if ok := i == len(got)-1; c == codes.OK != ok || !ok && c != codes.Unimplemented && c != codes.Unavailable {
				t.Errorf("calls get %v, want UNIMPLEMENTED or UNAVAILABLE, then OK, nothing else", got)
				break
			}
		}
	}
	e.content()
}

func TestFirstCallWhileTheAgentIsAwayIsUnavailable(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Known", "shop.New", "shop.Newer"})
	a := s.start(t, "--source", w.write().source()).ready()
	e := s.sidecar(t, "delta", "prod/me")
	reaches(t, e.conn, "shop.Known", "web-1-a")
	if _, err := say(t, e.conn, "shop.Nobody"); status.Code(err) != codes.Unimplemented {
		t.Fatal(err)
	}
	a.stop()
	reaches(t, e.conn, "shop.Known", "web-1-a")
	for range 2 {
		if _, err := say(t, e.conn, "shop.New"); status.Code(err) != codes.Unavailable {
			t.Errorf("first call while the agent is away: %v", err)
		}
	}
	if _, err := say(t, e.conn, "shop.Nobody"); status.Code(err) != codes.Unavailable {
		t.Errorf("call to a name that nobody has, while the agent is away: %v", err)
	}
	a = s.start(t, "--source", w.source()).ready()
	reaches(t, e.conn, "shop.New", "web-1-a")
	reaches(t, e.conn, "shop.Newer", "web-1-a")
	if _, err := say(t, e.conn, "shop.Nobody"); status.Code(err) != codes.Unimplemented {
		t.Errorf("after it: %v", err)
	}
	a.connected("prod/me", "cds", "lds")
	e.content()
}

func TestNamesThatASidecarKnowsNeverFailOverRestartsOfTheAgent(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	p, _ := m.serve("web-1-a", []string{"shop.Web"})
	m.front("web", p)
	m.put()
	e := m.sidecar(t, "delta", "prod/me")
	for _, conn := range []*grpc.ClientConn{e.conn, m.at("web"), m.at("10.96.0.1"), m.at("web.prod.svc.cluster.local:80")} {
		reaches(t, conn, "shop.Web", "web-1-a")
		answered, stop := load(t, conn, "shop.Web")
		defer stop()
		proceeds(t, answered)
	}
	before := e.changes()
	for range 3 {
		m.agent.stop()
		m.agent = m.start(t, "--source", m.source()).ready()
		m.agent.connected("prod/me", "cds", "lds")
	}
	answered, stop := load(t, e.conn, "shop.Web")
	proceeds(t, answered)
	stop()
	if after := e.changes(); fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("restarts changed what the sidecar has: %v, then %v", before, after)
	}
}

// rss is the resident memory of Envoy in KiB.
func (e *sidecar) rss() int {
	e.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", e.Pid()))
	if err != nil {
		e.t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		if f := bytes.Fields(line); len(f) > 1 && string(f[0]) == "VmRSS:" {
			n, err := strconv.Atoi(string(f[1]))
			if err != nil {
				e.t.Fatal(err)
			}
			return n
		}
	}
	e.t.Fatal("no VmRSS")
	return 0
}

// pods are so many of a ReplicaSet, by their ids: a, b, c and so on.
func pods(prefix string, n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprintf("%s%c", prefix, 'a'+i))
	}
	return ids
}

// The neighbour's calls go on, and so do its updates, as if nobody else were
// there; memory is that of the sidecar whose application invents names.
func TestInventedNamesCostNoMemoryAndNobodyElse(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web", "shop.Other"})
	beside := harness.NewNetwork(t)
	w.served(beside, "calm-1-a", "calm.Web")
	a := s.start(t, "--source", w.write().source()).ready()
	e := s.sidecar(t, "delta", "prod/me")
	neighbour := s.sidecarIn(t, beside, "delta", "prod/neighbour")
	neighbour.WaitReady(t, soon)
	reaches(t, e.conn, "shop.Web", "web-1-a")
	reaches(t, neighbour.conn, "calm.Web", "calm-1-a")
	invent := func(i int) error {
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		err := e.conn.Invoke(ctx, fmt.Sprintf("/invented.S%d/Say", i), &wrapperspb.StringValue{}, &emptypb.Empty{})
		if status.Code(err) != codes.Unimplemented {
			return fmt.Errorf("call %d: %w", i, err)
		}
		return nil
	}
	call := func(i int) {
		t.Helper()
		if err := invent(i); err != nil {
			t.Fatal(err)
		}
	}
	before := e.rss()
	// As long as the neighbour is looked at, and 10,000 times.
	answered, stop := load(t, neighbour.conn, "calm.Web")
	var enough atomic.Bool
	var flood errgroup.Group
	flood.Go(func() error {
		for i := 0; i < 10000 || !enough.Load(); i++ {
			if err := invent(i); err != nil {
				return err
			}
		}
		return nil
	})
	for i := range 5 {
		// First calls, updates of what it has, and a name that comes while it is called.
		name := fmt.Sprintf("calm.New%d", i)
		seen, done := outcomes(t, neighbour.conn, name)
		harness.Eventually(t, soon, func() error {
			if got := seen(); len(got) == 0 {
				return errors.New("no call has ended")
			}
			return nil
		})
		w.served(beside, fmt.Sprintf("calm%d-1-a", i), name)
		w.served(beside, fmt.Sprintf("calm-1-%c", 'b'+i), "calm.Web")
		w.write()
		reaches(t, neighbour.conn, name, fmt.Sprintf("calm%d-1-a", i))
		done()
		if got := seen(); !slices.Equal(got, []codes.Code{codes.Unimplemented, codes.OK}) && !slices.Equal(got, []codes.Code{codes.Unimplemented, codes.Unavailable, codes.OK}) {
			t.Errorf("calls of a name that comes get %v", got)
		}
		reaches(t, neighbour.conn, "calm.Web", pods("calm-1-", i+2)...)
		proceeds(t, answered)
	}
	enough.Store(true)
	if err := flood.Wait(); err != nil {
		t.Fatal(err)
	}
	stop()
	neighbour.content()
	if p, err := a.identityOf("prod/neighbour"); err != nil || p.State != "" {
		t.Errorf("the neighbour is %q, %v", p.State, err)
	}
	after := e.rss()
	if after > before+before/10 {
		t.Errorf("Envoy's memory is %d KiB, and was %d", after, before)
	}
	if n := len(e.clusters()); n > 80 {
		t.Errorf("the sidecar has %d clusters", n)
	}
	t.Logf("memory %d KiB, then %d; %d clusters", before, after, len(e.clusters()))
	if got := a.metric("fingerpost_on_demand_exchanged_total"); got != "1" {
		t.Errorf("tables were exchanged %s times", got)
	}
	reaches(t, e.conn, "shop.Web", "web-1-a")
	// A real one is there after one call that says so.
	_, err := say(t, e.conn, "shop.Other")
	if st := status.Convert(err); st.Code() != codes.Unavailable || !strings.Contains(st.Message(), "shop.Other is known, your sidecar is being updated") {
		t.Errorf("first call after the exchange: %v", err)
	}
	reaches(t, e.conn, "shop.Other", "web-1-a")
	// One that was invented and is real by now.
	w.serve("new-1-a", []string{"invented.S0", "invented.S9999"})
	w.write()
	reaches(t, e.conn, "invented.S0", "new-1-a")
	reaches(t, e.conn, "invented.S9999", "new-1-a")
	a.stop()
	a = s.start(t, "--source", w.source()).ready()
	a.connected("prod/me", "cds", "lds")
	for _, name := range []string{"shop.Web", "shop.Other", "invented.S0", "invented.S9999"} {
		if _, err := say(t, e.conn, name); err != nil {
			t.Errorf("%s after a restart: %v", name, err)
		}
	}
	call(1)
	call(20000)
	e.content()
}
