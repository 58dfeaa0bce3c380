package e2e_test

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

// gateOpen waits until the gate is open, ready or not.
func (a *agentProcess) gateOpen() {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		if s := a.status(); s.Gate != "open" {
			return fmt.Errorf("the gate is closed: %s", s.Reason)
		}
		return nil
	})
}

func TestAgentServesAgainAfterEachKill(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	w.write()
	for range 10 {
		a := s.start(t, "--source", w.source()).ready()
		c := connectRaw(t, s.ads, client.Options{Delta: true})
		c.subscribe(xds.Cluster)
		c.has(xds.Cluster, "prod/shop.Web")
		a.kill()
		_ = c.end()
	}
	a := s.start(t, "--source", w.source()).ready()
	a.stop()
	for _, dir := range []string{filepath.Dir(s.ads), filepath.Dir(s.admin)} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			// The locks stay: one that is removed guards nothing.
			if !strings.HasSuffix(e.Name(), ".lock") {
				t.Errorf("%s is left in %s", e.Name(), dir)
			}
		}
	}
}

func TestSecondAgentOnOnePathIsRefusedUntilTheFirstIsGone(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	w.write()
	first := s.start(t, "--source", w.source()).ready()
	c := connectRaw(t, s.ads, client.Options{Delta: true})
	c.subscribe(xds.Cluster)
	c.has(xds.Cluster, "prod/shop.Web")

	elsewhere := *s
	elsewhere.admin = filepath.Join(filepath.Dir(s.ads), "..", "other", "admin.sock")
	for name, second := range map[string]*site{"same admin path": s, "another admin path": &elsewhere} {
		out, errs, code := run(t, second.args("--source", w.source())...)
		if code != 1 || out != "" || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: exit %d, stdout %q, stderr %q, want one line and exit 1", name, code, out, errs)
		}
		if pid := fmt.Sprintf("pid %d", first.cmd.Process.Pid); !strings.Contains(errs, pid) || !strings.Contains(errs, s.ads) {
			t.Errorf("%s: %q does not name %s and %s", name, errs, pid, s.ads)
		}
	}
	if _, err := os.Stat(elsewhere.admin); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the refused agent left its admin socket: %v", err)
	}
	p, _ := w.serve("cart-1-a", []string{"shop.Cart"})
	w.write()
	c.has(xds.Cluster, "prod/shop.Cart", "prod/shop.Web")
	first.ready()
	w.remove(p)
	w.write()

	first.kill()
	elsewhere.start(t, "--source", w.source()).ready()
}

func TestRestartSendsNothingToADeltaClientThatKeptWhatItHas(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web", "shop.Admin"})
	cart, _ := w.serve("cart-1-a", []string{"shop.Cart"})
	w.write()
	a := s.start(t, "--source", w.source()).ready()
	clusters := []string{"prod/shop.Admin", "prod/shop.Cart", "prod/shop.Web"}
	before := connectRaw(t, s.ads, client.Options{Delta: true})
	before.subscribeAll(clusters...)
	before.has(xds.Cluster, clusters...)
	before.has(xds.Endpoint, clusters...)
	before.has(xds.Listener, "egress")
	before.has(xds.Route, "egress")
	a.kill()
	_ = before.end()

	a = s.start(t, "--source", w.source()).live()
	after := connectRaw(t, s.ads, client.Options{Delta: true, Memory: before.Memory()})
	after.subscribeAll(clusters...)
	a.ready()
	fresh := connectRaw(t, s.ads, client.Options{Delta: true})
	fresh.subscribeAll(clusters...)
	fresh.has(xds.Endpoint, clusters...)
	fresh.has(xds.Listener, "egress")
	fresh.has(xds.Route, "egress")
	if was, is := before.versions(), fresh.versions(); !maps.Equal(was, is) {
		t.Errorf("versions were %v, are %v after the restart", was, is)
	}
	// What changes next comes after all that the restart could have caused.
	w.add(newPod("cart-1-b", nextAddr(), int(cart.Spec.Containers[0].Ports[0].ContainerPort)))
	w.write()
	port := cart.Spec.Containers[0].Ports[0].ContainerPort
	after.endpoints("prod/shop.Cart", fmt.Sprintf("%s:%d", cart.Status.PodIP, port), fmt.Sprintf("%s:%d", w.pods[2].Status.PodIP, port))
	// A client has what came a moment before it says that it came.
	after.until(func() error {
		if len(after.spoken()) == 0 {
			return errors.New("the client was sent nothing")
		}
		return nil
	})
	if got := after.spoken(); !slices.Equal(got, []string{"eds prod/shop.Cart"}) {
		t.Errorf("the client was sent %v, want the changed endpoints alone", got)
	}
}

