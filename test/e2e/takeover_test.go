package e2e_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds/client"
)

// instance starts an agent with --takeover that is asked at its own admin
// socket, whoever has the name that it shares with the others.
func (s *site) instance(t *testing.T, args ...string) *agentProcess {
	t.Helper()
	a := s.start(t, append([]string{"--takeover"}, args...)...)
	s.atItsOwn(t, a)
	return a
}

// atItsOwn makes the agent be asked at its own admin socket.
func (s *site) atItsOwn(t *testing.T, a *agentProcess) {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat("/proc/self/ns/pid", &st); err != nil {
		t.Fatal(err)
	}
	own := *s
	own.admin = fmt.Sprintf("%s.%d-%d", s.admin, st.Ino, a.cmd.Process.Pid)
	a.site = &own
}

// takeover waits until the agent says so of its part.
func (a *agentProcess) takeover(want string) {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		if got := a.status().Parts["takeover"]; got != want {
			return fmt.Errorf("takeover is %q, want %q", got, want)
		}
		return nil
	})
}

// logs waits until the agent has logged the text.
func (a *agentProcess) logs(text string) {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		if !strings.Contains(a.log.String(), text) {
			return fmt.Errorf("not in the log: %s", text)
		}
		return nil
	})
}

// reachable connects to the ADS socket all the time until stop, which fails the
// test if nobody listened once.
func (s *site) reachable(t *testing.T) (stop func()) {
	end := make(chan struct{})
	var done sync.WaitGroup
	var failed error
	done.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			c, err := net.Dial("unix", s.ads)
			if err != nil {
				failed = err
				return
			}
			c.Close()
			select {
			case <-tick.C:
			case <-end:
				return
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(end)
		done.Wait()
		if failed != nil {
			t.Errorf("nobody listened: %v", failed)
		}
	})
	t.Cleanup(stop)
	return stop
}

func TestHandOverTakesNothingFromRawClients(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web", "shop.Admin"})
	cart, _ := w.serve("cart-1-a", []string{"shop.Cart"})
	w.write()
	clusters := []string{"prod/shop.Admin", "prod/shop.Cart", "prod/shop.Web"}
	a := s.instance(t, "--source", w.source()).ready()
	a.takeover("on")
	delta := s.faithful(t, "prod/delta", true, client.Memory{}, clusters...)
	sotw := s.faithful(t, "prod/sotw", false, client.Memory{}, clusters...)
	delta.has()
	sotw.has()
	delta.forget()
	stop := s.reachable(t)
	// Each goes on until the end: none is needed, and none is in the way.
	for range 3 {
		b := s.instance(t, "--source", w.source()).ready()
		b.takeover("on")
		b.connected("prod/delta")
		b.connected("prod/sotw", "cds", "eds", "lds", "rds")
		a.takeover(fmt.Sprintf("off: released to pid %d", b.cmd.Process.Pid))
		if _, body, err := a.get("/ready"); err != nil || !strings.Contains(body, "leads to another agent") {
			t.Errorf("/ready of the predecessor: %s, %v", body, err)
		}
		if n := a.status().Proxies; n != 0 {
			t.Errorf("the predecessor has %d clients", n)
		}
		if got := delta.came(); len(got) != 0 {
			t.Errorf("the delta client was sent %v again", got)
		}
		a = b
	}
	// The name of the admin socket went over too.
	shared := *a
	shared.site = s
	if n := shared.status().Proxies; n != 2 {
		t.Errorf("at the shared admin socket are %d clients", n)
	}
	port := cart.Spec.Containers[0].Ports[0].ContainerPort
	w.add(newPod("cart-1-b", nextAddr(), int(port)))
	w.write()
	for _, f := range []*faithful{delta, sotw} {
		harness.Eventually(t, soon, func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			if got, err := endpointsIn(f.memory, "prod/shop.Cart"); err != nil || len(got) != 2 {
				return fmt.Errorf("endpoints %v, %v", got, err)
			}
			return nil
		})
		if lost := f.lost(); len(lost) != 0 {
			t.Errorf("%s lost %v", f.id, lost)
		}
	}
	stop()
}

func TestSecondAgentWithoutTakeoverIsRefusedByASuccessorToo(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.write()
	s.instance(t, "--source", w.source()).ready()
	b := s.instance(t, "--source", w.source()).ready()
	_, errs, code := run(t, s.args("--source", w.source())...)
	if pid := fmt.Sprintf("pid %d", b.cmd.Process.Pid); code != 1 || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, pid) || !strings.Contains(errs, s.ads) {
		t.Errorf("exit %d, %q, want one line with %s", code, errs, pid)
	}
	b.ready()
}

