package resources_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// keep is how long what was learned outlives the last pod.
const keep = time.Minute

// history is a workload over its rollouts: a real directory and a compiler, and
// what one would say of both.
type history struct {
	*world
	dir *nodecache.Directory
	sub *nodecache.Subscription
	at  map[xds.ID]*xds.Resource // of names as first published

	revisions []*rev // the oldest first
	pods      int
	log       []string
}

// rev is a revision of the workload. All of its pods have one hinted port.
type rev struct {
	key  nodecache.OwnerKey
	r    nodecache.Reservation
	pods []*nodecache.Pod
	// answer is what its port answered; nil where it was not asked, could not be
	// asked or would not say.
	answer []string
	failed bool
	denied bool      // it was asked and would not say
	gone   time.Time // when the last pod went
}

var programs = [][]string{{"pkg.A"}, {"pkg.A", "pkg.B"}, {"pkg.B"}, {}}

func newHistory(t *testing.T) *history {
	h := &history{world: newWorld(t), dir: nodecache.New(nodecache.Options{Keep: keep}), at: map[xds.ID]*xds.Resource{}}
	h.sub = h.dir.Subscribe()
	return h
}

func (h *history) note(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
}

// roll begins a new revision.
func (h *history) roll() *rev {
	n := len(h.revisions) + 1
	r := &rev{key: nodecache.OwnerKey{UID: fmt.Sprint("rs", n), Revision: fmt.Sprint(n)}}
	h.revisions = append(h.revisions, r)
	h.grow(r)
	return r
}

// grow adds a pod to a revision.
func (h *history) grow(r *rev) *nodecache.Pod {
	h.pods++
	p := &nodecache.Pod{
		UID: fmt.Sprint("p", h.pods), Name: fmt.Sprint("a-", r.key.Revision, "-", h.pods), Node: "n1",
		State: nodecache.Serving, Addr: netip.AddrFrom4([4]byte{10, 0, byte(h.pods >> 8), byte(h.pods)}),
		Created: time.Unix(int64(slices.Index(h.revisions, r)+1)*1000, 0),
		Common: &nodecache.Common{
			Namespace: "prod", Owner: r.key, OwnerName: "ReplicaSet/a-" + r.key.Revision,
			Workload: nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: "a"},
			Hints:    []nodecache.Hint{{Port: 50051, Why: "port name"}},
		},
	}
	h.note("pod %s", p)
	r.r = h.dir.UpsertPod(p)
	r.pods = append(r.pods, p)
	return p
}

func (h *history) shrink(r *rev) {
	p := r.pods[0]
	h.note("pod %s goes", p)
	h.dir.RemovePod(p.UID)
	if len(r.pods) == 1 { // what it leaned on is kept as long as its own would be
		for _, on := range h.revisions {
			if len(on.pods) == 0 && h.decides(on, r) {
				on.gone = time.Now()
			}
		}
	}
	if r.pods = r.pods[1:]; len(r.pods) > 0 {
		return
	}
	r.gone, r.failed = time.Now(), false
	if r.answer == nil && !r.denied {
		h.forget(r)
	}
}

func (h *history) forget(r *rev) { *r = rev{key: r.key} }

