package nodecache_test

import (
	"math/rand/v2"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestAskableIsWhatTheViewSays(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)).IntN
	d := nodecache.New(nodecache.Options{})
	yes := 0
	for range 5000 {
		p := randomPod(random)
		p.UID = pick(random, worldUIDs)
		d.UpsertPod(&p)
		for _, node := range []string{"", "n1", "n2"} {
			for _, key := range worldOwners {
				o := d.Owner(key)
				there, may := d.Askable(key, node)
				if has := o != nil && len(o.Pods) > 0; there != has || may != (has && o.WhyNotAsked(node) == "") {
					t.Fatalf("%s on %q: there %t, may %t, view %+v", key, node, there, may, o)
				}
				if may {
					yes++
				}
			}
		}
	}
	if yes == 0 {
		t.Error("nothing was askable")
	}
}
