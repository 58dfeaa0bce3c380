package ads_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

func numbered(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("prod/pkg.S%05d", i)
	}
	return names
}

// everything subscribes to all types and takes the first answers.
func (s *stream) everything(cluster, listener, route string) {
	s.w.t.Helper()
	s.sub(cds)
	s.want(cds, cluster)
	s.sub(eds, cluster)
	s.want(eds, cluster)
	s.sub(lds)
	s.want(lds, listener)
	s.sub(rds, route)
	s.want(rds, route)
}

func TestAdditionsComeInOrder(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := openWorld(t, cluster("A", 1), cla("A", 1), listener("L", 1), route("R", 1))
		s := w.connect(client.Options{Delta: delta})
		s.everything("A", "L", "R")
		w.set(route("R", 2), listener("L", 2), cla("A", 2), cluster("A", 2))
		s.want(cds, "A")
		s.want(eds, "A")
		s.want(lds, "L")
		s.want(rds, "R")
		s.quiet()
	}
}

func TestRoutesWaitForClustersThatCannotBeSentYet(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := openWorld(t, cluster("A", 1), cla("A", 1), listener("L", 1), route("R", 1))
		s := w.connect(client.Options{Delta: delta, Reply: func(r client.Response) client.Reply {
			return client.Reply{Silent: r.Type == cds}
		}})
		s.everything("A", "L", "R") // the clusters stay unacknowledged
		w.set(cluster("A", 2), route("R", 2), listener("L", 2))
		w.set(cla("B", 1))
		s.sub(eds, "B") // its cluster is not waiting: it does not wait either
		s.want(eds, "B")
		if err := s.Ack(cds, ""); err != nil {
			t.Fatal(err)
		}
		s.want(cds, "A")
		s.want(eds, "A")
		s.want(lds, "L")
		s.want(rds, "R")
	}
}

func TestRemovedClusterLeavesAfterTheRouteThatNamedIt(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1), listener("L", 1), route("R", 1))
	s := w.delta()
	s.everything("A", "L", "R")
	w.server.Publish(xds.Update{
		Set:    []*xds.Resource{cluster("B", 1), cla("B", 1), route("R", 2)},
		Remove: []xds.ID{cluster("A", 1).ID, cla("A", 1).ID},
	})
	s.want(cds, "B")
	s.want(rds, "R")
	s.want(cds, "-A")
	s.want(eds, "-A")
	s.quiet()
}

func TestSotWRemovedClusterStaysInTheSetUntilTheRouteIsSent(t *testing.T) {
	w := openWorld(t, cluster("A", 1), listener("L", 1), route("R", 1))
	s := w.sotw()
	s.sub(cds)
	s.want(cds, "A")
	s.sub(rds, "R")
	s.want(rds, "R")
	w.server.Publish(xds.Update{
		Set:    []*xds.Resource{cluster("B", 1), route("R", 2)},
		Remove: []xds.ID{cluster("A", 1).ID},
	})
	s.want(cds, "A", "B")
	s.want(rds, "R")
	s.want(cds, "B")
	s.quiet()
}

// envoy #13009: a cluster that is sent again warms until its CLA comes again.
func TestCLAFollowsItsCluster(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := openWorld(t, cluster("A", 1), cla("A", 1), cluster("B", 1), cla("B", 1))
		s := w.connect(client.Options{Delta: delta})
		s.sub(cds, "A", "B")
		s.want(cds, "A", "B")
		s.sub(eds, "A", "B")
		s.want(eds, "A", "B")
		w.set(cluster("A", 2))
		if delta {
			s.want(cds, "A")
		} else {
			s.want(cds, "A", "B")
		}
		s.want(eds, "A")
		s.quiet()
	}
}

