package ads_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// holding waits until what the client prod/a-1 has is in the state, and returns
// it.
func (w *world) holding(t xds.Type, name string, state ads.HoldingState) ads.Holding {
	w.t.Helper()
	var h ads.Holding
	w.until(fmt.Sprintf("%s %s is %s", t, name, state), func() bool {
		hs := w.server.Holdings("prod/a-1", t, name)
		if len(hs) == 0 {
			return false
		}
		h = hs[len(hs)-1]
		return h.State == state
	})
	return h
}

// drained lets the client take responses that the test does not look at.
func (s *stream) drained() *stream {
	go func() {
		for range s.Responses() {
		}
	}()
	return s
}

func TestHoldingFollowsAResourceToItsAcknowledgement(t *testing.T) {
	for _, delta := range []bool{true, false} {
		t.Run(fmt.Sprint("delta ", delta), func(t *testing.T) {
			w := newWorld(t, ads.Options{})
			begin := time.Now()
			w.set(cluster("A", 1))
			var silent, bad atomic.Bool
			s := w.connect(client.Options{Delta: delta, Reply: func(r client.Response) client.Reply {
				return client.Reply{Silent: silent.Load()}
			}}).drained()
			if hs := w.server.Holdings("prod/a-1", cds, "A"); len(hs) != 0 {
				t.Errorf("a client that asked for nothing has %+v", hs)
			}
			s.sub(cds)
			w.holding(cds, "A", ads.Waiting) // the gate is closed
			w.server.OpenGate()
			first := w.holding(cds, "A", ads.Acked)
			if !first.Exact || first.Earlier || first.Since.Before(begin) || first.Since.Before(first.Connected) {
				t.Errorf("acknowledged: %+v", first)
			}
			w.holding(cds, "B", ads.Missing)
			if hs := w.server.Holdings("prod/a-1", eds, "A"); len(hs) != 0 {
				t.Errorf("a type that was not asked for: %+v", hs)
			}
			s.sub(eds, "other")
			w.holding(eds, "A", ads.Unasked)

			silent.Store(true)
			w.set(cluster("A", 2))
			if h := w.holding(cds, "A", ads.Sent); !h.Earlier || h.Since.Before(first.Since) {
				t.Errorf("sent: %+v", h)
			}
			if hs := w.server.Holdings("prod/other", cds, "A"); len(hs) != 0 {
				t.Errorf("another client has %+v", hs)
			}
			s.Close()

			// A refusal of what it has, and of what it never had.
			silent.Store(false)
			s = w.connect(client.Options{Delta: delta, Reply: func(r client.Response) client.Reply {
				if bad.Load() && slices.ContainsFunc(r.Names(), func(n string) bool { return n == "A" || n == "C" }) {
					return client.Reply{Nack: "A is bad, C is bad"}
				}
				return client.Reply{}
			}}).drained()
			s.sub(cds)
			w.holding(cds, "A", ads.Acked)
			bad.Store(true)
			w.set(cluster("A", 3), cluster("C", 1))
			if h := w.holding(cds, "A", ads.Rejected); !h.Earlier || h.Error != "A is bad, C is bad" || h.Since.Before(first.Since) {
				t.Errorf("refused: %+v", h)
			}
			if h := w.holding(cds, "C", ads.Rejected); h.Earlier {
				t.Errorf("refused, and never taken: %+v", h)
			}
			bad.Store(false)
			w.set(cluster("A", 4), cluster("C", 2))
			w.holding(cds, "A", ads.Acked)
			w.holding(cds, "C", ads.Acked)
			w.remove(cluster("C", 2))
			w.holding(cds, "C", ads.Missing)
		})
	}
}

// What a client brings is its own from before the stream began.
func TestHoldingOfAClientThatComesBack(t *testing.T) {
	for _, delta := range []bool{true, false} {
		w := openWorld(t, cluster("A", 1))
		s := w.connect(client.Options{Delta: delta})
		s.sub(cds)
		s.want(cds, "A")
		w.holding(cds, "A", ads.Acked)
		memory := s.Memory()
		s.Close()
		w.until("the stream ends", func() bool { return len(w.server.Clients()) == 0 })
		s = w.connect(client.Options{Delta: delta, Memory: memory})
		s.sub(cds)
		if h := w.holding(cds, "A", ads.Acked); h.Exact || !h.Since.Equal(h.Connected) {
			t.Errorf("delta %v: %+v", delta, h)
		}
	}
}

// A name that is kept for want of evidence is the client's still.
func TestHoldingOfWhatAClientBroughtAndNobodyHas(t *testing.T) {
	w := openWorld(t, cluster("A", 1))
	w.evidence(xds.Shared, xds.Failed)
	var brought client.Memory
	brought.Resources[cds] = map[string]client.Resource{}
	for _, r := range []*xds.Resource{cluster("A", 1), cluster("B", 1)} {
		brought.Resources[cds][r.Name] = client.Resource{Name: r.Name, Version: r.Version, Body: r.Body}
	}
	s := w.connect(client.Options{Delta: true, Memory: brought})
	s.sub(cds)
	s.want(cds) // it has all there is
	w.holding(cds, "A", ads.Acked)
	if h := w.holding(cds, "B", ads.Missing); !h.Earlier {
		t.Errorf("what was brought: %+v", h)
	}
	if h := w.holding(cds, "C", ads.Missing); h.Earlier {
		t.Errorf("what was not brought: %+v", h)
	}
	w.evidence(xds.Shared, xds.Complete)
	s.want(cds, "-B")
	if h := w.holding(cds, "B", ads.Missing); h.Earlier {
		t.Errorf("after its removal: %+v", h)
	}
}

// Only the latest acknowledgements are kept by resource, whatever a client does.
func TestTimeOfAnOldAcknowledgementIsABound(t *testing.T) {
	w := openWorld(t)
	s := w.delta()
	s.sub(cds)
	s.next() // the world is empty
	w.set(cluster("old", 1))
	s.want(cds, "old")
	at := w.holding(cds, "old", ads.Acked)
	for i := range 300 {
		w.set(cluster("new", i))
		s.want(cds, "new")
		w.until("it is acknowledged", func() bool { c := w.server.Clients()[0].Types["cds"]; return c.Sent == c.Acked })
	}
	if h := w.holding(cds, "old", ads.Acked); h.Exact || h.Since.Before(at.Since) {
		t.Errorf("an old acknowledgement: %+v, exactly %v", h, at.Since)
	}
	if h := w.holding(cds, "new", ads.Acked); !h.Exact {
		t.Errorf("the latest acknowledgement: %+v", h)
	}
}

func TestRefusalIsToldWithWhatIsWithheld(t *testing.T) {
	var mu sync.Mutex
	var told []string
	w := newWorld(t, ads.Options{Refused: func(r ads.Refusal) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, fmt.Sprint(r.Node.GetId(), " ", r.Type, " ", r.Error, " ", r.Withheld))
	}})
	w.server.OpenGate()
	w.set(cluster("A", 1), cluster("B", 1))
	s := w.connect(client.Options{Delta: true, Node: &corev3.Node{Id: "prod/a-1"}, Reply: func(r client.Response) client.Reply {
		if slices.Contains(r.Names(), "A") {
			return client.Reply{Nack: "A is bad"}
		}
		return client.Reply{}
	}})
	s.sub(cds)
	w.until("the refusal is told", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(told) > 0
	})
	mu.Lock()
	defer mu.Unlock()
	if got := strings.Join(told, "; "); got != "prod/a-1 cds A is bad [A]" {
		t.Errorf("told %q", got)
	}
}
