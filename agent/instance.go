package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fingerpost/fingerpost/xds/ads/socket"
)

// instanceName is the end of the name of an instance's socket.
var instanceName = regexp.MustCompile(`\.([0-9]+)-([0-9]+)$`)

// instanceSocket is the admin socket of one process of this pid namespace,
// beside the one that the holder of the ADS socket has. Two agents of one
// moment never share it.
func instanceSocket(admin string, pid int) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return "", fmt.Errorf("pid namespace: %w", err)
	}
	return fmt.Sprintf("%s.%d-%d", admin, st.Ino, pid), nil
}

// OwnAdminSocket is the admin socket to ask for the agent that admin stands
// for. In a container whose first process is an agent that is the agent's own
// socket, so that two containers that share the directory each reach their own;
// anywhere else, and if admin names an instance already, it is admin itself.
func OwnAdminSocket(admin string) string {
	if instanceName.MatchString(admin) || !agentIsFirst() {
		return admin
	}
	own, err := instanceSocket(admin, 1)
	if err != nil {
		return admin
	}
	return own
}

// agentIsFirst tells whether pid 1 of this pid namespace is this program as an
// agent.
func agentIsFirst() bool {
	first, err1 := os.ReadFile("/proc/1/comm")
	self, err2 := os.ReadFile("/proc/self/comm")
	line, err3 := os.ReadFile("/proc/1/cmdline")
	if errors.Join(err1, err2, err3) != nil || string(first) != string(self) {
		return false
	}
	args := strings.Split(string(line), "\x00")
	return len(args) > 1 && args[1] == "agent"
}

// openInstance opens this process's own admin socket, and removes what agents
// that were killed left of theirs.
func (a *Agent) openInstance() error {
	path, err := instanceSocket(a.config.AdminSocket, os.Getpid())
	if err != nil {
		return err
	}
	if a.instance, err = socket.Listen(socket.Options{Path: path, Mode: 0o600, Own: true}); err != nil {
		return err
	}
	left, err := filepath.Glob(globQuote.Replace(a.config.AdminSocket) + ".*-*")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, p := range left {
		if !instanceName.MatchString(p) || p == path {
			continue
		}
		if fi, err := os.Lstat(p); err != nil || fi.Mode().Type() != fs.ModeSocket {
			continue
		}
		c, err := socket.Dial(ctx, p)
		if err == nil {
			_ = c.Close()
		} else if errors.Is(err, unix.ECONNREFUSED) {
			_ = os.Remove(p)
		}
	}
	return nil
}

var globQuote = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)
