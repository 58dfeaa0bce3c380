package kube

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// sink is the store of a reflector that keeps nothing: it makes objects small
// and queues them.
type sink struct {
	queue    *queue
	health   *health
	resume   *resumption
	replaced func(objects []object, version string)
	heard    func(version string) // of each event, after it; nil: nobody
}

func (c *Cluster) sink(h *health, resume *resumption) *sink {
	s := &sink{queue: c.queue, health: h, resume: resume, replaced: func(objects []object, version string) { c.replaced(objects, version, h) }}
	if h == c.pods {
		s.heard = c.heard
	}
	return s
}

var (
	_ cache.TransformingStore      = (*sink)(nil)
	_ cache.ReflectorBookmarkStore = (*sink)(nil)
	_ cache.ResourceVersionUpdater = (*sink)(nil)
)

// Transformer makes the reflector's own list small while it is streamed.
func (s *sink) Transformer() cache.TransformFunc {
	return func(o any) (any, error) {
		if small := shrink(o); small != nil {
			return small, nil
		}
		return o, nil
	}
}

// shrink returns nil for what is nothing that is watched.
func shrink(o any) object {
	switch o := o.(type) {
	case *slimPod:
		if o != nil {
			return o.record
		}
	case *corev1.Namespace:
		if o != nil {
			return &namespace{name: o.Name, id: string(o.UID), optedOut: optsOut(o.Annotations)}
		}
	case *corev1.Service:
		if o != nil {
			return &front{ConvertService(o)}
		}
	case *discoveryv1.EndpointSlice:
		if o != nil {
			return &slice{ConvertSlice(o)}
		}
	case *gatewayObject:
		if o != nil {
			return o
		}
	case object:
		return o
	}
	return nil
}

func (s *sink) Add(o any) error {
	small := shrink(o)
	if small == nil {
		return fmt.Errorf("unexpected %T", o)
	}
	s.queue.upsert(small)
	s.health.current(false)
	return nil
}

func (s *sink) Update(o any) error { return s.Add(o) }

func (s *sink) Delete(o any) error {
	s.health.current(false)
	if t, ok := o.(*cache.DeletedFinalStateUnknown); ok && t != nil {
		o = *t
	}
	if t, ok := o.(cache.DeletedFinalStateUnknown); ok {
		if small := shrink(t.Obj); small != nil {
			o = small
		} else {
			ns, n, err := cache.SplitMetaNamespaceKey(t.Key)
			if err != nil || n == "" {
				return fmt.Errorf("deletion of %q", t.Key)
			}
			s.queue.remove(name{ns, n}, "")
			return nil
		}
	}
	small := shrink(o)
	if small == nil {
		return fmt.Errorf("unexpected %T", o)
	}
	s.queue.remove(small.key(), small.uid())
	return nil
}

func (s *sink) Replace(list []any, version string) error {
	if s.resume.listed() {
		return nil // the watch decides whether the checkpoint is taken
	}
	objects := make([]object, 0, len(list))
	for i, o := range list {
		small := shrink(o)
		if small == nil {
			return fmt.Errorf("unexpected %T", o)
		}
		objects = append(objects, small)
		list[i] = nil
	}
	s.replaced(objects, version)
	s.health.current(true)
	return nil
}

func (s *sink) Resync() error { return nil }

// UpdateResourceVersion hears of each event's version after the event.
func (s *sink) UpdateResourceVersion(version string) {
	if s.heard != nil {
		s.heard(version)
	}
}

func (s *sink) Bookmark(string) error {
	s.health.current(false)
	return nil
}
