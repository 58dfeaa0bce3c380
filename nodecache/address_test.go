package nodecache_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

const shared = "192.0.2.9"

// permutations yields every order of the indices below n.
func permutations(n int) [][]int {
	if n == 0 {
		return [][]int{nil}
	}
	var all [][]int
	for _, short := range permutations(n - 1) {
		for i := 0; i <= len(short); i++ {
			all = append(all, slices.Insert(slices.Clone(short), i, n-1))
		}
	}
	return all
}

func TestLivePodHasSharedAddressInEveryOrderOfArrival(t *testing.T) {
	var owners []nodecache.OwnerKey
	for i := range 3 {
		owners = append(owners, ownerKey(fmt.Sprint(i)))
	}
	tests := []struct {
		name string
		pods []*nodecache.Pod // the first has the address
		at   bool             // it also answers to the address
	}{
		{"serving before draining ghosts", []*nodecache.Pod{
			pod("a", shared, owned(owners[0]), created(1)),
			pod("b", shared, owned(owners[1]), created(2), in(nodecache.Draining)),
			pod("c", shared, owned(owners[2]), created(3), in(nodecache.Draining)),
		}, true},
		{"of serving ones the last created", []*nodecache.Pod{
			pod("a", shared, owned(owners[0]), created(3)),
			pod("b", shared, owned(owners[1]), created(1)),
			pod("c", shared, owned(owners[2]), created(2)),
		}, true},
		{"created at one time, the last UID", []*nodecache.Pod{
			pod("c", shared, owned(owners[0]), created(1)),
			pod("b", shared, owned(owners[1]), created(1)),
			pod("a", shared, owned(owners[2]), created(1)),
		}, true},
		{"all draining", []*nodecache.Pod{
			pod("a", shared, owned(owners[0]), created(2), in(nodecache.Draining)),
			pod("b", shared, owned(owners[1]), created(1), in(nodecache.Draining)),
		}, false},
		{"hostNetwork pods claim nothing", []*nodecache.Pod{
			pod("a", shared, owned(owners[0]), created(1)),
			pod("b", shared, owned(owners[1]), created(2), onHost),
		}, true},
		{"in one owner", []*nodecache.Pod{
			pod("a", shared, owned(owners[0]), created(2)),
			pod("b", shared, owned(owners[0]), created(1)),
		}, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for _, order := range permutations(len(test.pods)) {
				d := nodecache.New(nodecache.Options{})
				s := subscribe(t, d)
				heard := map[nodecache.OwnerKey]*nodecache.Owner{}
				for _, i := range order {
					d.UpsertPod(test.pods[i])
					for _, k := range next(t, s) {
						heard[k] = d.Owner(k)
					}
				}
				for i, p := range test.pods {
					for _, m := range heard[p.Owner].Pods {
						if m.UID == p.UID && m.Shadowed != (i > 0 && !p.HostNetwork) {
							t.Errorf("order %v: pod %s has shadowed %v by what was told", order, p.UID, m.Shadowed)
						}
					}
				}
				if got := d.PodAt(test.pods[0].Addr); (got == test.pods[0]) != test.at {
					t.Errorf("order %v: pod at the address %v", order, got)
				}
				for _, i := range order {
					d.RemovePod(test.pods[i].UID)
				}
				s.Close()
				if left := d.Sizes(); len(left) > 0 {
					t.Errorf("order %v: left behind %v", order, left)
				}
			}
		})
	}
}

