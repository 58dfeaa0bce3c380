package identity

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// soPeerPIDFD is SO_PEERPIDFD (Linux 6.5, <asm-generic/socket.h>).
const soPeerPIDFD = 77

// process proves by the caller's process.
type process struct {
	// cgroups reads what cgroups a process is in.
	cgroups func(pid int) ([]byte, error)
}

// openProcess tells whether processes can be told here.
func openProcess() (*process, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	fd, err := unix.GetsockoptInt(pair[0], unix.SOL_SOCKET, soPeerPIDFD)
	switch {
	case errors.Is(err, unix.ENOPROTOOPT):
		return nil, errors.New("the kernel is older than Linux 6.5 (no SO_PEERPIDFD)")
	case err != nil:
		return nil, fmt.Errorf("SO_PEERPIDFD: %w", err)
	}
	defer unix.Close(fd)
	pid, err := pidOf(fd)
	switch {
	case err != nil:
		return nil, err
	case pid <= 0:
		return nil, errors.New("/proc is of another pid namespace")
	case pid == 1:
		return nil, errors.New("this process is the first of a pid namespace of its own, where processes of other pods cannot be told (hostPID)")
	}
	return &process{cgroups: cgroups}, nil
}

func cgroups(pid int) ([]byte, error) { return os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)) }

// look says whose process connected.
func (p *process) look(c syscall.Conn, pods Pods) verdict {
	no := func(format string, args ...any) verdict { return verdict{reason: fmt.Sprintf(format, args...)} }
	fd := -1
	err := control(c, func(s int) (err error) {
		fd, err = unix.GetsockoptInt(s, unix.SOL_SOCKET, soPeerPIDFD)
		return err
	})
	if err != nil {
		return no("the kernel does not name the process: %v", err)
	}
	defer unix.Close(fd)
	const ended = "the process has ended"
	pid, err := pidOf(fd)
	switch {
	case err != nil:
		return no("%v", err)
	case pid < 0:
		return no(ended)
	case pid == 0:
		return no("the process is not in the pid namespace of this one (hostPID)")
	}
	text, err := p.cgroups(pid)
	// Only a process that has ended gives its number to another.
	if over(fd) {
		return no(ended)
	}
	if err != nil {
		return no("%v", err)
	}
	uids := uidsIn(string(text))
	switch {
	case len(uids) == 0:
		return no("the process is in no pod's cgroup")
	case len(uids) > 1:
		return no("the process is in cgroups of several pods (UIDs %s, %s)", uids[0], uids[1])
	case static(uids[0]):
		return no("the cgroup is of a static pod, which it does not name")
	}
	pod, ok := pods.WithUID(uids[0])
	if !ok {
		return verdict{uid: uids[0], pending: true, reason: fmt.Sprintf("no pod of this node with the cgroup's UID %s is known", uids[0])}
	}
	return verdict{uid: uids[0], pod: &pod}
}

// pidOf returns the number of a pidfd's process in the pid namespace of /proc: 0
// if it is not in it, -1 if it has ended (proc_pid_fdinfo(5)).
func pidOf(fd int) (int, error) {
	text, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(text) {
		if value, ok := bytes.CutPrefix(line, []byte("Pid:")); ok {
			return strconv.Atoi(string(bytes.TrimSpace(value)))
		}
	}
	return 0, errors.New("/proc/self/fdinfo does not say which process a pidfd is of")
}

// over tells whether a pidfd's process has ended.
func over(fd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return n != 0 || err != nil
}
