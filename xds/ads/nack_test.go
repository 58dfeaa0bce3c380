package ads_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// go-control-plane #962: a refused response came again at once, for ever.
func TestRefusedResponseComesAgainOnlyWithOtherContent(t *testing.T) {
	for _, typ := range []xds.Type{cds, eds, lds, rds} {
		for _, delta := range []bool{true, false} {
			w := openWorld(t, of(typ, "A", 1))
			var bad atomic.Bool
			bad.Store(true)
			s := w.connect(client.Options{Delta: delta, Reply: func(r client.Response) client.Reply {
				if r.Type == typ && bad.Load() && !strings.HasPrefix(r.Resources[0].Name, "fence") {
					return client.Reply{Nack: "A is bad"}
				}
				return client.Reply{}
			}})
			s.sub(typ, "A")
			refused := s.want(typ, "A")
			s.quiet()
			bad.Store(false)
			status := w.server.Clients()[0].Types[typ.String()]
			if typ != rds && (status.Acked != "" || status.Nack == nil || status.Nack.Version != refused.Version || status.Nack.Error != "A is bad") {
				t.Fatalf("status after refusal: %+v", status)
			}
			w.set(of(typ, "A", 1)) // the same content
			s.quiet()
			w.set(of(typ, "A", 2))
			fixed := s.want(typ, "A")
			s.quiet()
			w.until("the refusal is over", func() bool {
				status := w.server.Clients()[0].Types[typ.String()]
				return status.Nack == nil && (typ == rds || status.Acked == fixed.Version)
			})
		}
	}
}

func TestRefusalStandsWhileOtherResourcesMove(t *testing.T) {
	w := openWorld(t, cla("A", 1), cla("B", 1))
	s := w.connect(client.Options{Delta: true, Reply: func(r client.Response) client.Reply {
		for _, n := range r.Names() {
			if n == "A" {
				return client.Reply{Nack: "A is bad"}
			}
		}
		return client.Reply{}
	}})
	s.sub(eds, "A", "B")
	s.want(eds, "A", "B")
	w.set(cla("C", 1))
	s.sub(eds, "C")
	moved := s.want(eds, "C")
	w.until("C is accepted and A still refused", func() bool {
		status := w.server.Clients()[0].Types["eds"]
		return status.Acked == moved.Version && status.Nack != nil
	})
}

func TestRefusalIsCountedAndLoggedOnceForEachMessage(t *testing.T) {
	var log lockedBuffer
	reg := prometheus.NewRegistry()
	w := newWorld(t, ads.Options{Registerer: reg, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	w.server.OpenGate()
	s := w.connect(client.Options{Delta: true, Reply: func(r client.Response) client.Reply {
		return client.Reply{Nack: "never " + r.Type.String()}
	}})
	w.set(cla("A", 9999))
	s.sub(eds, "A")
	s.want(eds, "A")
	for rev := 1; rev <= 5; rev++ {
		w.set(cla("A", rev))
		s.want(eds, "A")
	}
	w.until("6 refusals counted", func() bool { return metric(t, reg, "fingerpost_ads_nacks_total", "eds") == 6 })
	if n := strings.Count(log.String(), "never eds"); n != 1 {
		t.Fatalf("logged %d times:\n%s", n, log.String())
	}
	if got := metric(t, reg, "fingerpost_ads_streams", "delta"); got != 1 {
		t.Fatalf("%v streams", got)
	}
}

func TestNoncesAreUniqueAndAnAckIsNotAnswered(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := openWorld(t, cluster("A", 1), cla("A", 1), listener("L", 1), route("R", 1))
		s := w.connect(client.Options{Delta: delta})
		seen := map[string]bool{}
		note := func(r client.Response) {
			t.Helper()
			if r.Nonce == "" || seen[r.Nonce] {
				t.Fatalf("nonce %q again", r.Nonce)
			}
			seen[r.Nonce] = true
		}
		s.sub(cds)
		note(s.want(cds, "A"))
		s.sub(eds, "A")
		note(s.want(eds, "A"))
		s.sub(lds)
		note(s.want(lds, "L"))
		s.sub(rds, "R")
		note(s.want(rds, "R"))
		for rev := 2; rev < 20; rev++ {
			w.set(cla("A", rev))
			note(s.want(eds, "A"))
		}
		s.quiet()
	}
}

func TestChangesWithoutAckGiveOneFurtherResponse(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := openWorld(t, cla("A", 9999))
		s := w.connect(client.Options{Delta: delta, Reply: func(r client.Response) client.Reply {
			return client.Reply{Silent: r.Type == eds}
		}})
		s.sub(eds, "A")
		s.want(eds, "A")
		for rev := 1; rev <= 1000; rev++ {
			w.set(cla("A", rev))
		}
		if err := s.Ack(eds, ""); err != nil {
			t.Fatal(err)
		}
		r := s.want(eds, "A")
		if !bytes.Equal(r.Resources[0].Body.GetValue(), cla("A", 1000).Body.GetValue()) {
			t.Fatal("the further response is not the newest")
		}
		if err := s.Ack(eds, ""); err != nil {
			t.Fatal(err)
		}
		w.until("all is acknowledged", func() bool { return w.server.Clients()[0].Types["eds"].Acked == r.Version })
		s.Close()
	}
}

