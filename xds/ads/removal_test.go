package ads_test

import (
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// graceWorld is an open world with another grace.
func graceWorld(t *testing.T, grace time.Duration, resources ...*xds.Resource) *world {
	w := newWorld(t, ads.Options{Grace: grace})
	w.server.OpenGate()
	w.set(resources...)
	return w
}

func silentOn(t xds.Type) func(client.Response) client.Reply {
	return func(r client.Response) client.Reply { return client.Reply{Silent: r.Type == t} }
}

func TestRemovedClusterStaysUntilTheRouteWithoutItIsAccepted(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := graceWorld(t, time.Hour, cluster("A", 1), cla("A", 1), cluster("B", 1), cla("B", 1), route("R", 1))
		s := w.connect(client.Options{Delta: delta, Reply: silentOn(rds)})
		s.sub(cds)
		s.want(cds, "A", "B")
		s.sub(eds, "A", "B")
		s.want(eds, "A", "B")
		s.sub(rds, "R")
		s.want(rds, "R")
		if err := s.Ack(rds, ""); err != nil {
			t.Fatal(err)
		}
		w.server.Publish(xds.Update{Set: []*xds.Resource{route("R", 2)}, Remove: []xds.ID{cluster("A", 1).ID, cla("A", 1).ID}})
		s.want(rds, "R")
		// Endpoints go on meanwhile; the cluster does not leave before the ACK.
		for rev := 2; rev < 10; rev++ {
			w.set(cla("B", rev))
			s.want(eds, "B")
		}
		if err := s.Ack(rds, ""); err != nil {
			t.Fatal(err)
		}
		if delta {
			s.want(cds, "-A")
			s.want(eds, "-A")
		} else {
			s.want(cds, "B")
		}
	}
}

func TestRemovedClusterLeavesAfterTheGraceThoughTheRouteIsNotAccepted(t *testing.T) {
	for name, reply := range map[string]client.Reply{"silent": {Silent: true}, "refused": {Nack: "no"}} {
		t.Run(name, func(t *testing.T) {
			w := graceWorld(t, 50*time.Millisecond, cluster("A", 1), cluster("B", 1), route("R", 1))
			first := true
			s := w.connect(client.Options{Delta: true, Reply: func(r client.Response) client.Reply {
				if r.Type != rds || first {
					first = first && r.Type != rds
					return client.Reply{}
				}
				return reply
			}})
			s.sub(cds)
			s.want(cds, "A", "B")
			s.sub(rds, "R")
			s.want(rds, "R")
			w.server.Publish(xds.Update{Set: []*xds.Resource{route("R", 2)}, Remove: []xds.ID{cluster("A", 1).ID}})
			s.want(rds, "R")
			s.want(cds, "-A")
		})
	}
}

// Envoy names a CLA only once it has its cluster: a route that needs both comes
// after both.
func TestRouteWaitsForTheCLAThatIsAskedForAfterItsCluster(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := graceWorld(t, time.Hour, cluster("A", 1), cla("A", 1), listener("L", 1), route("R", 1))
		s := w.connect(client.Options{Delta: delta, Reply: silentOn(cds)})
		s.everything("A", "L", "R")
		if err := s.Ack(cds, ""); err != nil {
			t.Fatal(err)
		}
		w.set(cluster("B", 1), cla("B", 1), listener("L", 2), route("R", 2))
		if delta {
			s.want(cds, "B")
		} else {
			s.want(cds, "A", "B")
		}
		w.set(cla("A", 2)) // what waits does not hold up endpoints
		s.want(eds, "A")
		s.sub(eds, "B")
		s.want(eds, "B")
		s.want(lds, "L")
		s.want(rds, "R")
	}
}

func TestRouteWaitsNotForEverForACLAThatNobodyAsksFor(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := graceWorld(t, 50*time.Millisecond, cluster("A", 1), cla("A", 1), route("R", 1))
		s := w.connect(client.Options{Delta: delta})
		s.sub(cds)
		s.sub(rds, "R")
		s.want(cds, "A")
		s.want(rds, "R")
		// Nor while clusters keep coming.
		w.set(route("R", 2))
		for rev := 2; ; rev++ {
			w.set(cluster("A", rev))
			if r := s.next(); r.Type == rds {
				break
			}
		}
	}
}

// A client that comes back has routes that are older than what is known here:
// the cluster that they name stays until the new routes are accepted, in
// whatever moment its requests arrive.
func TestRemovalAfterReconnectWaitsForTheOtherTypesFirstRequests(t *testing.T) {
	w := graceWorld(t, time.Hour, cluster("B", 1), cla("B", 1), listener("L", 1), route("R", 2))
	s := w.connect(client.Options{Delta: true, Memory: having("", cluster("A", 1), cla("A", 1), listener("L", 1), route("R", 1)), Reply: silentOn(rds)})
	s.sub(cds)
	w.until("the request has come", func() bool { return len(w.server.Clients()) == 1 })
	s.sub(eds, "A")
	s.sub(lds)
	s.sub(rds, "R")
	s.want(cds, "B")
	s.sub(eds, "B")
	got := []string{}
	for range 3 {
		r := s.next()
		if len(r.Removed) > 0 && r.Type == cds {
			t.Fatalf("removed %q before the route was accepted", r.Removed)
		}
		got = append(got, r.Type.String())
		if r.Type == rds {
			break
		}
	}
	if got[len(got)-1] != "rds" {
		t.Fatalf("no route: %q", got)
	}
	if err := s.Ack(rds, ""); err != nil {
		t.Fatal(err)
	}
	for {
		if r := s.next(); r.Type == cds {
			if len(r.Removed) != 1 || r.Removed[0] != "A" {
				t.Fatalf("got %q and %q", r.Names(), r.Removed)
			}
			return
		}
	}
}

func TestRemovalAfterReconnectOfAClientThatAsksForClustersOnlyIsNotLost(t *testing.T) {
	w := graceWorld(t, 20*time.Millisecond, cluster("B", 1))
	s := w.connect(client.Options{Delta: true, Memory: having("", cluster("A", 1))})
	if err := s.Send(cds, &discovery.DeltaDiscoveryRequest{InitialResourceVersions: map[string]string{"A": "1"}}); err != nil {
		t.Fatal(err)
	}
	s.want(cds, "B", "-A")
}
