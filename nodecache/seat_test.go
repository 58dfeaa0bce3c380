package nodecache_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/nodecache"
)

var bank = nodecache.OwnerKey{UID: "uid-bank"}

// bankFront is a Service without a selector that declares what is behind it.
func bankFront(declared ...nodecache.Declared) *nodecache.Front {
	return front("bank", 1, func(f *nodecache.Front) { f.Selects, f.Declared = false, declared })
}

func bankSlice(name string, addrs ...string) *nodecache.Slice {
	s := slice(name, "bank")
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, nodecache.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr(a)}, Ready: true, Serving: true, Zone: "z1"})
	}
	return s
}

// targets says where the bank's service goes.
func targets(d *nodecache.Directory, service string) string {
	o := d.Owner(bank)
	if o == nil {
		return "gone"
	}
	var out []string
	for _, t := range o.Targets(service) {
		out = append(out, fmt.Sprintf("%s %s", t.Addr, t.Pod.State))
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

func TestAddressesOfADeclaringServiceAreAnOwner(t *testing.T) {
	declared := nodecache.Declared{Services: []string{"bank.Accounts"}}
	steps := []func(*nodecache.Directory){
		func(d *nodecache.Directory) { d.UpsertFront(bankFront(declared)) },
		func(d *nodecache.Directory) { d.UpsertSlice(bankSlice("bank-1", "192.0.2.1", "fd00::1")) },
		func(d *nodecache.Directory) { d.UpsertSlice(bankSlice("bank-2", "192.0.2.2")) },
		// A pod has one of the addresses: it stays the pod's.
		func(d *nodecache.Directory) { d.UpsertPod(pod("a", "192.0.2.2")) },
	}
	for _, order := range [][]int{{0, 1, 2, 3}, {1, 0, 3, 2}, {3, 2, 1, 0}, {1, 2, 3, 0}} {
		d := nodecache.New(nodecache.Options{})
		s := subscribe(t, d)
		for _, i := range order {
			steps[i](d)
		}
		if keys := s.Poll(); !slices.Contains(keys, bank) {
			t.Errorf("%v: told of %v", order, keys)
		}
		if got, want := targets(d, "bank.Accounts"), "192.0.2.1:50051 serving, 192.0.2.2:50051 serving, [fd00::1]:50051 serving"; got != want {
			t.Errorf("%v: targets %s, want %s", order, got, want)
		}
		o := d.Owner(bank)
		if o.Knowledge != nodecache.Known || o.Origin != nodecache.OriginDeclared || len(o.Behind) != 1 || o.Behind[0].Name != "bank" ||
			o.Workload.Kind != "Service" || !o.Created.Equal(bankFront().Created) || o.Pods[0].Zone() != "z1" {
			t.Errorf("%v: owner %+v", order, o)
		}
		if o.WhyNotAsked("") == "" {
			t.Errorf("%v: it may be asked", order)
		}
		if p := d.PodAt(netip.MustParseAddr("192.0.2.2")); p == nil || p.UID != "a" {
			t.Errorf("%v: at the pod's address is %v", order, p)
		}

		// Addresses come, leave and drain with their slice.
		left := bankSlice("bank-1", "192.0.2.1", "192.0.2.3", "192.0.2.4")
		left.Endpoints[0].Ready, left.Endpoints[0].Terminating = false, true
		left.Endpoints[2].Ready, left.Endpoints[2].Serving = false, false
		d.UpsertSlice(left)
		if got, want := targets(d, "bank.Accounts"), "192.0.2.1:50051 draining, 192.0.2.2:50051 serving, 192.0.2.3:50051 serving"; got != want {
			t.Errorf("%v: targets %s, want %s", order, got, want)
		}

		// As with pods, what was declared outlives the last of them.
		d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "bank-1"})
		d.UpsertSlice(bankSlice("bank-2"))
		if o := d.Owner(bank); o == nil || len(o.Pods) != 0 || !slices.Equal(o.Services(), []string{"bank.Accounts"}) || len(o.Behind) != 1 {
			t.Errorf("%v: without addresses: %+v", order, o)
		}
		d.UpsertSlice(bankSlice("bank-2", "192.0.2.9"))
		if got := targets(d, "bank.Accounts"); got != "192.0.2.9:50051 serving" {
			t.Errorf("%v: targets %s", order, got)
		}
		d.RemoveFront(nodecache.Name{Namespace: "prod", Name: "bank"})
		if o := d.Owner(bank); o == nil || len(o.Pods) != 0 {
			t.Errorf("%v: without the Service: %+v", order, o)
		}
		d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "bank-2"})
		d.RemovePod("a")
		d.Expire(time.Now().Add(2 * keep))
		s.Close()
		if left := d.Sizes(); len(left) > 0 {
			t.Errorf("%v: left behind %v", order, left)
		}
	}
}

