package nodecache_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Writers each change pods and routes of their own, in owners and at addresses
// that they share, while collectors begin and commit. Whatever the order, the
// end is what the last word on every pod and route says; and one who only
// follows notifications knows all of it.
func TestConcurrentHistoriesEndAsTheLastWordsSay(t *testing.T) {
	histories := 400
	if testing.Short() {
		histories = 40
	}
	base := rand.Uint64()
	for i := range histories {
		if runConcurrently(t, base+uint64(i)); t.Failed() {
			t.Fatalf("the history of seed %d", base+uint64(i))
		}
	}
}

const (
	writers        = 3
	podsPerWriter  = 4
	stepsPerWriter = 60
)

// lastWords are what one writer said last.
type lastWords struct {
	pods   map[string]*nodecache.Pod
	routes map[string]*nodecache.Route
}

func runConcurrently(t *testing.T, seed uint64) {
	d, m := nodecache.New(nodecache.Options{}), newModel(time.Hour)
	for i := range podsPerWriter { // a pod's place is never its writer's alone
		m.serve(d, fmt.Sprint("s", i), fmt.Sprint("0-", i), fmt.Sprint("1-", i), fmt.Sprint("2-", i))
	}
	f := follow(d)
	var collectors, ws sync.WaitGroup
	stop := make(chan struct{})
	for i := range 2 {
		collectors.Go(func() { collectUntil(stop, d, rand.New(rand.NewPCG(seed, 100+uint64(i)))) })
	}
	words := make([]lastWords, writers)
	for i := range writers {
		ws.Go(func() { words[i] = write(d, i, rand.New(rand.NewPCG(seed, uint64(i)))) })
	}
	ws.Wait()
	close(stop)
	collectors.Wait()
	heard := f.stop()

	for _, w := range words {
		for _, p := range w.pods {
			m.upsert(*p, time.Now())
		}
		for _, r := range w.routes {
			_ = m.upsertRoute(*r)
		}
	}
	for _, key := range concurrentOwners() {
		o := d.Owner(key)
		if !reflect.DeepEqual(o, heard[key]) {
			t.Errorf("owner %s: is %+v, but by what was told %+v", key, o, heard[key])
		}
		pods := m.of(key)
		if o == nil {
			o = &nodecache.Owner{}
		}
		// Without pods it stands where the last one stood, whichever that was.
		if want := m.entries(key); len(pods) > 0 && !slices.Equal(o.Routes, want) {
			t.Errorf("owner %s: routes %v, want %v", key, o.Routes, want)
		}
		if len(o.Pods) != len(pods) {
			t.Errorf("owner %s: pods %v, want %d", key, uids(o), len(pods))
			continue
		}
		for i, p := range pods {
			holder, _ := m.at(p.Addr)
			if !o.Pods[i].Equal(&p) || o.Pods[i].Shadowed != (!p.HostNetwork && holder != p.UID) {
				t.Errorf("owner %s: pod %+v, want %+v, address held by %s", key, o.Pods[i], p, holder)
			}
		}
	}
}

func concurrentOwners() []nodecache.OwnerKey {
	keys := []nodecache.OwnerKey{ownerKey("shared"), ownerKey("shared too")}
	for i := range writers {
		keys = append(keys, ownerKey(fmt.Sprint("of ", i)))
	}
	return keys
}

// write does random things to pods and routes that are the writer's alone.
func write(d *nodecache.Directory, writer int, r *rand.Rand) lastWords {
	w := lastWords{map[string]*nodecache.Pod{}, map[string]*nodecache.Route{}}
	owners := []nodecache.OwnerKey{ownerKey("shared"), ownerKey("shared too"), ownerKey(fmt.Sprint("of ", writer))}
	uid := func() string { return fmt.Sprintf("%d-%d", writer, r.IntN(podsPerWriter)) }
	for range stepsPerWriter {
		switch r.IntN(8) {
		case 0, 1:
			u := uid()
			d.RemovePod(u)
			delete(w.pods, u)
		case 2:
			rt := route(uid(), 1)
			for range r.IntN(3) {
				lead(rt, fmt.Sprint("s", r.IntN(podsPerWriter)))
			}
			_ = d.UpsertRoute(rt)
			w.routes[rt.UID] = rt
		case 3:
			u := uid()
			d.RemoveRoute(u)
			delete(w.routes, u)
		default:
			p := randomPod(r.IntN)
			p.UID, p.Owner = uid(), pick(r.IntN, owners)
			p.Name = p.UID
			p.Addr = pick(r.IntN, append(worldAddrs, netip.AddrFrom4([4]byte{10, 0, 0, byte(writer)})))
			var replaces []string
			if r.IntN(4) == 0 {
				replaces = []string{uid()}
			}
			d.UpsertPod(&p, replaces...)
			for _, u := range replaces {
				delete(w.pods, u)
			}
			delete(w.pods, p.UID)
			if p.State != nodecache.Absent {
				w.pods[p.UID] = &p
			}
		}
	}
	return w
}

func collectUntil(stop <-chan struct{}, d *nodecache.Directory, r *rand.Rand) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		key := pick(r.IntN, concurrentOwners())
		res, err := d.Begin(key)
		if err != nil {
			continue
		}
		switch r.IntN(4) {
		case 0:
			_ = d.Fail(res, "refused", time.Time{})
		case 1:
			_ = d.Abandon(res)
		default:
			_ = d.Commit(res, pick(r.IntN, worldInfos))
		}
		d.Subscribe().Close()
		d.Counts()
		d.Owners()
	}
}

// follower knows the directory from notifications alone.
type follower struct {
	cancel context.CancelFunc
	done   chan map[nodecache.OwnerKey]*nodecache.Owner
}

func follow(d *nodecache.Directory) *follower {
	ctx, cancel := context.WithCancel(context.Background())
	f := &follower{cancel, make(chan map[nodecache.OwnerKey]*nodecache.Owner)}
	s := d.Subscribe()
	go func() {
		heard := map[nodecache.OwnerKey]*nodecache.Owner{}
		for {
			keys, err := s.Next(ctx)
			if err != nil { // but something may be pending
				if keys, err = s.Next(ctx); err != nil {
					break
				}
			}
			for _, k := range keys {
				if o := d.Owner(k); o != nil {
					heard[k] = o
				} else {
					delete(heard, k)
				}
			}
		}
		s.Close()
		f.done <- heard
	}()
	return f
}

// stop lets the follower read what is pending and returns what it knows.
func (f *follower) stop() map[nodecache.OwnerKey]*nodecache.Owner {
	f.cancel()
	return <-f.done
}
