package agent

import (
	"maps"
	"slices"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/resources"
)

const (
	// manyNobodys is the number of names that nobody has from which on a client
	// is to ask for no further one: each is a cluster in its memory.
	manyNobodys = 64
	// maxNobodys bounds the names that nobody has of one stream, between that and
	// the moment in which its client has the other route table; maxWanted bounds
	// all names of one stream.
	maxNobodys = 1 << 10
	maxWanted  = 1 << 15
	// maxUnknownSockets bounds the paths of unknown.sock that clients can name.
	maxUnknownSockets = 1 << 8
)

// view says what a client may see, and makes sure that it is there.
func (a *Agent) view(node *corev3.Node, delta bool) (ads.View, error) {
	client, err := resources.ParseClient(node)
	if err != nil {
		return ads.View{}, err
	}
	if client.OnDemand && !delta {
		client.OnDemand = false
		client.Warnings = append(client.Warnings, "clusters on demand need a delta stream; it has all clusters")
	}
	for _, w := range client.Warnings {
		a.log.Warn("client asks for what it cannot have", "client", node.GetId(), "warning", w)
	}
	if err := a.feed.namespace(client.Namespace, client.Form()); err != nil {
		return ads.View{}, err
	}
	v := ads.View{
		Scopes: client.Scopes(), Warnings: client.Warnings,
		Dialer: &dialer{feed: a.feed, namespace: client.Namespace, names: map[xds.ID]struct{}{}},
	}
	if client.Form() == resources.OnDemand {
		socket := a.feed.unknownSocket(client.UnknownSocket, UnknownSocket(a.config.ADSSocket))
		v.Demand = &demand{feed: a.feed, client: client, socket: socket, names: map[string]struct{}{}}
		v.Fallback = xds.FallbackScope(client.Namespace, socket)
	}
	return v, nil
}

// demand is what the client of one stream has asked for.
type demand struct {
	feed   *feed
	client resources.Client // read-only, as is socket
	socket string

	// What follows belongs to who holds feed.mu.
	names  map[string]struct{}
	asking bool // it has the route table that asks for no unknown name
	closed bool
}

// Ask makes the clusters, and what stands in for those that nobody has.
func (d *demand) Ask(names []string) []xds.Scope {
	f := d.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.closed {
		return nil
	}
	var fresh []string
	for _, name := range names {
		if _, ok := d.names[name]; !ok && len(d.names)+len(fresh) < maxWanted {
			fresh = append(fresh, name)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	ns := d.client.Namespace
	nobodys := f.compiler.Nobodys(ns, slices.Collect(maps.Keys(d.names)))
	u, known := f.compiler.Want(f.dir, ns, d.socket, fresh, maxNobodys-nobodys)
	for _, name := range known {
		d.names[name] = struct{}{}
	}
	f.publish(u)
	if d.asking || nobodys+f.compiler.Nobodys(ns, known) < manyNobodys {
		return nil
	}
	table, err := f.compiler.Namespace(ns, resources.Asking)
	if err != nil {
		return nil
	}
	d.asking = true
	f.exchanged.Inc()
	f.publish(table)
	return d.client.AskingScopes()
}

// Drop takes names back.
func (d *demand) Drop(names []string) {
	d.feed.mu.Lock()
	defer d.feed.mu.Unlock()
	var had []string
	for _, name := range names {
		if _, ok := d.names[name]; ok {
			delete(d.names, name)
			had = append(had, name)
		}
	}
	d.feed.publish(d.feed.compiler.Unwant(d.client.Namespace, d.socket, had))
}

// Close takes all names back.
func (d *demand) Close() {
	d.feed.mu.Lock()
	defer d.feed.mu.Unlock()
	d.closed = true
	had := slices.Collect(maps.Keys(d.names))
	clear(d.names)
	d.feed.publish(d.feed.compiler.Unwant(d.client.Namespace, d.socket, had))
}
