// Package redirect sends connections of chosen pods to chosen destinations to
// the sidecar that the pod has on loopback, by eBPF programs on the node: the
// application knows nothing of it, and the pod needs neither rules of iptables
// nor a capability.
//
//	connect(10.96.0.10:50051) ─▶ connect4 ─▶ 127.b.c.d:15002 ─▶ the sidecar's listener
//	                              │ by pods, destinations
//	getpeername() ◀─ 10.96.0.10:50051 ◀─ getpeername4, by numbers
//
// All of 127.0.0.0/8 is local in every network namespace. So each destination has
// a number of 24 bits, and a connection to it goes to the loopback address with
// that number, b.c.d; the sidecar's listener reads it from the connection's own
// local address. Nothing is kept for a connection, so nothing can leak or race.
//
// A pod is chosen by the cookie of its network namespace (SO_NETNS_COOKIE of a
// connection that it made). Connections of one uid, the sidecar's, stay as they
// are. So do all others: UDP, sockets bound to a device, destinations that have
// no number, and every connection while nobody listens on the sidecar's port. No
// connection is ever refused.
//
// IPv6 goes to ::ffff:127.b.c.d, since loopback of IPv6 is one address. A socket
// that may speak IPv6 alone cannot, nor can one that was bound before: those are
// left alone. The kernel keeps a socket that spoke IPv4 to it: one that was
// redirected, let go of (connect with AF_UNSPEC) and is connected again reaches
// IPv4 and what is redirected, and no other IPv6.
//
// # Pins
//
// Programs and maps outlive the process: they are pinned, and connections are
// redirected while no agent runs. A new process puts its programs in the place of
// the old ones. Maps of another layout are replaced with all that they held; the
// old programs run until then. A number means one destination for as long as it
// can matter: it is kept over restarts, for [Options.Grace] after the destination
// has gone, and given to another one only when all others were.
package redirect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/cgroup"
)

//go:generate go -C ../../tools/bpf run . ../../bpf/redirect redirect redirect.c -type destination -type number

// Port is where the sidecar listens.
const Port = 15002

// DefaultDir is where links and maps are pinned.
const DefaultDir = "/sys/fs/bpf/fingerpost"

// Options configures a [Redirector].
type Options struct {
	// Cgroup is the directory of the cgroup, of the second version, whose
	// processes are looked at, with those of the cgroups below it. If empty it
	// is the one that holds all pods of the node ([cgroup.Find]).
	Cgroup string
	// Dir is where links and maps are pinned, [DefaultDir] if empty. It is made
	// if its parent is there, and holds nothing else.
	Dir string
	// Port is where sidecars listen on loopback, [Port] if 0.
	Port uint16
	// Grace is how long at least the number of a destination that has gone means
	// that destination; 24 hours if 0.
	Grace time.Duration
	// Log hears what is replaced or made anew; nil is quiet.
	Log *slog.Logger
}

