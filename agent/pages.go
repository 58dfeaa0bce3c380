package agent

import (
	"bufio"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Nearly everything that is allocated while the pods of a checkpoint are taken
// over stays: the collector would look at all of it a dozen times. resumePercent
// is GOGC meanwhile, for resumeBound at most: an API server that refuses the
// checkpoint is not asked for a list before that, and of a list little stays.
const (
	resumePercent = 400
	resumeBound   = 500 * time.Millisecond
)

// spareCollector begins that time, and returns what ends it early.
func spareCollector() (end func()) {
	before := debug.SetGCPercent(resumePercent)
	end = sync.OnceFunc(func() { debug.SetGCPercent(before) })
	if before < 0 || before >= resumePercent { // by GOGC
		end()
		return end
	}
	time.AfterFunc(resumeBound, end)
	return end
}

// release gives back what the start needed and nothing after it does. It is a
// saving: without it everything works as well.
func (a *Agent) release() {
	// The first list took much more memory than what is kept of it. Nothing
	// grows from here on, so the runtime would give it back late.
	a.collectorSpared()
	debug.FreeOSMemory()
	if err := releaseProgram(); err != nil {
		a.log.Debug("pages of the program stay mapped", "error", err)
	}
}

// releaseProgram unmaps the pages of the program's own file: most of them were
// touched once, when each package began. One that is wanted again is mapped
// again, from the page cache.
func releaseProgram() error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return err
	}
	defer f.Close()
	var begin, end uintptr // of the mapping, if it is one of the program's
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := lines.Text()
		var from, to uintptr
		var mode string
		if n, _ := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); n == 3 {
			begin, end = 0, 0
			if strings.HasPrefix(mode, "r-") && strings.HasSuffix(line, " "+program) {
				begin, end = from, to
			}
			continue
		}
		// What somebody has written there, a debugger or a probe, would be lost.
		clean, _ := strings.CutPrefix(line, "Anonymous:")
		if begin == 0 || strings.TrimSpace(clean) != "0 kB" {
			continue
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, begin, end-begin, unix.MADV_DONTNEED); errno != 0 {
			return errno
		}
		begin = 0
	}
	return lines.Err()
}
