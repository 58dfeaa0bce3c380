package nodecache_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// key is the owner of pods that no test gives another.
var key = nodecache.OwnerKey{UID: "rs", Revision: "1"}

func ownerKey(uid string) nodecache.OwnerKey { return nodecache.OwnerKey{UID: uid, Revision: "1"} }

// pod returns a serving pod of key with one hint, changed by the edits.
func pod(uid, addr string, edits ...func(*nodecache.Pod)) *nodecache.Pod {
	p := &nodecache.Pod{
		UID: uid, Name: "name-" + uid, Node: "n1", State: nodecache.Serving, Addr: netip.MustParseAddr(addr),
		Common: &nodecache.Common{
			Namespace: "prod", Owner: key, OwnerName: "ReplicaSet/a-1",
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "a"},
			Hints:    []nodecache.Hint{{Port: 50051, Why: "port name"}},
		},
	}
	for _, edit := range edits {
		edit(p)
	}
	return p
}

func owned(key nodecache.OwnerKey) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) { p.Owner = key }
}

func in(s nodecache.PodState) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) { p.State = s }
}

func created(minute int) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) {
		p.Created = time.Date(2026, 5, 1, 12, minute, 0, 0, time.UTC)
	}
}

func declaring(port uint16, services ...string) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) {
		p.Declared = []nodecache.Declared{{Port: port, Services: services}}
	}
}

func onHost(p *nodecache.Pod) { p.HostNetwork = true }

// serves returns the info of one port with the services.
func serves(services ...string) *nodecache.Info {
	return ports(heard(50051, nodecache.PortServes, services...))
}

func ports(ps ...nodecache.PortInfo) *nodecache.Info {
	return &nodecache.Info{Ports: ps, Origin: nodecache.OriginSelf}
}

// heard is what a port said.
func heard(port uint16, s nodecache.PortState, services ...string) nodecache.PortInfo {
	p := nodecache.PortInfo{Port: port, State: s}
	for _, name := range services {
		p.Services = append(p.Services, nodecache.Service{Name: name})
	}
	return p
}

// uids returns the UIDs of the owner's pods, sorted; a nil owner has none.
func uids(o *nodecache.Owner) []string {
	var us []string
	if o != nil {
		for _, m := range o.Pods {
			us = append(us, m.UID)
		}
	}
	slices.Sort(us)
	return us
}

func wantUIDs(t *testing.T, d *nodecache.Directory, key nodecache.OwnerKey, want ...string) {
	t.Helper()
	if got := uids(d.Owner(key)); !slices.Equal(got, want) {
		t.Errorf("pods of %s: %v, want %v", key, got, want)
	}
}

func wantKnowledge(t *testing.T, d *nodecache.Directory, want nodecache.Knowledge) {
	t.Helper()
	o := d.Owner(key)
	if o == nil || o.Knowledge != want {
		t.Errorf("owner %+v, want %s", o, want)
	}
}

// patience is how long a condition may take to come true before a test gives
// up; it is never waited for where the code is right.
const patience = 20 * time.Second

// next returns the keys of the owners that changed, which must come.
func next(t *testing.T, s *nodecache.Subscription) []nodecache.OwnerKey {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	keys, err := s.Next(ctx)
	if err != nil {
		t.Fatalf("no notification: %v", err)
	}
	return keys
}

// quiet fails if a notification is waiting. What the directory's methods do
// is pending when they return, so a context that has ended is enough.
func quiet(t *testing.T, s *nodecache.Subscription) {
	t.Helper()
	if keys, err := s.Next(ended); err == nil {
		t.Errorf("notified of %v, want nothing", keys)
	}
}

var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func subscribe(t *testing.T, d *nodecache.Directory) *nodecache.Subscription {
	s := d.Subscribe()
	t.Cleanup(s.Close)
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func addr(i int) string { return fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255) }
