package nodecache_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// choice makes every decision of a history: a number below n.
type choice func(n int) int

// The world of the histories is small, so that things meet.
var (
	worldUIDs   = []string{"u0", "u1", "u2", "u3", "u4"}
	worldOwners = []nodecache.OwnerKey{{UID: "a"}, {UID: "a", Revision: "2"}, {UID: "b"}}
	worldAddrs  = []netip.Addr{
		netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::1"),
	}
	worldRoutes = []string{"r0", "r1", "r2"}
	worldInfos  = []*nodecache.Info{
		serves("pkg.A"), serves("pkg.A", "pkg.B"), serves(),
		ports(heard(50051, nodecache.PortDenied), heard(50052, nodecache.PortServes, "pkg.A")),
		ports(heard(50051, nodecache.PortNotGRPC), heard(50052, nodecache.PortDenied)),
		ports(heard(50051, nodecache.PortDenied)),
	}
	worldServices = []string{"pkg.A", "pkg.B", "pkg.D"}
)

func pick[T any](c choice, from []T) T { return from[c(len(from))] }

func randomPod(c choice) nodecache.Pod {
	p := *pod(pick(c, worldUIDs), "192.0.2.1", owned(pick(c, worldOwners)))
	p.Addr = pick(c, worldAddrs)
	p.State = pick(c, []nodecache.PodState{nodecache.Serving, nodecache.Serving, nodecache.Draining, nodecache.Absent})
	if m := c(4); m > 0 {
		created(m)(&p)
	}
	switch c(12) {
	case 0:
		p.HostNetwork = true
	case 1:
		declaring(uint16(50050+c(2)), "pkg.D")(&p)
	case 2:
		p.CollectOff = true
	case 3:
		p.Hints = nil
	case 4:
		p.More = []netip.Addr{pick(c, worldAddrs)}
	case 5:
		p.Hints = []nodecache.Hint{{Port: 50052, Why: "port name"}}
	case 6:
		p.Hints = append(p.Hints, nodecache.Hint{Port: 50052, Why: "port name"})
	}
	return p
}

func randomRoute(c choice) nodecache.Route {
	r := route(pick(c, worldRoutes), int64(c(3)))
	for range c(3) {
		lead(r, pick(c, []string{"s0", "s1", "s2"}))
		if c(3) == 0 {
			r.Rules[0].Backends[0].Weight = 0
		}
	}
	return *r
}

// history does the same steps to a directory and to the model and compares
// all that can be seen, also by what a subscriber was told. It needs a
// synctest bubble for the clock.
type history struct {
	t     *testing.T
	c     choice
	d     *nodecache.Directory
	m     *model
	sub   *nodecache.Subscription
	heard map[nodecache.OwnerKey]*nodecache.Owner
	held  []nodecache.Reservation
	log   []func() string
}

func runHistory(t *testing.T, c choice, steps int) {
	t.Helper()
	d := nodecache.New(nodecache.Options{Keep: time.Minute})
	h := &history{
		t: t, c: c, d: d, m: newModel(time.Minute), sub: d.Subscribe(),
		heard: map[nodecache.OwnerKey]*nodecache.Owner{},
		held:  []nodecache.Reservation{{}},
	}
	h.m.serve(d, "s0", "u0", "u1")
	h.m.serve(d, "s1", "u1", "u2", "u3")
	for range steps {
		h.step()
		if h.compare(); t.Failed() {
			break
		}
	}
	if !t.Failed() {
		h.end()
	}
	if t.Failed() {
		for _, line := range h.log {
			t.Log(line())
		}
	}
}

func (h *history) step() {
	c, now := h.c, time.Now()
	switch c(16) {
	default:
		p := randomPod(c)
		var replaces []string
		if c(6) == 0 {
			replaces = []string{pick(c, worldUIDs)}
		}
		h.note("upsert %+v replacing %v", p, replaces)
		r := h.d.UpsertPod(&p, replaces...)
		h.same("reservation", r, h.m.upsert(p, now, replaces...))
		h.held = append(h.held, r)
	case 0, 1, 2:
		uid := pick(c, worldUIDs)
		h.note("remove %s", uid)
		h.d.RemovePod(uid)
		h.m.remove(uid, now)
	case 3, 4:
		key := pick(c, worldOwners)
		h.note("begin %s", key)
		r, err := h.d.Begin(key)
		want, wantErr := h.m.begin(key)
		h.same("begun", r, want)
		h.same("error", err, wantErr)
		h.held = append(h.held, r)
	case 5, 6:
		r, info := h.reservation(), pick(c, worldInfos)
		h.note("commit %v of %v", servicesIn(info), r)
		h.ended(r, h.d.Commit(r, info))
		h.m.commit(r, info)
	case 7:
		r, reason := h.reservation(), pick(c, []string{"refused", "reset"})
		h.note("fail %v: %s", r, reason)
		h.ended(r, h.d.Fail(r, reason, now))
		h.m.fail(r, reason, now)
	case 8:
		r := h.reservation()
		h.note("abandon %v", r)
		h.ended(r, h.d.Abandon(r))
		h.m.abandon(r)
	case 9, 10:
		r := randomRoute(c)
		h.note("route %+v", r)
		h.same("error", h.d.UpsertRoute(&r), h.m.upsertRoute(r))
	case 11:
		uid := pick(c, worldRoutes)
		h.note("remove route %s", uid)
		h.d.RemoveRoute(uid)
		h.m.removeRoute(uid)
	case 12:
		time.Sleep(time.Duration(c(40)) * time.Second) // the bubble's clock
		h.note("expire at %v", time.Now())
		h.same("expired", h.d.Expire(time.Now()), h.m.expire(time.Now()))
	}
}

