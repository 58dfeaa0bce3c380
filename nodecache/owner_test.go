package nodecache_test

import (
	"slices"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

func TestPodsOwnDeclarationGoesBeforeInfo(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("a", "192.0.2.1"))
	d.UpsertPod(pod("b", "192.0.2.2", declaring(9000, "pkg.A", "pkg.D")))
	// The owner's info speaks of a port on which this pod declares other things.
	r := d.UpsertPod(pod("c", "192.0.2.3", declaring(50051, "pkg.D")))
	must(t, d.Commit(r, serves("pkg.A")))
	o := d.Owner(key)
	if got := o.Services(); !slices.Equal(got, []string{"pkg.A", "pkg.D"}) {
		t.Errorf("services %v", got)
	}
	for service, want := range map[string][]string{
		"pkg.A": {"192.0.2.1:50051", "192.0.2.2:9000"},
		"pkg.D": {"192.0.2.2:9000", "192.0.2.3:50051"},
		"pkg.X": nil,
	} {
		var got []string
		for _, target := range o.Targets(service) {
			got = append(got, target.Addr.String())
		}
		if !slices.Equal(got, want) {
			t.Errorf("targets of %s: %v, want %v", service, got, want)
		}
	}
}

func TestOwnerDisplayIsThatOfItsFirstPodAndAgeThatOfItsOldest(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("b", "192.0.2.2", created(1)))
	d.UpsertPod(pod("a", "192.0.2.1", created(5)))
	d.RemovePod("b")
	o := d.Owner(key)
	if o.Name != "ReplicaSet/a-1" || o.Workload.Name != "a" || o.Created.Minute() != 1 {
		t.Errorf("owner %+v, want the age of the oldest pod seen", o)
	}
}

// A view that somebody holds must not change under it.
func TestViewIsNotTouchedByLaterChanges(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	d.UpsertPod(pod("b", "192.0.2.2"))
	d.UpsertPod(pod("c", "192.0.2.3"))
	serve(d, "web", "b", "c")
	must(t, d.UpsertRoute(route("r", 1, "web")))
	o := d.Owner(key)
	d.UpsertPod(pod("a", "192.0.2.1"))
	d.UpsertPod(pod("b", "192.0.2.2", in(nodecache.Draining)))
	d.RemovePod("c")
	d.RemoveRoute("r")
	if !slices.Equal(uids(o), []string{"b", "c"}) || o.Pods[0].State != nodecache.Serving || len(o.Routes) != 1 {
		t.Errorf("the view became %+v", o)
	}
}

func TestOwnersAreSortedByNamespaceNameAndKey(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	named := func(namespace, name string) func(*nodecache.Pod) {
		return func(p *nodecache.Pod) {
			p.Workload.Namespace, p.OwnerName = namespace, name
			p.Owner = ownerKey(p.UID)
		}
	}
	d.UpsertPod(pod("4", "192.0.2.4", named("b", "x")))
	d.UpsertPod(pod("3", "192.0.2.3", named("a", "y")))
	d.UpsertPod(pod("2", "192.0.2.2", named("a", "x")))
	d.UpsertPod(pod("1", "192.0.2.1", named("a", "x")))
	var got []string
	for _, o := range d.Owners() {
		got = append(got, o.Key.UID)
	}
	if !slices.Equal(got, []string{"1", "2", "3", "4"}) {
		t.Errorf("order %v", got)
	}
}

func TestOwnerKeyIsReadBack(t *testing.T) {
	for _, test := range []struct {
		text string
		want nodecache.OwnerKey
		ok   bool
	}{
		{"u/r", nodecache.OwnerKey{UID: "u", Revision: "r"}, true},
		{"u/", nodecache.OwnerKey{UID: "u"}, true},
		{"u", nodecache.OwnerKey{UID: "u"}, true},
		{"", nodecache.OwnerKey{}, false},
		{"/r", nodecache.OwnerKey{}, false},
		{"u/r/x", nodecache.OwnerKey{}, false},
	} {
		got, err := nodecache.ParseOwnerKey(test.text)
		if got != test.want || (err == nil) != test.ok {
			t.Errorf("%q: %v, %v", test.text, got, err)
		}
	}
}

// 50,000 pods cost under 40 MiB with all indexes.
func TestMemoryPerPodIsBounded(t *testing.T) {
	const n, limit = 50_000, 40 << 20
	held := heapOf(func() any {
		d := nodecache.New(nodecache.Options{})
		for _, p := range own(fleet(n)) {
			d.UpsertPod(p)
		}
		return d
	})
	if held > limit {
		t.Errorf("%d bytes a pod, want at most %d", held/n, limit/n)
	}
}
