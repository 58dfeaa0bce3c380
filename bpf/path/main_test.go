package path_test

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fingerpost/fingerpost/bpf/path"
	"github.com/fingerpost/fingerpost/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// soon bounds every wait.
const soon = 20 * time.Second

// host is a node's network, without pods.
type host struct {
	*harness.Network
	t testing.TB
}

func newHost(t testing.TB) *host {
	t.Helper()
	return &host{harness.NewNetwork(t), t}
}

// ip gives lines to iproute2, as "link set eth0 up".
func (h *host) ip(lines string) {
	h.t.Helper()
	if out, err := h.batch(lines); err != nil {
		h.t.Fatalf("ip: %v\n%s", err, out)
	}
}

func (h *host) batch(lines string) (out string, err error) {
	cmd := exec.Command("ip", "-batch", "-")
	var said strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(lines), &said, &said
	if err := h.Start(cmd); err != nil {
		return "", err
	}
	err = cmd.Wait()
	return said.String(), err
}

// open makes the host's table, which is not run.
func (h *host) open(o path.Options) *path.Table {
	h.t.Helper()
	var table *path.Table
	if err := h.Do(func() (err error) { table, err = path.Open(o); return err }); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(table.Close)
	return table
}

// run runs a table until the test ends.
func run(t testing.TB, table *path.Table) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- table.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the table ended: %v", err)
		}
	})
}