// says is a collect with its outcome.
func (h *history) says(r *rev, what string) {
	h.note("%s says %s", r.key, what)
	info := func(s nodecache.PortState, services ...string) *nodecache.Info {
		p := nodecache.PortInfo{Port: 50051, State: s}
		for _, name := range services {
			p.Services = append(p.Services, nodecache.Service{Name: name})
		}
		return &nodecache.Info{Ports: []nodecache.PortInfo{p}, Origin: nodecache.OriginSelf}
	}
	var err error
	switch what {
	case "refused":
		r.failed = r.answer == nil && !r.denied
		err = h.dir.Fail(r.r, what, time.Now())
	case "denied":
		r.failed, r.denied, r.answer = false, true, nil
		err = h.dir.Commit(r.r, info(nodecache.PortDenied))
	case "tls":
		r.failed, r.denied, r.answer = false, false, []string{}
		err = h.dir.Commit(r.r, info(nodecache.PortTLS))
	default:
		r.failed, r.denied, r.answer = false, false, strings.Fields(what)
		err = h.dir.Commit(r.r, info(nodecache.PortServes, r.answer...))
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// leansOn returns the revision of which a revision with pods is presumed to be
// the successor; nil where it has its own word, or there is none.
func (h *history) leansOn(r *rev) *rev {
	if r.answer != nil {
		return nil
	}
	for i := slices.Index(h.revisions, r) - 1; i >= 0; i-- {
		if h.revisions[i].answer != nil {
			return h.revisions[i]
		}
	}
	return nil
}

// serves is what the pods of a revision are called for.
func (h *history) serves(r *rev) []string {
	if on := h.leansOn(r); on != nil {
		return on.answer
	}
	return r.answer
}

// expire forgets what nobody leans on, the first that went before others.
func (h *history) expire() {
	h.note("time passes")
	h.dir.Expire(time.Now())
	var due []*rev
	for _, r := range h.revisions {
		if len(r.pods) == 0 && (r.answer != nil || r.denied) && !time.Now().Before(r.gone.Add(keep)) {
			due = append(due, r)
		}
	}
	slices.SortStableFunc(due, func(a, b *rev) int { return a.gone.Compare(b.gone) })
	for _, r := range due {
		if !h.decides(r, h.revisions...) {
			h.forget(r)
		}
	}
}

// decides tells whether the pods of others would be presumed to serve something
// else if nothing were known of a revision.
func (h *history) decides(on *rev, of ...*rev) bool {
	before, answer := h.leanings(of...), on.answer
	on.answer = nil
	after := h.leanings(of...)
	on.answer = answer
	return !slices.Equal(before, after)
}

// leanings says what pods of these are presumed to serve, and by whom.
func (h *history) leanings(of ...*rev) []string {
	var out []string
	for _, r := range of {
		if on := h.leansOn(r); len(r.pods) > 0 && on != nil && len(on.answer) > 0 {
			out = append(out, fmt.Sprint(r.key, on.key, on.answer))
		}
	}
	return out
}

// restart is a new agent that finds what the old one saved, and the pods.
func (h *history) restart() {
	h.note("restart")
	saved := h.dir.Snapshot()
	h.sub.Close()
	h.dir = nodecache.New(nodecache.Options{Keep: keep})
	h.dir.Restore(saved, time.Now())
	h.sub = h.dir.Subscribe()
	needed := map[*rev]bool{}
	for _, r := range h.revisions {
		needed[r] = h.decides(r, h.revisions...)
	}
	for _, r := range h.revisions {
		switch {
		case len(r.pods) > 0:
		case needed[r]:
			r.gone = time.Now() // as if its pods had been there until now
		case !time.Now().Before(r.gone.Add(keep)):
			h.forget(r)
		}
	}
	for _, r := range h.revisions {
		for _, p := range r.pods {
			r.r = h.dir.UpsertPod(p)
		}
		if r.failed {
			h.says(r, "refused")
		}
	}
	c, err := resources.New(resources.Options{Report: func(id xds.ID, err error) { h.t.Errorf("%v: %v", id, err) }})
	if err != nil {
		h.t.Fatal(err)
	}
	h.c, h.published, h.evidence = c, map[xds.ID]*xds.Resource{}, map[xds.Scope]xds.Evidence{}
}

func (h *history) compare() {
	h.t.Helper()
	h.take(h.c.Apply(h.dir, h.sub.Poll()))
	want := map[string][]string{}
	evidence := xds.Complete
	for _, r := range h.revisions {
		for _, name := range r.answer {
			if want[name] == nil {
				want[name] = []string{}
			}
		}
		for _, p := range r.pods {
			for _, name := range h.serves(r) {
				want[name] = append(want[name], p.Addr.String()+":50051 HEALTHY")
			}
		}
		switch {
		case len(r.pods) == 0 || r.answer != nil || r.denied:
		case r.failed:
			evidence = max(evidence, xds.Failed)
		default:
			evidence = max(evidence, xds.Pending)
		}
	}
	for _, name := range []string{"pkg.A", "pkg.B"} {
		got := h.addrs("prod", name)
		slices.Sort(got)
		slices.Sort(want[name])
		if there := h.cla("prod", name) != nil; there != (want[name] != nil) || !slices.Equal(got, want[name]) {
			h.t.Errorf("%s is there %t at %v, want %v", name, there, got, want[name])
		}
	}
	if got := h.evidence[xds.NamespaceScope("prod")]; got != evidence {
		h.t.Errorf("evidence %d, want %d", got, evidence)
	}
	for id, r := range h.published {
		if id.Type == xds.Endpoint {
			continue
		}
		if h.at[id] == nil {
			h.at[id] = r
		}
		if h.at[id].Version != r.Version {
			h.t.Errorf("%v has changed", id)
		}
	}
	for _, v := range h.c.Services() {
		presumed := map[string]bool{}
		for _, r := range h.revisions {
			for _, p := range r.pods {
				presumed[p.String()] = r.answer == nil
			}
		}
		for _, e := range v.Endpoints {
			if (e.State == resources.StatePresumed) != presumed[e.Pod] {
				h.t.Errorf("%s: %+v", v.Name, e)
			}
		}
	}
}

func (h *history) step(r *rand.Rand) {
	live := slices.DeleteFunc(slices.Clone(h.revisions), func(r *rev) bool { return len(r.pods) == 0 })
	pick := func(from []*rev) *rev { return from[r.IntN(len(from))] }
	switch n := r.IntN(12); {
	case len(h.revisions) == 0 || n == 0 && len(h.revisions) < 6:
		h.roll()
	case n == 1:
		time.Sleep(time.Duration(r.IntN(90)) * time.Second)
		h.expire()
	case n == 2:
		h.restart()
	case n < 5 || len(live) == 0:
		h.grow(pick(h.revisions))
	case n < 8:
		h.shrink(pick(live))
	default:
		says := []string{"refused", "denied", "tls"}
		for _, p := range programs {
			says = append(says, strings.Join(p, " "))
		}
		h.says(pick(live), says[r.IntN(len(says))])
	}
}

// Set presumeSeed to what a failure printed to run that history alone.
const presumeSeed = 0

func TestPresumedEndpointsAgreeWithTheModel(t *testing.T) {
	histories := uint64(200)
	base := rand.Uint64()
	if testing.Short() {
		histories = 50
	}
	if presumeSeed != 0 {
		base, histories = presumeSeed, 1
	}
	seen := map[string]int{}
	synctest.Test(t, func(t *testing.T) {
		for i := range histories {
			h, r := newHistory(t), rand.New(rand.NewPCG(base+i, 0))
			for range 40 {
				h.step(r)
				if h.compare(); t.Failed() {
					t.Fatalf("the history of seed %d:\n%s", base+i, strings.Join(h.log, "\n"))
				}
				for _, l := range h.leanings(h.revisions...) {
					seen[l]++
				}
			}
			h.sub.Close()
		}
	})
	if len(seen) < 10 && presumeSeed == 0 {
		t.Errorf("the histories had only these presumptions: %v", slices.Collect(maps.Keys(seen)))
	}
}