func TestOnlyAServiceThatDeclaresAndSelectsNothingHasAddressesOfItsOwn(t *testing.T) {
	named := nodecache.Declared{Port: 9000, Services: []string{"bank.A"}}
	open := nodecache.Declared{Services: []string{"bank.B"}}
	for name, c := range map[string]struct {
		front *nodecache.Front
		slice func(*nodecache.Slice)
		want  string // of bank.A and bank.B
	}{
		"declares nothing": {bankFront(), nil, "gone gone"},
		"selects":          {front("bank", 1, func(f *nodecache.Front) { f.Declared = []nodecache.Declared{named} }), nil, "gone gone"},
		"names the port":   {bankFront(named), nil, "192.0.2.1:9000 serving "},
		"both":             {bankFront(open, named), nil, "192.0.2.1:9000 serving 192.0.2.1:50051 serving"},
		"which port?": {bankFront(open), func(s *nodecache.Slice) {
			s.Ports = append(s.Ports, nodecache.SlicePort{Name: "b", Port: 2})
		}, "gone gone"},
		"any port": {bankFront(open), func(s *nodecache.Slice) { s.AnyPort = true }, "gone gone"},
	} {
		d := nodecache.New(nodecache.Options{})
		s := bankSlice("bank-1", "192.0.2.1")
		if c.slice != nil {
			c.slice(s)
		}
		d.UpsertSlice(s)
		d.UpsertFront(c.front)
		if got := targets(d, "bank.A") + " " + targets(d, "bank.B"); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// The Service is created again, or another of its kind: another owner.
func TestAddressesGoOverToAServiceThatIsCreatedAgain(t *testing.T) {
	d := nodecache.New(nodecache.Options{})
	declared := nodecache.Declared{Services: []string{"bank.Accounts"}}
	d.UpsertSlice(bankSlice("bank-1", "192.0.2.1"))
	d.UpsertFront(bankFront(declared))
	again := bankFront(declared)
	again.UID = "uid-again"
	d.UpsertFront(again)
	if o := d.Owner(bank); o == nil || len(o.Pods) != 0 {
		t.Errorf("the old owner: %+v", o)
	}
	if o := d.Owner(nodecache.OwnerKey{UID: "uid-again"}); o == nil || len(o.Pods) != 1 || len(o.Pods[0].Behind) != 1 {
		t.Errorf("the new owner: %+v", o)
	}
	selects := *again
	selects.Selects = true
	d.UpsertFront(&selects)
	if o := d.Owner(nodecache.OwnerKey{UID: "uid-again"}); len(o.Pods) != 0 {
		t.Errorf("it selects pods now: %+v", o)
	}
}

// host is an ExternalName Service.
func host(name string, declared ...nodecache.Declared) *nodecache.Front {
	return front("bank", 1, func(f *nodecache.Front) {
		f.Type, f.Selects, f.External, f.Declared = "ExternalName", false, name, declared
	})
}

func TestNameOfADeclaringExternalNameServiceIsAnOwner(t *testing.T) {
	declared := nodecache.Declared{Port: 443, Services: []string{"bank.Accounts"}}
	steps := []func(*nodecache.Directory){
		func(d *nodecache.Directory) { d.UpsertFront(host("bank.example.com", declared)) },
		// Somebody wrote slices for it: no pod and no address stands behind it.
		func(d *nodecache.Directory) { d.UpsertSlice(slice("bank-1", "bank", "a")) },
		func(d *nodecache.Directory) { d.UpsertSlice(bankSlice("bank-2", "192.0.2.2")) },
		func(d *nodecache.Directory) { d.UpsertPod(pod("a", "192.0.2.1")) },
	}
	at := func(o *nodecache.Owner) string {
		var out []string
		for _, tg := range o.Targets("bank.Accounts") {
			out = append(out, fmt.Sprintf("%s:%d %s", tg.Pod.Host, tg.Addr.Port(), tg.Pod.State))
		}
		return strings.Join(out, ", ")
	}
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 0, 3, 2}} {
		d := nodecache.New(nodecache.Options{})
		s := subscribe(t, d)
		for _, i := range order {
			steps[i](d)
		}
		if keys := s.Poll(); !slices.Contains(keys, bank) {
			t.Errorf("%v: told of %v", order, keys)
		}
		o := d.Owner(bank)
		if got, want := at(o), "bank.example.com:443 serving"; got != want {
			t.Errorf("%v: at %s, want %s", order, got, want)
		}
		if o.Knowledge != nodecache.Known || o.Origin != nodecache.OriginDeclared || len(o.Behind) != 1 || !o.Behind[0].Leads(443) ||
			o.Workload.Kind != "Service" || !o.Created.Equal(bankFront().Created) {
			t.Errorf("%v: owner %+v", order, o)
		}
		if o.WhyNotAsked("") == "" || len(o.Pods[0].DialPorts()) != 0 {
			t.Errorf("%v: it may be asked", order)
		}
		if a := d.Owner(key); len(a.Behind) != 0 {
			t.Errorf("%v: a pod stands behind the name: %+v", order, a.Behind)
		}

		moved := host("b.example.com", declared)
		d.UpsertFront(moved)
		if got := at(d.Owner(bank)); got != "b.example.com:443 serving" || d.Owner(bank).Behind[0].Front != moved {
			t.Errorf("%v: moved: at %s", order, got)
		}
		// The same Service becomes one of addresses, and a name again.
		d.UpsertFront(bankFront(declared))
		if got, want := targets(d, "bank.Accounts"), "192.0.2.2:443 serving"; got != want {
			t.Errorf("%v: of addresses: %s, want %s", order, got, want)
		}
		wantBehind(t, d, "bank[50051]")
		d.UpsertFront(moved)
		if got := at(d.Owner(bank)); got != "b.example.com:443 serving" {
			t.Errorf("%v: a name again: at %s", order, got)
		}
		wantBehind(t, d, "")
		// Created again, it is another owner.
		again := host("c.example.com", declared)
		again.UID = "uid-again"
		d.UpsertFront(again)
		if o := d.Owner(bank); len(o.Pods) != 0 || len(o.Behind) != 0 {
			t.Errorf("%v: the old owner: %+v", order, o)
		}
		if got := at(d.Owner(nodecache.OwnerKey{UID: "uid-again"})); got != "c.example.com:443 serving" {
			t.Errorf("%v: created again: at %s", order, got)
		}
		// Without a declaration nothing is there.
		silent := host("c.example.com")
		silent.UID = "uid-again"
		d.UpsertFront(silent)
		if o := d.Owner(nodecache.OwnerKey{UID: "uid-again"}); len(o.Pods) != 0 {
			t.Errorf("%v: it declares nothing: %+v", order, o)
		}
		d.UpsertFront(again)
		d.RemoveFront(again.Key())
		d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "bank-1"})
		d.RemoveSlice(nodecache.Name{Namespace: "prod", Name: "bank-2"})
		d.RemovePod("a")
		d.Expire(time.Now().Add(2 * keep))
		s.Close()
		if left := d.Sizes(); len(left) > 0 {
			t.Errorf("%v: left behind %v", order, left)
		}
	}
}