// reservation is one of the newest ones, so that fresh and stale ones mix.
func (h *history) reservation() nodecache.Reservation {
	return h.held[len(h.held)-1-h.c(min(len(h.held), 6))]
}

func (h *history) ended(r nodecache.Reservation, err error) {
	h.t.Helper()
	if errors.Is(err, nodecache.ErrStale) != h.m.stale(r) || err != nil && !h.m.stale(r) {
		h.t.Errorf("%v for reservation %v, stale: %v", err, r, h.m.stale(r))
	}
}

func (h *history) compare() {
	h.t.Helper()
	told := h.c(3) > 0 // else the changes add up
	if told {
		if keys, err := h.sub.Next(ended); err == nil {
			for _, k := range keys {
				h.heard[k] = h.d.Owner(k)
			}
		}
	}
	counts := nodecache.Counts{Owners: map[nodecache.Knowledge]int{}, Pods: map[nodecache.PodState]int{}}
	for _, key := range worldOwners {
		o := h.heard[key]
		if !told {
			o = h.d.Owner(key)
		}
		if diff := h.m.diff(key, o); diff != "" {
			h.t.Errorf("owner %s (as told: %v): %s", key, told, diff)
		}
		if h.m.lives[key] != nil {
			counts.Owners[h.m.knowledge(key)]++
		}
	}
	for _, a := range worldAddrs {
		uid, serving := h.m.at(a)
		if p := h.d.PodAt(a); (p != nil) != serving || serving && p.UID != uid {
			h.t.Errorf("at %s: %v, want %s, serving %v", a, p, uid, serving)
		}
	}
	for _, p := range h.m.pods {
		counts.Pods[p.State]++
	}
	for _, uid := range worldUIDs {
		if (h.d.Pod(uid) != nil) != (h.m.find(uid) >= 0) {
			h.t.Errorf("pod %s: %v", uid, h.d.Pod(uid))
		}
	}
	for _, mem := range h.m.memories {
		if !mem.ends.IsZero() {
			counts.Retained++
		}
	}
	counts.Routes = len(h.m.routes)
	got := h.d.Counts()
	if !maps.Equal(got.Owners, counts.Owners) || !maps.Equal(got.Pods, counts.Pods) ||
		got.Routes != counts.Routes || got.Retained != counts.Retained {
		h.t.Errorf("counts %+v, want %+v", got, counts)
	}
}

// end takes everything away: nothing may be left.
func (h *history) end() {
	for _, uid := range worldUIDs {
		h.d.RemovePod(uid)
	}
	for _, uid := range worldRoutes {
		h.d.RemoveRoute(uid)
	}
	h.d.Expire(time.Now().Add(time.Hour))
	for _, name := range []string{"s0", "s1"} {
		h.d.RemoveSlice(named(name + "-1"))
		h.d.RemoveFront(named(name))
	}
	h.sub.Close()
	if left := h.d.Sizes(); len(left) > 0 {
		h.t.Errorf("left behind %v", left)
	}
}

func (h *history) same(what string, got, want any) {
	h.t.Helper()
	if got != want {
		h.t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func (h *history) note(format string, args ...any) {
	h.log = append(h.log, func() string { return fmt.Sprintf(format, args...) })
}

// Set seed to what a failure printed to run that history alone.
const seed = 0

func TestRandomHistoriesAgreeWithTheModel(t *testing.T) {
	const shards, steps = 2, 25
	histories := 10_000
	if testing.Short() {
		histories = 1_000
	}
	base := rand.Uint64()
	if seed != 0 {
		base, histories = seed, shards
	}
	for shard := range shards {
		t.Run(fmt.Sprint(shard), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				for i := range uint64(histories / shards) {
					s := base + 2*i + uint64(shard)
					r := rand.New(rand.NewPCG(s, 0))
					if runHistory(t, r.IntN, steps); t.Failed() {
						t.Fatalf("the history of seed %d", s)
					}
				}
			})
		})
	}
}

func FuzzHistory(f *testing.F) {
	f.Add([]byte{})
	for s := range uint64(4) {
		r := rand.New(rand.NewPCG(s, 1))
		b := make([]byte, 256)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:min(len(b), 1024)]
		c := func(n int) int {
			if len(b) == 0 {
				return 0
			}
			v := int(b[0]) % n
			b = b[1:]
			return v
		}
		synctest.Test(t, func(t *testing.T) { runHistory(t, c, len(b)/8+1) })
	})
}
