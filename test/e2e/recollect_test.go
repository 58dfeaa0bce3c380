package e2e_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// A tag that was pulled twice: the pods of one owner run two programs.
func TestPodsOfOneOwnerWithOtherImagesGetTheirOwnCallsOnly(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	run := func(p *corev1.Pod, image string) {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", ImageID: "example/app@sha256:" + image}}
	}
	old, first := w.serve("web-1-a", []string{"shop.Both", "shop.Old"})
	fresh, _ := w.serve("web-1-b", []string{"shop.Both", "shop.New"})
	run(old, "1")
	run(fresh, "2")
	a := s.start(t, "--source", w.write().source()).ready()
	at := func(service string) (pods []string) {
		for _, s := range a.services() {
			if s.Name == service {
				for _, e := range s.Endpoints {
					pods = append(pods, e.Pod)
				}
			}
		}
		return pods
	}
	harness.Eventually(t, soon, func() error {
		for service, want := range map[string][]string{
			"shop.Both": {"prod/web-1-a", "prod/web-1-b"}, "shop.Old": {"prod/web-1-a"}, "shop.New": {"prod/web-1-b"},
		} {
			if got := at(service); !slices.Equal(got, want) {
				return fmt.Errorf("%s at %v, want %v", service, got, want)
			}
		}
		return nil
	})
	owner := wantKeys(t, "owner", list(t, "owners", decoded(t, a, "owners"), 1)[0],
		"key", "namespace", "name", "workload", "knowledge", "origin", "services", "pods", "reason", "variants", "added", "dropped", "previous")
	variant := wantKeys(t, "variant", list(t, "variants", owner["variants"], 1)[0], "images", "pods", "services")
	if owner["knowledge"] != "known" || variant["images"] == "" {
		t.Errorf("owner %v", owner)
	}
	if out := a.must("explain", "pod", "prod/web-1-b"); !strings.Contains(out, "is served: shop.Both, shop.New") || strings.Contains(out, "shop.Old") {
		t.Errorf("explain says\n%s", out)
	}

	// The first is made to serve something else without a rollout.
	first.Stop()
	again, err := demo.StartSample("web-1-a", first.Addr(), []string{"shop.Both", "shop.Late"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Stop)
	for range 2 { // one pod each time
		row := wantKeys(t, "row", list(t, "rows", decoded(t, a, "recollect", "prod/web"), 1)[0], "owner", "report")
		if report := wantKeys(t, "report", row["report"], "result", "pod", "detail"); report["result"] != "known" {
			t.Errorf("report %v", report)
		}
	}
	if got := at("shop.Late"); !slices.Equal(got, []string{"prod/web-1-a"}) {
		t.Errorf("shop.Late at %v", got)
	}
	if got := at("shop.Old"); len(got) > 0 {
		t.Errorf("shop.Old at %v", got)
	}
}

func TestRecollectSaysWhatCameOut(t *testing.T) {
	t.Parallel()
	w, s := newWorld(t), newSite(t)
	w.serve("web-1-a", []string{"shop.Web"})
	w.add(newPod("dead-1-a", nextAddr(), 1))
	quiet := w.add(newPod("quiet-1-a", nextAddr(), 1))
	quiet.Spec.Containers[0].Ports[0].Name = "http"
	a := s.start(t, "--source", w.write().source()).ready()

	for _, name := range []string{"uid-web-1/1", "prod/web-1", "prod/web", "prod/ReplicaSet/web"} {
		out := a.must("recollect", name)
		if !strings.Contains(out, "known") || !strings.Contains(out, "prod/web-1-a") || !strings.Contains(out, "shop.Web") {
			t.Errorf("recollect %s says\n%s", name, out)
		}
	}
	fails := func(name, why string) {
		t.Helper()
		_, errs, code := run(t, "recollect", name, "--admin-socket", s.admin)
		if code != 1 || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, why) {
			t.Errorf("recollect %s: exit %d, %q; want 1 and %q", name, code, errs, why)
		}
	}
	fails("prod/web", "5 connections of this hour") // one at the start, four since
	fails("prod/dead", "refused")
	fails("prod/quiet", "no port has a gRPC hint")
	fails("prod/none", "there is no owner prod/none")
	fails("other/web", "there is no owner other/web")
	refused(t, 2, "NAMESPACE/NAME", nil, "recollect", "web")
	refused(t, 2, "", nil, "recollect")
	refused(t, 2, "--output", nil, "recollect", "prod/web", "-o", "xml")
	refused(t, 1, "no agent at", nil, "recollect", "prod/web", "--admin-socket", s.admin+".none")
}
