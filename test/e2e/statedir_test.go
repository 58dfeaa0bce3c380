package e2e_test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unique"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
)

// A server that hangs up gets no more connections because the agent dies
// again and again.
func TestRestartsMakeNoMoreConnectionsThanOneAgent(t *testing.T) {
	t.Parallel()
	w, s, k := newWorld(t), newSite(t), newCheckpoint(t)
	l, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		t.Fatal(err)
	}
	var accepted atomic.Int32
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			_, _ = io.CopyN(io.Discard, c, 1)
			_, _ = c.Write([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00")) // SETTINGS, and that was it
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	addr := l.Addr().(*net.TCPAddr)
	w.add(newPod("web-1-a", addr.IP.String(), addr.Port))
	w.write()
	limited := false
	for n := range 8 {
		a := s.start(t, "--source", w.source(), "--state-dir", k.Dir).live()
		harness.Eventually(t, soon, func() error {
			o := a.owners()
			if len(o) != 1 || o[0].Knowledge != "failed" {
				return fmt.Errorf("owners %+v", o)
			}
			limited = strings.Contains(o[0].Reason, "limited")
			return nil
		})
		// What counts is on the disk by now.
		k.until(func(s *nodecache.Saved) error {
			if len(s.Past) != 1 || len(s.Past[0].Calls[uint16(addr.Port)]) != int(accepted.Load()) {
				return fmt.Errorf("past %+v, accepted %d", s.Past, accepted.Load())
			}
			return nil
		})
		if a.kill(); accepted.Load() > 5 {
			t.Fatalf("%d connections after %d starts", accepted.Load(), n+1)
		}
	}
	if !limited {
		t.Errorf("the last agent could have connected: %d connections", accepted.Load())
	}
}

// Agents that share the directory, one after another and side by side, know
// different owners: the file has them all.
func TestAgentsThatOverlapLoseNothingOfOneAnother(t *testing.T) {
	t.Parallel()
	s, k := newSite(t), newCheckpoint(t)
	// What one agent sees, the other does not.
	old, young := newWorld(t), newWorld(t)
	r := newReflections()
	serve := func(w *world, id string) {
		t.Helper()
		w.serve(id, []string{"shop." + id[:strings.IndexByte(id, '-')]}, r.option())
		w.write()
	}
	var want []string
	saved := func(id string) {
		t.Helper()
		want = append(want, "uid-"+id[:strings.LastIndexByte(id, '-')])
		slices.Sort(want)
		k.until(func(s *nodecache.Saved) error {
			var got []string
			for _, i := range s.Infos {
				got = append(got, i.Key.UID)
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				return fmt.Errorf("saved are %v, want %v", got, want)
			}
			return nil
		})
	}
	serve(old, "a-1-a")
	first := s.instance(t, "--source", old.source(), "--state-dir", k.Dir).ready()
	saved("a-1-a")
	serve(young, "b-1-a")
	second := s.instance(t, "--source", young.source(), "--state-dir", k.Dir).ready()
	saved("b-1-a")
	for i := range 3 {
		serve(old, fmt.Sprintf("c-%d-a", i))
		saved(fmt.Sprintf("c-%d-a", i))
		serve(young, fmt.Sprintf("d-%d-a", i))
		saved(fmt.Sprintf("d-%d-a", i))
	}
	// One that stops writes last; one that is killed has written before.
	serve(old, "e-1-a")
	harness.Eventually(t, soon, func() error {
		known := 0
		for _, o := range first.owners() {
			if o.Knowledge == "known" {
				known++
			}
		}
		if known != 5 {
			return fmt.Errorf("%d owners are known", known)
		}
		return nil
	})
	first.stop()
	saved("e-1-a")
	second.kill()

	streams := r.streams()
	all := newWorld(t)
	all.pods = slices.Concat(old.pods, young.pods)
	all.write()
	third := s.instance(t, "--source", all.source(), "--state-dir", k.Dir).ready()
	for _, o := range third.owners() {
		if o.Origin != "checkpoint" || o.Knowledge != "known" {
			t.Errorf("owner %+v", o)
		}
	}
	if n := r.streams() - streams; n != 0 {
		t.Errorf("%d owners were asked again", n)
	}
}

// The program itself, killed while it writes: what it finds at the next start
// is whole. (How often a writer may be killed is shown beside the checkpoint.)
func TestAgentKilledWhileItWritesFindsEverything(t *testing.T) {
	t.Parallel()
	const owners, kills = 400, 40
	s, k := newSite(t), newCheckpoint(t)
	w := newWorld(t)
	w.serve("web-1-a", []string{"shop.Web"})
	w.write()
	// Enough that writing it takes a while.
	var infos []nodecache.SavedInfo
	for i := range owners {
		infos = append(infos, nodecache.SavedInfo{
			Key: nodecache.OwnerKey{UID: fmt.Sprintf("uid-%d", i)}, Name: "ReplicaSet/x", Workload: nodecache.Workload{Namespace: "prod"},
			Info: &nodecache.Info{Collected: time.Now(), Ports: []nodecache.PortInfo{{
				Port: 1, State: nodecache.PortServes, Services: []nodecache.Service{{Name: fmt.Sprintf("shop.S%d", i)}},
				Files: []unique.Handle[string]{unique.Make(fmt.Sprintf("%d %s", i, strings.Repeat("descriptor", 2000)))},
			}}},
		})
	}
	if err := k.Save(nodecache.Saved{Infos: infos}); err != nil {
		t.Fatal(err)
	}
	log := &output{}
	k.Log = slog.New(slog.NewTextHandler(log, nil))
	args := []string{"--source", w.source(), "--state-dir", k.Dir}
	tmp := filepath.Join(k.Dir, "checkpoint.tmp")
	exists := func() bool {
		_, err := os.Stat(tmp)
		return err == nil
	}
	cut := 0 // kills that left half a write
	for n := range kills {
		_ = os.Remove(tmp)
		a := s.start(t, args...)
		a.logs("restored from the checkpoint")
		// It writes when it is told to stop.
		_ = a.cmd.Process.Signal(syscall.SIGTERM)
		harness.Eventually(t, soon, func() error {
			select {
			case <-a.done:
				return nil
			default:
			}
			for range 1000 { // the write is short
				if exists() {
					return nil
				}
				time.Sleep(20 * time.Microsecond)
			}
			return errors.New("nothing is written")
		})
		time.Sleep(time.Duration(rand.IntN(10)) * time.Millisecond)
		a.kill()
		if exists() {
			cut++
		}
		if text := a.log.String(); strings.Contains(text, "set aside") || !strings.Contains(text, "owners=4") {
			t.Fatalf("start %d:\n%s", n, text)
		}
		saved, err := k.Load()
		if err != nil || len(saved.Infos) < owners || log.String() != "" {
			t.Fatalf("after kill %d: %d owners, %v, %s", n, len(saved.Infos), err, log)
		}
	}
	if cut == 0 {
		t.Error("no kill has hit a write")
	}
	// One that may finish has all that was there and its own.
	s.start(t, args...).ready().stop()
	k.owners(owners + 1)
	t.Logf("%d of %d kills left half a write", cut, kills)
}

// The workload behind the older Service has no pods when the agent ends and
// begins: its name does not pass to the claimant.
func TestScaledToZeroKeepsItsNameOverARestart(t *testing.T) {
	t.Parallel()
	w, s, k := newWorld(t), newSite(t), newCheckpoint(t)
	zulu, _ := w.serve("zulu-1-a", []string{"model.Predict"})
	alpha, _ := w.serve("alpha-1-a", []string{"model.Predict"})
	w.more = slices.Concat(service("zulu", 1, "api", zulu), service("alpha", 2, "api", alpha))
	w.write()
	args := []string{"--source", w.source(), "--state-dir", k.Dir}
	a := s.start(t, args...).ready()
	a.provided("model.Predict", "zulu-1-a, 1 claimants")
	w.remove(zulu)
	w.more = slices.Concat(service("zulu", 1, "api"), service("alpha", 2, "api", alpha))
	w.write()
	a.provided("model.Predict", ", 1 claimants")
	a.stop()
	a = s.start(t, args...).ready()
	if got := a.provider("model.Predict"); got != ", 1 claimants" {
		t.Errorf("after the restart it is provided by %s", got)
	}
	w.add(zulu)
	w.more = slices.Concat(service("zulu", 1, "api", zulu), service("alpha", 2, "api", alpha))
	w.write()
	a.provided("model.Predict", "zulu-1-a, 1 claimants")
}
