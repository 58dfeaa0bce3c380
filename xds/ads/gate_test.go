package ads_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// having is the memory of a client that holds the resources.
func having(version string, rs ...*xds.Resource) client.Memory {
	var m client.Memory
	for _, r := range rs {
		if m.Resources[r.Type] == nil {
			m.Resources[r.Type] = map[string]client.Resource{}
		}
		m.Resources[r.Type][r.Name] = client.Resource{Name: r.Name, Version: r.Version, Body: r.Body}
		m.Versions[r.Type] = version
	}
	return m
}

func TestClosedGateHoldsRequestsUntilItOpens(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := newWorld(t, ads.Options{})
		w.set(cluster("A", 1))
		s := w.connect(client.Options{Delta: delta})
		s.sub(cds)
		w.until("the request has come", func() bool { return len(w.server.Clients()) == 1 })
		w.set(cluster("B", 1))
		select {
		case r := <-s.Responses():
			t.Fatalf("answered with a closed gate: %v", r.Names())
		default:
		}
		if sent := w.server.Clients()[0].Types["cds"].Sent; sent != "" {
			t.Fatalf("sent %q with a closed gate", sent)
		}
		w.server.OpenGate()
		s.want(cds, "A", "B")
	}
}

// What a client brings is compared with what the tables have when it is
// answered, not when it asked: before the gate opens they are being made.
func TestTableThatComesToWhatTheClientHoldsSendsNothing(t *testing.T) {
	w := newWorld(t, ads.Options{})
	w.set(route("A", 1), route("B", 1))
	s := w.connect(client.Options{Delta: true, Memory: having("v", route("A", 3), route("B", 3), route("C", 3))})
	s.sub(rds, "A", "B", "C")
	w.until("the request has come", func() bool { return len(w.server.Clients()) == 1 })
	w.set(route("A", 2), route("B", 3), route("C", 2))
	w.set(route("A", 3), route("B", 2), route("C", 3))
	w.server.OpenGate()
	s.want(rds, "B")
	s.quiet()
	w.set(route("B", 3)) // sent meanwhile, what was brought is past
	s.want(rds, "B")
}

func TestClosedGateEndsStreamsAfterTheHoldLimit(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := newWorld(t, ads.Options{HoldLimit: 20 * time.Millisecond})
		s := w.connect(client.Options{Delta: delta})
		s.sub(cds)
		err := s.ended()
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the agent is still starting") {
			t.Fatalf("got %v", err)
		}
	}
}

func TestUnknownScopeIsAnswered(t *testing.T) {
	w := newWorld(t, ads.Options{View: func(in ads.Introduction) (ads.View, error) {
		n := in.Node
		if n.GetId() == "" {
			return ads.View{}, errors.New("node.id is empty; set it to <namespace>/<pod>")
		}
		return ads.View{Scopes: []xds.Scope{"ns/new"}}, nil
	}})
	w.server.OpenGate()
	s := w.delta()
	s.sub(cds)
	s.want(cds)
	bad := w.connect(client.Options{Delta: true, Node: &corev3.Node{}})
	bad.sub(cds)
	if err := bad.ended(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "node.id is empty") {
		t.Fatalf("got %v", err)
	}
}

func TestDeltaReconnectWithCurrentVersionsGetsNoBody(t *testing.T) {
	w := openWorld(t)
	var have []*xds.Resource
	var names []string
	for _, n := range numbered(10_000) {
		have = append(have, cluster(n, 1), cla(n, 1))
		names = append(names, n)
	}
	w.set(have...)
	s := w.connect(client.Options{Delta: true, Memory: having("", have...)})
	s.sub(cds)
	s.want(cds)
	s.sub(eds, names...)
	s.quiet()
	// It is told of as one that has what there is.
	if got := w.server.Clients()[0].Types["eds"]; got.Sent == "" || got.Acked != got.Sent {
		t.Errorf("sent %q, accepted %q", got.Sent, got.Acked)
	}
}

