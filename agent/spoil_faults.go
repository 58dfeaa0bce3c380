//go:build faults

package agent

import (
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"

	"github.com/fingerpost/fingerpost/xds"
)

// faultsEnv names a file of cluster names, one a line: an agent of this build
// publishes each of them in a form that passes its own validation and that
// Envoy refuses, as long as the name is in the file.
const faultsEnv = "FINGERPOST_TEST_FAULTS"

func init() {
	path := os.Getenv(faultsEnv)
	if path == "" {
		return
	}
	s := &spoiler{path: path, good: map[xds.ID]*xds.Resource{}}
	spoil = func(f *feed, u xds.Update) xds.Update {
		s.once.Do(func() { go s.follow(f) })
		return s.spoil(u)
	}
}

// spoiler is guarded by the feed's lock.
type spoiler struct {
	path string
	once sync.Once
	good map[xds.ID]*xds.Resource
	bad  []string
}

func (s *spoiler) read() []string {
	text, _ := os.ReadFile(s.path) // none: no faults
	return strings.Fields(string(text))
}

func (s *spoiler) spoil(u xds.Update) xds.Update {
	s.bad = s.read()
	for i, r := range u.Set {
		if r.Type == xds.Cluster {
			s.good[r.ID] = r
			u.Set[i] = s.form(r)
		}
	}
	return u
}

// form is the resource as it is published now: an EDS cluster that does not say
// where its endpoints come from is nothing to Envoy.
func (s *spoiler) form(r *xds.Resource) *xds.Resource {
	if !slices.Contains(s.bad, r.Name) {
		return r
	}
	var c clusterv3.Cluster
	if err := r.Body.UnmarshalTo(&c); err != nil {
		panic(err)
	}
	c.EdsClusterConfig = nil
	bad, err := xds.NewResource(r.ID, &c)
	if err != nil {
		panic(err)
	}
	return bad
}

// follow publishes what a change of the file changes.
func (s *spoiler) follow(f *feed) {
	for range time.Tick(20 * time.Millisecond) {
		f.mu.Lock()
		if now := s.read(); !slices.Equal(now, s.bad) {
			s.bad = now
			var u xds.Update
			for _, r := range s.good {
				u.Set = append(u.Set, s.form(r))
			}
			f.server.Publish(u)
		}
		f.mu.Unlock()
	}
}
