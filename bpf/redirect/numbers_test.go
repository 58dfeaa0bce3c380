package redirect_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/fingerpost/fingerpost/bpf/redirect"
)

// verdict is a program that says one thing.
func verdict(v int32) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, v), asm.Return()}
}

func destinations(from, to int) []netip.AddrPort {
	var list []netip.AddrPort
	for i := from; i < to; i++ {
		list = append(list, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 50051))
	}
	return list
}

func number(t testing.TB, r *redirect.Redirector, to netip.AddrPort) netip.Addr {
	t.Helper()
	n, ok := r.Number(to)
	if !ok {
		t.Fatalf("%s has no number", to)
	}
	return n
}

// A number outlives its destination, over restarts, and is nobody else's meanwhile.
func TestNumberWaits(t *testing.T) {
	n := newNode(t)
	r := n.open()
	list := destinations(0, 10)
	give := func(list []netip.AddrPort) {
		t.Helper()
		if done, err := r.SetDestinations(list); err != nil || done.Redirected != len(list) || done.Left != 0 {
			t.Fatalf("%+v, %v", done, err)
		}
	}
	give(list)
	was := map[netip.AddrPort]netip.Addr{}
	for _, to := range list {
		was[to] = number(t, r, to)
	}
	give(list[5:])
	for range 2 {
		for _, to := range list[:5] {
			if _, ok := r.Number(to); ok {
				t.Errorf("connections to %s are redirected", to)
			}
			if got, ok := r.Destination(was[to]); !ok || got != to {
				t.Errorf("%s, the number of %s, means %s", was[to], to, got)
			}
		}
		r.Close()
		r = n.open()
	}
	// Others get other numbers, and who comes back has its own again.
	next := destinations(10, 20)
	give(append(next, list[5:]...))
	seen := map[netip.Addr]netip.AddrPort{}
	for to, n := range was {
		seen[n] = to
	}
	for _, to := range next {
		n := number(t, r, to)
		if other, ok := seen[n]; ok {
			t.Errorf("%s has the number of %s", to, other)
		}
		seen[n] = to
	}
	give(append(list, next...))
	for _, to := range list {
		if got := number(t, r, to); got != was[to] {
			t.Errorf("%s came back as %s, and was %s", to, got, was[to])
		}
	}
}

// When its time is over a number means nothing, and is the last to be given again.
func TestNumberIsForgotten(t *testing.T) {
	n := newNode(t)
	n.options.Grace = time.Nanosecond
	r := n.open()
	a, b := destinations(0, 1), destinations(1, 2)
	for range 2 {
		if _, err := r.SetDestinations(a); err != nil {
			t.Fatal(err)
		}
		was := number(t, r, a[0])
		for range 2 {
			if _, err := r.SetDestinations(b); err != nil {
				t.Fatal(err)
			}
		}
		if got, ok := r.Destination(was); ok {
			t.Errorf("%s means %s", was, got)
		}
		r.Close()
		r = n.open()
		if _, err := r.SetDestinations(append(a, b...)); err != nil {
			t.Fatal(err)
		}
		if got := number(t, r, a[0]); got == was {
			t.Errorf("%s was given again", got)
		}
	}
	// Behind the last is the first that nobody has.
	r.SetNext(redirect.Last)
	if _, err := r.SetDestinations(destinations(5, 8)); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"127.254.255.255", "127.1.0.0", "127.1.0.1"} {
		if got := number(t, r, destinations(5+i, 6+i)[0]); got != netip.MustParseAddr(want) {
			t.Errorf("the number %d is %s, want %s", i, got, want)
		}
	}
	r.SetNext(redirect.Last)
	if _, err := r.SetDestinations(destinations(5, 9)); err != nil {
		t.Fatal(err)
	}
	if got := number(t, r, destinations(8, 9)[0]); got != netip.MustParseAddr("127.1.0.2") {
		t.Errorf("the number behind those that are taken is %s", got)
	}
}

// Without room a destination is called directly, and those that have a number
// keep it.
func TestNoRoom(t *testing.T) {
	n := newNode(t)
	r, err := redirect.OpenAs(n.options, func(spec *ebpf.CollectionSpec) {
		spec.Maps["destinations"].MaxEntries = 10
		spec.Maps["numbers"].MaxEntries = 16
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	if done, err := r.SetDestinations(destinations(5, 15)); err != nil || done != (redirect.Destinations{Redirected: 10}) {
		t.Fatal(done, err)
	}
	was := number(t, r, destinations(5, 6)[0])
	if done, err := r.SetDestinations(destinations(0, 20)); err != nil || done != (redirect.Destinations{Redirected: 10, Left: 10}) {
		t.Error(done, err)
	}
	if got := number(t, r, destinations(5, 6)[0]); got != was {
		t.Errorf("%s, and was %s", got, was)
	}
	// Numbers that wait take room, too: 16 in all.
	if done, err := r.SetDestinations(destinations(20, 30)); err != nil || done != (redirect.Destinations{Redirected: 6, Left: 4}) {
		t.Error(done, err)
	}
	if done, err := r.SetDestinations(destinations(5, 15)); err != nil || done != (redirect.Destinations{Redirected: 10}) {
		t.Error(done, err)
	}
}

// The full size of the tables.
func TestAllNumbers(t *testing.T) {
	n := newNode(t)
	r := n.open()
	list := destinations(0, 65536+100)
	if done, err := r.SetDestinations(list); err != nil || done != (redirect.Destinations{Redirected: 65536, Left: 100}) {
		t.Fatal(done, err)
	}
	r.Close()
	r = n.open()
	if done, err := r.SetDestinations(list[:1000]); err != nil || done != (redirect.Destinations{Redirected: 1000}) {
		t.Fatal(done, err)
	}
	for _, to := range list[:1000] {
		if got, ok := r.Destination(number(t, r, to)); !ok || got != to {
			t.Errorf("%s for %s", got, to)
		}
	}
}
