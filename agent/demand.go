package agent

import (
	"maps"
	"slices"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
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
func (a *Agent) view(in ads.Introduction) (ads.View, error) {
	client, err := resources.ParseClient(in.Node)
	if err != nil {
		return ads.View{}, err
	}
	if client.OnDemand && !in.Delta {
		client.OnDemand = false
		client.Warnings = append(client.Warnings, "clusters on demand need a delta stream; it has all clusters")
	}
	for _, w := range client.Warnings {
		a.log.Warn("client asks for what it cannot have", "client", in.Node.GetId(), "warning", w)
	}
	if err := a.feed.namespace(client.Namespace, client.Form()); err != nil {
		return ads.View{}, err
	}
	v := ads.View{
		Scopes: client.Scopes(), Warnings: client.Warnings,
		Dialer: &dialer{feed: a.feed, namespace: client.Namespace, names: map[xds.ID]struct{}{}},
	}
	pod := a.store.Pod(client.Namespace, client.Pod)
	switch client.Form() {
	case resources.OnDemand:
		socket := a.feed.unknownSocket(client.UnknownSocket, UnknownSocket(a.config.ADSSocket))
		d := &demand{feed: a.feed, client: client, socket: socket, names: map[string]bool{}}
		if in.Proved && pod != nil {
			d.workload = pod.Workload
		}
		a.feed.follow(d)
		v.Demand, v.Closed = d, d.Close
		v.Fallback = xds.FallbackScope(client.Namespace, socket)
		v.Wanted = func() []ads.Wanted { return a.wanted(d) }
	case resources.AllClusters:
		if pod == nil {
			break
		}
		if scope, ok := a.feed.declare(client.Namespace, pod.Upstreams); ok {
			v.Scopes = append(v.Scopes, scope)
			v.Closed = func() { a.feed.undeclare(scope) }
		}
	}
	return v, nil
}

// Why a client is given a cluster that it did not ask for.
const (
	originDeclared = "declared"
	originLearned  = "learned"
)

// wanted is what a client is given before it asks: what its pod declares, there
// or not, so that it is there when it is called; and of what its workload has
// called before what leads to somebody.
func (a *Agent) wanted(d *demand) []ads.Wanted {
	var list []ads.Wanted
	ns := d.client.Namespace
	add := func(name, origin string) {
		if !slices.ContainsFunc(list, func(w ads.Wanted) bool { return w.Cluster == name }) {
			list = append(list, ads.Wanted{Cluster: name, Origin: origin})
		}
	}
	if pod := a.store.Pod(ns, d.client.Pod); pod != nil {
		for _, u := range pod.Upstreams {
			names, _ := a.compiler.Upstream(a.dir, ns, u)
			for _, name := range names {
				add(name, originDeclared)
			}
		}
	}
	for _, n := range a.upstreams.Of(d.workload, time.Now()) {
		if a.compiler.Leads(a.dir, ns, n.Cluster) {
			add(n.Cluster, originLearned)
		}
	}
	return list
}

// demand is what the client of one stream has asked for.
type demand struct {
	feed   *feed
	client resources.Client // read-only, as are the next two
	socket string
	// workload is that of the pod that is proved; zero: none is, and nothing is
	// learned.
	workload nodecache.Workload

	// What follows belongs to who holds feed.mu.
	names  map[string]bool // set where the client asked for it itself
	asking bool            // it has the route table that asks for no unknown name
	closed bool
}

// Ask makes the clusters, and what stands in for those that nobody has.
func (d *demand) Ask(names []string, itself bool) []xds.Scope {
	f := d.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.closed {
		return nil
	}
	scopes := d.ask(names)
	if itself {
		for _, name := range names {
			if _, ok := d.names[name]; ok {
				d.names[name] = true
			}
		}
		d.learn(names, time.Now())
	}
	return scopes
}

// ask needs feed.mu.
func (d *demand) ask(names []string) []xds.Scope {
	f := d.feed
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
	nobodys := func(names []string) int { return len(names) - len(f.compiler.Found(ns, names)) }
	had := nobodys(slices.Collect(maps.Keys(d.names)))
	u, known := f.compiler.Want(f.dir, ns, d.socket, fresh, maxNobodys-had)
	for _, name := range known {
		d.names[name] = false
	}
	f.publish(u)
	if d.asking || had+nobodys(known) < manyNobodys {
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

// learn needs feed.mu. It notes those of the names for the workload that the
// client itself asked for, and that lead to somebody.
func (d *demand) learn(names []string, now time.Time) {
	if d.workload == (nodecache.Workload{}) {
		return
	}
	own := make([]string, 0, len(names))
	for _, name := range names {
		if d.names[name] {
			own = append(own, name)
		}
	}
	d.feed.learned.Use(d.workload, d.feed.compiler.Found(d.client.Namespace, own), now)
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
	if d.closed {
		return
	}
	d.closed = true
	had := slices.Collect(maps.Keys(d.names))
	d.learn(had, time.Now())
	delete(d.feed.demands, d)
	clear(d.names)
	d.feed.publish(d.feed.compiler.Unwant(d.client.Namespace, d.socket, had))
}
