package ads

import (
	"slices"

	"github.com/fingerpost/fingerpost/xds"
)

// Dialer hears which resources one stream's client asks for by name, of the types
// that have a wildcard: gRPC programs do so, Envoy does not. Its methods must be
// safe for concurrent use; none is called with the server's locks held.
type Dialer interface {
	// Ask makes what is to be there under the names. What it publishes counts
	// for the request that held them. Names may repeat those of earlier calls.
	Ask(t xds.Type, names []string)
	// Drop says that the client does not ask for the names any more.
	Drop(t xds.Type, names []string)
	// Close drops all. What comes after it changes nothing.
	Close()
}

// dial tells the dialer of names, with no lock held.
func (st *stream) dial(t xds.Type, names []string) {
	st.mu.Lock()
	d := st.dialer
	st.mu.Unlock()
	if d == nil || !t.HasWildcard() {
		return
	}
	if names = named(names); len(names) > 0 {
		d.Ask(t, names)
	}
}

// hangUp tells it of names that the client no longer asks for.
func (st *stream) hangUp(t xds.Type, names []string) {
	st.mu.Lock()
	d := st.dialer
	st.mu.Unlock()
	if d != nil && t.HasWildcard() && len(names) > 0 {
		d.Drop(t, names)
	}
}

// named are the names of a request without the wildcard.
func named(names []string) []string {
	if !slices.Contains(names, wildcard) {
		return names
	}
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == wildcard })
}
