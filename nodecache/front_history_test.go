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
		s := subscribeFronts(t, d)
		fronts, sls, pods := map[string]*nodecache.Front{}, map[string]*nodecache.Slice{}, map[string]*nodecache.Pod{}
		routes := map[string]*nodecache.Route{}
		seen, seenFronts := map[nodecache.OwnerKey]string{}, map[nodecache.Name]string{}
		for range 60 {
			name, uid := fmt.Sprint("s", rnd.IntN(3)), fmt.Sprint("p", rnd.IntN(4))
			switch rnd.IntN(9) {
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
			case 7:
				r := route(fmt.Sprint("r", rnd.IntN(3)), 1, name, fmt.Sprint("s", rnd.IntN(3)))
				r.Kind = nodecache.RouteKind(rnd.IntN(2))
				routes[r.UID] = r
				must(t, d.UpsertRoute(r))
			case 8:
				r := fmt.Sprint("r", rnd.IntN(3))
				delete(routes, r)
				d.RemoveRoute(r)
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
				seen[key] = fmt.Sprint(behind(d, key), paths(d, key))
			}
			for _, name := range s.PollFronts() {
				seenFronts[name] = before(d, name)
			}
			for i := range 3 {
				if name := named(fmt.Sprint("s", i)); before(d, name) != seenFronts[name] && seenFronts[name]+before(d, name) != "[]" {
					t.Fatalf("seed %d: %s is %q, and was last told %q", seed, name, before(d, name), seenFronts[name])
				}
			}
			for _, k := range []nodecache.OwnerKey{ownerKey("o0"), ownerKey("o1")} {
				if got := fmt.Sprint(behind(d, k), paths(d, k)); behind(d, k) != "gone" && got != seen[k] {
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
		for _, r := range routes {
			must(t, end.UpsertRoute(r))
		}
		for i := range 3 {
			if name := named(fmt.Sprint("s", i)); before(d, name) != before(end, name) {
				t.Fatalf("seed %d: %s is %q, want %q", seed, name, before(d, name), before(end, name))
			}
		}
		for uid := range pods {
			if got, want := stands(d, uid), stands(end, uid); got != want {
				t.Fatalf("seed %d: %s stands behind %q, want %q", seed, uid, got, want)
			}
		}
		for uid := range pods {
			d.RemovePod(uid)
		}
		for uid := range routes {
			d.RemoveRoute(uid)
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
		out = append(out, fmt.Sprint(st.Front, st.Created.Minute(), st.Ports, st.Hints))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// before says what is seen of a Service: itself, its pods, what is known of
// them, and the routes that have it as a parent or a backend.
func before(d *nodecache.Directory, name nodecache.Name) string {
	var out []string
	if v := d.Front(name); v != nil {
		out = append(out, fmt.Sprint(v.Front, v.Created.Minute()))
		for _, m := range v.Members() {
			out = append(out, m.Pod, fmt.Sprint(m.Ports))
			if p := d.Pod(m.Pod); p != nil {
				out = append(out, p.Addr.String(), d.Owner(p.Owner).Knowledge.String())
			}
		}
	}
	for _, r := range slices.Concat(d.RoutesOf(name), d.RoutesTo(name)) {
		out = append(out, fmt.Sprint(r.UID, r.Kind, r.Rules))
	}
	return fmt.Sprint(out)
}
