package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fingerpost/fingerpost/test/harness"
)

// manyPods starts agents, without clients, on an API server with many pods:
// until when they are ready, with a checkpoint and without, and how much memory
// they then have.
var manyPods = benchmark{names: []string{
	"start/10k-pods", "restart/10k-pods", "memory/10k-pods", "memory-peak/10k-pods",
	"start/50k-pods", "restart/50k-pods", "memory/50k-pods", "memory-peak/50k-pods",
}, run: runManyPods}

func runManyPods(ctx context.Context, r *run) ([]result, error) {
	sizes, rounds := []int{10_000, 50_000}, 3
	if r.short {
		sizes, rounds = []int{10_000}, 1
	}
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	bin, err := r.agent(ctx)
	if err != nil {
		return nil, err
	}
	api, err := harness.NewAPIServer()
	if err != nil {
		return nil, fmt.Errorf("%w (make test brings it)", err)
	}
	defer api.Close()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}
	if _, err := api.Client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	var results []result
	have := 0
	for _, n := range sizes {
		name := fmt.Sprintf("/%dk-pods", n/1000)
		starts, memories := r.wants("start"+name) || r.wants("restart"+name), r.wants("memory"+name) || r.wants("memory-peak"+name)
		if !starts && !memories {
			continue
		}
		r.progress("writing %d pods", n-have)
		if err := api.WritePods(ctx, clusterPods(have, n, 10)); err != nil {
			return nil, err
		}
		have = n
		if err := awaitPods(ctx, api.Config, n); err != nil {
			return nil, err
		}
		var ours, again, raw []time.Duration
		var memory, informer footprint
		for round := range rounds {
			d, bytes, err := rawList(ctx, api.Config, n)
			if err != nil {
				return nil, err
			}
			raw = append(raw, d)
			r.progress("%d pods: raw watch-list of %d MB in %v", n, bytes>>20, d.Round(time.Millisecond))
			state := filepath.Join(dir, fmt.Sprintf("state-%d-%d", n, round))
			start := func(settle bool) (time.Duration, error) {
				a, err := startProgram(ctx, dir, bin, "agent", "--node-name", "node-1", "--kubeconfig", api.Kubeconfig, "--state-dir", state,
					"--ads-socket", filepath.Join(dir, "ads", "ads.sock"), "--admin-socket", filepath.Join(dir, "admin", "admin.sock"))
				if err != nil {
					return 0, err
				}
				defer a.stop()
				d, err := a.ready(ctx)
				if err == nil && settle {
					memory, err = a.settle(ctx, r)
				}
				if resumed := strings.Contains(a.printed(), "resumed from the checkpoint"); err == nil && resumed != (len(again) < len(ours)) {
					err = fmt.Errorf("resumed %t: %s", resumed, a.printed())
				}
				return d, err
			}
			if d, err = start(memories && round == rounds-1); err != nil {
				return nil, err
			}
			ours = append(ours, d)
			r.progress("%d pods: agent ready in %v", n, d.Round(time.Millisecond))
			if d, err = start(false); err != nil {
				return nil, err
			}
			again = append(again, d)
			r.progress("%d pods: started again, ready in %v", n, d.Round(time.Millisecond))
		}
		value, baseline := milliseconds(median(ours)), milliseconds(median(raw))
		restart := milliseconds(median(again))
		results = append(results,
			result{Name: "start" + name, Value: value, Unit: "ms", Baseline: baseline, Ratio: baseline / value},
			result{Name: "restart" + name, Value: restart, Unit: "ms", Baseline: value, Ratio: value / restart})
		if !memories {
			continue
		}
		r.progress("%d pods: agent, %.0f MB resident, %.0f at most", n, memory.now, memory.peak)
		exe, err := os.Executable()
		if err != nil {
			return nil, err
		}
		i, err := startProgram(ctx, dir, exe, "informer", api.Kubeconfig)
		if err != nil {
			return nil, err
		}
		if err = i.says(ctx, "synced"); err == nil {
			informer, err = i.settle(ctx, r)
		}
		i.stop()
		if err != nil {
			return nil, err
		}
		r.progress("%d pods: stock informer, %.0f MB resident, %.0f at most", n, informer.now, informer.peak)
		results = append(results,
			result{Name: "memory" + name, Value: memory.now, Unit: "MB", Baseline: informer.now, Ratio: informer.now / memory.now},
			result{Name: "memory-peak" + name, Value: memory.peak, Unit: "MB", Baseline: informer.peak, Ratio: informer.peak / memory.peak})
	}
	return results, nil
}

