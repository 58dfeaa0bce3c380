package socket_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/xds/ads/socket"
)

func TestReplaceTakesTheNameThatItsHolderHasGiven(t *testing.T) {
	o := place(t)
	old := listen(t, o)
	o.Replace = true
	var held *socket.HeldError
	if _, err := socket.Listen(o); !errors.As(err, &held) || !old.Ours() {
		t.Fatalf("got %v; the lock was not given", err)
	}
	if err := old.Unlock(); err != nil || !old.Given() {
		t.Fatal(err)
	}
	next := listen(t, o)
	if old.Ours() || !next.Ours() {
		t.Fatal("the name does not lead to the successor")
	}
	if err := old.Relock(); !errors.As(err, &held) || held.PID != os.Getpid() {
		t.Fatalf("got %v, want that the successor has the lock", err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	answers(t, o.Path)
}

func TestReplaceIsForSocketsOnly(t *testing.T) {
	o := place(t)
	o.Replace = true
	if err := errors.Join(os.MkdirAll(filepath.Dir(o.Path), 0o755), os.WriteFile(o.Path, []byte("keep"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := socket.Listen(o); err == nil || !strings.Contains(err.Error(), "is a file") {
		t.Fatalf("got %v", err)
	}
}

func TestRelockTakesBackWhatNobodyTook(t *testing.T) {
	for name, lock := range map[string]bool{"with a lock": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			o := place(t)
			if !lock {
				o.Lock = ""
			}
			s := listen(t, o)
			for range 2 {
				if err := errors.Join(s.Unlock(), s.Relock(), s.Relock()); err != nil || s.Given() || !s.Ours() {
					t.Fatalf("%v, given %v, ours %v", err, s.Given(), s.Ours())
				}
			}
			var held *socket.HeldError
			if _, err := socket.Listen(o); !errors.As(err, &held) {
				t.Fatalf("got %v, want that it is held", err)
			}
			// A name that leads elsewhere is not this socket's to take back.
			_ = s.Unlock()
			if err := os.Remove(o.Path); err != nil {
				t.Fatal(err)
			}
			if err := s.Relock(); !errors.As(err, &held) || !s.Given() {
				t.Fatalf("got %v", err)
			}
			listen(t, o)
		})
	}
}

// The one that gives cannot know when the other takes.
func TestCloseAfterUnlockLeavesTheNameEvenIfNobodyTookIt(t *testing.T) {
	o := place(t)
	s := listen(t, o)
	if err := errors.Join(s.Unlock(), s.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(o.Path); err != nil {
		t.Fatal(err)
	}
	if s.Ours() {
		t.Error("a closed socket's name")
	}
	listen(t, o)
}

func TestConnectionsThatWaitAreSeen(t *testing.T) {
	o := place(t)
	s, err := socket.Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.Waiting() {
		t.Error("nobody waits")
	}
	c, err := net.Dial("unix", o.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if !s.Waiting() {
		t.Error("a connection waits")
	}
	a, err := s.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if s.Waiting() {
		t.Error("nobody waits any more")
	}
}

func TestOwnSocketMayLieDeeperThanASocketsPathReaches(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("d", 120), "release")
	s, err := socket.Listen(socket.Options{Path: path, Own: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	go serve(s)
	c, err := socket.Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if _, err := socket.Listen(socket.Options{Path: path, Own: true}); err == nil {
		t.Error("a second one was not refused")
	}
}

func TestSuccessorAndHolderHearOneAnother(t *testing.T) {
	o := place(t)
	l, err := socket.Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	asked := make(chan *socket.Successor)
	go func() {
		defer close(asked)
		for {
			s, err := socket.Accept(l.UnixListener)
			if err != nil {
				return
			}
			asked <- s
		}
	}()
	wait := func(what string, c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-ctx.Done():
			t.Fatalf("did not hear: %s", what)
		}
	}
	type result struct {
		p   *socket.Predecessor
		err error
	}
	ask := func() <-chan result {
		c := make(chan result, 1)
		go func() {
			p, err := socket.Ask(ctx, o.Path, socket.Request{Release: "/a", Admin: "/b"})
			c <- result{p, err}
		}()
		return c
	}

	answer := ask()
	s := <-asked
	if s.Request != (socket.Request{Release: "/a", Admin: "/b"}) || s.PID != os.Getpid() {
		t.Errorf("got %+v of %d", s.Request, s.PID)
	}
	if err := s.Grant(); err != nil {
		t.Fatal(err)
	}
	r := <-answer
	if r.err != nil {
		t.Fatal(r.err)
	}
	select {
	case <-s.Taken():
		t.Error("nothing is taken yet")
	case <-s.Gone():
		t.Error("the successor is there")
	default:
	}
	if err := r.p.Taken(); err != nil {
		t.Fatal(err)
	}
	wait("taken", s.Taken())
	_ = r.p.Close()
	wait("gone", s.Gone())
	s.Close()

	answer = ask()
	s = <-asked
	s.Refuse("not now")
	if r := <-answer; r.err == nil || r.err.Error() != "not now" {
		t.Errorf("got %v", r.err)
	}

	// A holder that dies before it answers.
	answer = ask()
	(<-asked).Close()
	if r := <-answer; r.err == nil || !strings.Contains(r.err.Error(), "did not answer") {
		t.Errorf("got %v", r.err)
	}

	// What is no question, and a line without end.
	for _, text := range []string{"hello\n", "{\"release\":" + strings.Repeat("x", 1<<16)} {
		c, err := socket.Dial(ctx, o.Path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte(text)) // it may be cut off in the middle
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("it was answered")
		}
		_ = c.Close()
	}
	_ = l.Close()
	if _, more := <-asked; more {
		t.Error("somebody asked")
	}
}
