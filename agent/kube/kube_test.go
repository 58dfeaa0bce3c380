package kube_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/agent/kube"
	"github.com/fingerpost/fingerpost/nodecache"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// eventually waits until cond says "" and fails with what it said last.
func eventually(t *testing.T, cond func() string) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		text := cond()
		if text == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still: %s", text)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// readyPod is a pod of ReplicaSet a-5d9 that serves.
func readyPod(name, uid, ip string) *corev1.Pod {
	yes := true
	return &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "prod", Name: name, UID: types.UID(uid),
			Labels:          map[string]string{"pod-template-hash": "5d9"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "a-5d9", UID: "rs", Controller: &yes}},
		},
		Spec: corev1.PodSpec{
			NodeName:   "n1",
			Containers: []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{{Name: "grpc", ContainerPort: 50051}}}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
}

// served lists the directory as namespace/name=address state.
func served(dir *nodecache.Directory) []string {
	lines := []string{}
	for _, o := range dir.Owners() {
		for _, p := range o.Pods {
			lines = append(lines, fmt.Sprintf("%s=%s %s", p, p.Addr, p.State))
		}
	}
	return lines
}

// lines is a log handler that keeps messages.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) Enabled(context.Context, slog.Level) bool { return true }
func (l *lines) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *lines) WithGroup(string) slog.Handler            { return l }
func (l *lines) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := r.Message
	r.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
	l.all = append(l.all, text)
	return nil
}

func (l *lines) get() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string{}, l.all...)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// replace renames over the file, as editors do.
func replace(t *testing.T, path, text string) {
	t.Helper()
	tmp := filepath.Join(filepath.Dir(path), ".edit")
	write(t, tmp, text)
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
}

// run runs the source until the test ends.
func run(t *testing.T, s kube.Source) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

func waitSynced(t *testing.T, s kube.Source) {
	t.Helper()
	select {
	case <-s.Synced():
	case <-time.After(20 * time.Second):
		t.Fatalf("not synced: %+v", s.Status())
	}
}
