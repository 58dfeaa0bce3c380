package nodecache_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

// However things came about, the directory says what one says that was told of
// the end alone; and a subscriber that reads what it is told of knows that.
func TestHistoryOfServicesEndsAsItsEndAlone(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		d := nodecache.New(nodecache.Options{})
		s := subscribe(t, d)
		fronts, sls, pods := map[string]*nodecache.Front{}, map[string]*nodecache.Slice{}, map[string]*nodecache.Pod{}
		seen := map[nodecache.OwnerKey]string{}
		for range 60 {
			name, uid := fmt.Sprint("s", rnd.IntN(3)), fmt.Sprint("p", rnd.IntN(4))
			switch rnd.IntN(7) {
			case 0:
				fronts[name] = front(name, rnd.IntN(3))
				d.UpsertFront(fronts[name])
			case 1:
				delete(fronts, name)
				d.RemoveFront(nodecache.Name{Namespace: "prod", Name: name})
			case 2, 3, 4:
				var members []string
				for i := range 4 {
					if rnd.IntN(2) == 0 {
						members = append(members, fmt.Sprint("p", i))
					}
				}
				sl := at(slice(fmt.Sprint("slice", rnd.IntN(4)), name, members...), uint16(1000+rnd.IntN(2)))
				sls[sl.Name] = sl
				d.UpsertSlice(sl)
			case 5:
				p := pod(uid, addr(1+rnd.IntN(250)), owned(ownerKey(fmt.Sprint("o", rnd.IntN(2)))))
				pods[uid] = p
				d.UpsertPod(p)
			case 6:
				for n := range sls {
					delete(sls, n)
					d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: n})
					break
				}
			}
			for _, key := range s.Poll() {
				seen[key] = behind(d, key)
			}
			for _, k := range []nodecache.OwnerKey{ownerKey("o0"), ownerKey("o1")} {
				if got := behind(d, k); got != "gone" && got != seen[k] {
					t.Fatalf("seed %d: %s stands behind %q, and was last told %q", seed, k, got, seen[k])
				}
			}
		}
		end := nodecache.New(nodecache.Options{})
		for _, p := range pods {
			end.UpsertPod(p)
		}
		for _, f := range fronts {
			end.UpsertFront(f)
		}
		for _, sl := range sls {
			end.UpsertSlice(sl)
		}
		for uid := range pods {
			if got, want := stands(d, uid), stands(end, uid); got != want {
				t.Fatalf("seed %d: %s stands behind %q, want %q", seed, uid, got, want)
			}
		}
		for uid := range pods {
			d.RemovePod(uid)
		}
		for n := range sls {
			d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: n})
		}
		for n := range fronts {
			d.RemoveFront(nodecache.Name{Namespace: "prod", Name: n})
		}
		s.Close()
		if left := d.Sizes(); len(left) != 0 {
			t.Fatalf("seed %d: left over %v", seed, left)
		}
	}
}

func stands(d *nodecache.Directory, uid string) string {
	m, _ := d.Member(uid)
	var out []string
	for _, st := range m.Behind {
		out = append(out, fmt.Sprint(st.Front, st.Created.Minute(), st.Ports))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}
