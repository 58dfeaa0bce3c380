package collect

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/agent/schedule"
	"github.com/fingerpost/fingerpost/nodecache"
)

// listener is a witness that notes what it is told.
type listener struct {
	mu   sync.Mutex // guards said
	said []string
}

func (l *listener) CollectBegun(o *nodecache.Owner) { l.note("begun %s", o.Key.UID) }
func (l *listener) CollectEnded(o *nodecache.Owner, result, detail string) {
	l.note("%s %s (%s)", result, o.Key.UID, detail)
}

func (l *listener) note(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = append(l.said, fmt.Sprintf(format, args...))
}

func TestWitnessHearsOfEachAttempt(t *testing.T) {
	p, l := &pods{says: map[string]string{"192.0.2.1": "!refused"}}, &listener{}
	var during func()
	answer := func(addr netip.AddrPort, opened func()) (Result, error) {
		if during != nil {
			during()
		}
		return p.answer(addr, opened)
	}
	inBubble(t, Options{Witness: l}, schedule.Options{}, answer, func(b *bench) {
		told := func(what string, want ...string) {
			t.Helper()
			l.mu.Lock()
			defer l.mu.Unlock()
			if !slices.Equal(l.said, want) {
				t.Errorf("%s: told %q, want %q", what, l.said, want)
			}
			l.said = nil
		}
		b.dir.UpsertPod(testPod("p", "a", "192.0.2.1"))
		b.after(time.Millisecond)
		told("refused", "begun a", "failed a (port 50051: refused: as told)")
		p.say("192.0.2.1", "a.A")
		b.after(5 * time.Second)
		told("known", "begun a", "known a (from pod prod/p)")
		b.dir.UpsertPod(testPod("p", "a", "192.0.2.1")) // nothing new
		b.after(time.Minute)
		told("nothing happens")
		b.after(80 * time.Minute)
		told("verified", "begun a", "known a (from pod prod/p)")
		during = func() { b.dir.RemovePod("q") }
		b.dir.UpsertPod(testPod("q", "b", "192.0.2.2"))
		b.after(time.Second)
		told("it goes meanwhile", "begun b", "stale b ()")
	})
}
