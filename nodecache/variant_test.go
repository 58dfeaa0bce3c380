package nodecache_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/fingerpost/fingerpost/nodecache"
)

func running(images string) func(*nodecache.Pod) {
	return func(p *nodecache.Pod) { p.Images = images }
}

// differ is an info whose pods of images "b" serve B, the pod "odd" serves C,
// and all others A.
func differ() *nodecache.Info {
	info := serves("pkg.A", "pkg.Both")
	info.Images = []string{"a"}
	info.Variants = []nodecache.Variant{
		{Pod: "odd", Images: "b", Ports: serves("pkg.C").Ports},
		{Images: "b", Ports: serves("pkg.B", "pkg.Both").Ports},
	}
	return info
}

func TestServiceOfOneImageGoesToPodsOfThatImageOnly(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	r := d.UpsertPod(pod("a1", "192.0.2.1", running("a")))
	d.UpsertPod(pod("b1", "192.0.2.2", running("b")))
	d.UpsertPod(pod("new", "192.0.2.3", running("c")))
	d.UpsertPod(pod("odd", "192.0.2.4", running("b")))
	must(t, d.Commit(r, differ()))
	o := d.Owner(key)
	for service, want := range map[string][]string{
		"pkg.A":    {"a1", "new"},
		"pkg.B":    {"b1"},
		"pkg.C":    {"odd"},
		"pkg.Both": {"a1", "b1", "new"},
		"pkg.None": nil,
	} {
		var got []string
		for _, target := range o.Targets(service) {
			got = append(got, target.Pod.UID)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s goes to %v, want %v", service, got, want)
		}
	}
	if got := o.Services(); !slices.Equal(got, []string{"pkg.A", "pkg.B", "pkg.Both", "pkg.C"}) {
		t.Errorf("services %v", got)
	}
	// The last pods of an image take its services with them.
	d.RemovePod("odd")
	d.RemovePod("a1")
	d.RemovePod("new")
	if got := d.Owner(key).Services(); !slices.Equal(got, []string{"pkg.B", "pkg.Both"}) {
		t.Errorf("services of the image that is left: %v", got)
	}
	d.RemovePod("b1")
	if got := d.Owner(key).Services(); !slices.Equal(got, []string{"pkg.A", "pkg.B", "pkg.Both", "pkg.C"}) {
		t.Errorf("services without pods: %v", got)
	}
}

func TestDeclaredPortStandsBeforeThatOfAVariant(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	r := d.UpsertPod(pod("b1", "192.0.2.2", running("b"), declaring(50051, "pkg.D")))
	must(t, d.Commit(r, differ()))
	o := d.Owner(key)
	if len(o.Targets("pkg.B")) != 0 || len(o.Targets("pkg.D")) != 1 {
		t.Errorf("targets %v and %v", o.Targets("pkg.B"), o.Targets("pkg.D"))
	}
	d.RemovePod("b1")
	if got := d.Owner(key).Services(); !slices.Equal(got, []string{"pkg.D"}) {
		t.Errorf("services without pods: %v", got)
	}
}

func TestOwnerOfWhichOnlyAVariantServesIsKnown(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	info := &nodecache.Info{
		Ports:    []nodecache.PortInfo{{Port: 50051, State: nodecache.PortEmpty}},
		Variants: []nodecache.Variant{{Images: "b", Ports: serves("pkg.B").Ports}},
	}
	must(t, d.Commit(d.UpsertPod(pod("b1", "192.0.2.1", running("b"))), info))
	wantKnowledge(t, d, nodecache.Known)
	if info.Reason() != "" {
		t.Errorf("reason %q", info.Reason())
	}
}

// Two who ask the same owner again must not undo one another.
func TestRevisionOfWhatIsNotKnownAnyMoreIsRefused(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	r := d.UpsertPod(pod("a", "192.0.2.1"))
	first, second := serves("pkg.A"), serves("pkg.B")
	must(t, d.Commit(r, first))
	sub := subscribe(t, d)
	must(t, d.Revise(r, first, second))
	next(t, sub)
	if err := d.Revise(r, first, serves("pkg.C")); !errors.Is(err, nodecache.ErrChanged) {
		t.Errorf("a revision of what is gone: %v", err)
	}
	if o := d.Owner(key); o.Info != second || o.Knowledge != nodecache.Known {
		t.Errorf("owner %+v", o)
	}
	must(t, d.Revise(r, second, &nodecache.Info{}))
	wantKnowledge(t, d, nodecache.None)
	d.RemovePod("a")
	if err := d.Revise(r, second, first); !errors.Is(err, nodecache.ErrStale) {
		t.Errorf("a revision of an owner that ended: %v", err)
	}
}
