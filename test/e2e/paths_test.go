package e2e_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
)

func (a *agentProcess) paths() []agent.PathView { return ask[[]agent.PathView](a.t, a, "paths") }

// becomes waits until a part of status is as wanted, which may be its beginning.
func (a *agentProcess) becomes(part, want string) {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		if got := a.status().Parts[part]; got != want && (want == "on" || !strings.HasPrefix(got, want)) {
			return fmt.Errorf("%s is %q, want %q", part, got, want)
		}
		return nil
	})
}

// serveIn lets a pod's network have a server at its address.
func serveIn(t *testing.T, network *harness.Network, id, addr, service string) {
	t.Helper()
	if err := network.Do(func() error {
		s, err := demo.StartSample(id, addr, []string{service})
		if err == nil {
			t.Cleanup(s.Stop)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// What the kernel says of the ways to pods, and what becomes of connections to
// them, is shown by paths, explain and the metrics.
func TestWaysAndConnectionsAreShown(t *testing.T) {
	s, w := newSite(t), newWorld(t)
	harness.NewCgroup(t) // or nothing can be observed here, and the test says so
	s.network = harness.NewNetwork(t)
	add := func(id, addr string, wired bool) *corev1.Pod {
		p := w.add(newPod(id, addr, 50051))
		if wired {
			network := harness.NewNetwork(t)
			s.network.Wire(t, "v"+id, network, addr)
			if err := network.Do(func() error {
				link, err := netlink.LinkByName("eth0")
				if err != nil {
					return err
				}
				// Answers find their way, whichever address of the host asks.
				return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: prefix("10.77.9.0/24")})
			}); err != nil {
				t.Fatal(err)
			}
			if id == "good-1-a" {
				serveIn(t, network, id, addr+":50051", "shop.Good")
			}
		}
		return p
	}
	s.network.Claim(t, "10.77.9.1")
	add("good-1-a", "10.77.9.2", true)
	add("deaf-1-a", "10.77.9.3", true)
	add("gone-1-a", "10.77.9.4", false)
	far := add("far-1-a", "10.77.10.2", false)
	far.Spec.NodeName = "n2"
	far.Annotations = map[string]string{"fingerpost.dev/services": "50051=shop.Far"}
	// A router behind the first pod's link will do.
	link, err := s.network.LinkByName("vgood-1-a")
	if err == nil {
		err = s.network.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: prefix("10.77.10.0/24"), Gw: netip.MustParseAddr("10.77.9.2").AsSlice(), Flags: unix.RTNH_F_ONLINK})
	}
	if err != nil {
		t.Fatal(err)
	}
	a := s.start(t, "--source", w.write().source()).ready()
	a.becomes("path", "on")
	a.becomes("observe", "on")

	// The first attempts may have been before it was observed; one that failed is
	// made again.
	a.must("recollect", "prod/ReplicaSet/good-1")
	rows := map[string]agent.PathView{}
	harness.Eventually(t, soon, func() error {
		clear(rows)
		for _, p := range a.paths() {
			rows[p.Address] = p
		}
		good, deaf := rows["10.77.9.2:50051"], rows["10.77.9.3:50051"]
		if good.Observed == nil || good.Observed.OK == 0 || good.Observed.RTTLastUS == 0 || deaf.Observed == nil || deaf.Observed.Refused == 0 {
			return fmt.Errorf("seen of good %+v, of deaf %+v", good.Observed, deaf.Observed)
		}
		return nil
	})
	good, deaf, away := rows["10.77.9.2:50051"], rows["10.77.9.3:50051"], rows["10.77.10.2:50051"]
	if good.Pod != "prod/good-1-a" || good.Node != "n1" || good.Class != "local" || good.Wired == nil || !*good.Wired || good.Link != "vgood-1-a" ||
		good.CostUS == nil || *good.CostUS != good.Observed.RTTAverageUS || good.Observed.Refused+good.Observed.TimedOut != 0 {
		t.Errorf("good: %+v, seen %+v", good, good.Observed)
	}
	if deaf.Pod != "prod/deaf-1-a" || deaf.Class != "local" || deaf.Observed.OK != 0 {
		t.Errorf("deaf: %+v, seen %+v", deaf, deaf.Observed)
	}
	if away.Class != "gateway" || away.Via != "10.77.9.2" || away.Wired != nil || away.Node != "n2" || away.Observed != nil || away.CostUS == nil {
		t.Errorf("far: %+v", away)
	}
	if out := a.must("paths"); !strings.Contains(out, "10.77.9.3:50051") || !strings.Contains(out, " refused") || !strings.Contains(out, "gateway") {
		t.Errorf("paths: %s", out)
	}
	for pod, want := range map[string][]string{
		"good-1-a": {"local by vgood-1-a (veth), takes about ", "port 50051: ", " ok", "SYN round trip "},
		"deaf-1-a": {" refused"},
		"gone-1-a": {"local, not wired: there is no route"},
		"far-1-a":  {"gateway 10.77.9.2 by vgood-1-a (veth)"},
	} {
		out := a.must("explain", "pod", "prod/"+pod)
		for _, words := range want {
			if !strings.Contains(out, words) {
				t.Errorf("explain pod %s does not say %q:\n%s", pod, words, out)
			}
		}
	}
	c := s.rawFrom(t, s.network, "prod/deaf-1-a")
	c.subscribe(xds.Cluster)
	c.gets("prod/shop.Far")
	if out := a.must("explain", "call", "--from", "prod/deaf-1-a", "/shop.Far/Do"); !strings.Contains(out, "10.77.10.2:50051: gateway 10.77.9.2 by vgood-1-a (veth), takes about ") {
		t.Errorf("explain call: %s", out)
	}
	for metric, want := range map[string]string{
		`fingerpost_bpf_available{part="path",reason=""}`:    "1",
		`fingerpost_bpf_available{part="observe",reason=""}`: "1",
		`fingerpost_path_local_pods{wired="true"}`:           "2",
		`fingerpost_path_local_pods{wired="false"}`:          "1",
	} {
		if got := a.metric(metric); got != want {
			t.Errorf("%s is %s, want %s", metric, got, want)
		}
	}
	for _, metric := range []string{`fingerpost_observed_connects_total{outcome="ok"}`, `fingerpost_observed_connects_total{outcome="refused"}`, "fingerpost_observed_syn_rtt_seconds_count", "fingerpost_observed_destinations"} {
		if got := a.metric(metric); got == "0" {
			t.Errorf("%s is 0", metric)
		}
	}
}

