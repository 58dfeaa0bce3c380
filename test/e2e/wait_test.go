package e2e_test

import (
	"bytes"
	"errors"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// waiting is a "fingerpost wait" that runs.
type waiting struct {
	t         *testing.T
	out, errs bytes.Buffer
	ended     chan int // its exit code
}

func (s *site) waits(t *testing.T, args ...string) *waiting {
	t.Helper()
	w := &waiting{t: t, ended: make(chan int, 1)}
	cmd := exec.Command(program, append([]string{"wait", "--admin-socket", s.admin}, args...)...)
	cmd.Stdout, cmd.Stderr = &w.out, &w.errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait(); w.ended <- cmd.ProcessState.ExitCode() }()
	return w
}

// ends checks how it ends: with 0 and nothing said, or with 1 and one line.
func (w *waiting) ends(code int, says string) {
	w.t.Helper()
	if got := <-w.ended; got != code || w.out.String() != "" || strings.Count(w.errs.String(), "\n") != code || !strings.Contains(w.errs.String(), says) {
		w.t.Errorf("wait: exit %d, %q, %q; want exit %d and %q", got, w.out.String(), w.errs.String(), code, says)
	}
}

// istio#49929: what has no configuration yet must not pass for ready. A wait ends
// well once the service is served and the clients that asked for it have it.
func TestWaitEndsOnceTheServiceIsServedAndAcknowledged(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	s.start(t, "--source", w.write().source()).ready()
	s.waits(t, "--service", "shop.Web").ends(0, "")
	s.waits(t, "--service", "prod/shop.Web").ends(0, "")
	s.waits(t, "--service", "shop.Cart", "--timeout", "300ms").ends(1, "wait: not within 300ms: shop.Cart is not served: no owner")
	s.waits(t, "--service", "test/shop.Web", "--timeout", "300ms").ends(1, "test/shop.Web is not served")

	// A client that has all, one that asks for something else, and one that takes
	// it and does not say so.
	connect := func(id string, delta bool, reply func(client.Response) client.Reply, names ...string) {
		c := connectRaw(t, s.ads, client.Options{Delta: delta, Node: &corev3.Node{Id: id}, Reply: reply})
		c.subscribe(xds.Cluster)
		c.subscribe(xds.Endpoint, names...)
	}
	connect("prod/a", true, nil, "prod/shop.Web", "prod/shop.Cart")
	connect("prod/b", false, nil, "prod/shop.Web")
	s.waits(t, "--service", "shop.Web").ends(0, "")
	waits := s.waits(t, "--service", "shop.Cart")
	late := s.waits(t, "--service", "shop.Cart", "--timeout", "1ms")
	late.ends(1, "shop.Cart is not served")
	w.serve("cart-1-a", []string{"shop.Cart"})
	w.write()
	waits.ends(0, "")

	silence := connectRaw(t, s.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/silent"}, Reply: func(r client.Response) client.Reply {
		return client.Reply{Silent: r.Type == xds.Endpoint}
	}})
	silence.subscribe(xds.Cluster)
	silence.subscribe(xds.Endpoint, "prod/shop.Cart")
	s.waits(t, "--service", "shop.Cart", "--timeout", "300ms").ends(1, "prod/silent has not acknowledged eds prod/shop.Cart")
	s.waits(t, "--service", "test/shop.Cart", "--timeout", "300ms").ends(1, "is not served")
	waits = s.waits(t, "--service", "shop.Cart")
	silence.close()
	waits.ends(0, "")

	// One that refuses ends the wait at once, of what it asked for alone.
	connect("prod/refuses", true, func(r client.Response) client.Reply {
		return client.Reply{Nack: map[bool]string{true: "not to my taste"}[r.Type == xds.Endpoint]}
	}, "prod/shop.Cart")
	s.waits(t, "--service", "shop.Cart", "--timeout", "30s").ends(1, "prod/refuses rejects eds prod/shop.Cart: not to my taste")
}

func TestWaitSaysThatTheGateIsClosedOrTheSourceStale(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	h := newReflectionHold()
	h.hold()
	w.serve("web-1-a", []string{"shop.Web"}, h.option())
	a := s.start(t, "--source", w.write().source()).live()
	h.waitAsked(t)
	s.waits(t, "--service", "shop.Web", "--timeout", "300ms").ends(1, "the gate is closed")
	waits := s.waits(t, "--service", "shop.Web")
	h.release()
	waits.ends(0, "")
	a.ready()
	w.writeRaw("kind: [")
	harness.Eventually(t, soon, func() error {
		if a.status().Source.Error == "" {
			return errors.New("not yet")
		}
		return nil
	})
	s.waits(t, "--service", "shop.Web", "--timeout", "30s").ends(1, "the source is stale")
	w.write()
	harness.Eventually(t, soon, func() error {
		if a.status().Source.Error != "" {
			return errors.New("not yet")
		}
		return nil
	})
	s.waits(t, "--service", "shop.Web").ends(0, "")
	for _, args := range [][]string{{}, {"--service", ""}, {"--service", "/x"}, {"--service", "a/b/c"}, {"--service", "shop.Web", "--timeout", "0s"}} {
		refused(t, 2, "--", nil, append([]string{"wait"}, args...)...)
	}
}
