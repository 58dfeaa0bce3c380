package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// flip is one change: a pod becomes Ready, or is not any more.
type flip struct {
	pod     int
	up      bool
	due     int64 // when it was to be made
	acked   int64 // when the API server had said that it is made
	watched int64 // when the reference watcher had it; 0: not yet
}

// writer makes changes at the API server, and watches them itself, with nothing
// between the wire and the clock.
type writer struct {
	w      *world
	client *kubernetes.Clientset
	order  []int // of services; each gets one change before any gets another
	next   int

	cancel context.CancelFunc
	ended  chan error

	// mu guards what the watch brought and nobody has read yet.
	mu    sync.Mutex
	heard []sight
}

// sight is an event of the watch. It is read later: when it comes, whoever is
// measured needs the processor.
type sight struct {
	at    int64
	frame []byte
}

// newWriter begins with the pods that have this place in their service; those
// that another writer left not Ready would be no change.
func (w *world) newWriter(ctx context.Context, place int) (*writer, error) {
	client, err := protobufClient(w.api.Kubeconfig)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	wr := &writer{
		w: w, client: client, order: rand.New(rand.NewPCG(1, 2)).Perm(w.services),
		next:   2 * place * w.services,
		cancel: cancel, ended: make(chan error, 1),
	}
	listed := make(chan struct{})
	go func() {
		defer close(wr.ended)
		wr.ended <- frames(ctx, w.api.Config, wr.hear(listed))
	}()
	select {
	case <-listed:
		return wr, nil
	case err := <-wr.ended:
		cancel()
		return nil, err
	}
}

func (wr *writer) stop() {
	wr.cancel()
	for range wr.ended {
		// It says that it was told to end.
	}
}

// hear closes listed after the list and keeps the events after it.
func (wr *writer) hear(listed chan<- struct{}) func([]byte) error {
	synced := false
	return func(frame []byte) error {
		at := now()
		switch bookmark := bytes.HasPrefix(frame, bookmarkFrame); {
		case bookmark && !synced:
			close(listed)
			synced = true
		case !bookmark && synced:
			wr.mu.Lock()
			defer wr.mu.Unlock()
			wr.heard = append(wr.heard, sight{at, slices.Clone(frame)})
		}
		return nil
	}
}

// take is the next change. A service has its pods flipped one after the other,
// each down and up again, so that one change of a service is far from the next.
func (wr *writer) take() flip {
	round := wr.next / len(wr.order)
	f := flip{pod: wr.order[wr.next%len(wr.order)]*wr.w.each + round/2%wr.w.each, up: round%2 == 1}
	wr.next++
	return f
}

// run makes n changes at moments that do not depend on how long any takes: a
// Poisson process of so many a second. It returns when all are acknowledged.
func (wr *writer) run(ctx context.Context, n int, perSecond float64) ([]flip, error) {
	flips := make([]flip, n)
	failed := make(chan error, n)
	var made sync.WaitGroup
	due := now()
	for i := range flips {
		due += int64(rand.ExpFloat64() / perSecond * 1e9)
		f := &flips[i]
		*f = wr.take()
		f.due = due
		select {
		case <-time.After(time.Duration(due - now())):
		case <-ctx.Done():
		}
		made.Go(func() {
			if err := wr.write(ctx, f); err != nil {
				failed <- err
			}
		})
	}
	made.Wait()
	select {
	case err := <-failed:
		return nil, err
	default:
		return flips, nil
	}
}

func (wr *writer) write(ctx context.Context, f *flip) error {
	status := corev1.ConditionFalse
	if f.up {
		status = corev1.ConditionTrue
	}
	patch := fmt.Appendf(nil, `{"status":{"conditions":[{"type":"Ready","status":"%s"}]}}`, status)
	err := wr.client.CoreV1().RESTClient().Patch(types.StrategicMergePatchType).Namespace(benchNamespace).Resource("pods").
		Name(podName(f.pod, wr.w.each)).SubResource("status").Body(patch).Do(ctx).Error()
	f.acked = now()
	return err
}

// watched fills in when the reference watcher had each change, if it was the
// last of its pod.
func (wr *writer) watched(flips []flip) error {
	wr.mu.Lock()
	defer wr.mu.Unlock()
	type state struct {
		pod string
		up  bool
	}
	seen := map[state]int64{}
	for _, h := range wr.heard {
		var event metav1.WatchEvent
		var object runtime.Unknown
		var pod corev1.Pod
		if err := event.Unmarshal(h.frame); err != nil {
			return err
		}
		raw, _ := bytes.CutPrefix(event.Object.Raw, []byte("k8s\x00"))
		if err := object.Unmarshal(raw); err != nil {
			return err
		}
		if err := pod.Unmarshal(object.Raw); err != nil {
			return err
		}
		seen[state{pod.Name, isReady(&pod)}] = h.at
	}
	wr.heard = nil
	for i := range flips {
		f := &flips[i]
		if at := seen[state{podName(f.pod, wr.w.each), f.up}]; at > f.due {
			f.watched = at
		}
	}
	return nil
}

// bookmarkFrame begins the frame of a bookmark.
var bookmarkFrame = []byte("\x0a\x08BOOKMARK")

// frames streams all pods, and what becomes of them, and gives f each event of
// the watch as it comes off the wire. It ends when f returns an error, or ctx.
func frames(ctx context.Context, config *rest.Config, f func([]byte) error) error {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	url := config.Host + "/api/v1/pods?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", runtime.ContentTypeProtobuf+";stream=watch")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	var frame []byte
	for {
		var head [4]byte
		if _, err := io.ReadFull(resp.Body, head[:]); err != nil {
			return err
		}
		length := binary.BigEndian.Uint32(head[:])
		if length > 16<<20 {
			return fmt.Errorf("an event of %d bytes", length)
		}
		if cap(frame) < int(length) {
			frame = make([]byte, length)
		}
		frame = frame[:length]
		if _, err := io.ReadFull(resp.Body, frame); err != nil {
			return err
		}
		if err := f(frame); err != nil {
			return err
		}
	}
}
