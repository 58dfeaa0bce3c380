package socket

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// The hand-over of a socket is three lines on a connection between the two
// agents, which stays open until one of them ends:
//
//	successor ─▶ Request              after its gate has opened
//	holder    ─▶ reply                the lock is free, or why not
//	successor ─▶ "taken"              the name is the successor's
//
// The lock and the name decide who the holder is; the lines only say when to
// look. The end of the connection tells either side that the other has died.

const (
	// talkTimeout bounds each line that one side owes the other.
	talkTimeout = 5 * time.Second

	// maxLine is the longest line in bytes: two paths.
	maxLine = 4096

	taken = "taken\n"
)

// Request is what a successor asks of the holder.
type Request struct {
	Release string `json:"release"` // the ADS socket
	Admin   string `json:"admin"`   // the admin socket
}

type reply struct {
	Error string `json:"error,omitempty"`
}

// Predecessor is the agent that gave its lock.
type Predecessor struct{ conn *net.UnixConn }

// Ask asks the agent that listens at path to give its lock, and returns once it
// did. The connection must stay open while this process serves the name.
func Ask(ctx context.Context, path string, r Request) (*Predecessor, error) {
	conn, err := Dial(ctx, path)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if err := ask(conn, r); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return &Predecessor{conn}, nil
}

func ask(conn *net.UnixConn, r Request) error {
	if err := conn.SetDeadline(time.Now().Add(2 * talkTimeout)); err != nil {
		return err
	}
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return err
	}
	line, err := bufio.NewReader(io.LimitReader(conn, maxLine)).ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("the holder did not answer: %w", err)
	}
	var answer reply
	if err := json.Unmarshal(line, &answer); err != nil {
		return fmt.Errorf("the holder's answer: %w", err)
	}
	if answer.Error != "" {
		return errors.New(answer.Error)
	}
	return conn.SetDeadline(time.Time{})
}

// Taken tells the predecessor that the name is this process's. An error means
// that it has gone, or will see for itself.
func (p *Predecessor) Taken() error {
	_ = p.conn.SetWriteDeadline(time.Now().Add(talkTimeout))
	_, err := io.WriteString(p.conn, taken)
	return err
}

// Close tells the predecessor that this process does not serve the name.
func (p *Predecessor) Close() error { return p.conn.Close() }

// Successor is an agent that asked for the lock.
type Successor struct {
	Request
	PID int // 0 if it cannot be seen: it is in another pid namespace

	conn  *net.UnixConn
	taken chan struct{}
	gone  chan struct{}
	heard sync.WaitGroup
}

// Accept returns the next agent that asks at the socket. A connection that asks
// for nothing within 5 seconds is closed. The error is the listener's.
func Accept(l *net.UnixListener) (*Successor, error) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		s := &Successor{conn: conn, taken: make(chan struct{}), gone: make(chan struct{})}
		_ = conn.SetReadDeadline(time.Now().Add(talkTimeout))
		r := bufio.NewReader(io.LimitReader(conn, maxLine))
		line, err := r.ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(line, &s.Request)
		}
		if err == nil {
			err = conn.SetReadDeadline(time.Time{})
		}
		if err != nil {
			_ = conn.Close()
			continue
		}
		s.PID = peer(conn)
		s.heard.Go(func() { s.listen(r) })
		return s, nil
	}
}

func (s *Successor) listen(r *bufio.Reader) {
	defer close(s.gone)
	if line, err := r.ReadString('\n'); err != nil || line != taken {
		return
	}
	close(s.taken)
	_, _ = io.Copy(io.Discard, r)
}

// Grant tells the successor that the lock is free.
func (s *Successor) Grant() error { return s.answer(reply{}) }

// Refuse tells the successor why it cannot have the lock, and ends the
// connection.
func (s *Successor) Refuse(reason string) {
	_ = s.answer(reply{Error: reason})
	s.Close()
}

func (s *Successor) answer(a reply) error {
	_ = s.conn.SetWriteDeadline(time.Now().Add(talkTimeout))
	return json.NewEncoder(s.conn).Encode(a)
}

// Taken is closed when the successor says that the name is its own.
func (s *Successor) Taken() <-chan struct{} { return s.taken }

// Gone is closed when the successor has closed the connection or died.
func (s *Successor) Gone() <-chan struct{} { return s.gone }

// Close ends the connection. The successor keeps what it has.
func (s *Successor) Close() {
	_ = s.conn.Close()
	s.heard.Wait()
}