// Every order of the events of two pods, each pod's own kept in order, ends
// with the same directory (check 1 of the acceptance list; public report:
// istio/istio#20676, where a pod moves and another takes its old address).
func TestAddressReuseEndsTheSameInEveryOrderOfEvents(t *testing.T) {
	moved, taken := "192.0.2.2", "192.0.2.1"
	x1 := pod("x", taken, owned(ownerKey("x")), created(1))
	x2 := pod("x", moved, owned(ownerKey("x")), created(1))
	y := pod("y", taken, owned(ownerKey("y")), created(2))
	z := pod("z", moved, owned(ownerKey("z")), created(0))
	events := []func(*nodecache.Directory){
		func(d *nodecache.Directory) { d.UpsertPod(x1) },
		func(d *nodecache.Directory) { d.UpsertPod(x2) },
		func(d *nodecache.Directory) { d.UpsertPod(y) },
		func(d *nodecache.Directory) { d.UpsertPod(z) },
		func(d *nodecache.Directory) { d.RemovePod("z") },
	}
	for _, order := range permutations(len(events)) {
		if slices.Index(order, 0) > slices.Index(order, 1) || slices.Index(order, 3) > slices.Index(order, 4) {
			continue
		}
		d := nodecache.New(nodecache.Options{})
		for _, i := range order {
			events[i](d)
		}
		if d.PodAt(x1.Addr) != y || d.PodAt(x2.Addr) != x2 {
			t.Errorf("order %v: %s has %v, %s has %v", order, taken, d.PodAt(x1.Addr), moved, d.PodAt(x2.Addr))
		}
		for _, o := range d.Owners() {
			if o.Pods[0].Shadowed {
				t.Errorf("order %v: %s is shadowed", order, o.Pods[0].UID)
			}
		}
		if n := d.Sizes()["claims"]; n != 2 {
			t.Errorf("order %v: %d claims, want 2", order, n)
		}
	}
}

// A pod that was serving is deleted while another has its address already.
func TestAddressPassesToSuccessorWhenHolderDrains(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	a, b := ownerKey("a"), ownerKey("b")
	d.UpsertPod(pod("a", shared, owned(a), created(2)))
	d.UpsertPod(pod("b", shared, owned(b), created(1)))
	s := subscribe(t, d)
	next(t, s)
	d.UpsertPod(pod("a", shared, owned(a), created(2), in(nodecache.Draining)))
	if keys := next(t, s); !slices.Contains(keys, b) {
		t.Errorf("notified of %v, but b has won the address", keys)
	}
	if !d.Owner(a).Pods[0].Shadowed || d.Owner(b).Pods[0].Shadowed {
		t.Error("the draining pod still has the address")
	}
}

func TestShadowedPodGetsNoCalls(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("ghost", shared, in(nodecache.Draining), declaring(1, "pkg.A")))
	if ts := d.Owner(key).Targets("pkg.A"); len(ts) != 1 {
		t.Errorf("targets before the address is used again: %v", ts)
	}
	d.UpsertPod(pod("new", shared, owned(ownerKey("other"))))
	if ts := d.Owner(key).Targets("pkg.A"); len(ts) != 0 {
		t.Errorf("targets %v, want none", ts)
	}
}

func TestHostNetworkPodsAreNeverFoundByAddress(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	h := pod("h", "192.0.2.1", onHost)
	d.UpsertPod(h)
	d.UpsertPod(pod("i", "192.0.2.1", onHost))
	moved := pod("h", "192.0.2.2", onHost)
	d.UpsertPod(moved)
	if d.PodAt(h.Addr) != nil || d.PodAt(moved.Addr) != nil || d.Sizes()["claims"] != 0 {
		t.Error("a node's address belongs to a pod")
	}
	for _, m := range d.Owner(key).Pods {
		if m.Shadowed {
			t.Errorf("%s is shadowed: host pods share their address", m.UID)
		}
	}
}

func TestDualStackPodIsFoundByEveryAddressInEveryForm(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	p := pod("a", "192.0.2.1")
	p.More = []netip.Addr{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("::ffff:192.0.2.1")}
	d.UpsertPod(p)
	for _, text := range []string{"192.0.2.1", "::ffff:192.0.2.1", "2001:db8::1"} {
		if d.PodAt(netip.MustParseAddr(text)) != p {
			t.Errorf("no pod at %s", text)
		}
	}
	d.RemovePod("a")
	if left := d.Sizes(); len(left) > 0 {
		t.Errorf("left behind %v", left)
	}
}
