package observe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/cgroup"
)

const (
	// needs is the first kernel that has all of what is used: sockops flags (4.16),
	// socket storage (5.3) and links (5.7) for cgroup programs, sock_release (5.9).
	needs = "Linux 5.9"

	// readEvery is how old what is known may become: nothing waits for it.
	readEvery = 5 * time.Second

	// batch is how many destinations are read at once. A bucket of the map that
	// has more would end the reading.
	batch = 4096
)

// Counts is what became of connections. Those whose end is open yet are
// Connects without the rest.
type Counts struct {
	// Connects counts SYNs that were sent first: a destination without a route
	// gets none, and is not here.
	Connects uint64
	OK       uint64 // established
	Refused  uint64 // answered by RST
	TimedOut uint64 // not answered, and the SYN was repeated; by the kernel's patience or the caller's
	// Unreachable were ended by ICMP, or since nobody has the address.
	Unreachable uint64
	// GivenUp were closed by the caller before the SYN was repeated: within a
	// second.
	GivenUp uint64
	// Retransmits counts segments that were sent again, SYNs too.
	Retransmits uint64
}

// Failed is how many connections did not come about.
func (c Counts) Failed() uint64 { return c.Refused + c.TimedOut + c.Unreachable + c.GivenUp }

// Stat is what was seen of one destination since the observer began, or since
// the destination's place was needed for another.
type Stat struct {
	Destination netip.AddrPort
	Counts
	// Last is when something was seen.
	Last time.Time
	// RTT are round trips of SYNs that were answered at first.
	RTT RTT
}

// RTT are round trips in the kernel's microseconds; 0: none was measured.
type RTT struct {
	Last, Min time.Duration
	// Average is a moving one, to which the last adds an eighth.
	Average time.Duration
}

// Totals is what was seen of all destinations.
type Totals struct {
	Counts
	// RTT is the sum of all measured round trips, Buckets how many there were up
	// to the bound of each, and Samples how many in all.
	RTT     time.Duration
	Samples uint64
	Buckets map[time.Duration]uint64
}

// Observer watches connections. It is safe for concurrent use; nil is one that
// sees nothing.
type Observer struct {
	objects programObjects
	links   []link.Link
	// dir is the cgroup, which is watched with all below it.
	dir string
	log *slog.Logger
	// seen is replaced whole.
	seen atomic.Pointer[map[netip.Addr][]Stat]

	// mu lets one ask the kernel at a time, which lasts milliseconds.
	mu     sync.Mutex
	closed bool
	// oneByOne is set where the kernel does not read in batches.
	oneByOne bool
}

// Options configures an [Observer].
type Options struct {
	// Cgroup is the directory of the cgroup to watch, which is one of a cgroup2;
	// empty: that of all pods of the node.
	Cgroup string
	// Logger may be nil.
	Logger *slog.Logger
}

// Open begins to observe, until Close: nothing is pinned. Its error is one line
// that says what is missing here; what the verifier says goes to the log.
func Open(opts Options) (_ *Observer, err error) {
	o := &Observer{dir: opts.Cgroup, log: opts.Logger}
	if o.log == nil {
		o.log = slog.New(slog.DiscardHandler)
	}
	if err := cgroup.Permitted(ebpf.SockOps); err != nil {
		return nil, err
	}
	if o.dir == "" {
		if o.dir, err = cgroup.Find(); err != nil {
			return nil, err
		}
	}
	if err := loadProgramObjects(&o.objects, nil); err != nil {
		var refused *ebpf.VerifierError
		if errors.As(err, &refused) {
			o.log.Debug("the verifier refuses the program of part observe", "log", fmt.Sprintf("%+v", refused))
		}
		return nil, cgroup.NotLoaded(err, needs)
	}
	for program, at := range map[*ebpf.Program]ebpf.AttachType{
		o.objects.FpSockops: ebpf.AttachCGroupSockOps,
		o.objects.FpRelease: ebpf.AttachCgroupInetSockRelease,
	} {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: o.dir, Attach: at, Program: program})
		if err != nil {
			o.Close()
			return nil, cgroup.NotAttached(err, o.dir)
		}
		o.links = append(o.links, l)
	}
	o.seen.Store(&map[netip.Addr][]Stat{})
	return o, nil
}

// Close ends it. What is known stays.
func (o *Observer) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	for _, l := range o.links {
		_ = l.Close()
	}
	_ = o.objects.Close()
}

// Cgroup is the directory of the cgroup that is watched.
func (o *Observer) Cgroup() string { return o.dir }

