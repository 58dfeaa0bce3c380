package redirect

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Numbers are loopback addresses from first to last. 127.0.0.0/16 is what people
// and programs use, and the last of all is for broadcast.
const (
	first = 127<<24 | 1<<16
	last  = 127<<24 | 255<<16 - 1
)

// number is what is known of a destination's number.
type number struct {
	address uint32 // the loopback address, in host order
	// written tells that the kernel redirects to it.
	written bool
	// retired is when the destination went, ns since boot; 0: it is there.
	retired uint64
}

// numbers says which destination has which number. Its user locks.
type numbers struct {
	byDestination map[netip.AddrPort]number
	byAddress     map[uint32]netip.AddrPort
	next          uint32
	series        uint32 // not 0
}

// readNumbers takes over what the maps hold. They are the only memory.
func readNumbers(maps map[string]*ebpf.Map) (numbers, error) {
	n := numbers{byDestination: map[netip.AddrPort]number{}, byAddress: map[uint32]netip.AddrPort{}}
	var address uint32
	var value redirectNumber
	it := maps[redirectMapNumbers].Iterate()
	for it.Next(&address, &value) {
		to, host := value.Destination.addrPort(), network32(address)
		n.byDestination[to] = number{address: host, retired: value.Retired}
		n.byAddress[host] = to
		n.next = max(n.next, host+1)
	}
	if err := it.Err(); err != nil {
		return numbers{}, err
	}
	var key redirectDestination
	var wrong []redirectDestination
	it = maps[redirectMapDestinations].Iterate()
	for it.Next(&key, &address) {
		to := key.addrPort()
		known, ok := n.byDestination[to]
		if !ok || known.address != network32(address) || known.retired != 0 {
			wrong = append(wrong, key)
			continue
		}
		known.written = true
		n.byDestination[to] = known
	}
	if err := it.Err(); err != nil {
		return numbers{}, err
	}
	for _, key := range wrong {
		if err := maps[redirectMapDestinations].Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return numbers{}, err
		}
	}
	var kept uint32
	if err := maps[redirectMapCursor].Lookup(uint32(0), &kept); err != nil {
		return numbers{}, err
	}
	switch {
	case kept != 0:
		n.next = kept
	case n.next == 0:
		// Connections may live that were redirected before all was removed:
		// their numbers are not likely to be the next.
		n.next = first + rand.Uint32N(last-first+1)
	}
	if err := maps[redirectMapCursor].Lookup(uint32(1), &n.series); err != nil {
		return numbers{}, err
	}
	if n.series == 0 {
		n.series = 1 + rand.Uint32N(math.MaxUint32)
		if err := maps[redirectMapCursor].Put(uint32(1), n.series); err != nil {
			return numbers{}, err
		}
	}
	return n, nil
}

// Series tells numbers of one memory from those of another: it stays as long as
// they do, over restarts and upgrades, and is another one, never 0, once they were
// removed. A connection that was redirected by a number of another series leads
// nowhere any more. It is safe for concurrent use.
func (r *Redirector) Series() uint32 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.numbers.series
}

// give returns a number that nobody has.
func (n *numbers) give() uint32 {
	for {
		if n.next < first || n.next > last {
			n.next = first
		}
		address := n.next
		n.next++
		if _, taken := n.byAddress[address]; !taken {
			return address
		}
	}
}

// Destinations is what [Redirector.SetDestinations] made of its list.
type Destinations struct {
	// Redirected is how many have a number.
	Redirected int
	// Left is how many do not, for want of room: they are called directly.
	Left int
}