func TestServiceThatWentWhileTheAgentWasDownIsRemovedAfterTheRestart(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	r := newReflections()
	w.serve("web-1-a", []string{"shop.Web"}, r.option())
	gone, _ := w.serve("old-1-a", []string{"shop.Old"})
	w.write()
	a := s.start(t, "--source", w.source()).ready()
	before := connectRaw(t, s.ads, client.Options{Delta: true})
	before.subscribeAll("prod/shop.Old", "prod/shop.Web")
	before.has(xds.Endpoint, "prod/shop.Old", "prod/shop.Web")
	a.kill()
	_ = before.end()

	w.remove(gone)
	w.write()
	r.hold()
	s.start(t, "--source", w.source()).live()
	after := connectRaw(t, s.ads, client.Options{Delta: true, Memory: before.Memory()})
	after.subscribeAll("prod/shop.Old", "prod/shop.Web")
	harness.Eventually(t, soon, func() error {
		if r.streams() < 2 {
			return errors.New("the owner is not asked yet")
		}
		return nil
	})
	if got := after.spoken(); len(got) != 0 {
		t.Errorf("with an owner not known the client was sent %v", got)
	}
	r.release()
	after.has(xds.Cluster, "prod/shop.Web")
	after.has(xds.Endpoint, "prod/shop.Web")
	if got := after.spoken(); !slices.Equal(got, []string{"cds -prod/shop.Old", "eds -prod/shop.Old"}) {
		t.Errorf("the client was sent %v, want the removals alone", got)
	}
}

func TestReflectionThatHangsAfterARestartRemovesNothing(t *testing.T) {
	// With one collect at a time the bound of the gate passes while owners are
	// still to be asked; else all were asked in vain before that.
	for _, limit := range []string{"1", "16"} {
		t.Run("collect-limit="+limit, func(t *testing.T) { t.Parallel(); hangAfterRestart(t, limit) })
	}
}

func hangAfterRestart(t *testing.T, limit string) {
	w, s := newWorld(t), newSite(t)
	r := newReflections()
	var clusters []string
	for _, x := range []string{"a", "b", "c", "d"} {
		w.serve(x+"-1-x", []string{"shop." + x}, r.option())
		clusters = append(clusters, "prod/shop."+x)
	}
	w.write()
	a := s.start(t, "--source", w.source()).ready()
	delta := connectRaw(t, s.ads, client.Options{Delta: true})
	delta.subscribeAll(clusters...)
	delta.has(xds.Endpoint, clusters...)
	delta.has(xds.Route, "egress")
	sotw := connectRaw(t, s.ads, client.Options{})
	sotw.subscribeAll(clusters...)
	sotw.has(xds.Endpoint, clusters...)
	sotw.has(xds.Route, "egress")
	a.kill()
	_ = delta.end()
	_ = sotw.end()

	r.hold()
	a = s.start(t, "--source", w.source(), "--collect-limit", limit).live()
	held := connectRaw(t, s.ads, client.Options{Delta: true, Memory: delta.Memory()})
	held.subscribeAll(clusters...)
	early := connectRaw(t, s.ads, client.Options{Memory: sotw.Memory()})
	early.subscribeAll(clusters...)
	fresh := connectRaw(t, s.ads, client.Options{Delta: true})
	fresh.subscribe(xds.Listener)
	fresh.subscribe(xds.Cluster)
	if code, body, err := a.get("/ready"); err != nil || code != http.StatusServiceUnavailable {
		t.Errorf("/ready with reflection hanging: %d %s %v", code, body, err)
	}
	wantUnavailable(t, early)
	a.gateOpen()
	fresh.has(xds.Listener, "egress")
	fresh.until(func() error {
		if len(fresh.of(xds.Cluster)) == 0 {
			return errors.New("a client that holds nothing is not answered")
		}
		return nil
	})
	if by := strings.Contains(a.log.String(), "not every owner was asked"); by != (limit == "1") {
		t.Errorf("the gate was opened by its bound: %v", by)
	}
	late := connectRaw(t, s.ads, client.Options{Memory: sotw.Memory()})
	late.subscribeAll(clusters...)
	wantUnavailable(t, late)
	if got := held.spoken(); len(got) != 0 {
		t.Errorf("the delta client was sent %v", got)
	}
	if code, body, err := a.get("/ready"); err != nil || code != http.StatusOK || !strings.Contains(body, "owners not known yet") {
		t.Errorf("/ready behind the open gate: %d %s %v", code, body, err)
	}
	r.release()
	a.kill()

	s.start(t, "--source", w.source()).ready()
	again := connectRaw(t, s.ads, client.Options{Delta: true, Memory: held.Memory()})
	again.subscribeAll(clusters...)
	whole := connectRaw(t, s.ads, client.Options{Memory: sotw.Memory()})
	whole.subscribeAll(clusters...)
	w.serve("e-1-x", []string{"shop.e"})
	w.write()
	all := append(slices.Clone(clusters), "prod/shop.e")
	again.has(xds.Cluster, all...)
	whole.has(xds.Cluster, all...)
	if got := again.spoken(); !slices.Equal(got, []string{"cds prod/shop.e"}) {
		t.Errorf("the delta client was sent %v, want the new cluster alone", got)
	}
}