func (o Options) withDefaults() Options {
	if o.Dir == "" {
		o.Dir = DefaultDir
	}
	if o.Port == 0 {
		o.Port = Port
	}
	if o.Grace == 0 {
		o.Grace = 24 * time.Hour
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Redirector says which connections are redirected. It is safe for concurrent use.
type Redirector struct {
	// Set by Open, read-only.
	options   Options
	pins      *pins
	maps      map[string]*ebpf.Map
	links     map[string]link.Link
	host      uint64 // cookie of our own network namespace
	recreated int
	replaced  bool

	// setting serialises SetDestinations: what it writes to the kernel follows
	// what it decided.
	setting sync.Mutex
	// mu protects what each number means.
	mu      sync.RWMutex
	numbers numbers
}

// load is what the programs and maps are; tests have others.
var load = loadRedirect

// Open attaches the programs, or puts them in the place of those that run, and
// takes over what their maps hold. An error is an [Unavailable]. Nothing that ran
// before is ended by one.
func Open(o Options) (_ *Redirector, err error) {
	o = o.withDefaults()
	if err := cgroup.Capable(); err != nil {
		return nil, unavailable(Capability, "%w", err)
	}
	if o.Cgroup == "" {
		switch o.Cgroup, err = cgroup.Find(); {
		case errors.Is(err, cgroup.ErrNone):
			return nil, unavailable(NoCgroup2, "%w", err)
		case err != nil:
			return nil, unavailable(AttachPoint, "%w", err)
		}
	}
	dir, err := openCgroup(o.Cgroup)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	r := &Redirector{options: o}
	if r.host, err = ownCookie(); err != nil {
		return nil, unavailable(Kernel, "the cookie of a network namespace (SO_NETNS_COOKIE, Linux 5.14): %w", err)
	}
	if r.pins, err = openPins(o.Dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	spec, err := load()
	if err != nil {
		return nil, unavailable(Kernel, "%w", err)
	}
	if err := spec.Variables[redirectVarCapturePort].Set(o.Port); err != nil {
		return nil, unavailable(Kernel, "%w", err)
	}
	pinned, kept, err := r.pins.maps(spec)
	if err != nil {
		return nil, err
	}
	defer closeAll(pinned) // the collection has its own descriptors
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: kept})
	if err != nil {
		var refused *ebpf.VerifierError
		if errors.As(err, &refused) {
			o.Log.Warn("the kernel's verifier refuses the programs for redirection", "log", fmt.Sprintf("%+v", refused))
		}
		return nil, unavailable(Kernel, "%w", cgroup.NotLoaded(err, "Linux 5.8"))
	}
	defer closeAll(coll.Programs)
	r.maps = coll.Maps
	fresh := map[string]*ebpf.Map{}
	for _, name := range pinnedMaps {
		if kept[name] == nil {
			fresh[name] = coll.Maps[name]
		}
	}
	if err := carry(pinned, fresh); err != nil {
		return nil, unavailable(Kernel, "what the maps held: %w", err)
	}
	if r.numbers, err = readNumbers(coll.Maps); err != nil {
		return nil, unavailable(Kernel, "numbers of destinations: %w", err)
	}
	if err := r.attach(dir, coll.Programs); err != nil {
		return nil, err
	}
	for name, m := range fresh {
		if pinned[name] != nil {
			r.replaced = true
			o.Log.Warn("a pinned map has another layout, and was replaced with what it held", "map", name)
		}
		if err := r.pins.put(name, m.Pin); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Close lets go of what the process holds. Connections are redirected as before.
func (r *Redirector) Close() {
	closeAll(r.maps)
	for _, l := range r.links {
		_ = l.Close()
	}
	r.pins.close()
}

func closeAll[C interface{ Close() error }](m map[string]C) {
	for c := range maps.Values(m) {
		_ = c.Close()
	}
}

// Allow lets connections from the network namespace with the cookie be
// redirected, except those of processes with the uid, as the host counts it. It
// returns [ErrHost] for the host's own network.
func (r *Redirector) Allow(cookie uint64, exempt uint32) error {
	if cookie == r.host {
		return ErrHost
	}
	if err := r.maps[redirectMapPods].Put(cookie, exempt); err != nil {
		return fmt.Errorf("choose a network namespace for redirection: %w", err)
	}
	return nil
}

// Forget leaves new connections from the network namespace alone. Those that it
// has stay.
func (r *Redirector) Forget(cookie uint64) error {
	if err := r.maps[redirectMapPods].Delete(cookie); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("end the redirection of a network namespace: %w", err)
	}
	return nil
}

// Allowed returns the cookies of all chosen network namespaces with the uid that
// is exempt in each: also those that a process before this one chose.
func (r *Redirector) Allowed() (map[uint64]uint32, error) {
	allowed := map[uint64]uint32{}
	var cookie uint64
	var uid uint32
	it := r.maps[redirectMapPods].Iterate()
	for it.Next(&cookie, &uid) {
		allowed[cookie] = uid
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("chosen network namespaces: %w", err)
	}
	return allowed, nil
}

// outcomes are the names of enum outcome.
var outcomes = [...]string{"redirected4", "redirected6", "exempt", "no_listener", "bound_device", "ipv6_alone"}

// Counters returns what became of connections of chosen pods to destinations
// that have a number, since the programs were first attached: redirected4 and
// redirected6; or left alone because of the uid (exempt), because nobody listened
// (no_listener), or for the socket: bound_device, ipv6_alone.
func (r *Redirector) Counters() (map[string]uint64, error) {
	counters := make(map[string]uint64, len(outcomes))
	for i, name := range outcomes {
		var each []uint64
		if err := r.maps[redirectMapCounters].Lookup(uint32(i), &each); err != nil {
			return nil, fmt.Errorf("counters of redirection: %w", err)
		}
		for _, n := range each {
			counters[name] += n
		}
	}
	return counters, nil
}

// Recreated is how many programs Open had to attach anew because the cgroup to
// which they were attached is not the one that they should be, or is no more.
func (r *Redirector) Recreated() int { return r.recreated }

// Replaced tells whether Open replaced maps of another layout.
func (r *Redirector) Replaced() bool { return r.replaced }

func openCgroup(dir string) (*os.File, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return nil, unavailable(NoCgroup2, "%q: %w", dir, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, unavailable(NoCgroup2, "%q is not on a cgroup2 file system", dir)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, unavailable(NoCgroup2, "%w", err)
	}
	return f, nil
}

// ownCookie is the cookie of this process's network namespace.
func ownCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

// network is a number as the kernel has it in network order.
func network16(v uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], v)
	return binary.NativeEndian.Uint16(b[:])
}

func network32(v uint32) uint32 {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], v)
	return binary.NativeEndian.Uint32(b[:])
}

func destinationOf(a netip.AddrPort) redirectDestination {
	d := redirectDestination{Port: network16(a.Port())}
	b := a.Addr().As16()
	for i := range d.Addr {
		d.Addr[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return d
}

func (d redirectDestination) addrPort() netip.AddrPort {
	var b [16]byte
	for i, v := range d.Addr {
		binary.NativeEndian.PutUint32(b[4*i:], v)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(b).Unmap(), network16(d.Port))
}