// Kills come at every moment of a successor's short life, also where no test
// could stop it: within the exchange with the holder, between two renames.
func TestSuccessorKilledAtAnyMomentCostsNothing(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	w.write()
	a := s.instance(t, "--source", w.source()).ready()
	delta := s.faithful(t, "prod/delta", true, client.Memory{}, "prod/shop.Web")
	sotw := s.faithful(t, "prod/sotw", false, client.Memory{}, "prod/shop.Web")
	delta.has()
	sotw.has()
	delta.forget()
	for i := range rounds {
		b := s.instance(t, "--source", w.source())
		if i%2 == 0 {
			b.logs("took the ADS socket over") // and the clients are on the way
		} else {
			b.logs("gate open")
			// Spread over the moments of the exchange, which are few milliseconds.
			for range rand.IntN(50000) {
				syscall.Getpid()
			}
		}
		b.kill()
		a.ready()
		a.takeover("on")
		a.connected("prod/delta")
		a.connected("prod/sotw", "cds", "eds", "lds", "rds")
	}
	for _, f := range []*faithful{delta, sotw} {
		if lost := f.lost(); len(lost) != 0 {
			t.Errorf("%s lost %v", f.id, lost)
		}
	}
	if got := delta.came(); len(got) != 0 {
		t.Errorf("the delta client was sent %v again", got)
	}
}

func TestOfThreeAgentsTheOneThatLivesServes(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	w.write()
	agents := []*agentProcess{}
	for range 3 {
		agents = append(agents, s.instance(t, "--source", w.source()).ready())
	}
	f := s.faithful(t, "prod/delta", true, client.Memory{}, "prod/shop.Web")
	f.has()
	f.forget()
	serving := 2
	for len(agents) > 1 {
		if len(agents) == 3 {
			agents[serving].kill()
		} else {
			agents[serving].stop()
		}
		agents = append(agents[:serving], agents[serving+1:]...)
		// Which of those that are left is nobody's promise.
		harness.Eventually(t, soon, func() error {
			for i, a := range agents {
				if _, body, err := a.get("/ready"); err == nil && strings.Contains(body, "true") {
					serving = i
					return nil
				}
			}
			return errors.New("no agent is ready")
		})
		agents[serving].connected("prod/delta")
	}
	if lost, came := f.lost(), f.came(); len(lost)+len(came) != 0 {
		t.Errorf("the client lost %v and was sent %v", lost, came)
	}
	// The old version comes once more, and takes over as the new one did.
	last := s.instance(t, "--source", w.source()).ready()
	last.connected("prod/delta")
	agents[0].takeover(fmt.Sprintf("off: released to pid %d", last.cmd.Process.Pid))
}

// A successor whose gate is closed leaves the socket where it is, and is there
// at once if the holder dies.
func TestSuccessorWaitsForItsGateButNotForADeadHolder(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	r := newReflections()
	w.serve("web-1-a", []string{"shop.Web"}, r.option())
	w.write()
	a := s.instance(t, "--source", w.source()).ready()
	r.hold()
	defer r.release()
	b := s.instance(t, "--source", w.source())
	b.live()
	b.takeover(fmt.Sprintf("off: waits for its own gate; %s is served by another agent (pid %d)", s.ads, a.cmd.Process.Pid))
	if out := b.must("status"); !strings.Contains(out, "gate") {
		t.Errorf("status of the successor: %s", out)
	}
	a.ready()
	a.kill()
	b.takeover("on")
	if gate := b.status().Gate; gate != "closed" {
		t.Errorf("the gate is %s: the successor waited for it", gate)
	}
}

