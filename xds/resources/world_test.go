package resources_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/protobuf/proto"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// views is a directory made by hand.
type views map[nodecache.OwnerKey]*nodecache.Owner

func (v views) Owner(k nodecache.OwnerKey) *nodecache.Owner { return v[k] }

// world is a compiler, what it reads and what it has published.
type world struct {
	t         testing.TB
	views     views
	c         *resources.Compiler
	published map[xds.ID]*xds.Resource
	evidence  map[xds.Scope]xds.Evidence
}

func newWorld(t testing.TB) *world {
	t.Helper()
	return newWorldOf(t, resources.Options{})
}

func newWorldOf(t testing.TB, o resources.Options) *world {
	t.Helper()
	o.Report = func(id xds.ID, err error) { t.Errorf("%v: %v", id, err) }
	c, err := resources.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return &world{t: t, views: views{}, c: c, published: map[xds.ID]*xds.Resource{}, evidence: map[xds.Scope]xds.Evidence{}}
}

// set puts views in place and compiles them.
func (w *world) set(owners ...*nodecache.Owner) xds.Update {
	var keys []nodecache.OwnerKey
	for _, o := range owners {
		w.views[o.Key] = o
		keys = append(keys, o.Key)
	}
	return w.apply(keys...)
}

func (w *world) remove(key nodecache.OwnerKey) xds.Update {
	delete(w.views, key)
	return w.apply(key)
}

func (w *world) apply(keys ...nodecache.OwnerKey) xds.Update {
	w.t.Helper()
	return w.take(w.c.Apply(w.views, keys))
}

// take publishes an update.
func (w *world) take(u xds.Update) xds.Update {
	w.t.Helper()
	for _, r := range u.Set {
		if old := w.published[r.ID]; old != nil && old.Version == r.Version {
			w.t.Errorf("%v is set again though nothing changed", r.ID)
		}
		w.published[r.ID] = r
	}
	for _, id := range u.Remove {
		if w.published[id] == nil {
			w.t.Errorf("%v is removed and was not there", id)
		}
		delete(w.published, id)
	}
	for s, e := range u.Evidence {
		if w.evidence[s] == e {
			w.t.Errorf("evidence of %s is %d again", s, e)
		}
		w.evidence[s] = e
	}
	return u
}

// cla returns the published assignment, nil if there is none.
func (w *world) cla(namespace, service string) *endpointv3.ClusterLoadAssignment {
	r := w.published[xds.ID{Type: xds.Endpoint, Name: namespace + "/" + service, Scope: xds.NamespaceScope(namespace)}]
	if r == nil {
		return nil
	}
	return decode(w.t, r, &endpointv3.ClusterLoadAssignment{})
}

// addrs returns address and health of each endpoint.
func (w *world) addrs(namespace, service string) []string {
	var out []string
	for _, l := range w.cla(namespace, service).GetEndpoints() {
		for _, e := range l.GetLbEndpoints() {
			a := e.GetEndpoint().GetAddress().GetSocketAddress()
			out = append(out, fmt.Sprintf("%s:%d %s", a.GetAddress(), a.GetPortValue(), e.GetHealthStatus()))
		}
	}
	return out
}

func (w *world) cluster(namespace, service string) *clusterv3.Cluster {
	r := w.published[xds.ID{Type: xds.Cluster, Name: namespace + "/" + service, Scope: xds.NamespaceScope(namespace)}]
	if r == nil {
		return nil
	}
	return decode(w.t, r, &clusterv3.Cluster{})
}

func decode[M proto.Message](t testing.TB, r *xds.Resource, m M) M {
	t.Helper()
	if err := r.Body.UnmarshalTo(m); err != nil {
		t.Fatal(err)
	}
	return m
}

// known is an owner prod/workload whose info says that port 50051 serves.
func known(uid, workload string, services []string, pods ...*nodecache.Pod) *nodecache.Owner {
	info := &nodecache.PortInfo{Port: 50051, State: nodecache.PortServes, Hash: uid}
	for _, s := range services {
		info.Services = append(info.Services, nodecache.Service{Name: s})
	}
	slices.SortFunc(info.Services, func(a, b nodecache.Service) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	o := owner(uid, workload, nodecache.Known, pods...)
	o.Info = &nodecache.Info{Ports: []nodecache.PortInfo{*info}, Origin: nodecache.OriginSelf}
	return o
}

func owner(uid, workload string, k nodecache.Knowledge, pods ...*nodecache.Pod) *nodecache.Owner {
	o := &nodecache.Owner{
		Key: nodecache.OwnerKey{UID: uid, Revision: "1"}, Name: "ReplicaSet/" + uid,
		Workload:  nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: workload},
		Knowledge: k,
	}
	for _, p := range pods {
		o.Pods = append(o.Pods, nodecache.Member{Pod: p})
	}
	return o
}

func pod(addr string, state nodecache.PodState) *nodecache.Pod {
	return &nodecache.Pod{
		UID: "uid-" + addr, Name: "pod-" + addr, Node: "n1",
		State: state, Addr: netip.MustParseAddr(addr), Created: time.Unix(1700000000, 0),
		Common: &nodecache.Common{Namespace: "prod", Hints: []nodecache.Hint{{Port: 50051, Why: "port name"}}},
	}
}
