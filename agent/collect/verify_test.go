package collect

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// pods answers by address what it was told to, which may change.
type pods struct {
	mu   sync.Mutex
	says map[string]string // services, or an error after "!"
}

func (p *pods) say(addr, services string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.says[addr] = services
}

func (p *pods) answer(addr netip.AddrPort, opened func()) (Result, error) {
	p.mu.Lock()
	says := p.says[addr.Addr().String()]
	p.mu.Unlock()
	opened()
	if class, failed := strings.CutPrefix(says, "!"); failed {
		return Result{}, &Failure{Class: Class(class), Detail: "as told"}
	}
	r := Result{PortInfo: nodecache.PortInfo{Port: addr.Port(), State: nodecache.PortState(says)}}
	if says == "" || strings.Contains(says, ".") {
		fill(&r.PortInfo, strings.Fields(says), newFileSet(Budget{}.orDefault()))
	}
	return r, nil
}

func imagePod(uid, addr, images string) *nodecache.Pod {
	p := testPod(uid, "a", addr)
	p.Images = images
	return p
}

// where writes which pods get the calls of a service.
func (b *bench) where(service string) string {
	var uids []string
	for _, t := range b.dir.Owner(testKey("a")).Targets(service) {
		uids = append(uids, t.Pod.UID)
	}
	return strings.Join(uids, " ")
}

func (b *bench) wantWhere(t *testing.T, service, want string) {
	t.Helper()
	if got := b.where(service); got != want {
		t.Errorf("%s at %q, want %q", service, got, want)
	}
}

func asked(calls []call) string {
	var as []string
	for _, c := range calls {
		as = append(as, strings.TrimPrefix(c.addr.String(), "192.0.2."))
	}
	return strings.Join(as, " ")
}

func TestOwnerIsVerifiedAboutHourlyOnAnotherPod(t *testing.T) {
	p := &pods{says: map[string]string{"192.0.2.1": "a.A", "192.0.2.2": "a.A", "192.0.2.3": "a.A"}}
	inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
		for i := range 3 {
			b.dir.UpsertPod(imagePod(fmt.Sprint("p", i+1), fmt.Sprint("192.0.2.", i+1), "x"))
		}
		calls := b.after(7 * time.Hour)
		if len(calls) < 6 || len(calls) > 8 {
			t.Fatalf("%d questions in seven hours: %v", len(calls), calls)
		}
		for i := 1; i < len(calls); i++ {
			if d := calls[i].at - calls[i-1].at; d < time.Hour || d > 72*time.Minute {
				t.Errorf("question %d came after %s", i, d)
			}
			if calls[i].addr == calls[i-1].addr {
				t.Errorf("question %d was to the same pod as the one before", i)
			}
		}
		if got := asked(calls[:3]); got != "1 2 3" {
			t.Errorf("the first three went to %s", got)
		}
	})
}

func TestAddedServiceAppearsAtOnceAndLacksNeedTwoPods(t *testing.T) {
	p := &pods{says: map[string]string{"192.0.2.1": "a.A a.B", "192.0.2.2": "a.A a.B", "192.0.2.3": "a.A a.B"}}
	inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
		for i := range 3 {
			b.dir.UpsertPod(imagePod(fmt.Sprint("p", i+1), fmt.Sprint("192.0.2.", i+1), "x"))
		}
		b.after(0)
		// The next to be asked serves more.
		p.say("192.0.2.2", "a.A a.B a.C")
		b.after(80 * time.Minute)
		b.wantWhere(t, "a.C", "p1 p2 p3")
		// Then one lacks B: a second pod is asked at once, and has it.
		p.say("192.0.2.3", "a.A a.C")
		p.say("192.0.2.1", "a.A a.B a.C")
		n := len(b.after(0))
		calls := b.after(75 * time.Minute)
		if got := asked(calls[n:]); got != "3 1" {
			t.Errorf("asked %s, want 3 and then 1", got)
		}
		b.wantWhere(t, "a.B", "p1 p2")
		b.wantWhere(t, "a.A", "p1 p2 p3")
		if !slices.Contains(b.dir.Owner(testKey("a")).Services(), "a.B") {
			t.Error("B was dropped on one pod's word")
		}
		// At last all lack it.
		for i := range 3 {
			p.say(fmt.Sprint("192.0.2.", i+1), "a.A a.C")
		}
		b.after(75 * time.Minute)
		if got := b.dir.Owner(testKey("a")); slices.Contains(got.Services(), "a.B") || len(got.Info.Variants) != 0 {
			t.Errorf("services %v, variants %v", got.Services(), got.Info.Variants)
		}
		b.wantWhere(t, "a.C", "p1 p2 p3")
	})
}

