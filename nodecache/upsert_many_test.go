package nodecache_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Pods that move between few owners, end, and take addresses from one another.
func TestManyPodsAtOnceAreAsOneAfterAnother(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		one, many := nodecache.New(nodecache.Options{}), nodecache.New(nodecache.Options{})
		toldOne, toldMany := subscribe(t, one), subscribe(t, many)
		for range 6 {
			var pods []*nodecache.Pod
			for range r.IntN(12) {
				uid := fmt.Sprint(r.IntN(8))
				pods = append(pods, pod(uid, addr(r.IntN(6)), owned(ownerKey(fmt.Sprint("o", r.IntN(3)))), in(nodecache.PodState(r.IntN(3))), created(r.IntN(3))))
			}
			for _, p := range pods {
				one.UpsertPod(p)
			}
			many.UpsertPods(pods)
			views := func(d *nodecache.Directory) []nodecache.Owner {
				var views []nodecache.Owner
				for _, o := range d.Owners() {
					view := *o
					view.Generation = 0 // counts those that came and went as well
					views = append(views, view)
				}
				return views
			}
			if a, b := views(one), views(many); !reflect.DeepEqual(a, b) {
				t.Fatalf("seed %d: %+v, want %+v", seed, b, a)
			}
			if a, b := one.Counts(), many.Counts(); !reflect.DeepEqual(a, b) {
				t.Fatalf("seed %d: %+v, want %+v", seed, b, a)
			}
			a, b := toldOne.Poll(), toldMany.Poll()
			slices.SortFunc(a, compareKeys)
			slices.SortFunc(b, compareKeys)
			if !slices.Equal(a, b) {
				t.Fatalf("seed %d: told of %v, want %v", seed, b, a)
			}
		}
	}
}

func compareKeys(a, b nodecache.OwnerKey) int {
	return slices.Compare([]string{a.UID, a.Revision}, []string{b.UID, b.Revision})
}
