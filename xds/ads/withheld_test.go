package ads_test

import (
	"strings"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// A client that refused the new routes still has the old ones, and calls what
// they name.
func TestRemovedClusterStaysWhileTheRouteWithoutItIsRefused(t *testing.T) {
	w := graceWorld(t, time.Hour, cluster("A", 1), cluster("B", 1), route("R", 1))
	p := refusing(true, route("R", 2))
	s := w.connect(client.Options{Delta: true, Reply: p.reply})
	s.sub(cds)
	s.want(cds, "A", "B")
	s.sub(rds, "R")
	s.want(rds, "R")
	w.server.Publish(xds.Update{Set: []*xds.Resource{route("R", 2)}, Remove: []xds.ID{cluster("A", 1).ID}})
	s.want(rds, "R")
	w.until("refused", func() bool { return w.types(rds).Nack != nil })
	w.set(cluster("B", 2))
	s.want(cds, "B")
	w.set(route("R", 3))
	s.want(rds, "R")
	s.want(cds, "-A")
}

func TestWildcardThatIsAskedForAgainDoesNotBringWhatIsWithheld(t *testing.T) {
	w := trialWorld(t, time.Hour, cluster("A", 1), cluster("B", 1))
	p := refusing(true, cluster("A", 2))
	s := w.connect(client.Options{Delta: true, Reply: p.reply})
	s.sub(cds)
	s.want(cds, "A", "B")
	w.set(cluster("A", 2))
	s.want(cds, "A")
	w.until("A is withheld", func() bool { return len(w.types(cds).Withheld) == 1 })
	if err := s.Send(cds, &discovery.DeltaDiscoveryRequest{ResourceNamesSubscribe: []string{"*"}}); err != nil {
		t.Fatal(err)
	}
	s.want(cds, "B")
	// By its name it is asked for on purpose.
	s.sub(cds, "A")
	s.want(cds, "A")
	w.until("refused again", func() bool { return p.count() == 2 && len(w.types(cds).Withheld) == 1 })
}

// A cluster that is sent again warms until its CLA is answered, be it by a
// refusal.
func TestRefusedCLAComesAgainWithItsCluster(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := trialWorld(t, time.Hour, cluster("A", 1), cla("A", 1))
		p := refusing(true, cla("A", 1))
		s := w.connect(client.Options{Delta: delta, Reply: p.reply})
		s.sub(cds, "A")
		s.want(cds, "A")
		s.sub(eds, "A")
		s.want(eds, "A")
		w.until("the CLA is withheld", func() bool { return len(w.types(eds).Withheld) == 1 })
		p.set()
		w.set(cluster("A", 2))
		s.want(cds, "A")
		s.want(eds, "A")
		w.until("it is accepted", func() bool { st := w.types(eds); return st.Nack == nil && st.Withheld == nil })
	}
}

// cilium#5649: the reason showed only as a timeout.
func TestErrorTextIsKeptAsItIs(t *testing.T) {
	text := "Error adding/updating cluster(s) A: „ü“ \t\"quoted\"\nsecond line"
	w := trialWorld(t, time.Hour, cluster("A", 1))
	s := w.connect(client.Options{Delta: true, Reply: func(client.Response) client.Reply { return client.Reply{Nack: text} }})
	s.sub(cds)
	s.want(cds, "A")
	w.until("kept", func() bool { st := w.types(cds); return st.Nack != nil && st.Nack.Error == text })
	if strings.Contains(w.types(cds).Withheld[0].Error, "(cut)") {
		t.Fatal("cut")
	}
}
