package kube

import (
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// lane carries the objects of one further resource, Services or slices, from
// its watch to the directory: a queue and a worker of its own.
type lane struct {
	resource string
	kind     runtime.Object
	client   rest.Interface
	queue    *queue
	health   *health
	held     func() []name
	apply    func(key name, ch change)
	// synced is closed by ready once the first list was applied, or is
	// refused: without the right to read Services, pods are still served.
	synced <-chan struct{}
	ready  func()
}

func newLane(resource string, kind runtime.Object, client rest.Interface, h *health, held func() []name, apply func(name, change)) *lane {
	synced := make(chan struct{})
	return &lane{
		resource: resource, kind: kind, client: client, queue: newQueue(), health: h, held: held, apply: apply,
		synced: synced, ready: sync.OnceFunc(func() { close(synced) }),
	}
}

// replaced takes over a complete list.
func (l *lane) replaced(objects []object) {
	l.queue.replace(objects, l.held, func(name) bool { return true })
	l.queue.whenApplied(l.ready)
}

// refused hears of a list that failed.
func (l *lane) refused(err error) {
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		l.ready()
	}
}

// sink makes the store of the lane's reflector.
func (l *lane) sink() cache.ReflectorStore {
	return &sink{queue: l.queue, health: l.health, replaced: func(objects []object, _ string) { l.replaced(objects) }}
}

func (c *Cluster) applyService(key name, ch change) {
	switch o := ch.object.(type) {
	case *front:
		c.store.UpsertService(o.Front)
	case nil:
		c.store.RemoveService(key.namespace, key.name, ch.gone...)
	default:
		panic(fmt.Sprintf("%T among Services", o)) // the lane's watch is typed
	}
}

func (c *Cluster) applySlice(key name, ch change) {
	switch o := ch.object.(type) {
	case *slice:
		c.store.UpsertSlice(o.Slice)
	case nil:
		c.store.RemoveSlice(key.namespace, key.name, ch.gone...)
	default:
		panic(fmt.Sprintf("%T among EndpointSlices", o))
	}
}
