package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// faithful is a raw client that comes back whenever its stream ends, with what
// it has.
type faithful struct {
	t        *testing.T
	delta    bool
	socket   string
	id       string
	clusters []string
	cancel   context.CancelFunc
	done     sync.WaitGroup

	// mu guards all below.
	mu      sync.Mutex
	stream  *client.Stream
	memory  client.Memory
	streams int
	bodies  []string // resources that came, by type and name
	removed []string
}

func (s *site) faithful(t *testing.T, id string, delta bool, m client.Memory, clusters ...string) *faithful {
	ctx, cancel := context.WithCancel(context.Background())
	f := &faithful{t: t, delta: delta, socket: s.ads, id: id, clusters: clusters, cancel: cancel, memory: m}
	f.done.Go(func() {
		for ctx.Err() == nil {
			if !f.serve(ctx) {
				select {
				case <-time.After(5 * time.Millisecond): // of a client, not of the test: the agent may be gone for now
				case <-ctx.Done():
				}
			}
		}
	})
	t.Cleanup(f.close)
	return f
}

func (f *faithful) close() {
	f.cancel()
	f.done.Wait()
}

// serve has one stream, and tells whether there was one.
func (f *faithful) serve(ctx context.Context) bool {
	conn, err := client.Dial(f.socket)
	if err != nil {
		f.t.Error(err)
		return false
	}
	defer conn.Close()
	f.mu.Lock()
	m := f.memory
	f.mu.Unlock()
	s, err := client.Open(ctx, conn, client.Options{Delta: f.delta, Node: &corev3.Node{Id: f.id}, Memory: m})
	if err != nil {
		return false
	}
	defer s.Close()
	f.mu.Lock()
	f.stream, f.streams = s, f.streams+1
	f.mu.Unlock()
	for _, sub := range []struct {
		t     xds.Type
		names []string
	}{{xds.Cluster, nil}, {xds.Endpoint, f.clusters}, {xds.Listener, nil}, {xds.Route, []string{"egress"}}} {
		if s.Subscribe(sub.t, sub.names...) != nil {
			break
		}
	}
	for r := range s.Responses() {
		f.mu.Lock()
		f.memory = s.Memory()
		for _, n := range r.Names() {
			f.bodies = append(f.bodies, r.Type.String()+" "+n)
		}
		for _, n := range r.Removed {
			f.removed = append(f.removed, r.Type.String()+" "+n)
		}
		if !f.delta && r.Type == xds.Cluster && len(r.Resources) < len(f.clusters) {
			f.removed = append(f.removed, fmt.Sprintf("cds has only %v", r.Names()))
		}
		f.mu.Unlock()
	}
	f.mu.Lock()
	f.memory = s.Memory()
	f.mu.Unlock()
	return true
}

// has waits until the client has the endpoints of each of its clusters.
func (f *faithful) has() {
	f.t.Helper()
	harness.Eventually(f.t, soon, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, c := range f.clusters {
			if _, err := endpointsIn(f.memory, c); err != nil {
				return err
			}
		}
		if len(f.memory.Resources[xds.Route]) == 0 {
			return errors.New("the client has no route")
		}
		return nil
	})
}

// lost is what was ever taken from the client.
func (f *faithful) lost() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.removed...)
}

// forget starts the list of what comes anew.
func (f *faithful) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bodies = nil
}

func (f *faithful) came() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.bodies...)
}
