package main

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/demo"
)

// caller makes unary calls and keeps streams open, all the time.
type caller struct {
	*out
	services       []string // each with @HOST:PORT, or not
	timeout, every time.Duration

	unary, failed, messages, cut, open, slowest atomic.Int64
	answered                                    sync.Map // keys: what was to be called, and a pod that has answered
}

// run calls until ctx ends, and then lets the running calls end.
func (c *caller) run(ctx context.Context, target string, callers, streams int) error {
	conns := map[string]*grpc.ClientConn{}
	defer func() {
		for _, conn := range conns {
			_ = conn.Close()
		}
	}()
	var all sync.WaitGroup
	for _, what := range c.services {
		service, at, ok := strings.Cut(what, "@")
		if !ok {
			at = target
		}
		conn := conns[at]
		if conn == nil {
			var err error
			conn, err = grpc.NewClient("passthrough:"+at, grpc.WithTransportCredentials(insecure.NewCredentials()),
				// A sidecar that starts is asked again soon.
				grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
			if err != nil {
				return err
			}
			conns[at] = conn
		}
		for range callers {
			all.Go(func() { c.repeat(ctx, func() { c.say(conn, what, service) }) })
		}
		for range streams {
			all.Go(func() { c.repeat(ctx, func() { c.chat(ctx, conn, service) }) })
		}
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-tick.C:
			c.tally()
		case <-ctx.Done():
		}
	}
	all.Wait()
	c.tally()
	return nil
}

func (c *caller) repeat(ctx context.Context, f func()) {
	tick := time.NewTicker(c.every)
	defer tick.Stop()
	for ctx.Err() == nil {
		f()
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// say makes one unary call. It does not end with the client, so that what is
// counted is what the mesh did.
func (c *caller) say(conn *grpc.ClientConn, what, service string) {
	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	defer cancel()
	start := time.Now()
	answer, err := demo.Say(ctx, conn, service)
	took := time.Since(start).Milliseconds()
	if err != nil {
		c.failed.Add(1)
		c.write(failure("unary", service, "", took, err))
		return
	}
	c.unary.Add(1)
	pod, _, _ := strings.Cut(answer, ": ")
	c.answered.Store([2]string{what, pod}, true)
	for old := c.slowest.Load(); took > old && !c.slowest.CompareAndSwap(old, took); old = c.slowest.Load() {
	}
}

// chat opens a stream and talks on it until it breaks or ctx ends.
func (c *caller) chat(ctx context.Context, conn *grpc.ClientConn, service string) {
	own, cancel := context.WithCancel(context.Background())
	defer cancel()
	whole, end := context.WithCancel(ctx)
	defer end()
	start, server := time.Now(), ""
	broken := func(err error) {
		c.cut.Add(1)
		c.write(failure("stream", service, server, time.Since(start).Milliseconds(), err))
	}
	s, err := demo.Chat(own, conn, service)
	if err != nil {
		broken(err)
		return
	}
	c.open.Add(1)
	defer c.open.Add(-1)
	c.repeat(whole, func() {
		// An answer that does not come is a stream that broke.
		late := time.AfterFunc(c.timeout, cancel)
		answer, err := s.Ask("still there?")
		if err == nil {
			server, _, _ = strings.Cut(answer, ": ")
			c.messages.Add(1)
		} else {
			if !late.Stop() {
				err = status.Errorf(codes.DeadlineExceeded, "no answer on the stream for %v", c.timeout)
			}
			broken(err)
			end()
		}
		late.Stop()
	})
}

func failure(kind, service, server string, ms int64, err error) Line {
	st := status.Convert(err)
	return Line{Kind: kind, Service: service, Server: server, Millis: ms, Code: st.Code().String(), Message: st.Message()}
}

func (c *caller) tally() {
	answered := map[string][]string{}
	for key := range c.answered.Range {
		who := key.([2]string)
		answered[who[0]] = append(answered[who[0]], who[1])
	}
	for _, pods := range answered {
		slices.Sort(pods)
	}
	c.write(Line{Kind: "tally", Tally: &Tally{
		Unary: c.unary.Load(), Failed: c.failed.Load(), Messages: c.messages.Load(),
		Cut: c.cut.Load(), Open: c.open.Load(), SlowestMillis: c.slowest.Swap(0), Answered: answered,
	}})
}