// Each part is off for a reason that is named, once in the log, and clients get
// what they would get anyway.
func TestPartsOfTheKernelThatAreOff(t *testing.T) {
	const noCgroups = `for m in $(awk '$3 ~ /^cgroup/ { print $2 }' /proc/self/mounts | tac); do umount -l "$m" || exit 1; done; exec "$@"`
	for name, test := range map[string]struct {
		change        func(*exec.Cmd)
		path, observe string
	}{
		"without capabilities": {
			change: func(cmd *exec.Cmd) {
				cmd.SysProcAttr = &unix.SysProcAttr{
					Cloneflags:  unix.CLONE_NEWUSER,
					UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
					GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
				}
			},
			path: "on", observe: "off: the kernel does not permit BPF here",
		},
		"without cgroup2": {
			change: func(cmd *exec.Cmd) {
				cmd.Args = append([]string{"sh", "-c", noCgroups, "sh", cmd.Path}, cmd.Args[1:]...)
				cmd.Path = "/bin/sh"
				cmd.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
			},
			path: "on", observe: "off: no cgroup2 is mounted here",
		},
		"in a pod's own network": {
			change: func(cmd *exec.Cmd) {
				cmd.Env = append(os.Environ(), "POD_NAMESPACE=prod", "POD_NAME=agent-1-a")
			},
			path: "off: the agent's pod has a network of its own, whose routes are not the node's; set hostNetwork: true", observe: "on",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, w := newSite(t), newWorld(t)
			harness.NewCgroup(t)
			s.network = harness.NewNetwork(t)
			s.wiredPod(w, "prod", "web-1-a", "10.77.11.2", "shop.Web")
			p := newPod("agent-1-a", "10.77.11.3", 9)
			p.Spec.Containers[0].Ports = nil
			w.add(p)
			cmd := exec.Command(program, s.args("--source", w.write().source())...)
			test.change(cmd)
			a := s.launch(t, cmd).ready()
			a.becomes("path", test.path)
			a.becomes("observe", test.observe)
			c := s.rawFrom(t, s.network, "prod/web-1-a")
			c.subscribe(xds.Cluster)
			c.gets("prod/shop.Web")
			for part, want := range map[string]string{"path": test.path, "observe": test.observe} {
				reason, off := strings.CutPrefix(a.status().Parts[part], "off: ")
				if !off {
					reason = ""
				}
				value := "1"
				if off {
					value = "0"
					if n := strings.Count(a.log.String(), "part="+part+" state=\"off: "); n != 1 {
						t.Errorf("the log says %d times that %s is off", n, part)
					}
				}
				if got := a.metric(fmt.Sprintf(`fingerpost_bpf_available{part="%s",reason="%s"}`, part, reason)); got != value {
					t.Errorf("%s: %s, want %s", part, got, want)
				}
			}
			out := a.must("explain", "pod", "prod/web-1-a")
			if off := strings.HasPrefix(test.path, "off: "); off != strings.Contains(out, "part path is off: ") || off == strings.Contains(out, "local by vweb-1-a") {
				t.Errorf("explain pod: %s", out)
			}
			if len(a.paths()) == 0 {
				t.Error("there are no paths")
			}
		})
	}
}

func prefix(s string) *net.IPNet {
	p := netip.MustParsePrefix(s)
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