// SetDestinations says to which destinations connections are redirected; of IPv4
// as such or v4-mapped. One that is new gets a number, one that is not in the
// list is called directly from now on, and keeps its number for a while. An error
// is of the kernel; the next call makes good what it left undone.
func (r *Redirector) SetDestinations(list []netip.AddrPort) (Destinations, error) {
	r.setting.Lock()
	defer r.setting.Unlock()
	now, err := sinceBoot()
	if err != nil {
		return Destinations{}, err
	}
	want := make(map[netip.AddrPort]bool, len(list))
	order := make([]netip.AddrPort, 0, len(list))
	for _, to := range list {
		to = netip.AddrPortFrom(to.Addr().WithZone("").Unmap(), to.Port())
		if !want[to] {
			want[to] = true
			order = append(order, to)
		}
	}
	table, reverse := r.maps[redirectMapDestinations], r.maps[redirectMapNumbers]
	room := int(table.MaxEntries())

	// What has gone is no longer redirected to, then its number waits.
	var gone, expired []netip.AddrPort
	for to, n := range r.numbers.byDestination { // written by this function alone
		switch {
		case want[to]:
		case n.retired == 0:
			gone = append(gone, to)
		case now-n.retired > uint64(r.options.Grace):
			expired = append(expired, to)
		}
	}
	slices.SortFunc(gone, netip.AddrPort.Compare)
	for _, to := range gone {
		n := r.numbers.byDestination[to]
		if err := table.Delete(destinationOf(to)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return Destinations{}, fmt.Errorf("end the redirection to %s: %w", to, err)
		}
		n.written, n.retired = false, now
		if err := reverse.Put(network32(n.address), redirectNumber{Destination: destinationOf(to), Retired: now}); err != nil {
			return Destinations{}, fmt.Errorf("retire the number of %s: %w", to, err)
		}
		r.keep(to, n)
	}
	for _, to := range expired {
		n := r.numbers.byDestination[to]
		if err := reverse.Delete(network32(n.address)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return Destinations{}, fmt.Errorf("forget the number of %s: %w", to, err)
		}
		r.drop(to, n)
	}

	// Those that have a number first, so that none loses it for want of room.
	slices.SortStableFunc(order, func(a, b netip.AddrPort) int {
		_, x := r.numbers.byDestination[a]
		_, y := r.numbers.byDestination[b]
		return cmp.Compare(btoi(y), btoi(x))
	})
	var done Destinations
	for _, to := range order {
		n, known := r.numbers.byDestination[to]
		if done.Redirected >= room || !known && len(r.numbers.byDestination) >= int(reverse.MaxEntries()) {
			done.Left++
			continue
		}
		done.Redirected++
		if known && n.written {
			continue
		}
		if !known {
			n.address = r.numbers.give()
			if err := r.maps[redirectMapCursor].Put(uint32(0), r.numbers.next); err != nil {
				return Destinations{}, fmt.Errorf("remember the next number: %w", err)
			}
		}
		n.retired = 0
		// What the number means is known before it is used.
		r.keep(to, n)
		if err := reverse.Put(network32(n.address), redirectNumber{Destination: destinationOf(to)}); err != nil {
			return Destinations{}, fmt.Errorf("number %s: %w", to, err)
		}
		if err := table.Put(destinationOf(to), network32(n.address)); err != nil {
			return Destinations{}, fmt.Errorf("redirect to %s: %w", to, err)
		}
		n.written = true
		r.keep(to, n)
	}
	return done, nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (r *Redirector) keep(to netip.AddrPort, n number) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.numbers.byDestination[to] = n
	r.numbers.byAddress[n.address] = to
}

func (r *Redirector) drop(to netip.AddrPort, n number) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.numbers.byDestination, to)
	delete(r.numbers.byAddress, n.address)
}

// Destination returns the destination whose number a loopback address is; also of
// one that has gone, as long as its number waits.
func (r *Redirector) Destination(loopback netip.Addr) (netip.AddrPort, bool) {
	loopback = loopback.Unmap()
	if !loopback.Is4() {
		return netip.AddrPort{}, false
	}
	b := loopback.As4()
	r.mu.RLock()
	defer r.mu.RUnlock()
	to, ok := r.numbers.byAddress[uint32(b[0])<<24|uint32(b[1])<<16|uint32(b[2])<<8|uint32(b[3])]
	return to, ok
}

// Number returns the loopback address to which connections to a destination go.
func (r *Redirector) Number(to netip.AddrPort) (netip.Addr, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	n, ok := r.numbers.byDestination[netip.AddrPortFrom(to.Addr().WithZone("").Unmap(), to.Port())]
	if !ok || n.retired != 0 {
		return netip.Addr{}, false
	}
	a := n.address
	return netip.AddrFrom4([4]byte{byte(a >> 24), byte(a >> 16), byte(a >> 8), byte(a)}), true
}

// sinceBoot is a clock that goes on over restarts of the process, as the maps do.
func sinceBoot() (uint64, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0, fmt.Errorf("clock: %w", err)
	}
	return uint64(ts.Nano()), nil
}
