package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/test/harness"
)

// Pods that say themselves what they serve: nobody is asked, and all that is
// measured is the way of a change.
const (
	benchNamespace     = "bench"
	declaredAnnotation = "fingerpost.dev/services"
	declaredFormat     = benchNamespace + "/shop.Service%05d"
)

// declaredName is the name of cluster and CLA of service i.
func declaredName(i int) string { return fmt.Sprintf(declaredFormat, i) }

// world is an API server whose pods serve, each of a service's pods the same
// one, and the programs that follow it.
type world struct {
	dir, bin       string
	api            *harness.APIServer
	services, each int
	crowd          *crowd
}

// newWorld starts an API server without pods.
func newWorld(ctx context.Context, r *run, each int) (_ *world, err error) {
	w := &world{each: each}
	if w.dir, err = os.MkdirTemp(r.dir, "world"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			w.stop()
		}
	}()
	if w.bin, err = r.agent(ctx); err != nil {
		return nil, err
	}
	if w.api, err = harness.NewAPIServer(); err != nil {
		return nil, fmt.Errorf("%w (make test brings it)", err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: benchNamespace}}
	if _, err := w.api.Client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	w.crowd, err = startCrowd(ctx)
	return w, err
}

func (w *world) stop() {
	if w.crowd != nil {
		w.crowd.stop()
	}
	if w.api != nil {
		w.api.Close()
	}
	_ = os.RemoveAll(w.dir)
}

// grow writes pods until there are so many services.
func (w *world) grow(ctx context.Context, services int) error {
	if err := w.api.WritePods(ctx, declaredPods(w.services*w.each, services*w.each, w.each)); err != nil {
		return err
	}
	w.services = services
	return awaitPods(ctx, w.api.Config, services*w.each)
}

func declaredPods(from, to, each int) iter.Seq[*corev1.Pod] {
	return func(yield func(*corev1.Pod) bool) {
		i := from
		for pod := range clusterPods(from, to, each) {
			pod.Namespace = benchNamespace
			_, service, _ := strings.Cut(declaredName(i/each), "/")
			pod.Annotations = map[string]string{declaredAnnotation: "8080=" + service}
			i++
			if !yield(pod) {
				return
			}
		}
	}
}

// podAt is the number of the pod with this address, the opposite of what
// clusterPods writes.
func podAt(addr netip.Addr) int {
	b := addr.As4()
	b[0] = 0
	return int(binary.BigEndian.Uint32(b[:]))
}

func podName(i, each int) string { return fmt.Sprintf("checkout-%d-5d9f8c7b6d-%05d", i/each, i) }

func isReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// subject is a server that is measured.
type subject struct {
	*program
	name, path string
}

// agent starts an agent and waits until it answers.
func (w *world) agent(ctx context.Context) (*subject, error) {
	dir, err := os.MkdirTemp(w.dir, "agent")
	if err != nil {
		return nil, err
	}
	s := &subject{name: "fingerpost", path: filepath.Join(dir, "ads", "ads.sock")}
	s.program, err = startProgram(ctx, dir, w.bin, "agent", "--node-name", "node-1", "--kubeconfig", w.api.Kubeconfig,
		"--ads-socket", s.path, "--admin-socket", filepath.Join(dir, "admin", "admin.sock"),
		"--state-dir", filepath.Join(dir, "state"), "--http-address", "", "--peer-address", "")
	if err != nil {
		return nil, err
	}
	if _, err := s.ready(ctx); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

// linear starts the rival and waits until it answers.
func (w *world) linear(ctx context.Context) (*subject, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(w.dir, "linear")
	if err != nil {
		return nil, err
	}
	s := &subject{name: "linear-cache", path: filepath.Join(dir, "ads.sock")}
	if s.program, err = startProgram(ctx, dir, exe, "linear", w.api.Kubeconfig, s.path); err != nil {
		return nil, err
	}
	if err := s.says(ctx, "synced"); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}
