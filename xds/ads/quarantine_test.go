package ads_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// picky refuses every response that carries one of the bodies, as a client
// that takes nothing of a refused response.
type picky struct {
	mu    sync.Mutex
	named bool // the text names what is bad
	bad   []*xds.Resource
	nacks int
}

func refusing(named bool, bad ...*xds.Resource) *picky { return &picky{named: named, bad: bad} }

func (p *picky) set(bad ...*xds.Resource) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bad = bad
}

func (p *picky) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.nacks
}

func (p *picky) reply(r client.Response) client.Reply {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, res := range r.Resources {
		for _, b := range p.bad {
			if b.Type == r.Type && b.Name == res.Name && bytes.Equal(b.Body.GetValue(), res.Body.GetValue()) {
				p.nacks++
				if p.named {
					return client.Reply{Nack: fmt.Sprintf("Error adding/updating cluster(s) %s: no such thing", b.Name)}
				}
				return client.Reply{Nack: "something is wrong"}
			}
		}
	}
	return client.Reply{}
}

func trialWorld(t *testing.T, trial time.Duration, resources ...*xds.Resource) *world {
	w := newWorld(t, ads.Options{Trial: trial})
	w.server.OpenGate()
	w.set(resources...)
	return w
}

// drain takes what comes until the client's copy of a type satisfies ok.
func (s *stream) drain(what string, ok func() bool) {
	s.w.t.Helper()
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-s.Responses():
			case <-stop:
				return
			}
		}
	}()
	defer func() { close(stop); <-done }()
	s.w.until(what, ok)
}

func (s *stream) holds(t xds.Type, rs ...*xds.Resource) bool {
	have := s.Memory().Resources[t]
	if len(have) != len(rs) {
		return false
	}
	for _, r := range rs {
		if h, ok := have[r.Name]; !ok || !bytes.Equal(h.Body.GetValue(), r.Body.GetValue()) {
			return false
		}
	}
	return true
}

func (w *world) types(t xds.Type) ads.TypeStatus {
	w.t.Helper()
	clients := w.server.Clients()
	if len(clients) == 0 {
		return ads.TypeStatus{}
	}
	return clients[len(clients)-1].Types[t.String()]
}

func TestRefusedClusterIsWithheldAndEverythingElseMovesOn(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := trialWorld(t, time.Hour, cluster("A", 1), cluster("B", 1))
		p := refusing(true, cluster("A", 2))
		s := w.connect(client.Options{Delta: delta, Reply: p.reply})
		s.sub(cds)
		good := s.want(cds, "A", "B")
		w.set(cluster("A", 2))
		if delta {
			s.want(cds, "A")
		} else {
			s.want(cds, "A", "B")
		}
		w.until("A is withheld", func() bool { return len(w.types(cds).Withheld) == 1 })
		status := w.types(cds)
		if h := status.Withheld[0]; h.Name != "A" || h.Version != cluster("A", 2).Version || !strings.Contains(h.Error, "no such thing") {
			t.Fatalf("withheld %+v", h)
		}
		if status.Acked != good.Version || status.Nack == nil {
			t.Fatalf("status %+v, last accepted %s", status, good.Version)
		}
		for rev := 2; rev < 10; rev++ {
			w.set(cluster("B", rev))
			s.next()
			if !delta {
				// Absence would remove what the client has.
				if r := s.Memory().Resources[cds]["A"]; !bytes.Equal(r.Body.GetValue(), cluster("A", 1).Body.GetValue()) {
					t.Fatal("the last accepted content left the set")
				}
			}
		}
		w.until("B is accepted", func() bool { return s.holds(cds, cluster("A", 1), cluster("B", 9)) })
		if n := p.count(); n != 1 {
			t.Fatalf("%d refusals", n)
		}
		if w.types(cds).Nack == nil {
			t.Fatal("the refusal is not shown any more")
		}
		w.set(cluster("A", 3))
		s.next()
		w.until("the fix is accepted", func() bool {
			st := w.types(cds)
			return s.holds(cds, cluster("A", 3), cluster("B", 9)) && st.Nack == nil && st.Withheld == nil && st.Acked == st.Sent
		})
		s.quiet()
	}
}

