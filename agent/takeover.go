package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/xds/ads/socket"
)

const (
	// lookEvery is how often an agent that does not hold the names looks
	// whether anybody does. The end of a connection tells sooner, if the one
	// who died was the direct successor.
	lookEvery = 200 * time.Millisecond

	// takeTimeout bounds how long a successor may leave the names alone that
	// it was given. The names lead to this agent for that time.
	takeTimeout = 10 * time.Second

	// lockTimeout bounds how long a successor tries to get the lock that it was
	// given: an agent that looks has it for a moment.
	lockTimeout = 2 * time.Second
)

// keep holds the names for as long as it is this agent's turn, and ends the
// service when ctx does. It alone makes, gives and ends fronts.
//
//	        nobody has them                 asked, gives the lock
//	wait ───────────────────────▶ hold ───────────────────────────▶ watch
//	     gate open, holder gives       ◀───────────────────────────
//	                                      nobody has them any more
func (a *Agent) keep(ctx context.Context, g *errgroup.Group, f *front) error {
	var failed error
	if f == nil {
		f, failed = a.wait(ctx)
	}
	if f != nil {
		a.serve(g, f)
	}
	for f != nil && ctx.Err() == nil {
		s := a.hold(ctx, f)
		if s == nil {
			break
		}
		f = a.watch(ctx, g, f, s)
		s.Close()
	}
	if failed == nil {
		<-ctx.Done()
	}
	a.log.Info("agent stops")
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*stopSpread)
	defer cancel()
	err := a.server.Shutdown(bound, stopSpread)
	if f != nil {
		f.stop()
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil // the clients that were left are cut off
	}
	return errors.Join(failed, err)
}

// wait returns a front once nobody holds the names, or once the gate is open
// and the holder has given them; nil when ctx ends. The names are those of the
// agent that returns.
func (a *Agent) wait(ctx context.Context) (*front, error) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	said, opened := "", a.gate.opened
	for {
		f, err := a.openFront(false, nil)
		if err == nil {
			a.log.Info("nobody holds the ADS socket any more; this agent does now", "socket", a.config.ADSSocket)
			a.setPart("takeover", "on")
			return f, nil
		}
		var held *socket.HeldError
		if !errors.As(err, &held) {
			return nil, err
		}
		reason := "waits for its own gate; " + held.Serves()
		if a.gate.open.Load() {
			if f, err = a.succeed(ctx); err == nil {
				a.setPart("takeover", "on")
				return f, nil
			}
			if ctx.Err() != nil {
				return nil, nil
			}
			reason = held.Serves() + ", which does not release it: " + err.Error()
		}
		a.setPart("takeover", "off: "+reason)
		if reason != said {
			said = reason
			a.log.Info("takeover", "state", reason)
		}
		select {
		case <-opened:
			opened = nil
		case <-tick.C:
		case <-ctx.Done():
			return nil, nil
		}
	}
}

// succeed asks the holder for the names and takes them.
func (a *Agent) succeed(ctx context.Context) (*front, error) {
	p, err := socket.Ask(ctx, a.config.releaseSocket(), socket.Request{Release: a.config.ADSSocket, Admin: a.config.AdminSocket})
	if err != nil {
		return nil, err
	}
	f, err := a.claim(ctx)
	if err != nil {
		_ = p.Close()
		return nil, err
	}
	if err := p.Taken(); err != nil {
		a.log.Info("the predecessor is gone already", "error", err)
	}
	a.predecessor = p
	a.log.Info("took the ADS socket over", "socket", a.config.ADSSocket)
	return f, nil
}

// claim takes the names that the holder has given.
func (a *Agent) claim(ctx context.Context) (*front, error) {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		f, err := a.openFront(true, nil)
		var held *socket.HeldError
		if err == nil || !errors.As(err, &held) {
			return f, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, err
		}
	}
}

// hold serves until a successor asks, gives it the names, and returns it; nil
// when ctx ends.
func (a *Agent) hold(ctx context.Context, f *front) *socket.Successor {
	asked, done := make(chan *socket.Successor), make(chan struct{})
	go func() {
		defer close(done)
		for {
			s, err := socket.Accept(f.release.UnixListener)
			if err != nil {
				return
			}
			select {
			case asked <- s:
			case <-ctx.Done():
				s.Close()
				return
			}
		}
	}()
	defer func() {
		_ = f.release.SetDeadline(time.Unix(1, 0)) // ends the accepting
		<-done
		_ = f.release.SetDeadline(time.Time{})
	}()
	for {
		select {
		case s := <-asked:
			if s.Release != a.config.ADSSocket {
				s.Refuse(fmt.Sprintf("it serves %s, not %s", a.config.ADSSocket, s.Release))
				continue
			}
			if err := f.give(s.Admin == a.config.AdminSocket); err != nil {
				a.log.Warn("lock", "error", err)
			}
			// Whether it heard that shows when it takes the names, or not.
			_ = s.Grant()
			return s
		case <-ctx.Done():
			return nil
		}
	}
}

