package agent

import (
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func residentOfFiles(t *testing.T) (kB int) {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "RssFile:")
	if _, err := fmt.Sscanf(rest, "%d kB", &kB); err != nil {
		t.Fatal(err)
	}
	return kB
}

func TestPagesOfTheStartAreGivenBack(t *testing.T) {
	before := residentOfFiles(t)
	if err := releaseProgram(); err != nil {
		t.Fatal(err)
	}
	if after := residentOfFiles(t); after > before/2 {
		t.Errorf("%d kB of files are resident, there were %d", after, before)
	}
}

func TestCollectorIsSparedForAWhileOnly(t *testing.T) {
	const usual = 50
	defer debug.SetGCPercent(debug.SetGCPercent(usual))
	want := func(percent int) {
		t.Helper()
		now := debug.SetGCPercent(usual)
		debug.SetGCPercent(now)
		if now != percent {
			t.Errorf("GOGC is %d, want %d", now, percent)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		end := spareCollector()
		want(resumePercent)
		end()
		want(usual)
		spareCollector()
		want(resumePercent)
		time.Sleep(resumeBound)
		synctest.Wait()
		want(usual)
		for _, own := range []int{-1, 2 * resumePercent} { // of whoever starts the agent
			debug.SetGCPercent(own)
			spareCollector()
			want(own)
		}
	})
}
