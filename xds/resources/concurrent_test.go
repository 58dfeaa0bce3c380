package resources_test

import (
	"fmt"
	"math/rand"
	"sync"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// Readers of every kind run beside changes; the race detector judges.
func TestReadersRunBesideChanges(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	c, err := resources.New(resources.Options{})
	if err != nil {
		t.Fatal(err)
	}
	sub := d.Subscribe()
	defer sub.Close()
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				c.Services()
				c.Lookup("prod", "pkg.A")
				for _, name := range c.Names("prod") {
					c.Providers("prod", name)
				}
				if _, err := c.Namespace("prod", resources.ShapeOne); err != nil {
					t.Error(err)
				}
			}
		})
	}
	rng := rand.New(rand.NewSource(1))
	for range 500 {
		p := pod(fmt.Sprintf("10.0.0.%d", 1+rng.Intn(9)), nodecache.Serving)
		p.Owner = nodecache.OwnerKey{UID: fmt.Sprint(rng.Intn(3))}
		p.Workload = nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: p.Owner.UID}
		p.Declared = []nodecache.Declared{{Port: 1, Services: []string{"pkg.A", "pkg.B"}[:1+rng.Intn(2)]}}
		if rng.Intn(3) == 0 {
			d.RemovePod(p.UID)
		} else {
			d.UpsertPod(p)
		}
		keys := []nodecache.OwnerKey{{UID: "0"}, {UID: "1"}, {UID: "2"}}
		c.Apply(d, keys)
	}
	close(stop)
	readers.Wait()
}
