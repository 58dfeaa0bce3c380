package path_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/path"
	"github.com/fingerpost/fingerpost/test/harness"
)

// changes a test makes; each with what the map must come to say.
func TestMapFollowsChanges(t *testing.T) {
	h := newHost(t)
	h.ip(uplink + pod("cali1"))
	ways := h.open(path.Options{})
	run(t, ways)
	is := func(to string, local bool, want path.Class, wired bool) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			if p := ways.Of(netip.MustParseAddr(to), local); p.Class != want || p.Wired != wired {
				return fmt.Errorf("%s: %v, want %s, wired %t", to, p, want, wired)
			}
			return nil
		})
	}
	is("10.1.0.5", true, path.Local, false)
	is("10.1.7.5", false, path.Gateway, false)
	is("2001:db8:7::5", false, path.Gateway, false)
	h.ip("route add 10.1.0.5/32 dev cali1 scope link\nroute add blackhole 10.1.7.0/24\nroute add unreachable 2001:db8:7::/64\n")
	is("10.1.0.5", true, path.Local, true)
	is("10.1.7.5", false, path.Unreachable, false)
	is("2001:db8:7::5", false, path.Unreachable, false)
	h.ip("link set cali1p down\n")
	is("10.1.0.5", true, path.Local, false)
	h.ip("link set cali1p up\n")
	is("10.1.0.5", true, path.Local, true)
	// Rules and addresses count as routes do.
	h.ip("rule add to 10.1.8.5 lookup 100 pref 50\nroute add 10.1.8.0/24 dev eth0 table 100\naddr add 10.1.9.5/32 dev eth0\n")
	is("10.1.8.5", false, path.SameL2, false)
	is("10.1.9.5", false, path.Host, true)
	h.ip("link del cali1\n")
	is("10.1.0.5", true, path.Local, false)
}

// 10,000 routes change while the socket that tells of it has room for a few: the
// map is right afterwards, and follows what comes later (vishvananda/netlink#477).
func TestBurstOfChangesUnderASmallReceiveBuffer(t *testing.T) {
	const routes = 10000
	h := newHost(t)
	h.ip(uplink + vxlan)
	ways := h.open(path.Options{ReceiveBuffer: 4096})
	if size, err := unix.GetsockoptInt(ways.Events(), unix.SOL_SOCKET, unix.SO_RCVBUF); err != nil || size > 16384 {
		t.Fatalf("the receive buffer has %d bytes (%v)", size, err)
	}
	run(t, ways)
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}) }
	all := func(want path.Class) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			for i := range routes {
				if p := ways.Of(addr(i), false); p.Class != want {
					return fmt.Errorf("%s: %v, want %s", addr(i), p, want)
				}
			}
			return nil
		})
	}
	all(path.Gateway) // the default route
	var add, replace, remove strings.Builder
	for i := range routes {
		fmt.Fprintf(&add, "route add %s/32 via 10.2.255.255 dev flannel.1 onlink\n", addr(i))
		fmt.Fprintf(&replace, "route replace unreachable %s/32\n", addr(i))
		fmt.Fprintf(&remove, "route del %s/32\n", addr(i))
	}
	h.ip(add.String())
	all(path.Tunnel)
	h.ip(replace.String())
	all(path.Unreachable)
	h.ip(remove.String())
	all(path.Gateway)
	h.ip("route add unreachable 10.2.0.7/32\n")
	harness.Eventually(t, soon, func() error {
		if p := ways.Of(addr(7), false); p.Class != path.Unreachable {
			return fmt.Errorf("after the bursts: %v", p)
		}
		return nil
	})
}

// What a node of many pods costs to classify, from nothing.
func BenchmarkClassify500(b *testing.B) {
	h := newHost(b)
	h.ip(uplink)
	var pods []netip.Addr
	var lines strings.Builder
	lines.WriteString(pod("cali1"))
	for i := range 500 {
		a := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		pods = append(pods, a)
		fmt.Fprintf(&lines, "route add %s/32 dev cali1 scope link\n", a)
	}
	h.ip(lines.String())
	ways := h.open(path.Options{})
	for b.Loop() {
		ways.Forget()
		for _, a := range pods {
			if p := ways.Of(a, true); !p.Wired {
				b.Fatal(p)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/500-pods")
}
