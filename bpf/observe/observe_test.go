package observe_test

import (
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/bpf/observe"
	"github.com/fingerpost/fingerpost/test/harness"
)

type counts = observe.Counts

// sysctl sets one of a network's.
func (w *world) sysctl(n *harness.Network, name, value string) {
	w.t.Helper()
	if err := n.Do(func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) }); err != nil {
		w.t.Fatal(err)
	}
}

// mute lets nothing come back from the server.
func (w *world) mute() { w.ip(w.other, "route replace blackhole "+podIP+"\n") }

func (w *world) unmute() { w.ip(w.other, "route replace "+podIP+" dev eth0\n") }

// The ways in which a connection ends before it has begun are told apart.
func TestFailuresAreToldApart(t *testing.T) {
	w := newWorld(t).observe()
	p := w.start(w.pod, w.cgroup)
	// A router that says that it knows no way, and one that has no neighbour.
	w.sysctl(w.other, "ipv4/ip_forward", "1")
	w.ip(w.other, "route add unreachable 10.9.1.0/24\n")
	w.ip(w.pod, "route add 10.9.1.0/24 via "+otherIP+" dev eth9\n")

	w.listen(otherIP + ":50051")
	w.listen("[" + otherIP6 + "]:50051")
	p.do("ok", "dial a %s:50051", otherIP)
	p.do("ok", "dial b [%s]:50051", otherIP6)
	p.do("ok", "mapped c %s:50051", otherIP)
	w.becomes(otherIP+":50051", counts{Connects: 2, OK: 2})
	w.becomes("["+otherIP6+"]:50051", counts{Connects: 1, OK: 1})

	p.do("refused", "dial d %s:50052", otherIP)
	w.becomes(otherIP+":50052", counts{Connects: 1, Refused: 1})
	p.do("refused", "dial d [%s]:50052", otherIP6)
	w.becomes("["+otherIP6+"]:50052", counts{Connects: 1, Refused: 1})

	// The first answer comes while the caller is in connect(2), where it is no
	// more than a hint; to the next SYN it counts.
	p.do("no route to host", "mapped e 10.9.1.7:50051")
	w.becomes("10.9.1.7:50051", counts{Connects: 1, Unreachable: 1, Retransmits: 1})
	// Nobody has this address: by the time that shows the SYN was repeated.
	p.do("no route to host", "dial f 10.9.0.77:50051")
	harness.Eventually(t, soon, func() error {
		if s := w.at("10.9.0.77:50051"); s.Unreachable != 1 || s.TimedOut+s.GivenUp+s.Refused != 0 || s.Connects != 1 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})

	w.mute()
	p.do("timeout", "dial g %s:50061 250", otherIP)
	w.becomes(otherIP+":50061", counts{Connects: 1, GivenUp: 1})
	p.do("timeout", "dial h %s:50062 1500", otherIP)
	w.becomes(otherIP+":50062", counts{Connects: 1, TimedOut: 1, Retransmits: 1})
	// The kernel's own patience.
	w.sysctl(w.pod, "ipv4/tcp_syn_retries", "1")
	w.sysctl(w.pod, "ipv4/tcp_syn_linear_timeouts", "0")
	p.do("timed out", "dial i %s:50063", otherIP)
	w.becomes(otherIP+":50063", counts{Connects: 1, TimedOut: 1, Retransmits: 1})
	// The end of a process.
	p.Tell("dial j %s:50064", otherIP)
	w.becomes(otherIP+":50064", counts{Connects: 1})
	p.End()
	w.becomes(otherIP+":50064", counts{Connects: 1, GivenUp: 1})

	all, err := w.Totals()
	if err != nil {
		t.Fatal(err)
	}
	if all.OK != 3 || all.Refused != 2 || all.Unreachable != 2 || all.TimedOut != 2 || all.GivenUp != 2 || all.Connects != 11 {
		t.Errorf("in all: %+v", all.Counts)
	}
	if got := all.OK + all.Failed(); got != all.Connects {
		t.Errorf("%d connects have come to %d ends", all.Connects, got)
	}
}

// connection is what ss says of one: its round trip, and how often it sent again.
var (
	ssRTT     = regexp.MustCompile(` rtt:([0-9.]+)/`)
	ssRetrans = regexp.MustCompile(` retrans:\d+/(\d+)`)
)

func (w *world) ss(dst string) (rtt time.Duration, retrans uint64) {
	w.t.Helper()
	out := w.run(w.pod, nil, "ss", "-tinH", "dst", dst)
	m := ssRTT.FindStringSubmatch(out)
	if m == nil {
		w.t.Fatalf("ss says nothing of %s: %q", dst, out)
	}
	ms, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		w.t.Fatal(err)
	}
	if r := ssRetrans.FindStringSubmatch(out); r != nil {
		if retrans, err = strconv.ParseUint(r[1], 10, 64); err != nil {
			w.t.Fatal(err)
		}
	}
	return time.Duration(ms*1000+0.5) * time.Microsecond, retrans
}

