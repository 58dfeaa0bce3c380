package ads

import (
	"sync"
	"time"

	"github.com/fingerpost/fingerpost/xds"
)

// What is remembered of refusals over reconnects is bounded: so many clients,
// and so many resources of each. What is forgotten is sent and refused again.
const (
	maxRemembering = 512
	maxRemembered  = 32
)

// memory is what clients refused, by client id, for their next streams.
type memory struct {
	// mu guards all below. It is a leaf.
	mu      sync.Mutex
	clients map[string]*clientMemory
}

type clientMemory struct {
	at       time.Time // of the last refusal
	refusals map[refusedName]remembered
}

type refusedName struct {
	t    xds.Type
	name string
}

// remembered is a refusal with what the client has instead of the refused
// content, where that is known (SotW).
type remembered struct {
	refusal
	accepted *entry
}

// note remembers a refusal of a client that says who it is.
func (m *memory) note(client string, t xds.Type, name string, r refusal, accepted *entry) {
	if client == "" {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.clients[client]
	if c == nil {
		if m.clients == nil {
			m.clients = map[string]*clientMemory{}
		}
		if len(m.clients) >= maxRemembering {
			m.dropOldest()
		}
		c = &clientMemory{refusals: map[refusedName]remembered{}}
		m.clients[client] = c
	}
	c.at = r.at
	key := refusedName{t, name}
	if _, known := c.refusals[key]; !known && len(c.refusals) >= maxRemembered {
		oldest, first := refusedName{}, time.Time{}
		for k, v := range c.refusals {
			if first.IsZero() || v.at.Before(first) {
				oldest, first = k, v.at
			}
		}
		delete(c.refusals, oldest)
	}
	c.refusals[key] = remembered{r, accepted}
}

func (m *memory) dropOldest() {
	oldest, first := "", time.Time{}
	for id, c := range m.clients {
		if first.IsZero() || c.at.Before(first) {
			oldest, first = id, c.at
		}
	}
	delete(m.clients, oldest)
}

// forget drops a refusal: the client has accepted the resource.
func (m *memory) forget(client string, t xds.Type, name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.clients[client]
	if c == nil {
		return
	}
	delete(c.refusals, refusedName{t, name})
	if len(c.refusals) == 0 {
		delete(m.clients, client)
	}
}

// of returns the refusals of a client by name; nil for nearly all.
func (m *memory) of(client string, t xds.Type) map[string]remembered {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.clients[client]
	if c == nil {
		return nil
	}
	found := map[string]remembered{}
	for k, r := range c.refusals {
		if k.t == t {
			found[k.name] = r
		}
	}
	return found
}