// clusterPods yields pods, each to a ReplicaSet, as an API server has them:
// most of their kilobytes are of no use to anybody but a kubelet.
func clusterPods(from, to, each int) iter.Seq[*corev1.Pod] {
	created := metav1.NewTime(time.Unix(1.75e9, 0))
	fields := []byte("{" + strings.Repeat(`"f:containers":{"k:{\"name\":\"app\"}":{".":{},"f:env":{}}},`, 10) + `"f:phase":{}}`)
	var env []corev1.EnvVar
	for i := range 30 {
		env = append(env, corev1.EnvVar{Name: fmt.Sprintf("CHECKOUT_SETTING_%d", i), Value: "a value of an ordinary length"})
	}
	volume := corev1.Volume{Name: "kube-api-access", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}
	yes, grace := true, int64(30)
	return func(yield func(*corev1.Pod) bool) {
		for i := from; i < to; i++ {
			owner, ip, node := fmt.Sprintf("checkout-%d-5d9f8c7b6d", i/each), fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), i%500
			status := corev1.PodStatus{
				Phase: corev1.PodRunning, HostIP: fmt.Sprintf("172.16.%d.%d", node>>8, node&255), PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, StartTime: &created,
				ContainerStatuses: []corev1.ContainerStatus{{
					Name: "app", Ready: true, Started: &yes, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: created}},
					Image: "registry.example/shop/checkout:v1.2.3", ImageID: "registry.example/shop/checkout@sha256:" + strings.Repeat("0", 64), ContainerID: "containerd://" + strings.Repeat("1", 64),
				}},
			}
			for _, c := range []corev1.PodConditionType{"PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"} {
				status.Conditions = append(status.Conditions, corev1.PodCondition{Type: c, Status: corev1.ConditionTrue, LastTransitionTime: created})
			}
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: "prod", Name: fmt.Sprintf("%s-%05d", owner, i), UID: types.UID(fmt.Sprintf("3b241101-0000-4000-8000-%012d", i)),
					CreationTimestamp: created,
					Labels:            map[string]string{"app.kubernetes.io/name": "checkout", "pod-template-hash": "5d9f8c7b6d", "topology.kubernetes.io/zone": fmt.Sprintf("zone-%d", node%3)},
					OwnerReferences: []metav1.OwnerReference{{
						APIVersion: "apps/v1", Kind: "ReplicaSet", Name: owner, UID: types.UID(fmt.Sprintf("9d1f6c1e-0000-4000-8000-%012d", i/each)), Controller: &yes,
					}},
				},
				Spec: corev1.PodSpec{
					NodeName: fmt.Sprintf("node-%d", node), RestartPolicy: corev1.RestartPolicyAlways, TerminationGracePeriodSeconds: &grace,
					DNSPolicy: corev1.DNSClusterFirst, ServiceAccountName: "checkout", SecurityContext: &corev1.PodSecurityContext{}, SchedulerName: "default-scheduler",
					Volumes: []corev1.Volume{volume},
					Containers: []corev1.Container{{
						Name: "app", Image: "registry.example/shop/checkout:v1.2.3", Env: env,
						Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080, Protocol: corev1.ProtocolTCP}},
					}},
				},
				Status: status,
			}
			for _, manager := range []string{"kube-controller-manager", "kubelet", "kube-scheduler"} {
				pod.ManagedFields = append(pod.ManagedFields, metav1.ManagedFieldsEntry{
					Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", Time: &created,
					FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(string(fields)),
				})
			}
			if !yield(pod) {
				return
			}
		}
	}
}

// awaitPods waits until a watch-list has n pods. One that the API server ends,
// since it is still taking them in, is tried again.
func awaitPods(ctx context.Context, config *rest.Config, n int) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		_, _, err := rawList(ctx, config, n)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%d pods were written: %w", n, err)
		}
	}
}

var errCount = errors.New("another number of pods than was written")

// rawList streams all pods and looks at nothing but where each event ends: what
// the API server alone needs. It returns the time and the bytes.
func rawList(ctx context.Context, config *rest.Config, n int) (time.Duration, int, error) {
	began := time.Now()
	pods, size := 0, 0
	err := frames(ctx, config, func(frame []byte) error {
		size += len(frame)
		if bytes.HasPrefix(frame, bookmarkFrame) {
			return errListed
		}
		pods++
		return nil
	})
	switch {
	case !errors.Is(err, errListed):
		return 0, 0, err
	case pods != n:
		return 0, 0, fmt.Errorf("%w: %d", errCount, pods)
	}
	return time.Since(began), size, nil
}

// errListed ends a watch after its list.
var errListed = errors.New("all pods were listed")
