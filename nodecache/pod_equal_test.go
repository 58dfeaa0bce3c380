package nodecache_test

import (
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Every field counts: one that Equal forgot would be a change that nobody
// hears of.
func TestPodEqualSeesEveryField(t *testing.T) {
	full := func() *nodecache.Pod {
		p := pod("a", "192.0.2.1", created(1), declaring(1, "pkg.D"))
		p.More = []netip.Addr{netip.MustParseAddr("2001:db8::1")}
		p.Export = "web"
		p.Policy, p.Ignored = &nodecache.Policy{NoOutliers: true}, []string{"x"}
		p.Upstreams = []nodecache.Upstream{{Authority: "users", Service: "pkg.D"}}
		return p
	}
	if !full().Equal(full()) {
		t.Fatal("equal pods are not Equal")
	}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[nodecache.Pod]()) {
		if field.Anonymous { // its fields are visible themselves
			continue
		}
		p := full()
		change(t, reflect.ValueOf(p).Elem().FieldByIndex(field.Index))
		if p.Equal(full()) || full().Equal(p) {
			t.Errorf("Equal does not see %s", field.Name)
		}
	}
}

// change sets a value to another one, of structs every field, one that Equal
// treats as a whole.
func change(t *testing.T, v reflect.Value) {
	t.Helper()
	switch x := v.Addr().Interface().(type) {
	case *time.Time:
		*x = x.Add(time.Second)
		return
	case *netip.Addr:
		*x = x.Next()
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Uint8, reflect.Uint16:
		v.SetUint(v.Uint() + 1)
	case reflect.Slice:
		change(t, v.Index(0))
	case reflect.Pointer:
		change(t, v.Elem())
	case reflect.Struct:
		change(t, v.Field(v.NumField()-1))
	default:
		t.Fatalf("a field of kind %s", v.Kind())
	}
}

func TestPodEqualTakesNilForEmpty(t *testing.T) {
	p, q := pod("a", "192.0.2.1"), pod("a", "192.0.2.1")
	q.More, q.Declared = []netip.Addr{}, []nodecache.Declared{}
	if !p.Equal(q) {
		t.Error("nil and empty slices differ")
	}
	q.Declared = []nodecache.Declared{{Port: 1}}
	if p.Equal(q) {
		t.Error("a declaration more is not seen")
	}
}

func TestServiceEqualSeesEveryField(t *testing.T) {
	full := func() *nodecache.Front {
		f := front("web", 1)
		f.ClusterIPs = []netip.Addr{netip.MustParseAddr("10.96.0.1")}
		f.Ports = []nodecache.FrontPort{{Port: 80}}
		f.Declared = []nodecache.Declared{{Port: 1, Services: []string{"pkg.D"}}}
		f.Policy = &nodecache.Policy{}
		return f
	}
	if !full().Equal(full()) {
		t.Fatal("equal Services are not Equal")
	}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[nodecache.Front]()) {
		f := full()
		change(t, reflect.ValueOf(f).Elem().FieldByIndex(field.Index))
		if f.Equal(full()) || full().Equal(f) {
			t.Errorf("Equal does not see %s", field.Name)
		}
	}
}