// What happens to a resource while a response is on its way is summed up.
func TestChangesWhileAResponseIsOnItsWayAreSummedUp(t *testing.T) {
	a1, a2 := cluster("A", 1), cluster("A", 2)
	for name, row := range map[string]struct {
		held  bool
		then  func(*world)
		delta []string
		sotw  []string
	}{
		"removed and back with other content": {true, func(w *world) { w.remove(a1); w.set(a2) }, []string{"A"}, []string{"A", "X"}},
		"changed and removed":                 {true, func(w *world) { w.set(a2); w.remove(a2) }, []string{"-A"}, []string{"X"}},
		"new and removed":                     {false, func(w *world) { w.set(a1); w.remove(a1) }, nil, nil},
		"new and changed":                     {false, func(w *world) { w.set(a1); w.set(a2) }, []string{"A"}, []string{"A", "X"}},
	} {
		for _, delta := range []bool{true, false} {
			w := openWorld(t, cluster("X", 1))
			first := []string{"X"}
			if row.held {
				w.set(a1)
				first = append(first, "A")
			}
			s := w.connect(client.Options{Delta: delta, Reply: func(r client.Response) client.Reply {
				return client.Reply{Silent: r.Type == cds}
			}})
			s.sub(cds)
			s.want(cds, first...)
			row.then(w)
			if err := s.Ack(cds, ""); err != nil {
				t.Fatal(err)
			}
			want := row.sotw
			if delta {
				want = row.delta
			}
			if want != nil {
				t.Log(name, delta)
				s.want(cds, want...)
				if err := s.Ack(cds, ""); err != nil {
					t.Fatal(err)
				}
			}
			s.quiet()
		}
	}
}

func TestUnseenChangeSendsNothing(t *testing.T) {
	w := openWorld(t, cluster("A", 1), cla("A", 1))
	s := w.delta()
	s.sub(eds, "A")
	s.want(eds, "A")
	w.set(cla("B", 1), cluster("A", 2), listener("L", 1))
	w.set(in(xds.NamespaceScope("test"), cla("A", 7)))
	s.quiet()
}

func TestClientsInTheFormOfTheProxiesCommand(t *testing.T) {
	w := newWorld(t, ads.Options{})
	w.server.OpenGate()
	w.set(cluster("A", 1))
	s := w.delta()
	s.sub(cds)
	r := s.want(cds, "A")
	w.until("acknowledged", func() bool { return w.server.Clients()[0].Types["cds"].Acked == r.Version })
	raw, err := json.Marshal(w.server.Clients())
	if err != nil {
		t.Fatal(err)
	}
	var got []map[string]any
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	if got[0]["connected"] == "" {
		t.Fatal("no time of connection")
	}
	delete(got[0], "connected")
	have, _ := json.Marshal(got)
	want := `[{"clusters":"all","delta":true,"id":"prod/a-1",` +
		`"identity":{"method":"none","pod":"","reason":"callers are not identified"},"pod":"",` +
		`"types":{"cds":{"acked":"` + r.Version + `","nack":null,"sent":"` + r.Version + `"}}}]`
	if string(have) != want {
		t.Fatalf("got\n%s\nwant\n%s", have, want)
	}
}

func TestIdentifierIsSentOnSotW(t *testing.T) {
	w := newWorld(t, ads.Options{Identifier: "node-1 v1"})
	w.server.OpenGate()
	s := w.sotw()
	s.sub(cds)
	if r := s.want(cds); r.Identifier != "node-1 v1" {
		t.Fatalf("identifier %q", r.Identifier)
	}
}

func TestRequestWithoutTypeEndsTheStream(t *testing.T) {
	w := openWorld(t)
	c, err := discovery.NewAggregatedDiscoveryServiceClient(w.conn).DeltaAggregatedResources(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Send(&discovery.DeltaDiscoveryRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Recv(); err == nil || !strings.Contains(err.Error(), "type_url is required") {
		t.Fatalf("got %v", err)
	}
}

func metric(t *testing.T, reg *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	t.Fatalf("no metric %s{%s}", name, label)
	return 0
}

// lockedBuffer is a buffer that several goroutines may use.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
