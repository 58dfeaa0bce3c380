package main

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"
)

// crowd is a process of its own full of ADS clients, so that they use none of
// the time of who measures. It obeys one order after another.
type crowd struct {
	cmd *exec.Cmd
	in  io.Closer
	enc *gob.Encoder
	dec *gob.Decoder
}

// order is what a crowd is told: connect, take, or leave.
type order struct {
	Do       string
	Path     string // connect: the socket
	Clients  int    // connect: how many more
	Services int    // connect: the number of services that each waits for
	Each     int    // connect: endpoints of a service
}

// answer is what a crowd says to an order.
type answer struct {
	Err    string
	Took   time.Duration // connect: until the last client had everything
	Events []event       // take: what came since the last take
	Bytes  int64         // take: read from all sockets since the last take
}

// event is one CLA that one client got.
type event struct {
	Client  int32
	Service int32
	At      int64  // when it was received; see now
	Members uint64 // a bit for each endpoint of the service that is in it
	Message int32  // bytes of the response
	CLA     int32  // and of the assignment in it
	Of      int32  // how many are in the response
}

// now is the time in nanoseconds by a clock that all processes share and nobody
// sets.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // every Linux has it
	}
	return t.Nano()
}

func startCrowd(ctx context.Context) (*crowd, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &crowd{cmd: exec.CommandContext(ctx, exe, "crowd")}
	c.cmd.Stderr = os.Stderr
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.in, c.enc, c.dec = in, gob.NewEncoder(in), gob.NewDecoder(out)
	return c, c.cmd.Start()
}

func (c *crowd) stop() {
	_ = c.in.Close()
	_ = c.cmd.Wait()
}

func (c *crowd) tell(o order) (answer, error) {
	if err := c.enc.Encode(o); err != nil {
		return answer{}, err
	}
	var a answer
	if err := c.dec.Decode(&a); err != nil {
		return answer{}, fmt.Errorf("the clients' process: %w", err)
	}
	if a.Err != "" {
		return answer{}, errors.New(a.Err)
	}
	return a, nil
}

// connect adds clients, all at once, and returns how long it took until the
// last of them had everything.
func (c *crowd) connect(path string, clients int, w *world) (time.Duration, error) {
	a, err := c.tell(order{Do: "connect", Path: path, Clients: clients, Services: w.services, Each: w.each})
	return a.Took, err
}

// take returns what came since the last take.
func (c *crowd) take() (answer, error) { return c.tell(order{Do: "take"}) }

// leave ends all clients.
func (c *crowd) leave() error {
	_, err := c.tell(order{Do: "leave"})
	return err
}

// beCrowd is the life of the crowd's process.
func beCrowd(ctx context.Context, in io.Reader, out io.Writer) error {
	dec, enc := gob.NewDecoder(in), gob.NewEncoder(out)
	m := &members{}
	defer func() { m.leave() }()
	for {
		var o order
		if err := dec.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var a answer
		switch o.Do {
		case "connect":
			took, err := m.connect(ctx, o)
			if a.Took = took; err != nil {
				a.Err = err.Error()
			}
		case "take":
			a.Events, a.Bytes = m.take()
		case "leave":
			m.leave()
		}
		if err := enc.Encode(a); err != nil {
			return err
		}
	}
}
