package harness

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// Child is the test's own program in another role, which does what it is told by
// lines, and answers with lines.
type Child struct {
	*exec.Cmd
	t     testing.TB
	in    io.WriteCloser
	lines *bufio.Scanner
}

// NewChild makes one whose environment has env as well, from which it knows its
// role. The caller starts it, and ends it.
func NewChild(t testing.TB, env string) *Child {
	t.Helper()
	// Not by its path: go test builds in a directory that other users do not see.
	c := &Child{Cmd: exec.Command("/proc/self/exe"), t: t}
	c.Env = append(os.Environ(), env)
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err1 := c.StdinPipe()
	out, err2 := c.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	c.in, c.lines = in, bufio.NewScanner(out)
	return c
}

// Tell gives it something to do, whose answer is not waited for.
func (c *Child) Tell(format string, args ...any) {
	c.t.Helper()
	if _, err := fmt.Fprintf(c.in, format+"\n", args...); err != nil {
		c.t.Fatal(err)
	}
}

// Answer is the next line that it says.
func (c *Child) Answer() string {
	c.t.Helper()
	if !c.lines.Scan() {
		c.t.Fatalf("the child said nothing: %v", c.lines.Err())
	}
	return c.lines.Text()
}

// End kills it and waits until it has gone.
func (c *Child) End() {
	_ = c.Process.Kill()
	_ = c.Wait()
}
