package agent

import (
	"context"
	"sync"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// feed carries changes of the directory through the compiler to the ADS
// server, in order.
type feed struct {
	dir      *nodecache.Directory
	sub      *nodecache.Subscription
	compiler *resources.Compiler
	server   *ads.Server

	// mu is held from compiling to publishing, so that updates are published
	// in the order in which they were made. The locks of the directory, the
	// compiler and the server are taken under it, one after the other.
	mu sync.Mutex
}

func newFeed(dir *nodecache.Directory, compiler *resources.Compiler, server *ads.Server) *feed {
	f := &feed{dir: dir, sub: dir.Subscribe(), server: server, compiler: compiler}
	server.Publish(compiler.Initial())
	return f
}

// run publishes until ctx ends. It begins once the source has synced: nobody is
// answered before, and an owner that is compiled once, not as often as another
// of its pods comes, spares much of what a start costs.
func (f *feed) run(ctx context.Context, synced <-chan struct{}) error {
	defer f.sub.Close()
	select {
	case <-synced:
	case <-ctx.Done():
		return nil
	}
	for {
		select {
		case <-f.sub.Changed():
			f.flush()
		case <-ctx.Done():
			return nil
		}
	}
}

// flush publishes every change that the directory has seen so far.
func (f *feed) flush() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if keys := f.sub.Poll(); len(keys) > 0 {
		f.server.Publish(f.compiler.Apply(f.dir, keys))
	}
}

// namespace makes sure that clients of the namespace find what each of them
// needs. It returns an error if the namespace is none.
func (f *feed) namespace(ns string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	u, err := f.compiler.Namespace(ns)
	if err != nil {
		return err
	}
	f.server.Publish(u)
	return nil
}
