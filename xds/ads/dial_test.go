package ads_test

import (
	"slices"
	"sync"
	"testing"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
)

const dialScope xds.Scope = "api/dial/prod"

// dialler makes a listener for each name that is asked for.
type dialler struct {
	w *world

	// mu guards what follows.
	mu     sync.Mutex
	names  map[string]bool
	closed bool
}

func (d *dialler) Ask(t xds.Type, names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, n := range names {
		if name := t.String() + " " + n; t == lds && !d.names[name] {
			d.names[name] = true
			d.w.set(in(dialScope, listener(n, 1)))
		}
	}
}

func (d *dialler) Drop(t xds.Type, names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, n := range names {
		delete(d.names, t.String()+" "+n)
	}
}

func (d *dialler) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
}

func (d *dialler) has(names ...string) func() bool {
	return func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.names) == len(names) && !slices.ContainsFunc(names, func(n string) bool { return !d.names[n] })
	}
}

func TestWhatAClientNamesIsMadeForItAndNoOther(t *testing.T) {
	for _, delta := range []bool{false, true} {
		d := &dialler{names: map[string]bool{}}
		w := newWorld(t, ads.Options{View: func(in ads.Introduction) (ads.View, error) {
			node := in.Node
			v := ads.View{Scopes: []xds.Scope{dialScope, xds.Shared}}
			if node.GetId() == "prod/a-1" {
				v.Dialer = d
			}
			return v, nil
		}})
		d.w = w
		w.server.OpenGate()
		w.set(listener("egress", 1))
		s := w.sotw()
		if delta {
			s = w.delta()
		}
		s.sub(lds, "A")
		s.want(lds, "A")
		s.sub(lds, "B")
		if delta {
			s.want(lds, "B")
		} else {
			s.want(lds, "A", "B")
		}
		w.until("both are asked for", d.has("lds A", "lds B"))
		s.unsub(lds, "A")
		w.until("one is", d.has("lds B"))
		s.Close()
		w.until("closed", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return d.closed })
		// A wildcard has none of them.
		other := w.delta()
		other.sub(lds)
		other.want(lds, "egress")
		other.Close()
	}
}

// A name for which nothing was made is given up as well.
func TestMissingNameIsDroppedToo(t *testing.T) {
	d := &dialler{names: map[string]bool{}}
	w := newWorld(t, ads.Options{View: func(ads.Introduction) (ads.View, error) {
		return ads.View{Scopes: []xds.Scope{xds.Shared}, Dialer: d}, nil
	}})
	d.w = newWorld(t, ads.Options{}) // what it makes nobody sees
	w.server.OpenGate()
	s := w.sotw()
	s.sub(lds, "A", "B")
	w.until("both are asked for", d.has("lds A", "lds B"))
	s.unsub(lds, "A")
	w.until("one is", d.has("lds B"))
}
