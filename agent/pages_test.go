package agent

import (
	"fmt"
	"os"
	"strings"
	"testing"
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
