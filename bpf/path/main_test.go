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

// open makes the host's map, which is not run.
func (h *host) open(o path.Options) *path.Map {
	h.t.Helper()
	var ways *path.Map
	if err := h.Do(func() (err error) { ways, err = path.Open(o); return err }); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(ways.Close)
	return ways
}

// run runs a map until the test ends.
func run(t testing.TB, ways *path.Map) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- ways.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the map ended: %v", err)
		}
	})
}