// wantUnavailable waits for the end of a SotW stream that must not have been
// told anything that could remove a cluster.
func wantUnavailable(t *testing.T, c *rawClient) {
	t.Helper()
	if err := c.end(); status.Code(err) != codes.Unavailable {
		t.Errorf("the SotW stream ended with %v, want UNAVAILABLE", err)
	}
	if got := c.spoken(); len(got) != 0 {
		t.Errorf("a SotW client that names a version was sent %v", got)
	}
	for _, r := range c.of(xds.Cluster) {
		t.Errorf("a SotW client that names a version was sent clusters %v", r.Names())
	}
}

// A server that has stopped answering takes connections all the same: the
// kernel does that for it.
func TestServerThatAnswersAtLastIsLearnedAndGivesEverythingBack(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	_, web := w.serve("web-1-a", []string{"shop.Web"})
	w.serve("cart-1-a", []string{"shop.Cart"})
	w.write()
	clusters := []string{"prod/shop.Cart", "prod/shop.Web"}
	a := s.start(t, "--source", w.source()).ready()
	delta := connectRaw(t, s.ads, client.Options{Delta: true})
	delta.subscribeAll(clusters...)
	delta.has(xds.Endpoint, clusters...)
	sotw := connectRaw(t, s.ads, client.Options{})
	sotw.subscribeAll(clusters...)
	sotw.has(xds.Endpoint, clusters...)
	a.kill()
	_ = delta.end()
	_ = sotw.end()

	web.Stop()
	silent, err := net.Listen("tcp", web.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	a = s.start(t, "--source", w.source()).live()
	held := connectRaw(t, s.ads, client.Options{Delta: true, Memory: delta.Memory()})
	held.subscribeAll(clusters...)
	gated := connectRaw(t, s.ads, client.Options{Memory: sotw.Memory()})
	gated.subscribeAll(clusters...)
	a.gateOpen()
	harness.Eventually(t, soon, func() error {
		if n := a.status().Owners["failed"]; n != 1 {
			return fmt.Errorf("%d owners have failed", n)
		}
		return nil
	})
	fresh := connectRaw(t, s.ads, client.Options{})
	fresh.subscribe(xds.Cluster)
	fresh.has(xds.Cluster, "prod/shop.Cart")
	if got := held.spoken(); len(got) != 0 {
		t.Errorf("the delta client was sent %v", got)
	}
	if got := gated.of(xds.Cluster); len(got) != 0 {
		t.Errorf("the SotW client was sent clusters %v", got)
	}
	silent.Close()
	back, err := demo.StartSample("web-1-a", web.Addr(), []string{"shop.Web"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(back.Stop)
	fresh.has(xds.Cluster, clusters...)
	again := connectRaw(t, s.ads, client.Options{Memory: sotw.Memory()})
	again.subscribe(xds.Cluster)
	w.serve("new-1-a", []string{"shop.New"})
	w.write()
	all := append(slices.Clone(clusters), "prod/shop.New")
	held.has(xds.Cluster, all...)
	again.has(xds.Cluster, all...)
	if got := held.spoken(); !slices.Equal(got, []string{"cds prod/shop.New"}) {
		t.Errorf("the delta client was sent %v, want the new cluster alone", got)
	}
	for _, r := range gated.of(xds.Cluster) {
		if !slices.Contains(r.Names(), "prod/shop.Web") {
			t.Errorf("the SotW client was sent clusters %v", r.Names())
		}
	}
}

func TestPodsOfOneOwnerAreVisibleBeforeItsOnlyCollectReturns(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	r := newReflections()
	r.hold()
	want := []string{}
	for i := range 10 {
		id := fmt.Sprintf("web-1-%d", i)
		w.serve(id, []string{"shop.Web"}, r.option())
		want = append(want, "prod/"+id)
	}
	w.write()
	a := s.start(t, "--source", w.source()).live()
	harness.Eventually(t, soon, func() error {
		if r.streams() == 0 {
			return errors.New("the owner is not asked yet")
		}
		return nil
	})
	owners := a.owners()
	if len(owners) != 1 || !slices.Equal(owners[0].Pods, want) || owners[0].Knowledge != "collecting" {
		t.Errorf("owners during the collect: %+v", owners)
	}
	code, body, err := a.get("/ready")
	if err != nil || code != http.StatusServiceUnavailable || !strings.Contains(body, "prod/ReplicaSet/web-1 (collecting)") {
		t.Errorf("/ready during the collect: %d %s %v", code, body, err)
	}
	if s := a.status(); s.Pods != 10 || s.Gate != "closed" || s.Owners["collecting"] != 1 {
		t.Errorf("status during the collect: %+v", s)
	}
	r.release()
	a.ready()
	if n := r.streams(); n != 1 {
		t.Errorf("%d reflection streams, want 1", n)
	}
	if o := a.owners(); len(o) != 1 || o[0].Knowledge != "known" || !slices.Equal(o[0].Services, []string{"shop.Web"}) {
		t.Errorf("owners after the collect: %+v", o)
	}
	if s := a.services(); len(s) != 1 || len(s[0].Endpoints) != 10 {
		t.Errorf("services after the collect: %+v", s)
	}
}
