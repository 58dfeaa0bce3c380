package kube_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

// system makes the server that of the cluster of the ID.
func (s *apiServer) system(id types.UID) {
	s.set(true, "ADDED", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "kube-system", UID: "cluster-" + id}})
}

// saved returns what an agent would save now, after it has heard of the last
// change.
func (x *clusterFixture) saved(t *testing.T, s *apiServer) nodecache.Unit {
	t.Helper()
	var last int
	s.do(func() { last = s.version })
	s.say("pods", bookmark(last))
	eventually(t, func() string {
		if v := x.src.Version(); v != uint64(last) {
			return fmt.Sprintf("version %d, want %d", v, last)
		}
		return ""
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	u, err := x.src.Checkpoint(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func bookmark(version int) string {
	return fmt.Sprintf(`{"type":"BOOKMARK","object":{"apiVersion":"v1","kind":"Pod","metadata":{"resourceVersion":"%d"}}}`, version)
}

// checkpointed runs a source on the server until it has the pods, and returns
// what it saves.
func checkpointed(t *testing.T, s *apiServer) (u nodecache.Unit) {
	t.Helper()
	t.Run("first agent", func(t *testing.T) {
		x := newCluster(t, s.URL)
		run(t, x.src)
		waitSynced(t, x.src)
		u = x.saved(t, s)
	})
	s.do(func() { clear(s.asked); s.from = nil })
	return u
}

func (x *clusterFixture) current() bool {
	select {
	case <-x.src.Current():
		return true
	default:
		return false
	}
}

func (x *clusterFixture) waitCurrent(t *testing.T) {
	t.Helper()
	select {
	case <-x.src.Current():
	case <-time.After(20 * time.Second):
		t.Fatalf("not current: %+v; logged %q", x.src.Status(), x.log.get())
	}
}

func (s *apiServer) counts(t *testing.T, lists bool) {
	t.Helper()
	s.do(func() {
		if got := s.asked["pods list"]+s.asked["pods stream"] > 0; got != lists {
			t.Errorf("asked %v, watches %q: listed %t, want %t", s.asked, s.from, got, lists)
		}
	})
}

func TestRestartResumesFromTheStoredVersionWithoutAList(t *testing.T) {
	s := newAPIServer(t)
	s.system("1")
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	s.set(true, "ADDED", readyPod("b", "ub", "192.0.2.2"))
	u := checkpointed(t, s)
	s.set(false, "DELETED", readyPod("a", "ua", "192.0.2.1"))
	s.set(false, "ADDED", readyPod("c", "uc", "192.0.2.3"))

	x := newCluster(t, s.URL)
	x.src.Resume(u)
	run(t, x.src)
	waitSynced(t, x.src)
	x.waitCurrent(t)
	x.wait(t, "prod/b=192.0.2.2 serving", "prod/c=192.0.2.3 serving")
	x.waitError(t, "")
	s.counts(t, false)
	s.do(func() {
		if want := "pods " + strconv.FormatUint(u.Version, 10); !slices.Contains(s.from, want) {
			t.Errorf("watches %q, want %q", s.from, want)
		}
	})
	s.set(false, "MODIFIED", readyPod("b", "ub", "192.0.2.4"))
	x.wait(t, "prod/b=192.0.2.4 serving", "prod/c=192.0.2.3 serving")
	if next := x.saved(t, s); next.Line != u.Line || next.Version <= u.Version || next.Force {
		t.Errorf("saves %s %d force %t after %s %d", next.Line, next.Version, next.Force, u.Line, u.Version)
	}
}

// Nothing tells that all was heard of where nothing has happened: the source is
// synced, and current only after the server has said how far it is.
func TestResumedWatchIsCurrentAfterABookmark(t *testing.T) {
	s := newAPIServer(t)
	s.system("1")
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	u := checkpointed(t, s)
	s.do(func() { s.version += 10 }) // by other resources
	x := newCluster(t, s.URL)
	x.src.Resume(u)
	run(t, x.src)
	waitSynced(t, x.src)
	if got := served(x.dir); len(got) != 1 {
		t.Errorf("synced with %q", got)
	}
	if x.current() {
		t.Error("current without a word of the server")
	}
	s.do(func() {
		if s.asked["pods watch"] == 0 {
			t.Error("no watch")
		}
	})
	s.say("pods", bookmark(int(u.Version)+5))
	x.waitError(t, "")
	s.say("pods", bookmark(int(u.Version)+10))
	x.waitCurrent(t)
	s.counts(t, false)
}

func TestStaleVersionListsAgain(t *testing.T) {
	s := newAPIServer(t)
	s.system("1")
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	u := checkpointed(t, s)
	s.set(true, "DELETED", readyPod("a", "ua", "192.0.2.1"))
	s.set(true, "ADDED", readyPod("c", "uc", "192.0.2.3"))
	s.do(func() { s.compacted = s.version })
	x := newCluster(t, s.URL)
	x.src.Resume(u)
	run(t, x.src)
	waitSynced(t, x.src)
	x.waitCurrent(t)
	if got := served(x.dir); !slices.Equal(got, []string{"prod/c=192.0.2.3 serving"}) {
		t.Errorf("synced with %q", got)
	}
	s.counts(t, true)
	n := 0
	for _, l := range x.log.get() {
		if strings.Contains(l, "does not resume") {
			n++
		}
	}
	if n != 1 {
		t.Errorf("logged %q", x.log.get())
	}
}

func TestCheckpointOfAnotherClusterOrProgramIsNotUsed(t *testing.T) {
	for name, resume := range map[string]func(t *testing.T, s *apiServer, u nodecache.Unit) *clusterFixture{
		"cluster": func(t *testing.T, s *apiServer, u nodecache.Unit) *clusterFixture {
			s.system("2")
			return newCluster(t, s.URL)
		},
		"program": func(t *testing.T, s *apiServer, u nodecache.Unit) *clusterFixture {
			x := newCluster(t, s.URL)
			src, err := kube.NewCluster(&rest.Config{Host: s.URL}, "v2", x.store, slog.New(x.log))
			if err != nil {
				t.Fatal(err)
			}
			x.src = src
			return x
		},
		"unreadable": func(t *testing.T, s *apiServer, u nodecache.Unit) *clusterFixture {
			clear(u.Data)
			return newCluster(t, s.URL)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newAPIServer(t)
			s.system("1")
			s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
			u := checkpointed(t, s)
			x := resume(t, s, u)
			if got := x.src.Resume(u); got != (name != "program") {
				t.Errorf("read by this version: %t", got)
			}
			run(t, x.src)
			waitSynced(t, x.src)
			x.waitCurrent(t)
			x.wait(t, "prod/a=192.0.2.1 serving")
			s.counts(t, true)
		})
	}
}

// An API server put back from a backup counts from an earlier version.
func TestVersionsThatWentBackReplaceTheStoredOnes(t *testing.T) {
	s := newAPIServer(t)
	s.system("1")
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	u := checkpointed(t, s)
	u.Version += 1000
	s.do(func() { s.compacted = int(u.Version) + 1 })
	x := newCluster(t, s.URL)
	x.src.Resume(u)
	run(t, x.src)
	waitSynced(t, x.src)
	s.do(func() { s.compacted = 0 })
	if next := x.saved(t, s); !next.Force || next.Version >= u.Version {
		t.Errorf("saves %d force %t after %d", next.Version, next.Force, u.Version)
	}
}

func TestServerThatIsAwayIsAskedToResumeWhenItIsBack(t *testing.T) {
	s := newAPIServer(t)
	s.system("1")
	s.set(true, "ADDED", readyPod("a", "ua", "192.0.2.1"))
	u := checkpointed(t, s)
	s.do(func() { s.down = true })
	x := newCluster(t, s.URL)
	x.src.Resume(u)
	run(t, x.src)
	x.waitError(t, "the server is down")
	if x.src.Status().Synced || len(served(x.dir)) > 0 {
		t.Errorf("with the server down: %+v %q", x.src.Status(), served(x.dir))
	}
	s.do(func() { s.down = false })
	waitSynced(t, x.src)
	x.wait(t, "prod/a=192.0.2.1 serving")
	x.waitError(t, "")
}
