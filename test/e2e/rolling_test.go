package e2e_test

import (
	"fmt"
	"sync"
	"testing"
)

// Pods are replaced one after another as a kubelet does it: the server ends
// its own way in the moment in which its pod begins to terminate, and so before
// any client can have heard of it.
func TestRollingChangesUnderLoadLoseNoCall(t *testing.T) {
	const rounds = 200
	eachFront(t, "shop.v1.Cart", func(t *testing.T, s *site, start func() front) {
		w := newWorld(t)
		w.serve("cart-1-stays", []string{"shop.v1.Cart"})
		old, server := w.serve("cart-1-0", []string{"shop.v1.Cart"})
		w.write()
		a := s.start(t, "--source", w.source()).ready()
		f := start()
		stream := onPod(t, f.conn, "shop.v1.Cart", "cart-1-stays")
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-stays", "cart-1-0")
		answered, stop := load(t, f.conn, "shop.v1.Cart")
		var ending sync.WaitGroup
		for i := range rounds {
			next, successor := w.serve(fmt.Sprintf("cart-1-%d", i+1), []string{"shop.v1.Cart"})
			terminate(old)
			w.write()
			ending.Go(server.GracefulStop)
			proceeds(t, answered)
			stays(t, stream, "cart-1-stays")
			w.remove(old)
			w.write()
			old, server = next, successor
		}
		reaches(t, f.conn, "shop.v1.Cart", "cart-1-stays", fmt.Sprintf("cart-1-%d", rounds))
		proceeds(t, answered)
		stop()
		ending.Wait()
		a.connected("prod/web", "cds", "eds")
		if n := a.metric(`fingerpost_collects_total{result="known"}`); n != "1" {
			t.Errorf("%s collects of one owner", n)
		}
	})
}
