package nodecache_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

func wanting(max uint32) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) { p.Policy = &nodecache.Policy{MaxRequests: max} }
}

// wantsOf is what the owner's view and its Service say, 0 for nothing.
func wantsOf(d *nodecache.Directory, key nodecache.OwnerKey, service string) (owner, behind uint32) {
	if o := d.Owner(key); o != nil && o.Policy != nil {
		owner = o.Policy.MaxRequests
	}
	if p, _ := d.PolicyBehind(named(service)); p != nil {
		behind = p.MaxRequests
	}
	return owner, behind
}

func TestPolicyIsTheWordOfTheRevisionThatCameLast(t *testing.T) {
	next := nodecache.OwnerKey{UID: "rs-2"}
	d := nodecache.New(nodecache.Options{Keep: time.Minute})
	old := pod("a", "10.0.0.1", created(1), wanting(1))
	fresh := pod("b", "10.0.0.2", created(2), wanting(2), owned(next))
	serve(d, "web", "a", "b", "c", "d")
	check := func(when string, want uint32) {
		t.Helper()
		for _, k := range []nodecache.OwnerKey{key, next} {
			if d.Owner(k) == nil {
				continue
			}
			if owner, behind := wantsOf(d, k, "web"); owner != want || behind != want {
				t.Errorf("%s: %s says %d and its Service %d, want %d", when, k, owner, behind, want)
			}
		}
	}
	must(t, d.Commit(d.UpsertPod(old), serves("pkg.A")))
	check("alone", 1)
	d.UpsertPod(fresh)
	check("with the first pod of a new revision, which nobody asked", 2)
	d.RemovePod("b")
	check("with that pod not ready", 2)
	d.UpsertPod(fresh)
	check("with that pod ready again", 2)
	d.UpsertPod(pod("c", "10.0.0.3", created(3), wanting(7), owned(next)))
	check("with a pod that somebody has annotated by itself", 2)
	d.UpsertPod(pod("d", "10.0.0.4", created(4), wanting(1)))
	check("with one more pod of the old revision", 2)
	d.RemovePod("a")
	d.RemovePod("d")
	check("after the rollout", 2)
	d.RemovePod("c")
	d.RemovePod("b")
	check("scaled to zero", 2)
	d.UpsertPod(pod("e", "10.0.0.5", created(5), wanting(1)))
	serve(d, "web", "e")
	check("after a way back", 1)
	if n := d.Expire(time.Now().Add(2 * time.Minute)); n != 1 {
		t.Errorf("%d were forgotten", n)
	}
	check("with the other forgotten", 1)
	d.UpsertPod(pod("e", "10.0.0.5", created(5)))
	check("with the annotation taken away", 0)
}

func TestPolicyOfSeveralWorkloadsIsThatOfTheFirstByName(t *testing.T) {
	of := func(name string) func(*nodecache.Pod) {
		return func(p *nodecache.Pod) {
			p.Owner, p.Workload.Name = nodecache.OwnerKey{UID: name}, name
		}
	}
	d := nodecache.New(nodecache.Options{})
	serve(d, "web", "a", "b", "c")
	for i, want := range []uint32{3, 2, 2} { // the last says nothing
		p := pod([]string{"a", "b", "c"}[i], fmt.Sprintf("10.0.0.%d", i+1), of([]string{"z", "y", "x"}[i]))
		if i < 2 {
			wanting(uint32(3 - i))(p)
		}
		d.UpsertPod(p)
		if _, got := wantsOf(d, key, "web"); got != want {
			t.Errorf("with %d workloads the Service has %d, want %d", i+1, got, want)
		}
	}
}