func TestHundredAndTenClientsComeBackWithoutABody(t *testing.T) {
	w, s := newWorld(t), newSite(t)
	var clusters []string
	for i := range 10 {
		var services []string
		for j := range 30 {
			services = append(services, fmt.Sprintf("shop.v%d.Service%d", i, j))
			clusters = append(clusters, "prod/"+services[j])
		}
		w.serve(fmt.Sprintf("web%d-1-a", i), services)
	}
	w.write()
	a := s.instance(t, "--source", w.source()).ready()
	first := s.faithful(t, "prod/first", true, client.Memory{}, clusters...)
	first.has()
	first.close()
	const n = 110
	all := make([]*faithful, n)
	for i := range all {
		all[i] = s.faithful(t, fmt.Sprintf("prod/c-%d", i), true, first.memory, clusters...)
	}
	everybody := func(a *agentProcess) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			if got := a.status().Proxies; got != n {
				return fmt.Errorf("%d clients, want %d", got, n)
			}
			return nil
		})
	}
	everybody(a)
	alone := newSite(t).start(t, "--source", w.source()).ready()
	_, before := memoryOf(t, alone.cmd.Process.Pid)
	alone.stop()
	for _, how := range []string{"hand-over", "all at once"} {
		var b *agentProcess
		if how == "hand-over" {
			b = s.instance(t, "--source", w.source()).ready()
			everybody(b)
			a.stop()
		} else {
			a.kill()
			b = s.start(t, "--source", w.source()).live() // they are there before its gate is open
		}
		everybody(b)
		b.ready()
		steady, peak := memoryOf(t, b.cmd.Process.Pid)
		t.Logf("%s: %d clients with %d services each: at most %d kB resident without clients, %d kB with them, at most %d kB", how, n, len(clusters), before, steady, peak)
		if peak > before+30_000 {
			t.Errorf("%s: the peak is %d kB, that of a start without clients %d kB", how, peak, before)
		}
		// What is sent next comes after all that their return could have caused.
		w.serve(strings.ReplaceAll(how, " ", "-")+"-1-a", []string{"shop.New" + strconv.Itoa(b.cmd.Process.Pid)})
		w.write()
		for _, f := range all {
			harness.Eventually(t, soon, func() error {
				if got := f.came(); len(got) == 0 {
					return fmt.Errorf("%s has not heard of the new service", f.id)
				}
				return nil
			})
			if got := f.came(); len(got) != 1 || !strings.HasPrefix(got[0], "cds prod/shop.") {
				t.Errorf("%s: %s was sent %v, want the new cluster alone", how, f.id, got)
			}
			f.forget()
		}
		a = b
	}
	for _, f := range all {
		if lost := f.lost(); len(lost) != 0 {
			t.Errorf("%s lost %v", f.id, lost)
		}
	}
}

// memoryOf is what is resident of a process now and was at most, in kB.
func memoryOf(t *testing.T, pid int) (now, peak int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch v, _ := strconv.Atoi(f[1]); f[0] {
		case "VmRSS:":
			now = v
		case "VmHWM:":
			peak = v
		}
	}
	return now, peak
}

// Two containers share the directories of the sockets and not their pid
// namespaces; each one's probes must reach its own agent.
func TestCommandsInAContainerAskItsOwnAgent(t *testing.T) {
	t.Parallel()
	unshare, err := exec.LookPath("unshare")
	if err == nil {
		err = exec.Command(unshare, "--pid", "--fork", "--mount-proc", "true").Run()
	}
	if err != nil {
		t.Skipf("no pid namespace can be made here: %v", err)
	}
	w, s := newWorld(t), newSite(t)
	w.write()
	container := func(node string) *agentProcess {
		args := append([]string{"--pid", "--fork", "--kill-child", "--mount-proc", program}, s.args("--takeover", "--source", w.source(), "--node-name", node)...)
		a := s.launch(t, exec.Command(unshare, args...))
		t.Cleanup(a.kill) // unshare hears no SIGTERM
		return a
	}
	// exec is what kubectl exec does.
	run := func(a *agentProcess, args ...string) (string, error) {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", a.cmd.Process.Pid, a.cmd.Process.Pid))
		if err != nil || len(strings.Fields(string(children))) != 1 {
			return "", fmt.Errorf("children %q, %w", children, err)
		}
		enter := append([]string{"--target", strings.Fields(string(children))[0], "--pid", "--mount", program}, args...)
		out, err := exec.Command("nsenter", append(enter, "--admin-socket", s.admin)...).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return string(out), err
	}
	is := func(a *agentProcess, node, takeover string) {
		t.Helper()
		harness.Eventually(t, soon, func() error {
			out, err := run(a, "status")
			if err == nil && (!strings.Contains(out, node) || !strings.Contains(out, takeover)) {
				err = fmt.Errorf("status in the container of %s, want %s:\n%s", node, takeover, out)
			}
			return err
		})
	}
	ready := func(a *agentProcess) {
		t.Helper()
		harness.Eventually(t, soon, func() error { _, err := run(a, "status", "--ready"); return err })
	}
	a := container("old")
	is(a, "old", "on")
	ready(a)
	b := container("new")
	is(b, "new", "on")
	ready(b)
	is(a, "old", "off: released to another pid namespace")
	if out, err := run(a, "status", "--ready"); err == nil {
		t.Errorf("the predecessor is ready: %s", out)
	}
	b.kill() // with its namespace
	is(a, "old", "on")
	ready(a)
}
