package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fingerpost/fingerpost/bpf/redirect"
	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/ads/socket"
)

// Uninstall removes from the node what agents with the configuration leave
// there: the programs and maps of redirection that are pinned in pins, sockets,
// locks and the checkpoint. It returns what it removed, in order. The directory of the ADS socket
// stays: it is mounted into pods, and an agent that comes later is to be found in
// it. A [*socket.HeldError] says that an agent runs; with force that does not
// matter, and a [*UsageError] that a path cannot be meant. It is good to be called again.
func Uninstall(c Config, pins string, force bool) (removed []string, err error) {
	for _, s := range []struct{ flag, path string }{{"--ads-socket", c.ADSSocket}, {"--admin-socket", c.AdminSocket}} {
		if err := checkSocketPath(s.flag, s.path); err != nil {
			return nil, err
		}
	}
	also := func(paths []string, failed error) {
		removed = append(removed, paths...)
		err = errors.Join(err, failed)
	}
	sockets := []string{c.ADSSocket, UnknownSocket(c.ADSSocket), c.AdminSocket, c.releaseSocket()}
	own, _ := filepath.Glob(c.AdminSocket + ".*-*")
	sockets = append(sockets, own...)
	// First, so that nothing is removed if an agent with other locks serves: one
	// of another ADS socket beside the same admin socket, or that waits to take over.
	if !force {
		for _, path := range sockets {
			if err := socket.Vacant(path); err != nil {
				return nil, err
			}
		}
	}
	admin := filepath.Dir(c.AdminSocket)
	lock := c.lockOf(c.ADSSocket)
	_, absent := os.Lstat(lock) // else it is made here, and was not left
	if _, err := os.Stat(admin); err == nil && !force {
		held, err := socket.Hold(lock, c.ADSSocket)
		if err != nil {
			return nil, err
		}
		defer held.Close()
	}
	also(redirect.Uninstall(pins, force))
	for _, path := range sockets {
		also(socket.Remove(path, force))
	}
	if c.StateDir != "" {
		also((&nodecache.Checkpoint{Dir: c.StateDir}).Remove())
		also(removeEmpty(c.StateDir))
	}
	// Last: the lock guards the rest.
	for _, path := range []string{c.lockOf(c.AdminSocket), lock} {
		switch failed := os.Remove(path); {
		case failed == nil && (path != lock || absent == nil):
			also([]string{path}, nil)
		case failed == nil:
		case !errors.Is(failed, fs.ErrNotExist):
			also(nil, failed)
		}
	}
	if admin != filepath.Dir(c.ADSSocket) {
		also(removeEmpty(admin))
	}
	return removed, err
}

// removeEmpty removes a directory that holds nothing and that nothing is mounted
// on.
func removeEmpty(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && len(entries) > 0:
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("uninstall: %w", err)
	}
	if os.Remove(dir) != nil {
		return nil, nil // a mount point
	}
	return []string{dir}, nil
}