// What is seen is what the kernel says of the same connections by itself.
func TestFiguresAreThoseOfSS(t *testing.T) {
	w := newWorld(t).observe()
	p := w.start(w.pod, w.cgroup)
	var last, least time.Duration
	for i := range 5 {
		to := fmt.Sprintf("%s:%d", otherIP, 50051+i)
		w.listen(to)
		p.do("ok", "dial c%d %s", i, to)
		rtt, _ := w.ss(to)
		s := w.at(to)
		if s.RTT.Last != rtt || s.RTT.Min != rtt || s.RTT.Average != rtt || rtt == 0 {
			t.Errorf("%s: SYN round trip %+v, ss says %s", to, s.RTT, rtt)
		}
		if age := time.Since(s.Last); age < 0 || age > soon {
			t.Errorf("%s was seen at %s", to, s.Last)
		}
	}
	// Several of one destination: the last, the least, and between them the average.
	to := otherIP + ":50099"
	w.listen(to)
	var sum time.Duration
	for i := range 8 {
		p.do("ok", "mapped m%d %s", i, to)
		last = w.at(to).RTT.Last
		if sum += last; least == 0 || last < least {
			least = last
		}
	}
	if s := w.at(to); s.RTT.Min != least || s.RTT.Last != last || s.RTT.Average < least || s.OK != 8 {
		t.Errorf("%+v, want least %s, last %s", s, least, last)
	}
	all, err := w.Totals()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		sum += w.at(fmt.Sprintf("%s:%d", otherIP, 50051+i)).RTT.Last
	}
	if all.RTT != sum || all.Samples != 13 {
		t.Errorf("%d samples sum up to %s, want 13 to %s", all.Samples, all.RTT, sum)
	}
	var before uint64
	for bound := 64 * time.Microsecond; bound < 2*time.Second; bound *= 4 {
		n, ok := all.Buckets[bound]
		if !ok || n < before || n > 13 {
			t.Errorf("%d of them up to %s, %d before", n, bound, before)
		}
		before = n
	}

	// What is lost is sent again, and the answers to that as well.
	to = otherIP + ":50051"
	w.mute()
	p.do("ok", "write c0 3000")
	harness.Eventually(t, soon, func() error {
		if n := w.at(to).Retransmits; n < 3 {
			return fmt.Errorf("sent again: %d", n)
		}
		return nil
	})
	w.unmute()
	harness.Eventually(t, soon, func() error {
		_, before := w.ss(to)
		seen := w.at(to).Retransmits
		if _, after := w.ss(to); seen < before || seen > after || before != after {
			return fmt.Errorf("sent again: %d, ss says %d to %d", seen, before, after)
		}
		return nil
	})
	if n := w.at(otherIP + ":50052").Retransmits; n != 0 {
		t.Errorf("sent again on another connection: %d", n)
	}
}

// A socket that is used again counts for each destination by itself.
func TestSocketThatIsConnectedAgain(t *testing.T) {
	w := newWorld(t).observe()
	p := w.start(w.pod, w.cgroup)
	w.listen(otherIP + ":50051")
	w.listen(otherIP + ":50052")
	p.do("ok", "mapped s %s:50051", otherIP)
	p.do("ok", "again s %s:50052", otherIP)
	p.do("refused", "again s %s:50053", otherIP)
	p.do("ok", "again s %s:50051", otherIP)
	w.becomes(otherIP+":50051", counts{Connects: 2, OK: 2})
	w.becomes(otherIP+":50052", counts{Connects: 1, OK: 1})
	w.becomes(otherIP+":50053", counts{Connects: 1, Refused: 1})
}

// Connections to oneself are no paths, nor are those of other cgroups.
func TestWhatIsNotObserved(t *testing.T) {
	w := newWorld(t).observe()
	p := w.start(w.pod, w.cgroup)
	p.do("ok", "listen l 127.0.0.7:50051")
	p.do("ok", "dial a 127.0.0.7:50051")
	p.do("ok", "listen m [::1]:50051")
	p.do("ok", "dial b [::1]:50051")
	p.do("ok", "listen n 127.0.0.8:50051")
	p.do("ok", "mapped c 127.0.0.8:50051")
	w.listen(otherIP + ":50051")
	beside := w.start(w.pod, harness.NewCgroup(t))
	beside.do("ok", "dial a %s:50051", otherIP)
	below := w.start(w.pod, w.cgroup.Below(t, "container"))
	below.do("ok", "dial a %s:50051", otherIP)
	w.becomes(otherIP+":50051", counts{Connects: 1, OK: 1})
	w.All(func(s observe.Stat) {
		if s.Destination != netip.MustParseAddrPort(otherIP+":50051") {
			t.Errorf("seen: %+v", s)
		}
	})
	below.End()
}

// Many at once are counted each, for its destination and in all; and they are
// read in batches as they are one by one.
func TestManyConnectionsAtOnce(t *testing.T) {
	const each, ports = 250, 8
	w := newWorld(t).observe()
	p := w.start(w.pod, w.cgroup)
	q := w.start(w.pod, w.cgroup.Below(t, "container"))
	var all []string
	for i := range ports {
		to := fmt.Sprintf("%s:%d", otherIP, 50051+i)
		w.listen(to)
		all = append(all, to)
	}
	// Nobody accepts: what the caller has ended leaves the queue by its RST.
	for _, r := range []*process{p, q} {
		r.Tell("many %d 8 %s", each*ports/2, strings.Join(all, " "))
	}
	for _, r := range []*process{p, q} {
		if got := r.Answer(); got != "ok" {
			t.Fatal(got)
		}
	}
	check := func() {
		t.Helper()
		for _, to := range all {
			s := w.at(to)
			// A SYN that was lost, for want of room, was sent again.
			if s.Retransmits = 0; s.Counts != (counts{Connects: each, OK: each}) {
				t.Errorf("%s: %+v", to, s.Counts)
			}
		}
		if got := len(w.At(netip.MustParseAddr(otherIP))); got != ports {
			t.Errorf("%d destinations", got)
		}
	}
	check()
	if !w.Batches() {
		t.Error("the kernel does not read in batches")
	}
	w.OneByOne()
	check()
	totals, err := w.Totals()
	if err != nil || totals.Connects != each*ports || totals.OK != each*ports {
		t.Errorf("in all: %+v, %v", totals, err)
	}
	q.End()
}
