package nodecache_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/fingerpost/fingerpost/nodecache"
)

// crashDir names the directory that a child of the crash test writes to.
const crashDir = "FINGERPOST_TEST_CRASH_DIR"

// crashOwners is how many owners each state of the crash test has.
const crashOwners = 100

// crashWriter writes one state after another until it is killed. Each state
// says everywhere which one it is.
func crashWriter(dir string) {
	c := &nodecache.Checkpoint{Dir: dir}
	last, err := c.Load()
	for n := last.Pods.Version + 1; err == nil; n++ {
		var infos []nodecache.SavedInfo
		for i := range crashOwners {
			in := savedInfo(fmt.Sprint(i), int(n), "pkg.A")
			in.Name = fmt.Sprint(n)
			in.Info.Ports[0].Files = []unique.Handle[string]{unique.Make(fmt.Sprintf("%d of %d", i, n))}
			infos = append(infos, in)
		}
		if err = c.Save(nodecache.Saved{Infos: infos, Pods: nodecache.Unit{Line: "c", Version: n, Data: fmt.Append(nil, n)}}); err == nil && n == last.Pods.Version+1 {
			fmt.Println("saved")
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func TestKilledWriterLeavesAWholeState(t *testing.T) {
	kills := 200
	if testing.Short() {
		kills = 20
	}
	s := newState(t)
	s.save(nodecache.Unit{Line: "c", Version: 1, Data: []byte("1")})
	aside, last := 0, uint64(0)
	for range kills {
		var errs strings.Builder
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), crashDir+"="+s.Dir)
		child.Stderr = &errs
		out, err := child.StdoutPipe()
		must(t, err)
		must(t, child.Start())
		// The kill comes at any moment after the child has begun to write.
		if _, err := out.Read(make([]byte, 1)); err != nil {
			t.Fatalf("the child writes nothing: %v %s", err, errs.String())
		}
		time.Sleep(time.Duration(rand.IntN(4000)) * time.Microsecond)
		must(t, child.Process.Kill())
		_ = child.Wait()

		got := s.load()
		n := strconv.FormatUint(got.Pods.Version, 10)
		if got.Pods.Version < last || len(got.Infos) != crashOwners || string(got.Pods.Data) != n {
			t.Fatalf("%d owners, pods %q, of state %s after %d", len(got.Infos), got.Pods.Data, n, last)
		}
		for _, in := range got.Infos {
			if in.Name != n || in.Info.Ports[0].Files[0].Value() != in.Key.UID+" of "+n {
				t.Fatalf("owner %+v in state %s", in, n)
			}
		}
		last = got.Pods.Version
	}
	if s.log.Len() > 0 {
		t.Errorf("logged %s", s.log)
	}
	for _, name := range s.files() {
		if strings.Contains(name, "corrupt") {
			aside++
		}
	}
	if aside > 0 {
		t.Errorf("%d files were set aside", aside)
	}
	s.save(nodecache.Unit{}) // the lock is free
}
