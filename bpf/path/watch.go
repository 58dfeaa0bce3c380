package path

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// settle is how long a change waits for those that follow it: a network
	// plugin makes several at once, a router's restart thousands.
	settle = 200 * time.Millisecond

	// resync is how often all is asked anew, come what may.
	resync = time.Minute
)

// Run forgets what is known whenever something changes, within 200 ms, and each
// minute, until ctx ends. It returns an error where the kernel says no more what
// changes; the map must not be used then.
func (m *Map) Run(ctx context.Context) error {
	changed, ended := make(chan struct{}, 1), make(chan error, 1)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		ended <- m.receive(changed)
	}()
	defer func() {
		m.events.Close() // ends receive
		<-gone
	}()
	tick := time.NewTicker(resync)
	defer tick.Stop()
	var due <-chan time.Time
	for {
		select {
		case <-changed:
			if due == nil {
				due = time.After(settle)
			}
		case <-due:
			due = nil
			m.forget()
		case <-tick.C:
			m.forget()
		case err := <-ended:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

// receive says that something has changed for each message, unless that was said
// and not yet heard. A message that was lost for want of room says the same
// (vishvananda/netlink#477: a loop that ends on ENOBUFS hears of nothing again).
func (m *Map) receive(changed chan<- struct{}) error {
	for {
		_, _, err := m.events.Receive()
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return err
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}