func TestOnlyPodIsBelievedAlone(t *testing.T) {
	p := &pods{says: map[string]string{"192.0.2.1": "a.A a.B"}}
	inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
		b.dir.UpsertPod(imagePod("p", "192.0.2.1", "x"))
		b.after(0)
		p.say("192.0.2.1", "a.A")
		b.after(75 * time.Minute)
		b.wantWhere(t, "a.A", "p")
		b.wantWhere(t, "a.B", "")
		p.say("192.0.2.1", "")
		b.after(75 * time.Minute)
		if k := b.dir.Owner(testKey("a")).Knowledge; k != nodecache.None {
			t.Errorf("the owner is %s", k)
		}
	})
}

// Whatever a question to an owner that is known meets, what is known stands.
func TestFailedVerificationTakesNothing(t *testing.T) {
	for _, says := range []string{"!refused", "!deadline", "!silent", "no-reflection", "denied"} {
		t.Run(says, func(t *testing.T) {
			p := &pods{says: map[string]string{"192.0.2.1": "a.A"}}
			inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
				b.dir.UpsertPod(imagePod("p", "192.0.2.1", "x"))
				b.after(0)
				sub := b.dir.Subscribe()
				p.say("192.0.2.1", says)
				calls := b.after(6 * time.Hour)
				if o := b.dir.Owner(testKey("a")); o.Knowledge != nodecache.Known {
					t.Errorf("the owner is %s: %s", o.Knowledge, o.Reason)
				}
				b.wantWhere(t, "a.A", "p")
				if len(calls) < 4 || len(calls) > 25 {
					t.Errorf("%d questions in six hours", len(calls))
				}
				sub.Close()
				p.say("192.0.2.1", "a.A a.B")
				b.after(3 * time.Hour)
				b.wantWhere(t, "a.B", "p")
			})
		})
	}
}

func TestPodsOfOtherImagesAreAskedToo(t *testing.T) {
	p := &pods{says: map[string]string{"192.0.2.1": "a.A", "192.0.2.2": "a.B", "192.0.2.3": "a.A", "192.0.2.4": "a.B"}}
	inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
		b.dir.UpsertPod(imagePod("p1", "192.0.2.1", "x"))
		b.dir.UpsertPod(imagePod("p2", "192.0.2.2", "y"))
		b.dir.UpsertPod(imagePod("p3", "192.0.2.3", "z"))
		b.dir.UpsertPod(imagePod("p4", "192.0.2.4", "y"))
		if calls := b.after(time.Minute); len(calls) != 3 {
			t.Errorf("asked %s, want one pod of each image", asked(calls))
		}
		b.wantWhere(t, "a.A", "p1 p3")
		b.wantWhere(t, "a.B", "p2 p4")
		o := b.dir.Owner(testKey("a"))
		if !slices.Equal(o.Info.Images, []string{"x", "z"}) || len(o.Info.Variants) != 1 || o.Knowledge != nodecache.Known {
			t.Errorf("%s, info %+v", o.Knowledge, o.Info)
		}
		// A rollout by tag alone ends: the other image is all that is left.
		b.dir.RemovePod("p1")
		b.dir.RemovePod("p3")
		b.wantWhere(t, "a.A", "")
		b.after(75 * time.Minute)
		o = b.dir.Owner(testKey("a"))
		if !slices.Equal(o.Info.Images, []string{"y"}) || len(o.Info.Variants) != 0 {
			t.Errorf("info %+v", o.Info)
		}
		b.wantWhere(t, "a.B", "p2 p4")
	})
}

func TestImagesOfAnOwnerAreToldApartUpToALimit(t *testing.T) {
	p := &pods{says: map[string]string{}}
	inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
		for i := range 20 {
			addr := fmt.Sprint("192.0.2.", i+1)
			p.say(addr, fmt.Sprintf("a.S%d", i))
			b.dir.UpsertPod(imagePod(fmt.Sprintf("p%02d", i), addr, fmt.Sprint("image", i)))
		}
		calls := b.after(12 * time.Hour)
		for i := 5; i < len(calls); i++ {
			if d := calls[i].at - calls[i-5].at; d < time.Hour {
				t.Fatalf("six connections within %s", d)
			}
		}
		o := b.dir.Owner(testKey("a"))
		if n := len(o.Info.Variants); n == 0 || n > nodecache.MaxVariants {
			t.Errorf("%d variants", n)
		}
		if n := len(o.Services()); n > nodecache.MaxVariants+1 {
			t.Errorf("%d services", n)
		}
	})
}