func TestNewClusterThatIsRefusedIsLeftOutOfLaterSets(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := trialWorld(t, time.Hour, cluster("A", 1))
		p := refusing(true, cluster("B", 1))
		s := w.connect(client.Options{Delta: delta, Reply: p.reply})
		s.sub(cds)
		s.want(cds, "A")
		w.set(cluster("B", 1))
		s.next()
		w.until("B is withheld", func() bool { return len(w.types(cds).Withheld) == 1 })
		w.set(cluster("C", 1))
		s.next()
		w.until("C is accepted", func() bool { return s.holds(cds, cluster("A", 1), cluster("C", 1)) })
		w.remove(cluster("B", 1))
		w.until("nothing is withheld", func() bool { st := w.types(cds); return st.Withheld == nil && st.Nack == nil })
		s.drain("A and C are left", func() bool { return s.holds(cds, cluster("A", 1), cluster("C", 1)) })
		if n := p.count(); n != 1 {
			t.Fatalf("%d refusals", n)
		}
	}
}

// An error that names nothing leaves suspects: they are tried in halves until
// only the bad ones are left, and everything else has arrived.
func TestSuspectsAreHalvedUntilTheBadOnesAreFound(t *testing.T) {
	for _, typ := range []xds.Type{cds, eds, lds, rds} {
		for _, delta := range []bool{true, false} {
			t.Run(fmt.Sprint(typ, delta), func(t *testing.T) {
				w := trialWorld(t, 10*time.Millisecond)
				names := numbered(50)
				var good []*xds.Resource
				bad := []*xds.Resource{of(typ, names[7], 1), of(typ, names[31], 1)}
				for i, n := range names {
					r := of(typ, n, 1)
					w.set(r)
					if i != 7 && i != 31 {
						good = append(good, r)
					}
				}
				p := refusing(false, bad...)
				s := w.connect(client.Options{Delta: delta, Reply: p.reply})
				if typ.HasWildcard() {
					s.sub(typ)
				} else {
					s.sub(typ, names...)
				}
				s.drain("all good ones arrive", func() bool {
					return s.holds(typ, good...) && len(w.types(typ).Withheld) == 2 && w.types(typ).Suspects == 0
				})
				if n := p.count(); n > 30 {
					t.Fatalf("%d refusals to find 2 of 50", n)
				}
				p.set()
				w.set(of(typ, names[7], 2), of(typ, names[31], 2))
				s.drain("the fix arrives", func() bool {
					return s.holds(typ, append(slices.Clone(good), of(typ, names[7], 2), of(typ, names[31], 2))...) && w.types(typ).Nack == nil
				})
			})
		}
	}
}

// cilium #2991, #3405, #8149: an agent spun sending what was refused.
func TestClientThatRefusesEverythingIsLeftAlone(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := trialWorld(t, time.Hour)
		for _, n := range numbered(100) {
			w.set(cluster(n, 1))
		}
		var nacks atomic.Int32
		s := w.connect(client.Options{Delta: delta, Reply: func(r client.Response) client.Reply {
			if r.Type == rds {
				return client.Reply{}
			}
			nacks.Add(1)
			return client.Reply{Nack: "no"}
		}})
		s.sub(cds)
		s.next()
		s.quiet()
		for i := range 10 {
			w.set(cluster("X", i))
			s.next()
			s.quiet()
		}
		if n := nacks.Load(); n != 11 {
			t.Fatalf("%d refusals of 11 contents", n)
		}
	}
}

func TestChangeGoesOutAtOnceWhileOthersAreSuspect(t *testing.T) {
	w := trialWorld(t, time.Hour, cla("A", 1), cla("B", 1), cla("C", 1))
	p := refusing(false, cla("A", 1))
	s := w.connect(client.Options{Delta: true, Reply: p.reply})
	s.sub(eds, "A", "B", "C")
	s.want(eds, "A", "B", "C")
	w.until("all are suspect", func() bool { return w.types(eds).Suspects == 3 })
	s.quiet()
	w.set(cla("B", 2))
	s.want(eds, "B")
	s.want(eds, "A") // then the first set of suspects
	w.until("A is found", func() bool { return len(w.types(eds).Withheld) == 1 })
	w.set(cla("B", 3))
	s.want(eds, "B")
	s.want(eds, "C")
	s.quiet()
}

