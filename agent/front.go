package agent

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/ads/socket"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

// front is one hold of the names by which others reach the agent: the sockets,
// and the servers behind them. An agent whose successor has died makes another
// one; what the servers serve is the agent's and stays.
type front struct {
	// Set by openFront, read-only.
	ads, unknown, release *socket.Socket

	// admin is nil once a later front of this agent has it.
	admin *socket.Socket

	// Set by serve, read-only after it. The admin's goes with its socket.
	adsServer     *grpc.Server
	unknownServer *unknown.Server
	adminServer   *http.Server
}

// shortHash tells paths apart in names of bounded length.
func shortHash(path string) string {
	sum := sha256.Sum256([]byte(filepath.Clean(path)))
	return fmt.Sprintf("%x", sum[:4])
}

// The locks lie beside the admin socket, where no pod can hold them.
func (c *Config) lockOf(path string) string {
	return filepath.Join(filepath.Dir(c.AdminSocket), fmt.Sprintf("%s.%s.lock", filepath.Base(path), shortHash(path)))
}

// releaseSocket is where the holder of the ADS socket is asked to release it.
func (c *Config) releaseSocket() string {
	return filepath.Join(filepath.Dir(c.AdminSocket), "release."+shortHash(c.ADSSocket))
}

// openFront takes all names, or says who has them. With replace the holder has
// given them; mine, if not nil, is an earlier front of this agent, which may be
// replaced where it still is there.
func (a *Agent) openFront(replace bool, mine *front) (_ *front, err error) {
	c, f := &a.config, &front{}
	if mine == nil {
		mine = &front{}
	}
	listen := func(o socket.Options, old *socket.Socket) (s *socket.Socket) {
		if err == nil {
			o.Replace = replace || o.Replace || old != nil && old.Ours()
			s, err = socket.Listen(o)
		}
		return s
	}
	f.ads = listen(socket.Options{Path: c.ADSSocket, Lock: c.lockOf(c.ADSSocket)}, mine.ads)
	// Who has the lock of the ADS socket has these too.
	f.unknown = listen(socket.Options{Path: UnknownSocket(c.ADSSocket)}, mine.unknown)
	f.release = listen(socket.Options{Path: c.releaseSocket(), Mode: 0o600, Own: true, Replace: true}, nil)
	kept := mine.admin != nil && !mine.admin.Given()
	if !kept {
		f.admin = listen(socket.Options{Path: c.AdminSocket, Lock: c.lockOf(c.AdminSocket), Mode: 0o600}, mine.admin)
	}
	if err != nil {
		f.close()
		return nil, err
	}
	if kept {
		f.admin, f.adminServer, mine.admin = mine.admin, mine.adminServer, nil
	}
	return f, nil
}

// serve starts the servers of the front.
func (a *Agent) serve(g *errgroup.Group, f *front) {
	creds := ads.Credentials(a.callers)
	f.adsServer = ads.NewGRPCServer(a.server, grpc.Creds(creds))
	f.unknownServer = unknown.New(a.know(), unknown.Options{
		Synced: a.complete, Hurry: a.hurry, Credentials: creds, Caller: a.server.Caller, Form: a.formOf, Deliver: a.deliver,
	})
	g.Go(func() error { return served(f.adsServer.Serve(f.ads)) })
	g.Go(func() error { return served(f.unknownServer.Serve(f.unknown)) })
	if f.adminServer == nil {
		server, lis := newHTTPServer(a.admin()), f.admin
		f.adminServer = server
		g.Go(func() error { return served(server.Serve(lis)) })
	}
	a.front.Store(f)
}

// served is the error of a server that may have been stopped on purpose.
func served(err error) error {
	if errors.Is(err, grpc.ErrServerStopped) || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// retire lets the clients of a front, whose names lead elsewhere by now, go
// there: connections that wait are accepted, all are told to connect anew, and
// the streams end one by one. The admin's server, which may be nil, ends when
// what it was asked is answered. It takes 2 stopSpread at most.
func (a *Agent) retire(ctx context.Context, f *front, admin *http.Server) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*stopSpread)
	defer cancel()
	f.settle(ctx)
	var left sync.WaitGroup
	left.Go(f.adsServer.GracefulStop)
	if admin != nil {
		left.Go(func() {
			if admin.Shutdown(ctx) != nil {
				_ = admin.Close() // a stream that its reader keeps open
			}
		})
	}
	// An error says that some streams are left for the Stop below.
	_ = a.server.Disperse(ctx, stopSpread)
	// Last, since it ends connections on which nothing was said yet.
	left.Go(f.unknownServer.Drain)
	stop := context.AfterFunc(ctx, func() {
		f.adsServer.Stop()
		f.unknownServer.Stop()
	})
	left.Wait()
	stop()
	return nil
}

// settle waits until every connection that came before the name led elsewhere
// is accepted, or ctx ends.
func (f *front) settle(ctx context.Context) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for f.ads.Waiting() || f.unknown.Waiting() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// stop ends the servers at once.
func (f *front) stop() {
	f.adsServer.Stop()
	f.unknownServer.Stop()
	if f.adminServer != nil {
		_ = f.adminServer.Close()
	}
	f.close()
}

// close gives back every name that still is the front's.
func (f *front) close() {
	for _, s := range []*socket.Socket{f.release, f.admin, f.unknown, f.ads} {
		if s != nil {
			_ = s.Close()
		}
	}
}

// give lets a successor take the names.
func (f *front) give(admin bool) error {
	gives := []*socket.Socket{f.ads, f.unknown, f.release}
	if admin {
		gives = append(gives, f.admin)
	}
	var err error
	for _, s := range gives {
		err = errors.Join(err, s.Unlock())
	}
	return err
}

// ours tells whether every name that was given still leads here.
func (f *front) ours() bool {
	return f.ads.Ours() && f.unknown.Ours() && (f.admin == nil || !f.admin.Given() || f.admin.Ours())
}

// takeBack takes back what was given, if nobody took any of it.
func (f *front) takeBack() error {
	for _, s := range []*socket.Socket{f.ads, f.unknown, f.admin, f.release} {
		if s == nil {
			continue
		}
		if err := s.Relock(); err != nil {
			return errors.Join(err, f.give(f.admin != nil && f.admin.Given()))
		}
	}
	return nil
}