// Run reads every 5 seconds what was seen, until ctx ends.
func (o *Observer) Run(ctx context.Context) {
	tick := time.NewTicker(readEvery)
	defer tick.Stop()
	said := false
	for {
		if err := o.Read(); err != nil && !said {
			said = true
			o.log.Warn("what was observed cannot be read; trying on", "part", "observe", "error", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// At is what was seen of the ports of an address, when it was read last. It is
// not to be changed.
func (o *Observer) At(addr netip.Addr) []Stat {
	if o == nil {
		return nil
	}
	return (*o.seen.Load())[addr.Unmap()]
}

// All calls f with what was seen of each destination, when it was read last.
func (o *Observer) All(f func(Stat)) {
	if o == nil {
		return
	}
	for _, stats := range *o.seen.Load() {
		for _, s := range stats {
			f(s)
		}
	}
}

// Read reads what was seen from the kernel.
func (o *Observer) Read() error {
	if o == nil {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return os.ErrClosed
	}
	// The kernel's clock does not stop, ours may be set.
	var mono unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono); err != nil {
		return err
	}
	now := time.Now()
	seen := map[netip.Addr][]Stat{}
	add := func(d *programDestination, v *programObserved) {
		s := stat(d, v)
		s.Last = now.Add(time.Duration(int64(v.Last) - mono.Nano()))
		seen[s.Destination.Addr()] = append(seen[s.Destination.Addr()], s)
	}
	err := errors.ErrUnsupported
	if !o.oneByOne {
		if err = o.readBatches(add); err != nil {
			o.oneByOne = true
			o.log.Debug("destinations are read one by one", "error", err)
			clear(seen)
		}
	}
	if err != nil {
		err = o.readOneByOne(add)
	}
	if err == nil {
		o.seen.Store(&seen)
	}
	return err
}

func (o *Observer) readBatches(add func(*programDestination, *programObserved)) error {
	keys, values := make([]programDestination, batch), make([]programObserved, batch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := o.objects.FpObserved.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		for i := range n {
			add(&keys[i], &values[i])
		}
		if err != nil {
			return nil // there are no more
		}
	}
}

func (o *Observer) readOneByOne(add func(*programDestination, *programObserved)) error {
	var d programDestination
	var v programObserved
	entries := o.objects.FpObserved.Iterate()
	for entries.Next(&d, &v) {
		add(&d, &v)
	}
	// It changes while it is read: that ends the reading early, at worst.
	if err := entries.Err(); !errors.Is(err, ebpf.ErrIterationAborted) {
		return err
	}
	return nil
}

func stat(d *programDestination, v *programObserved) Stat {
	var a [16]byte
	for i, word := range d.Addr {
		// Network byte order, in a word of the machine, which is little endian.
		a[4*i], a[4*i+1], a[4*i+2], a[4*i+3] = byte(word), byte(word>>8), byte(word>>16), byte(word>>24)
	}
	c := &v.Counts
	us := func(n uint32) time.Duration { return time.Duration(n) * time.Microsecond }
	return Stat{
		Destination: netip.AddrPortFrom(netip.AddrFrom16(a).Unmap(), uint16(d.Port)),
		Counts:      Counts{c.Connects, c.Ok, c.Refused, c.TimedOut, c.Unreachable, c.GivenUp, c.Retransmits},
		RTT:         RTT{us(v.RttLast), us(v.RttMin), us(v.RttEwma)},
	}
}

// Totals reads what was seen of all destinations from the kernel. It never
// decreases.
func (o *Observer) Totals() (Totals, error) {
	t := Totals{Buckets: map[time.Duration]uint64{}}
	if o == nil {
		return t, nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return t, os.ErrClosed
	}
	var cpus []programTotals
	if err := o.objects.FpTotals.Lookup(uint32(0), &cpus); err != nil {
		return t, err
	}
	var sum uint64
	for i := range cpus {
		c := &cpus[i].Counts
		t.Connects += c.Connects
		t.OK += c.Ok
		t.Refused += c.Refused
		t.TimedOut += c.TimedOut
		t.Unreachable += c.Unreachable
		t.GivenUp += c.GivenUp
		t.Retransmits += c.Retransmits
		t.Samples += cpus[i].Samples
		sum += cpus[i].RttSum
		for b, n := range cpus[i].Rtt {
			t.Buckets[64*time.Microsecond<<(2*b)] += n
		}
	}
	t.RTT = time.Duration(sum) * time.Microsecond
	return t, nil
}