func TestLargeAnswersComeInChunks(t *testing.T) {
	filler, err := structpb.NewStruct(map[string]any{"filler": string(make([]byte, 300<<10))})
	if err != nil {
		t.Fatal(err)
	}
	w := openWorld(t)
	names := numbered(10)
	for _, n := range names {
		w.set(resource(cds, n, &clusterv3.Cluster{Name: n,
			Metadata: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"x": filler}}}))
	}
	s := w.delta()
	s.sub(cds)
	got := map[string]bool{}
	for len(got) < len(names) {
		r := s.next()
		size := 0
		for _, res := range r.Resources {
			if got[res.Name] {
				t.Fatalf("%s twice", res.Name)
			}
			got[res.Name] = true
			size += proto.Size(&discovery.Resource{Name: res.Name, Version: res.Version, Resource: res.Body})
		}
		if size > 1<<20 {
			t.Fatalf("a response of %d bytes", size)
		}
	}
	s.quiet()
}

func TestLargeSotWAnswersComeInChunksWhereTheProtocolLetsThem(t *testing.T) {
	w := openWorld(t)
	names := numbered(10)
	for _, n := range names {
		w.set(resource(rds, n, &routev3.RouteConfiguration{Name: n, InternalOnlyHeaders: []string{strings.Repeat("x", 300<<10)}}))
	}
	s := w.sotw()
	s.sub(rds, names...)
	var got []string
	for len(got) < len(names) {
		r := s.next()
		size := 0
		for _, res := range r.Resources {
			size += len(res.Body.GetValue())
		}
		if size > 1<<20 {
			t.Fatalf("a response of %d bytes", size)
		}
		got = append(got, r.Names()...)
	}
	slices.Sort(got)
	if !slices.Equal(got, names) {
		t.Fatalf("got %q", got)
	}
	s.quiet()
}

// A CLA that comes late is needed even if the client brought an equal one,
// when its cluster was sent on this stream (envoy #22418).
func TestLateCLAOfAClusterThatWasSentIsSent(t *testing.T) {
	w := openWorld(t, cluster("A", 2))
	w.evidence(xds.Shared, xds.Failed)
	s := w.connect(client.Options{Delta: true, Memory: having("", cluster("A", 1), cla("A", 1))})
	s.sub(cds)
	s.want(cds, "A")
	s.sub(eds, "A")
	s.quiet()
	w.set(cla("A", 1))
	s.want(eds, "A")
	s.quiet()
}

func TestVersionsFollowFromContentAlone(t *testing.T) {
	answer := func(delta bool, publish func(*world)) string {
		w := openWorld(t)
		publish(w)
		s := w.connect(client.Options{Delta: delta})
		s.sub(cds)
		return s.want(cds, "A", "B").Version
	}
	for _, delta := range []bool{true, false} {
		one := answer(delta, func(w *world) { w.set(cluster("A", 1), cluster("B", 1)) })
		two := answer(delta, func(w *world) {
			w.set(cluster("B", 7), cluster("C", 1))
			w.remove(cluster("C", 1))
			w.set(cluster("B", 1))
			w.set(cluster("A", 1))
		})
		other := answer(delta, func(w *world) { w.set(cluster("A", 1), cluster("B", 2)) })
		if one != two || one == other || one == "" {
			t.Fatalf("delta %v: %q, %q, other content %q", delta, one, two, other)
		}
	}
}

func TestNamesThatComeAndGoForEverTakeNoMemory(t *testing.T) {
	w := openWorld(t, cluster("stays", 1))
	s := w.delta()
	s.sub(cds, "stays", "c-00999", "never")
	s.want(cds, "stays", "-c-00999", "-never")
	for i := range 1000 {
		r := cluster(fmt.Sprintf("c-%05d", i), 1)
		w.set(r)
		if i == 999 {
			s.want(cds, "c-00999")
		}
		w.remove(r)
	}
	s.want(cds, "-c-00999")
	for i := range 1000 {
		r := cluster(fmt.Sprintf("e-%05d", i), 1)
		w.set(r)
		w.remove(r)
	}
	// Ids are given again by now; the names must still be told apart.
	for i := range 1000 {
		w.set(cluster(fmt.Sprintf("d-%05d", i), 1))
	}
	s.quiet()
	w.set(cluster("never", 1))
	s.want(cds, "never")
	w.set(cluster("c-00999", 2))
	s.want(cds, "c-00999")
	w.set(cluster("stays", 2))
	s.want(cds, "stays")
}
