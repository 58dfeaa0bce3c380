package resources_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// front returns a Service of prod that was created in the minute.
func front(name string, minute int) *nodecache.Front {
	return &nodecache.Front{UID: name, Namespace: "prod", Name: name, Created: time.Date(2026, 5, 1, 12, minute, 0, 0, time.UTC)}
}

// standing puts the owner behind the Services, which lead to its port.
func standing(o *nodecache.Owner, fronts ...*nodecache.Front) *nodecache.Owner {
	return leading(o, 50051, fronts...)
}

func leading(o *nodecache.Owner, port uint16, fronts ...*nodecache.Front) *nodecache.Owner {
	for _, f := range fronts {
		o.Behind = append(o.Behind, &nodecache.Standing{Front: f, Ports: []uint16{port}})
	}
	return o
}

func TestProviderIsWhomTheOldestServiceLeadsTo(t *testing.T) {
	a := func(o ...*nodecache.Front) *nodecache.Owner {
		return standing(known("a1", "a", []string{"pkg.S"}, pod("10.0.0.1", nodecache.Serving)), o...)
	}
	b := func(o ...*nodecache.Front) *nodecache.Owner {
		return standing(known("b1", "b", []string{"pkg.S"}, pod("10.0.0.2", nodecache.Serving)), o...)
	}
	c := func(o ...*nodecache.Front) *nodecache.Owner {
		return standing(known("c1", "c", []string{"pkg.S"}, pod("10.0.0.3", nodecache.Serving)), o...)
	}
	bare := func(uid string, pods ...*nodecache.Pod) *nodecache.Owner {
		o := known(uid, uid, []string{"pkg.S"}, pods...)
		o.Workload.Kind = "Pod"
		return o
	}
	undated := &nodecache.Front{UID: "x", Namespace: "prod", Name: "x"}
	for _, row := range []struct {
		name   string
		owners []*nodecache.Owner
		want   string // owners of the provider | claimants
	}{
		{"without Services the lowest by itself", []*nodecache.Owner{a(), b(), c()}, "a1/1 | b1/1 c1/1"},
		{"a bare pod takes nothing from a workload", []*nodecache.Owner{bare("0", pod("10.0.0.9", nodecache.Serving)), a()}, "a1/1 | 0/1"},
		{"nor one that has gone from one that is there", []*nodecache.Owner{bare("0"), bare("z", pod("10.0.0.9", nodecache.Serving))}, "z/1 | "},
		{"one with a Service", []*nodecache.Owner{a(), b(front("s", 1))}, "b1/1 | a1/1"},
		{"the older Service", []*nodecache.Owner{a(front("s", 2)), b(front("t", 1))}, "b1/1 | a1/1"},
		{"of two of one age the first by name", []*nodecache.Owner{a(front("t", 1)), b(front("s", 1))}, "b1/1 | a1/1"},
		{"by its oldest", []*nodecache.Owner{a(front("s", 2)), b(front("t", 1), front("z", 3))}, "b1/1 | a1/1"},
		{"one of unknown age goes last", []*nodecache.Owner{a(undated), b(front("t", 1)), c()}, "b1/1 | a1/1 c1/1"},
		{"all behind a common one", []*nodecache.Owner{a(front("s", 1)), b(front("s", 1)), c(front("t", 0), front("s", 1))}, "a1/1 b1/1 c1/1 | "},
		{"a canary behind the common Service and an older one of its own", []*nodecache.Owner{a(front("s", 1)), b(front("s", 1), front("old", 0)), c(front("u", 2))}, "a1/1 b1/1 | c1/1"},
		{"behind a common one, but not that of the provider", []*nodecache.Owner{a(front("s", 1)), b(front("t", 2)), c(front("t", 2))}, "a1/1 | b1/1 c1/1"},
		{"a Service of another port puts nobody first", []*nodecache.Owner{
			leading(a(front("s", 2)), 9102, front("metrics", 0)), leading(b(front("t", 1)), 9102, front("metrics", 0)),
		}, "b1/1 | a1/1"},
		{"unless there is none else", []*nodecache.Owner{a(), leading(b(), 9102, front("metrics", 0))}, "b1/1 | a1/1"},
	} {
		t.Run(row.name, func(t *testing.T) {
			for range 2 {
				w := newWorld(t)
				w.set(row.owners...)
				v := w.c.Services()[0]
				sorted := slices.Sorted(slices.Values(v.Owners))
				if got := strings.Join(sorted, " ") + " | " + strings.Join(v.Claimants, " "); got != row.want {
					t.Errorf("%s, want %s", got, row.want)
				}
				if len(w.addrs("prod", "pkg.S")) != len(v.Owners) {
					t.Errorf("endpoints %v of owners %v", w.addrs("prod", "pkg.S"), v.Owners)
				}
				slices.Reverse(row.owners)
			}
		})
	}
}

func TestScaledToZeroKeepsItsPlace(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	w := newWorld(t)
	sub := d.Subscribe()
	flush := func() {
		for _, key := range sub.Poll() {
			if o := d.Owner(key); o != nil {
				w.set(o)
			} else {
				w.remove(key)
			}
		}
	}
	serve := func(workload, revision, addr string) {
		p := pod(addr, nodecache.Serving)
		p.Owner = nodecache.OwnerKey{UID: workload + revision, Revision: revision}
		p.Workload = nodecache.Workload{Namespace: "prod", Kind: "ReplicaSet", Name: workload}
		p.Hints = []nodecache.Hint{{Port: 50051, Why: "port name"}}
		r := d.UpsertPod(p)
		if err := d.Commit(r, &nodecache.Info{Ports: []nodecache.PortInfo{{Port: 50051, Services: []nodecache.Service{{Name: "pkg.S"}}}}}); err != nil {
			t.Fatal(err)
		}
	}
	members := func(name string, pods ...string) {
		s := &nodecache.Slice{UID: name, Namespace: "prod", Name: name + "-1", Service: name, Ports: []nodecache.SlicePort{{Port: 50051}}}
		for _, p := range pods {
			s.Endpoints = append(s.Endpoints, nodecache.Endpoint{Pod: "uid-" + p})
		}
		d.UpsertSlice(s)
	}
	provides := func(addrs ...string) {
		t.Helper()
		flush()
		for i := range addrs {
			addrs[i] += ":50051 HEALTHY"
		}
		if got := w.addrs("prod", "pkg.S"); !slices.Equal(got, addrs) {
			t.Errorf("endpoints %v, want %v", got, addrs)
		}
	}
	d.UpsertFront(front("old", 1))
	d.UpsertFront(front("new", 2))
	serve("z", "1", "10.0.0.1")
	members("old", "10.0.0.1")
	serve("a", "1", "10.0.0.2")
	members("new", "10.0.0.2")
	provides("10.0.0.1")
	// A rollout of each.
	serve("z", "2", "10.0.0.3")
	provides("10.0.0.1", "10.0.0.3")
	members("old", "10.0.0.3", "10.0.0.1")
	d.RemovePod("uid-10.0.0.1")
	members("old", "10.0.0.3")
	serve("a", "2", "10.0.0.4")
	members("new", "10.0.0.4")
	d.RemovePod("uid-10.0.0.2")
	provides("10.0.0.3")
	// To zero, and back.
	d.RemovePod("uid-10.0.0.3")
	provides()
	members("old")
	provides()
	serve("z", "2", "10.0.0.5")
	provides("10.0.0.5")
	members("old", "10.0.0.5")
	provides("10.0.0.5")
	d.RemovePod("uid-10.0.0.5")
	members("old")
	d.Expire(time.Now().Add(time.Hour))
	provides("10.0.0.4")
}
