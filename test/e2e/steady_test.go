package e2e_test

import (
	"fmt"
	"strings"
	"testing"
)

// A front under load, while agents come and go: every call is answered, and a
// stream goes on.
type steady struct {
	front
	t        *testing.T
	w        *world
	stream   interface{ Ask(string) (string, error) }
	answered func() int64
	stop     func()
	// The whole configuration of an Envoy, and what it ever changed of it.
	dump, changes map[string]string
}

// steadily puts a front whose agent is a under load.
func steadily(t *testing.T, w *world, a *agentProcess, f front) *steady {
	t.Helper()
	reaches(t, f.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
	a.connected("prod/web", "cds", "eds", "lds")
	s := &steady{front: f, t: t, w: w, stream: onPod(t, f.conn, "shop.v1.Cart", "cart-1-b")}
	s.answered, s.stop = load(t, f.conn, "shop.v1.Cart")
	if f.envoy != nil {
		a.connected("prod/web", "rds")
		f.envoy.content()
		s.dump, s.changes = f.envoy.dump(), f.envoy.changes()
	}
	return s
}

// goesOn is asked after each event, with or without an agent.
func (s *steady) goesOn() {
	s.t.Helper()
	proceeds(s.t, s.answered)
	if answer, err := s.stream.Ask("here"); err != nil || answer != "cart-1-b: here" {
		s.t.Fatalf("the stream: %q, %v", answer, err)
	}
}

// back waits until the client is the agent's. In delta it needs nothing that it
// has; bodies tells whether that can be read from the agent, which was new.
func (s *steady) back(a *agentProcess, bodies bool) {
	s.t.Helper()
	a.connected("prod/web")
	s.goesOn()
	if s.envoy == nil {
		return
	}
	s.envoy.content()
	if !bodies || !strings.HasSuffix(s.t.Name(), "/delta") {
		return
	}
	for _, kind := range []string{"cds", "eds", "lds", "rds"} {
		if n := a.metric(fmt.Sprintf("fingerpost_ads_resources_total{type=%q}", kind)); n != "0" {
			s.t.Errorf("%s %s were sent to a client that has them", n, kind)
		}
	}
}

// end checks that nothing was taken, and that the agent is heard.
func (s *steady) end() {
	s.t.Helper()
	if s.envoy != nil && strings.HasSuffix(s.t.Name(), "/delta") {
		same(s.t, "at the end", s.dump, s.envoy.dump())
		same(s.t, "at the end", s.changes, s.envoy.changes())
	}
	s.w.serve("cart-1-c", []string{"shop.v1.Cart"})
	s.w.write()
	reaches(s.t, s.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b", "cart-1-c")
	s.goesOn()
	s.stop()
	if s.envoy == nil {
		return
	}
	for name, value := range s.envoy.stats("(cluster|listener)_(modified|removed)$") {
		if value != "0" {
			s.t.Errorf("%s is %s", name, value)
		}
	}
}

// rounds is how often agents come and go.
const rounds = 20

func TestRestartsUnderLoadLoseNoCallAndNoStream(t *testing.T) {
	eachFront(t, "shop.v1.Cart", func(t *testing.T, s *site, start func() front) {
		t.Parallel()
		w := shop(t)
		a := s.start(t, "--source", w.source()).ready()
		f := steadily(t, w, a, start())
		for i := range rounds {
			if i%2 == 0 {
				a.stop()
			} else {
				a.kill()
			}
			f.goesOn()
			a = s.start(t, "--source", w.source()).ready()
			f.back(a, true)
		}
		f.end()
	})
}

func TestHandOversUnderLoadLoseNoCallAndNoStream(t *testing.T) {
	eachFront(t, "shop.v1.Cart", func(t *testing.T, s *site, start func() front) {
		t.Parallel()
		w := shop(t)
		successor := func() *agentProcess { return s.instance(t, "--source", w.source()) }
		a := successor().ready()
		f := steadily(t, w, a, start())
		for i := range rounds {
			b := successor()
			switch i % 6 {
			case 0: // as a rollout does it
				b.ready()
				a.stop()
				a = b
			case 1: // it dies before it has the name
				b.logs("gate open")
				b.kill()
				a.ready()
			case 2: // it dies while the client is on its way, or there
				b.ready().kill()
				a.ready()
			case 3: // both stay for a while, and the old one serves again
				b.ready().connected("prod/web")
				b.stop()
				a.ready()
			case 4: // the old one dies
				b.ready()
				a.kill()
				a = b
			case 5: // the third takes over from the second, and both others go
				b.ready()
				c := successor().ready()
				c.connected("prod/web")
				a.stop()
				b.kill()
				a = c
			}
			f.back(a, i > 0)
		}
		f.end()
	})
}