// Old knowledge is not asked for again at once, and not by all at one moment.
func TestKnowledgeFromBeforeARestartIsVerifiedWithinTheHour(t *testing.T) {
	p := &pods{says: map[string]string{"192.0.2.1": "a.A"}}
	inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
		old := &nodecache.Info{
			Ports:  []nodecache.PortInfo{{Port: 50051, State: nodecache.PortServes, Services: []nodecache.Service{{Name: "a.A"}}}},
			Origin: nodecache.OriginCheckpoint, Collected: time.Now().Add(-24 * time.Hour),
		}
		// The directory had it before the collector heard of the owner.
		pod := imagePod("p", "192.0.2.1", "x")
		pod.Hints = nil
		r := b.dir.UpsertPod(pod)
		if err := b.dir.Commit(r, old); err != nil {
			t.Error(err)
		}
		b.dir.UpsertPod(imagePod("p", "192.0.2.1", "x"))
		if calls := b.after(0); len(calls) != 0 {
			t.Errorf("asked at once: %v", calls)
		}
		if calls := b.after(time.Hour); len(calls) != 1 {
			t.Errorf("%d questions within the hour", len(calls))
		}
	})
}

func TestRecollectAsksAtOnceWhateverIsKnown(t *testing.T) {
	p := &pods{says: map[string]string{"192.0.2.1": "a.A", "192.0.2.2": "a.A"}}
	inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
		recollect := func() Report {
			t.Helper()
			r, err := b.Recollect(context.Background(), testKey("a"))
			if err != nil {
				t.Error(err)
			}
			return r
		}
		if _, err := b.Recollect(context.Background(), testKey("nobody")); !errors.Is(err, ErrNotAsked) {
			t.Errorf("an owner that is not there: %v", err)
		}
		b.dir.UpsertPod(imagePod("p", "192.0.2.1", "x"))
		if r := recollect(); r.Result != resultKnown || r.Pod != "prod/p" {
			t.Errorf("report %+v", r)
		}
		p.say("192.0.2.1", "a.A a.B")
		n := len(b.after(time.Second))
		if r := recollect(); r.Result != resultKnown {
			t.Errorf("report %+v", r)
		}
		if calls := b.after(0); len(calls) != n+1 {
			t.Errorf("%d questions, want one more than %d", len(calls), n)
		}
		b.wantWhere(t, "a.B", "p")
		// A server that must be left alone, until somebody says otherwise.
		p.say("192.0.2.1", "!deadline")
		if r := recollect(); r.Result != resultFailed || !strings.Contains(r.Detail, "deadline") {
			t.Errorf("report %+v", r)
		}
		b.wantWhere(t, "a.B", "p")
		p.say("192.0.2.1", "a.A")
		if r := recollect(); r.Result != resultKnown {
			t.Errorf("report %+v", r)
		}
		b.wantWhere(t, "a.B", "")
		// The limit of connections holds.
		for range 4 {
			recollect()
		}
		if r := recollect(); r.Result != resultFailed || !strings.Contains(r.Detail, "connections of this hour") {
			t.Errorf("report %+v", r)
		}
		if calls := b.after(0); len(calls) != maxCalls {
			t.Errorf("%d connections", len(calls))
		}
		b.wantWhere(t, "a.A", "p")
	})
}

func TestRecollectOfAFailedOwnerDoesNotWait(t *testing.T) {
	p := &pods{says: map[string]string{"192.0.2.1": "!exhausted"}}
	inBubble(t, Options{}, schedule.Options{}, p.answer, func(b *bench) {
		b.dir.UpsertPod(imagePod("p", "192.0.2.1", "x"))
		b.after(time.Minute)
		p.say("192.0.2.1", "a.A")
		if r, err := b.Recollect(context.Background(), testKey("a")); err != nil || r.Result != resultKnown {
			t.Errorf("report %+v, %v", r, err)
		}
		if k := b.dir.Owner(testKey("a")).Knowledge; k != nodecache.Known {
			t.Errorf("the owner is %s", k)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := b.Recollect(ctx, testKey("a")); !errors.Is(err, context.Canceled) {
			t.Errorf("a caller that left: %v", err)
		}
	})
}
