package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// The waits of an [Announcer]: a little for everybody, since agents start
// together; after a failure, and where the annotation is lost again and again,
// doubling up to a bound. Each has as much again of jitter.
const (
	announceSpread = time.Second
	announceLeast  = time.Second
	announceMost   = 5 * time.Minute
)

// AnnouncerOptions configures an [Announcer]. All but State are required.
type AnnouncerOptions struct {
	Namespace, Pod string // of the pod that this agent runs in
	Node           string // of this agent
	Text           string // of the annotation, see [FormatPeer]
	// State hears how it went, in order: nil where the pod has the annotation,
	// else in one line why not. Nil: nobody hears.
	State func(error)
}

// Announcer writes the [PeerAnnotation] on the pod of this agent, and again where
// it is lost. Its methods are safe for concurrent use.
type Announcer struct {
	o      AnnouncerOptions
	client rest.Interface
	lost   chan struct{} // capacity 1

	// mu guards what follows.
	mu   sync.Mutex
	uid  types.UID // of the pod that was written; empty: none yet
	seen bool      // the watch has shown the annotation as it should be
}

// NewAnnouncer makes no connection before Run.
func NewAnnouncer(config *rest.Config, o AnnouncerOptions) (*Announcer, error) {
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.WarningHandler = rest.NoWarnings{}
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	if o.State == nil {
		o.State = func(error) {}
	}
	return &Announcer{o: o, client: client, lost: make(chan struct{}, 1)}, nil
}

// Run announces until ctx ends.
func (a *Announcer) Run(ctx context.Context) {
	wait := announceSpread / 2
	for sleep(ctx, wait/2+rand.N(wait)) {
		begun := time.Now()
		err := a.announce(ctx)
		if ctx.Err() != nil {
			return
		}
		a.o.State(err)
		if err != nil {
			wait = min(max(2*wait, announceLeast), announceMost)
			continue
		}
		select {
		case <-a.lost:
		case <-ctx.Done():
			return
		}
		// Who takes it away may do so again.
		if wait = min(max(2*wait, announceLeast), announceMost); time.Since(begun) > announceMost {
			wait = announceLeast
		}
	}
}

// sleep returns false when ctx ends.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Seen hears which agents' pods this node has, as the watch tells.
func (a *Announcer) Seen(pods []AgentPod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	i := slices.IndexFunc(pods, func(p AgentPod) bool { return a.uid != "" && p.UID == string(a.uid) })
	mine := i >= 0 && FormatPeer(pods[i].At.Port(), pods[i].Key) == a.o.Text
	// What the watch shows may be from before the annotation was written: then
	// there is nothing to write.
	if a.seen && !mine || i >= 0 && !mine {
		select {
		case a.lost <- struct{}{}:
		default:
		}
	}
	a.seen = mine
}

var errNotOwnPod = errors.New("it is not this agent's pod")

// announce makes the pod have the annotation.
func (a *Announcer) announce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	name := fmt.Sprintf("%s/%s", a.o.Namespace, a.o.Pod)
	var pod corev1.Pod
	err := a.client.Get().Namespace(a.o.Namespace).Resource("pods").Name(a.o.Pod).Do(ctx).Into(&pod)
	switch {
	case err != nil:
		return fmt.Errorf("pod %s cannot be read: %s", name, oneLine(err))
	case pod.Spec.NodeName != a.o.Node:
		return fmt.Errorf("pod %s is on node %q and this agent on %q: %w; set POD_NAME from metadata.name and NODE_NAME from spec.nodeName", name, pod.Spec.NodeName, a.o.Node, errNotOwnPod)
	}
	a.mu.Lock()
	a.uid = pod.UID
	a.mu.Unlock()
	if pod.Annotations[PeerAnnotation] == a.o.Text || pod.DeletionTimestamp != nil {
		return nil
	}
	// The UID lets the API server refuse it for a pod that has the name by now.
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "annotations": map[string]string{PeerAnnotation: a.o.Text},
	}})
	if err != nil {
		return err
	}
	err = a.client.Patch(types.MergePatchType).Namespace(a.o.Namespace).Resource("pods").Name(a.o.Pod).Body(patch).Do(ctx).Error()
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("no right to write the annotation %s on pod %s: apply the Role fingerpost-peer of the manifests: %s", PeerAnnotation, name, oneLine(err))
	}
	if err != nil {
		return fmt.Errorf("annotation %s on pod %s: %s", PeerAnnotation, name, oneLine(err))
	}
	return nil
}