func TestRefusalIsRememberedOverReconnects(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := trialWorld(t, time.Hour, cluster("A", 1), cluster("B", 1))
		p := refusing(true, cluster("A", 2))
		opts := client.Options{Delta: delta, Reply: p.reply}
		s := w.connect(opts)
		s.sub(cds)
		s.want(cds, "A", "B")
		w.set(cluster("A", 2))
		s.next()
		w.until("A is withheld", func() bool { return len(w.types(cds).Withheld) == 1 })
		opts.Memory = s.Memory()
		s.Close()
		w.until("the stream is gone", func() bool { return len(w.server.Clients()) == 0 })

		s = w.connect(opts)
		s.sub(cds)
		if delta {
			s.want(cds)
		} else {
			s.quiet() // what it brings is what it would get
		}
		if st := w.types(cds); len(st.Withheld) != 1 || st.Nack == nil {
			t.Fatalf("not remembered: %+v", st)
		}
		w.set(cluster("B", 2))
		s.next()
		w.until("B moves on", func() bool { return s.holds(cds, cluster("A", 1), cluster("B", 2)) })
		if n := p.count(); n != 1 {
			t.Fatalf("delta %v: %d refusals %+v", delta, n, w.server.Clients())
		}
		// Another client that accepts it has it.
		other := w.connect(client.Options{Delta: delta, Node: &corev3.Node{Id: "prod/b-1"}})
		other.sub(cds)
		other.want(cds, "A", "B")
		if !other.holds(cds, cluster("A", 2), cluster("B", 2)) {
			t.Fatal("the refusal of one client changed what another gets")
		}
		w.set(cluster("A", 3))
		s.drain("the fix arrives", func() bool { return s.holds(cds, cluster("A", 3), cluster("B", 2)) })
		s.Close()
	}
}

// The id is a claim, and behind it may be another program by now.
func TestRememberedRefusalIsTriedOnceOnANewStream(t *testing.T) {
	w := trialWorld(t, 50*time.Millisecond, cluster("A", 1))
	p := refusing(true, cluster("A", 1))
	s := w.connect(client.Options{Delta: true, Reply: p.reply})
	s.sub(cds)
	s.want(cds, "A")
	w.until("A is withheld", func() bool { return len(w.types(cds).Withheld) == 1 })
	s.Close()
	w.until("the stream is gone", func() bool { return len(w.server.Clients()) == 0 })
	s = w.delta()
	s.sub(cds)
	s.want(cds)
	s.want(cds, "A")
	w.until("accepted", func() bool { st := w.types(cds); return st.Nack == nil && st.Withheld == nil })
	s.Close()
	w.until("the stream is gone", func() bool { return len(w.server.Clients()) == 0 })
	s = w.delta()
	s.sub(cds)
	s.want(cds, "A") // forgotten
}

// A restart while a client refuses: it keeps what it had accepted, and learns
// what is good.
func TestRestartWhileRefusedLosesNothing(t *testing.T) {
	for _, delta := range []bool{true, false} {
		p := refusing(true, cluster("A", 2))
		memory := having("the version of another process", cluster("A", 1), cluster("B", 1))
		w := trialWorld(t, time.Hour, cluster("A", 2), cluster("B", 2), cluster("C", 1))
		// As Envoy, which takes what is good of a refused response.
		a1 := cluster("A", 1)
		s := w.connect(client.Options{Delta: delta, Memory: memory, Reply: p.reply})
		s.sub(cds)
		first := s.next()
		w.until("A is withheld", func() bool { return len(w.types(cds).Withheld) == 1 })
		w.set(cluster("D", 1))
		for range 2 {
			r := s.next()
			if slices.Contains(r.Removed, "A") || !delta && !slices.Contains(r.Names(), "A") {
				t.Fatalf("A left: %q, %q", r.Names(), r.Removed)
			}
			if !delta {
				break // refused again because of A; the client took D all the same
			}
		}
		if !slices.Contains(first.Names(), "A") {
			t.Fatalf("first answer %q", first.Names())
		}
		if delta {
			w.until("the others arrived", func() bool { return s.holds(cds, a1, cluster("B", 2), cluster("C", 1), cluster("D", 1)) })
		}
		w.set(cluster("A", 3))
		s.drain("the fix arrives", func() bool {
			return s.holds(cds, cluster("A", 3), cluster("B", 2), cluster("C", 1), cluster("D", 1)) && w.types(cds).Nack == nil
		})
		s.Close()
	}
}

// Suspects that are tried while the bad one still stands in the set, since nothing
// is known that could stand there instead, are refused with it once more. With
// the fix the whole set is accepted, and no refusal stands.
func TestRefusalEndsWithTheFixThoughSuspectsWereTriedBefore(t *testing.T) {
	w := trialWorld(t, time.Millisecond, cluster("A", 2), cluster("B", 2), cluster("C", 1))
	memory := having("the version of another process", cluster("A", 1), cluster("B", 1))
	s := w.connect(client.Options{Memory: memory, Reply: refusing(true, cluster("A", 2)).reply})
	s.sub(cds)
	s.drain("the suspects are tried", func() bool {
		st := w.types(cds)
		return len(st.Withheld) == 1 && st.Suspects == 0
	})
	w.set(cluster("A", 3))
	s.drain("the fix arrives", func() bool {
		return s.holds(cds, cluster("A", 3), cluster("B", 2), cluster("C", 1)) && w.types(cds).Nack == nil
	})
	if st := w.types(cds); len(st.Withheld)+st.Suspects != 0 {
		t.Errorf("withheld: %+v", st)
	}
}