// watch lets the clients go once the names are the successor's, and returns the
// front that serves once they are this agent's again, or that of before when
// ctx ends.
func (a *Agent) watch(ctx context.Context, g *errgroup.Group, f *front, s *socket.Successor) *front {
	who := "another pid namespace"
	if s.PID != 0 {
		who = fmt.Sprintf("pid %d", s.PID)
	}
	a.log.Info("released the ADS socket to a successor", "pid", s.PID)
	a.setPart("takeover", "off: released to "+who)
	patience := time.NewTimer(takeTimeout)
	defer patience.Stop()
	select {
	case <-s.Taken():
	case <-s.Gone():
	case <-patience.C:
	case <-ctx.Done():
		return f
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	gone, retired := s.Gone(), false
	retire := func(f *front) {
		retired = true
		_ = f.release.Close() // who asks there has to ask the successor
		var admin *http.Server
		if f.admin != nil && f.admin.Given() {
			admin = f.adminServer
		}
		g.Go(func() error { return a.retire(ctx, f, admin) })
	}
	for {
		switch again, err := a.retake(f, retired); {
		case again == f:
			a.log.Info("the successor has gone before it took the ADS socket", "pid", s.PID)
			return f
		case again != nil:
			a.log.Warn("the successor has gone; this agent serves the ADS socket again", "pid", s.PID)
			if !retired {
				retire(f)
			}
			a.serve(g, again)
			return again
		case err != nil:
			a.log.Error("the successor has gone, and the ADS socket cannot be taken back", "error", err)
		}
		if !retired && !f.ads.Ours() {
			a.log.Info("the successor has the ADS socket", "pid", s.PID)
			retire(f)
		}
		select {
		case <-gone:
			gone = nil
		case <-tick.C:
		case <-ctx.Done():
			return f
		}
	}
}

// retake takes the names back if nobody has them: f itself if they all lead
// there still, else a new front. It returns nil while somebody has them.
func (a *Agent) retake(f *front, retired bool) (*front, error) {
	var held *socket.HeldError
	if !retired && f.ours() {
		err := f.takeBack()
		if err == nil {
			a.setPart("takeover", "on")
			return f, nil
		}
		if !errors.As(err, &held) {
			return nil, err
		}
		return nil, nil
	}
	again, err := a.openFront(false, f)
	if err != nil {
		if errors.As(err, &held) {
			err = nil
		}
		return nil, err
	}
	a.setPart("takeover", "on")
	return again, nil
}

// partSockets is the part of Status that says whether the names lead here.
const partSockets = "sockets"

// socketState says whether clients find the sockets that this agent holds.
func (a *Agent) socketState() string {
	f := a.front.Load()
	if f == nil || f.ads.Given() {
		return "on: another agent holds them" // the part takeover says which
	}
	for _, s := range []*socket.Socket{f.ads, f.unknown} {
		if !s.Ours() {
			return fmt.Sprintf("off: %s was removed or replaced; restart the agent", s.Path())
		}
	}
	return "on"
}

// Ready returns nil if the gate is open and whoever dials the ADS socket
// reaches this process, else what is missing.
func (a *Agent) Ready(ctx context.Context) error {
	if !a.gate.open.Load() {
		_, reason := a.gateState()
		return fmt.Errorf("the gate is closed: %s", reason)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", a.config.ADSSocket)
	if err != nil {
		return fmt.Errorf("the ADS socket cannot be reached: %w", err)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	// The kernel says who listens, in terms of our pid namespace (unix(7),
	// SO_PEERCRED): an agent in another container is never our own pid.
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return credErr
	}
	f := a.front.Load()
	if int(cred.Pid) != unix.Getpid() || f == nil || !f.ads.Ours() {
		return fmt.Errorf("the ADS socket leads to another agent (pid %d); takeover: %s", cred.Pid, a.partStates()["takeover"])
	}
	if !f.unknown.Ours() {
		return fmt.Errorf("%s was removed or replaced", f.unknown.Path())
	}
	return nil
}