func TestDeltaReconnectGetsWhatDiffersAndWhatIsGone(t *testing.T) {
	w := openWorld(t, cluster("same", 1), cluster("new", 1), cluster("other", 2), cla("same", 1), cla("other", 2))
	s := w.connect(client.Options{Delta: true, Memory: having("",
		cluster("same", 1), cluster("other", 1), cluster("gone", 1), cla("same", 1), cla("other", 1), cla("gone", 1))})
	s.sub(cds)
	s.want(cds, "new", "other", "-gone")
	s.sub(eds, "same", "other", "gone")
	s.want(eds, "other", "-gone")
	s.quiet()
}

// envoy #22418: a CLA's version is reported although the cluster is new.
func TestDeltaReconnectGetsTheCLAOfAClusterThatIsSent(t *testing.T) {
	w := openWorld(t, cluster("A", 2), cla("A", 1), cluster("B", 1), cla("B", 1))
	s := w.connect(client.Options{Delta: true, Memory: having("", cluster("A", 1), cluster("B", 1), cla("A", 1), cla("B", 1))})
	s.sub(cds)
	s.want(cds, "A")
	s.sub(eds, "A", "B")
	s.want(eds, "A")
	s.quiet()
}

func TestNothingThatADeltaClientHoldsIsRemovedForWantOfEvidence(t *testing.T) {
	for _, ev := range []xds.Evidence{xds.Pending, xds.Failed} {
		w := newWorld(t, ads.Options{})
		w.evidence(xds.Shared, ev)
		w.server.OpenGate()
		w.set(cluster("known", 1))
		s := w.connect(client.Options{Delta: true, Memory: having("",
			cluster("known", 1), cluster("late", 1), cluster("changed", 1), cluster("gone", 1), cla("late", 1), cla("gone", 1))})
		s.sub(cds)
		s.want(cds)
		s.sub(eds, "late", "gone", "never")
		s.want(eds, "-never") // not held: answered at once
		s.quiet()
		w.set(cluster("late", 1), cla("late", 1)) // learned again, as it was
		s.quiet()
		w.set(cluster("changed", 2))
		s.want(cds, "changed")
		w.remove(cluster("late", 1)) // seen going
		s.want(cds, "-late")
		w.evidence(xds.Shared, xds.Complete)
		s.want(cds, "-gone")
		s.want(eds, "-gone")
		s.quiet()
	}
}

func TestWhatThisProcessRemovedIsRemovedFromWhoBringsIt(t *testing.T) {
	w := openWorld(t, cluster("A", 1))
	w.evidence(xds.Shared, xds.Failed)
	w.remove(cluster("A", 1))
	s := w.connect(client.Options{Delta: true, Memory: having("", cluster("A", 1), cluster("B", 1))})
	s.sub(cds)
	s.want(cds, "-A")
	s.quiet()
}

// waiting counts the clients that asked for the type and have no answer.
func (w *world) waiting(typ xds.Type) int {
	n := 0
	for _, c := range w.server.Clients() {
		if t, asked := c.Types[typ.String()]; asked && t.Sent == "" {
			n++
		}
	}
	return n
}

func TestSotWClientWithAVersionWaitsForEvidence(t *testing.T) {
	for _, typ := range []xds.Type{cds, eds, lds, rds} {
		w := newWorld(t, ads.Options{})
		w.evidence(xds.Shared, xds.Pending)
		w.server.OpenGate()
		w.set(of(typ, "A", 1))
		holder := w.connect(client.Options{Memory: having("v1", of(typ, "A", 1), of(typ, "B", 1))})
		holder.sub(typ, "A", "B")
		w.until("the holder has asked", func() bool { return w.waiting(typ) == 1 })
		fresh := w.sotw()
		fresh.sub(typ, "A", "B")
		fresh.want(typ, "A")
		if w.waiting(typ) != 1 {
			t.Fatalf("%s: the holder was answered without evidence", typ)
		}
		w.evidence(xds.Shared, xds.Failed)
		holder.want(typ, "A")
	}
}

