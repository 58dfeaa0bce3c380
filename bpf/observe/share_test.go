package observe_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/bpf/observe"
	"github.com/fingerpost/fingerpost/test/harness"
)

// Offsets in struct bpf_sock_ops, and what linux/bpf.h has by these names.
const (
	opOffset, flagsOffset = 0, 84

	opConnect, opActive, opPassive, opRTT = 3, 4, 5, 12

	allFlags = 0xf // RTO, RETRANS, STATE, RTT
)

// neighbour is another sockops program, which asks for all callbacks of all
// sockets and counts those that tell of round trips.
func (w *world) neighbour() (roundTrips func() uint64) {
	w.t.Helper()
	count, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { count.Close() })
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SockOps, License: "Apache-2.0", Instructions: asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, opOffset, asm.Word),
		asm.JEq.Imm(asm.R2, opConnect, "ask"),
		asm.JEq.Imm(asm.R2, opActive, "ask"),
		asm.JEq.Imm(asm.R2, opPassive, "ask"),
		asm.JNE.Imm(asm.R2, opRTT, "done"),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, count.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "done"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Ja.Label("done"),
		asm.LoadMem(asm.R2, asm.R6, flagsOffset, asm.Word).WithSymbol("ask"),
		asm.Or.Imm(asm.R2, allFlags),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.FnSockOpsCbFlagsSet.Call(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("done"),
		asm.Return(),
	}})
	if err != nil {
		w.t.Fatalf("%+v", err)
	}
	w.t.Cleanup(func() { program.Close() })
	l, err := link.AttachCgroup(link.CgroupOptions{Path: w.cgroup.Dir, Attach: ebpf.AttachCGroupSockOps, Program: program})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Close() })
	return func() uint64 {
		var n uint64
		if err := count.Lookup(uint32(0), &n); err != nil {
			w.t.Fatal(err)
		}
		return n
	}
}

// Several programs share the flags of a socket, and each gets the callbacks that
// the others asked for: none loses its own, and what others asked for of sockets
// that are no caller's is not taken for a destination.
func TestSeveralProgramsShareTheFlags(t *testing.T) {
	for name, before := range map[string]bool{"the other one first": true, "the other one last": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			var roundTrips func() uint64
			if before {
				roundTrips = w.neighbour()
				w.observe()
			} else {
				w.observe()
				roundTrips = w.neighbour()
			}
			to := otherIP + ":50051"
			server, p := w.start(w.other, w.cgroup), w.start(w.pod, w.cgroup)
			server.do("ok", "listen s %s", to)
			p.do("ok", "dial a %s", to)
			p.do("ok", "write a 1000")
			harness.Eventually(t, soon, func() error {
				if roundTrips() < 2 {
					return fmt.Errorf("the other program heard of %d round trips", roundTrips())
				}
				return nil
			})
			// Both ends send again.
			w.ip(w.pod, "route replace blackhole "+otherIP+"\n")
			harness.Eventually(t, soon, func() error {
				server.Tell("write s 1000")
				if got := server.Answer(); got != "ok" {
					return fmt.Errorf("the server: %s", got)
				}
				return nil
			})
			out := func() string { return w.run(w.other, nil, "ss", "-tinH", "src", to) }
			harness.Eventually(t, soon, func() error {
				if s := out(); ssRetrans.FindString(s) == "" {
					return fmt.Errorf("the server has not sent again: %s", s)
				}
				return nil
			})
			w.ip(w.pod, "route del blackhole "+otherIP+"\n")
			w.mute()
			p.do("ok", "write a 1000")
			harness.Eventually(t, soon, func() error {
				if s := w.at(to); s.Retransmits == 0 || s.Connects != 1 || s.OK != 1 {
					return fmt.Errorf("%+v", s)
				}
				return nil
			})
			w.All(func(s observe.Stat) {
				if s.Destination != netip.MustParseAddrPort(to) {
					t.Errorf("seen, though nobody connects there: %+v", s)
				}
			})
		})
	}
}

// A program that lets no other be beside it, at a cgroup or above.
func TestProgramThatAllowsNoOther(t *testing.T) {
	w := newWorld(t)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SockOps, License: "Apache-2.0", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	below := w.cgroup.Below(t, "pod")
	fd, err := unix.Open(w.cgroup.Dir, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	o := link.RawAttachProgramOptions{Target: fd, Program: program, Attach: ebpf.AttachCGroupSockOps}
	if err := link.RawAttachProgram(o); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{w.cgroup.Dir, below.Dir} {
		off(t, dir, "a program without BPF_F_ALLOW_MULTI is attached to it or above")
	}
	if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: fd, Program: program, Attach: ebpf.AttachCGroupSockOps}); err != nil {
		t.Fatal(err)
	}
	for range 70 {
		o, err := observe.Open(observe.Options{Cgroup: below.Dir})
		if err != nil {
			t.Fatal(err)
		}
		o.Close() // or the 65th would find no room
	}
	var held []*observe.Observer
	for range 64 {
		o, err := observe.Open(observe.Options{Cgroup: below.Dir})
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, o)
	}
	off(t, below.Dir, "it has 64 programs")
	for _, o := range held {
		o.Close()
	}
}