func TestWhatIsRememberedOfRefusalsIsBounded(t *testing.T) {
	w := trialWorld(t, time.Hour)
	for _, n := range numbered(100) {
		w.set(cla(n, 1))
	}
	for i := range 600 {
		s := w.connect(client.Options{Delta: true, Node: &corev3.Node{Id: fmt.Sprint("prod/", i)}, Reply: func(client.Response) client.Reply {
			return client.Reply{Nack: strings.Repeat("prod/pkg.S00001 ", 10_000)}
		}})
		s.sub(eds, numbered(100)[1])
		s.next()
		w.until("refused", func() bool { st := w.types(eds); return len(st.Withheld) == 1 })
		if e := w.types(eds).Withheld[0].Error; len(e) > 5000 {
			t.Fatalf("a text of %d bytes is kept", len(e))
		}
		s.Close()
		w.until("gone", func() bool { return len(w.server.Clients()) == 0 })
	}
	// The last is remembered, the first forgotten.
	for id, want := range map[string]int{"prod/599": 1, "prod/0": 0} {
		s := w.connect(client.Options{Delta: true, Node: &corev3.Node{Id: id}})
		s.sub(eds, numbered(100)[1])
		s.sub(rds, "R")
		s.drain("answered", func() bool { return len(w.types(rds).Sent) > 0 })
		if got := len(w.types(eds).Withheld); got != want {
			t.Fatalf("%s: %d withheld", id, got)
		}
		s.Close()
		w.until("gone", func() bool { return len(w.server.Clients()) == 0 })
	}
}

// What changed while the client was away is new to it.
func TestRefusalEndsWithItsContentWhileTheClientIsAway(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := trialWorld(t, time.Hour, cluster("A", 1))
		s := w.connect(client.Options{Delta: delta, Reply: refusing(true, cluster("A", 1)).reply})
		s.sub(cds)
		s.want(cds, "A")
		w.until("A is withheld", func() bool { return len(w.types(cds).Withheld) == 1 })
		s.Close()
		w.until("the stream is gone", func() bool { return len(w.server.Clients()) == 0 })
		w.set(cluster("A", 2))
		s = w.connect(client.Options{Delta: delta})
		s.sub(cds)
		s.want(cds, "A")
		if st := w.types(cds); st.Withheld != nil || st.Nack != nil {
			t.Errorf("delta %v: the refusal of what is gone is shown: %+v", delta, st)
		}
		s.Close()
	}
}

// Of one client only the latest refusals are remembered: the others are sent,
// and refused, once more.
func TestRefusalsRememberedOfOneClientAreBounded(t *testing.T) {
	const refused, kept = 40, 32
	w := trialWorld(t, time.Hour)
	names := numbered(refused)
	for _, n := range names {
		w.set(cla(n, 1))
	}
	s := w.connect(client.Options{Delta: true, Reply: func(r client.Response) client.Reply {
		return client.Reply{Nack: "bad: " + strings.Join(r.Names(), ", ")}
	}})
	for i, n := range names {
		s.sub(eds, n)
		s.want(eds, n)
		w.until("refused", func() bool { return len(w.types(eds).Withheld) == i+1 })
	}
	s.Close()
	w.until("the stream is gone", func() bool { return len(w.server.Clients()) == 0 })
	s = w.delta()
	if err := s.Send(eds, &discovery.DeltaDiscoveryRequest{ResourceNamesSubscribe: names}); err != nil {
		t.Fatal(err)
	}
	s.want(eds, names[:refused-kept]...)
	if got := len(w.types(eds).Withheld); got != kept {
		t.Errorf("%d are remembered, want %d", got, kept)
	}
}

func TestWithheldResourcesAreAMetric(t *testing.T) {
	reg := prometheus.NewRegistry()
	w := newWorld(t, ads.Options{Registerer: reg, Trial: time.Hour})
	w.server.OpenGate()
	w.set(cluster("A", 1))
	s := w.connect(client.Options{Delta: true, Reply: refusing(true, cluster("A", 1)).reply})
	s.sub(cds)
	s.want(cds, "A")
	w.until("counted", func() bool { return metric(t, reg, "fingerpost_ads_withheld_resources", "cds") == 1 })
	s.Close()
	w.until("gone with its client", func() bool { return metric(t, reg, "fingerpost_ads_withheld_resources", "cds") == 0 })
}
