package path_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/bpf/path"
	"github.com/fingerpost/fingerpost/test/harness"
)

// uplink is a node's eth0 with a router behind it. Like a kind node's it is a
// veth: kinds prove nothing.
const uplink = `
link add eth0 type veth peer name wire0
link set wire0 up
link set eth0 up
addr add 192.0.2.10/24 dev eth0
addr add 2001:db8::10/64 dev eth0 nodad
route add default via 192.0.2.1 dev eth0
route add default via 2001:db8::1 dev eth0
`

// pod is the host's end of a pod's link.
func pod(name string) string {
	return "link add " + name + " type veth peer name " + name + "p\nlink set " + name + "p up\nlink set " + name + " up\n"
}

const vxlan = "link add flannel.1 type vxlan id 1 dstport 8472 local 192.0.2.10\nlink set flannel.1 up\naddr add 10.1.0.0/32 dev flannel.1\n"

// The layouts of network plugins, as they write routes.
func TestRoutesOfNetworkPlugins(t *testing.T) {
	for name, test := range map[string]struct {
		setup string
		to    string
		local bool
		want  path.Path // Reason: a part of it
	}{
		"bridge, local": {
			setup: uplink + "link add cni0 type bridge\n" + pod("veth1") + "link set veth1 master cni0\nlink set cni0 up\naddr add 10.1.0.1/24 dev cni0\n",
			to:    "10.1.0.5", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "cni0", Kind: "bridge"},
		},
		"bridge, its pods have gone": {
			setup: uplink + "link add cni0 type bridge\n" + pod("veth1") + "link set veth1 master cni0\nlink set cni0 up\naddr add 10.1.0.1/24 dev cni0\nlink set veth1p down\n",
			to:    "10.1.0.5", local: true, want: path.Path{Class: path.Local, Link: "cni0", Kind: "bridge", Reason: "link cni0 is down"},
		},
		"ptp and kindnet, local": {
			setup: uplink + pod("veth1") + "addr add 10.1.0.1/32 dev veth1\nroute add 10.1.0.5/32 dev veth1 scope host\n",
			to:    "10.1.0.5", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "veth1", Kind: "veth"},
		},
		"ptp, its pod has gone": {
			setup: uplink,
			to:    "10.1.0.5", local: true,
			want: path.Path{Class: path.Local, Link: "eth0", Kind: "veth", Via: netip.MustParseAddr("192.0.2.1"), Reason: "but the default one", Contrary: true},
		},
		"Calico, local": {
			setup: uplink + pod("cali1") + "route add 10.1.0.5/32 dev cali1 scope link\n",
			to:    "10.1.0.5", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "cali1", Kind: "veth"},
		},
		"Calico, local, IPv6": {
			setup: uplink + pod("cali1") + "route add 2001:db8:1::5/128 dev cali1\n",
			to:    "2001:db8:1::5", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "cali1", Kind: "veth"},
		},
		"Calico, no such pod of the block": {
			setup: uplink + "route add blackhole 10.1.0.0/26 proto bird\n",
			to:    "10.1.0.5", local: true, want: path.Path{Class: path.Local, Reason: "blackhole"},
		},
		"Calico, no such pod of the block, IPv6": {
			setup: uplink + "route add blackhole 2001:db8:1::/122\n",
			to:    "2001:db8:1::5", want: path.Path{Class: path.Unreachable, Reason: "blackhole"},
		},
		"VXLAN": {
			setup: uplink + vxlan + "route add 10.1.7.0/24 via 10.1.7.0 dev flannel.1 onlink\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Tunnel, Link: "flannel.1", Kind: "vxlan", Via: netip.MustParseAddr("10.1.7.0")},
		},
		"a tunnel without gateway": {
			setup: uplink + vxlan + "route add 10.1.7.0/24 dev flannel.1\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Tunnel, Link: "flannel.1", Kind: "vxlan"},
		},
		"kindnet, host-gw and BGP, remote": {
			setup: uplink + "route add 10.1.7.0/24 via 192.0.2.17 dev eth0\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Gateway, Link: "eth0", Kind: "veth", Via: netip.MustParseAddr("192.0.2.17")},
		},
		"host-gw, IPv6": {
			setup: uplink + "route add 2001:db8:7::/64 via 2001:db8::17 dev eth0\n",
			to:    "2001:db8:7::5", want: path.Path{Class: path.Gateway, Link: "eth0", Kind: "veth", Via: netip.MustParseAddr("2001:db8::17")},
		},
		"by the default route": {
			setup: uplink,
			to:    "10.1.7.5", want: path.Path{Class: path.Gateway, Link: "eth0", Kind: "veth", Via: netip.MustParseAddr("192.0.2.1")},
		},
		"Cilium, local, without endpoint routes": {
			setup: uplink + pod("cilium_host") + "addr add 10.1.0.9/32 dev cilium_host\nroute add 10.1.0.9/32 dev cilium_host scope link\nroute add 10.1.0.0/24 via 10.1.0.9 dev cilium_host src 10.1.0.9\n",
			to:    "10.1.0.5", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "cilium_host", Kind: "veth", Via: netip.MustParseAddr("10.1.0.9")},
		},
		"Cilium, remote, tunnel": {
			setup: uplink + pod("cilium_host") + "addr add 10.1.0.9/32 dev cilium_host\nroute add 10.1.0.9/32 dev cilium_host scope link\nroute add 10.1.7.0/24 via 10.1.0.9 dev cilium_host src 10.1.0.9\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Unknown, Link: "cilium_host", Kind: "veth", Via: netip.MustParseAddr("10.1.0.9"), Reason: "with Cilium"},
		},
		"Cilium, endpoint routes": {
			setup: uplink + pod("lxc1") + "route add 10.1.0.5/32 dev lxc1 scope link\n",
			to:    "10.1.0.5", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "lxc1", Kind: "veth"},
		},
		"AWS, local": {
			setup: uplink + pod("eni1") + "route add 192.0.2.55/32 dev eni1 scope link\nrule add to 192.0.2.55 lookup main pref 512\n",
			to:    "192.0.2.55", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "eni1", Kind: "veth"},
		},
		"AWS, local, interface of its own": { // it looks as one of the same subnet
			setup: uplink,
			to:    "192.0.2.56", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "eth0", Kind: "veth"},
		},
		"AWS, same subnet": {
			setup: uplink,
			to:    "192.0.2.57", want: path.Path{Class: path.SameL2, Link: "eth0", Kind: "veth"},
		},
		"same subnet, IPv6": {
			setup: uplink,
			to:    "2001:db8::57", want: path.Path{Class: path.SameL2, Link: "eth0", Kind: "veth"},
		},
		"several next hops": {
			setup: uplink + "route add 10.1.7.0/24 nexthop via 192.0.2.17 dev eth0 nexthop via 192.0.2.18 dev eth0\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Gateway, Link: "eth0", Kind: "veth", Via: netip.MustParseAddr("192.0.2.17")},
		},
		"several next hops, all by a tunnel": {
			setup: uplink + vxlan + "route add 10.1.7.0/24 nexthop via 10.1.7.0 dev flannel.1 onlink nexthop via 10.1.7.1 dev flannel.1 onlink\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Tunnel, Link: "flannel.1", Kind: "vxlan", Via: netip.MustParseAddr("10.1.7.0")},
		},
		"several next hops, IPv6": {
			setup: uplink + "route add 2001:db8:7::/64 nexthop via 2001:db8::17 dev eth0 nexthop via 2001:db8::18 dev eth0\n",
			to:    "2001:db8:7::5", want: path.Path{Class: path.Gateway, Link: "eth0", Kind: "veth", Via: netip.MustParseAddr("2001:db8::17")},
		},
		"by an IPv6 router": {
			setup: uplink + "route add 10.1.7.0/24 via inet6 2001:db8::17 dev eth0\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Gateway, Link: "eth0", Kind: "veth", Via: netip.MustParseAddr("2001:db8::17")},
		},
		"unreachable": {
			setup: uplink + "route add unreachable 10.1.7.0/24\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Unreachable, Reason: "unreachable"},
		},
		"prohibited": {
			setup: uplink + "route add prohibit 10.1.7.0/24\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Unreachable, Reason: "prohibit"},
		},
		"unreachable, IPv6": {
			setup: uplink + "route add unreachable 2001:db8:7::/64\n",
			to:    "2001:db8:7::5", want: path.Path{Class: path.Unreachable, Reason: "unreachable"},
		},
		"no route": {
			to: "10.1.7.5", want: path.Path{Class: path.Unreachable, Reason: "there is no route"},
		},
		"no route, IPv6": {
			to: "2001:db8:7::5", want: path.Path{Class: path.Unreachable, Reason: "there is no route"},
		},
		"no route, local": {
			to: "10.1.7.5", local: true, want: path.Path{Class: path.Local, Reason: "there is no route"},
		},
		"host network, of this node": {
			setup: uplink,
			to:    "192.0.2.10", local: true, want: path.Path{Class: path.Host, Wired: true, Link: "eth0", Kind: "veth"},
		},
		"host network, of this node, IPv6": {
			setup: uplink,
			to:    "2001:db8::10", local: true, want: path.Path{Class: path.Host, Wired: true, Kind: "veth", Link: "eth0"},
		},
		"loopback": {
			to: "127.0.0.5", local: true, want: path.Path{Class: path.Host, Wired: true, Link: "lo", Kind: "device"},
		},
		"without carrier": {
			setup: uplink + "link add veth1 type veth peer name veth1p\nlink set veth1 up\nroute add 10.1.0.5/32 dev veth1 scope link\n",
			to:    "10.1.0.5", local: true, want: path.Path{Class: path.Local, Link: "veth1", Kind: "veth", Reason: "link veth1 is down"},
		},
		"the uplink without carrier": {
			setup: uplink + "link set wire0 down\n",
			to:    "192.0.2.57", want: path.Path{Class: path.Unreachable, Link: "eth0", Kind: "veth", Reason: "link eth0 is down"},
		},
		"one of the next hops without carrier": {
			setup: uplink + pod("eth1") + "addr add 198.51.100.10/24 dev eth1\nroute add 10.1.7.0/24 nexthop via 192.0.2.17 dev eth0 nexthop via 198.51.100.17 dev eth1\nlink set wire0 down\n",
			to:    "10.1.7.5", want: path.Path{Class: path.Gateway, Link: "eth1", Kind: "veth", Via: netip.MustParseAddr("198.51.100.17")},
		},
		"a remote pod whose route is a local one's": {
			setup: uplink + pod("cali1") + "route add 10.1.0.5/32 dev cali1 scope link\n",
			to:    "10.1.0.5", want: path.Path{Class: path.Unknown, Link: "cali1", Kind: "veth", Reason: "as to a pod of this node", Contrary: true},
		},
		"IPv4-mapped": {
			setup: uplink + pod("cali1") + "route add 10.1.0.5/32 dev cali1 scope link\n",
			to:    "::ffff:10.1.0.5", local: true, want: path.Path{Class: path.Local, Wired: true, Link: "cali1", Kind: "veth"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.ip(test.setup)
			ways := h.open(path.Options{})
			// The kernel is late to say that a link has lost its carrier.
			harness.Eventually(t, soon, func() error {
				ways.Forget()
				got, want := ways.Of(netip.MustParseAddr(test.to), test.local), test.want
				if !strings.Contains(got.Reason, want.Reason) || (got.Reason == "") != (want.Reason == "") {
					return fmt.Errorf("%v: reason %q, want %q", got, got.Reason, want.Reason)
				}
				if got.Reason = want.Reason; got != want {
					return fmt.Errorf("%+v, want %+v", got, want)
				}
				return nil
			})
		})
	}
}

// A class costs more the farther it is, and what is not known is taken for far.
func TestCostFollowsClass(t *testing.T) {
	order := []path.Class{path.Host, path.Local, path.SameL2, path.Gateway, path.Tunnel, path.Unreachable}
	for i := range order[1:] {
		if near, far := order[i], order[i+1]; near.Cost() >= far.Cost() {
			t.Errorf("%s costs %s, %s %s", near, near.Cost(), far, far.Cost())
		}
	}
	if path.Unknown.Cost() < path.Gateway.Cost() || path.Unknown.Cost() >= path.Unreachable.Cost() {
		t.Errorf("%s costs %s", path.Unknown, path.Unknown.Cost())
	}
}

// Without a map spec.nodeName still says what is local, and nothing is cut off.
func TestNoMap(t *testing.T) {
	var none *path.Map
	if p := none.Of(netip.MustParseAddr("10.1.0.5"), true); p.Class != path.Local || !p.Wired {
		t.Errorf("local: %v", p)
	}
	if p := none.Of(netip.MustParseAddr("10.1.0.5"), false); p.Class != path.Unknown {
		t.Errorf("remote: %v", p)
	}
}