func TestSotWClientIsAnsweredWhereNothingCanBeLacking(t *testing.T) {
	for _, typ := range []xds.Type{cds, eds, lds, rds} {
		w := newWorld(t, ads.Options{})
		w.evidence(xds.Shared, xds.Pending)
		w.server.OpenGate()
		w.set(of(typ, "A", 1))
		holder := w.connect(client.Options{Memory: having("v1", of(typ, "A", 1), of(typ, "B", 1))})
		holder.sub(typ, "A", "B")
		w.until("the holder has asked", func() bool { return w.waiting(typ) == 1 })
		w.set(of(typ, "B", 1))
		holder.want(typ, "A", "B")
	}
}

func TestSotWClientThatHoldsJustWhatThereIsNeedNotWait(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1))
	first := w.sotw()
	first.sub(cds)
	first.want(cds, "A")
	first.sub(eds, "A")
	first.want(eds, "A")
	w.evidence(xds.Shared, xds.Pending)
	same := w.connect(client.Options{Memory: first.Memory()})
	same.sub(cds)
	same.sub(eds, "A")
	same.want(eds, "A")
	same.quiet()
	// Equal clusters are no evidence for a CLA that nobody has.
	more := w.connect(client.Options{Memory: first.Memory()})
	more.sub(cds)
	more.sub(eds, "A", "B")
	w.until("the client has asked", func() bool { return w.waiting(eds) == 1 })
	w.evidence(xds.Shared, xds.Complete)
	more.want(eds, "A")
}

func TestSotWClientThatWaitsTooLongIsClosed(t *testing.T) {
	w := newWorld(t, ads.Options{HoldLimit: 20 * time.Millisecond})
	w.evidence(xds.Shared, xds.Pending)
	w.server.OpenGate()
	s := w.connect(client.Options{Memory: having("v1", cluster("A", 1))})
	s.sub(cds)
	err := s.ended()
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "could remove what this client holds") {
		t.Fatalf("got %v", err)
	}
}

func TestSotWReconnectWithEqualVersion(t *testing.T) {
	content := []*xds.Resource{cluster("A", 1), cluster("B", 1), cla("A", 1)}
	first := openWorld(t, content...).sotw()
	first.sub(cds)
	first.want(cds, "A", "B")
	first.sub(eds, "A")
	first.want(eds, "A")
	memory := first.Memory()

	// Another process with equal content, learned in another order.
	w := openWorld(t, content[2], content[1])
	w.set(content[0])
	s := w.connect(client.Options{Memory: memory})
	s.sub(cds)
	s.sub(eds, "A")
	s.want(eds, "A") // a named set is answered again, a pure wildcard is not
	s.quiet()
	w.set(cluster("B", 2))
	s.want(cds, "A", "B")

	named := w.connect(client.Options{Memory: memory})
	named.sub(cds, "A", "X")
	named.want(cds, "A")
	absent := w.connect(client.Options{Memory: memory})
	absent.sub(cds, "X")
	absent.want(cds)
}

func TestTypesInAnyOrderAreServed(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := openWorld(t, cluster("A", 1), cla("A", 1), listener("L", 1), route("R", 1))
		s := w.connect(client.Options{Delta: delta})
		s.sub(rds, "R")
		s.want(rds, "R")
		s.sub(eds, "A")
		s.want(eds, "A")
		s.sub(lds)
		s.want(lds, "L")
		w.set(cluster("A", 2), cla("A", 2)) // clusters never asked for
		s.want(eds, "A")
		s.quiet()
	}
}

func TestShutdownRefusesNewStreamsAndEndsRunningOnes(t *testing.T) {
	w := openWorld(t)
	running := []*stream{w.delta(), w.sotw(), w.delta()}
	for _, s := range running {
		s.sub(cds)
		s.want(cds)
	}
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	if err := w.server.Shutdown(ctx, 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	for _, s := range append(running, w.delta()) {
		if err := s.ended(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the agent is stopping") {
			t.Fatalf("got %v", err)
		}
	}
	if n := len(w.server.Clients()); n != 0 {
		t.Fatalf("%d clients left", n)
	}
}