func TestRestoredOwnersHaveTheirPolicy(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	serve(d, "web", "a")
	must(t, d.Commit(d.UpsertPod(pod("a", "10.0.0.1", wanting(1))), serves("pkg.A")))
	d.UpsertPod(pod("b", "10.0.0.2", owned(nodecache.OwnerKey{UID: "silent"}), wanting(2), func(p *nodecache.Pod) { p.Workload.Name = "b" }))
	d.RemovePod("a")
	d.RemovePod("b")
	again := reborn(d, time.Now())
	if owner, _ := wantsOf(again, key, "web"); owner != 1 {
		t.Errorf("it says %d after a restart", owner)
	}
	if owner, _ := wantsOf(again, nodecache.OwnerKey{UID: "silent"}, "web"); owner != 2 {
		t.Errorf("one that was never asked says %d after a restart", owner)
	}
	again.UpsertFront(front("web", 1))
	if _, behind := wantsOf(again, key, "web"); behind != 1 {
		t.Errorf("its Service has %d after a restart", behind)
	}
}

func said(d *nodecache.Directory, service nodecache.Name) string {
	p, _ := d.PolicyBehind(service)
	return p.String()
}

// Who is told of nothing sees no other policy, whatever happened.
func TestPolicyChangesAreTold(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 7))
		d := nodecache.New(nodecache.Options{Keep: time.Minute})
		s := d.SubscribeFronts()
		uids := []string{"a", "b", "c", "d", "e", "f"}
		serve(d, "web", uids[:4]...)
		serve(d, "old", uids[0], uids[2])
		owners, fronts := map[nodecache.OwnerKey]string{}, map[nodecache.Name]string{}
		now := time.Now()
		for step := range 60 {
			i := r.IntN(len(uids))
			key := nodecache.OwnerKey{UID: fmt.Sprint("rs-", i/2)}
			switch r.IntN(6) {
			case 0, 1, 2:
				p := pod(uids[i], fmt.Sprintf("10.0.0.%d", i+1), owned(key), created(r.IntN(30)))
				if n := r.IntN(3); n > 0 {
					wanting(uint32(n))(p)
				}
				d.UpsertPod(p)
			case 3, 4:
				d.RemovePod(uids[i])
			case 5:
				if res, err := d.Begin(key); err == nil {
					must(t, d.Commit(res, serves("pkg.A")))
				}
				if r.IntN(4) == 0 {
					d.Expire(now.Add(time.Duration(r.IntN(2)) * time.Hour))
				}
			}
			for _, k := range s.Poll() {
				owners[k] = ""
				if o := d.Owner(k); o != nil {
					owners[k] = o.Policy.String()
				}
			}
			for _, n := range s.PollFronts() {
				fronts[n] = said(d, n)
			}
			for _, k := range slices.Collect(maps.Keys(owners)) {
				if o := d.Owner(k); o != nil && o.Policy.String() != owners[k] {
					t.Fatalf("seed %d, step %d: %s says %q, told was %q", seed, step, k, o.Policy, owners[k])
				}
			}
			for n, told := range fronts {
				if got := said(d, n); got != told {
					t.Fatalf("seed %d, step %d: Service %s has %q, told was %q", seed, step, n, got, told)
				}
			}
		}
		s.Close()
	}
}

func TestPolicyIsShownInTheWordsOfTheAnnotations(t *testing.T) {
	var none *nodecache.Policy
	for want, p := range map[string]*nodecache.Policy{
		"":                               none,
		"num-retries=0":                  {NoRetries: true},
		"outlier-detection=off":          {NoOutliers: true},
		"outlier-detection=3":            {OutlierFailures: 3},
		"retry-on=a,b":                   {RetryOn: "a,b"},
		"max-requests=9":                 {MaxRequests: 9},
		"retry-budget=5%":                {RetryBudget: 5},
		"keepalive-interval=2s":          {Keepalive: 2 * time.Second},
		"connect-timeout=100ms":          {ConnectTimeout: 100 * time.Millisecond},
		"num-retries=2, retry-budget=1%": {Retries: 2, RetryBudget: 1},
	} {
		if got := p.String(); got != want {
			t.Errorf("%+v is %q, want %q", p, got, want)
		}
	}
}
