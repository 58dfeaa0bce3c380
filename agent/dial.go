package agent

import (
	"slices"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// maxDialled bounds the names of one stream that are made for it: a program dials
// some, and has a cluster for each gRPC service behind them.
const maxDialled = 1 << 11

// dialer is what the client of one stream asks for by name, as a gRPC program
// does.
type dialer struct {
	feed      *feed
	namespace string // read-only

	// What follows belongs to who holds feed.mu.
	names  map[xds.ID]struct{} // without scope
	closed bool
}

// Ask makes what is dialled.
func (d *dialer) Ask(t xds.Type, names []string) {
	names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !resources.Dialled(t, n) })
	if len(names) == 0 {
		return
	}
	d.feed.mu.Lock()
	defer d.feed.mu.Unlock()
	if d.closed {
		return
	}
	var fresh []string
	for _, name := range names {
		id := xds.ID{Type: t, Name: name}
		if _, ok := d.names[id]; !ok && len(d.names) < maxDialled {
			d.names[id] = struct{}{}
			fresh = append(fresh, name)
		}
	}
	if len(fresh) > 0 {
		d.feed.publish(d.feed.compiler.Dial(d.feed.dir, d.namespace, t, fresh))
	}
}

// Drop takes names back.
func (d *dialer) Drop(t xds.Type, names []string) {
	d.feed.mu.Lock()
	defer d.feed.mu.Unlock()
	var had []string
	for _, name := range names {
		id := xds.ID{Type: t, Name: name}
		if _, ok := d.names[id]; ok {
			delete(d.names, id)
			had = append(had, name)
		}
	}
	if len(had) > 0 {
		d.feed.publish(d.feed.compiler.Hangup(d.namespace, t, had))
	}
}

// Close takes all names back.
func (d *dialer) Close() {
	d.feed.mu.Lock()
	defer d.feed.mu.Unlock()
	d.closed = true
	had := map[xds.Type][]string{}
	for id := range d.names {
		had[id.Type] = append(had[id.Type], id.Name)
	}
	clear(d.names)
	for t, names := range had {
		d.feed.publish(d.feed.compiler.Hangup(d.namespace, t, names))
	}
}
