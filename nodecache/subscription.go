package nodecache

import (
	"context"
	"sync"
)

// Subscription hears of every change of the directory. Changes of one owner,
// or of one Service, that were not fetched yet are one: a slow subscriber costs
// a set of keys and blocks nobody. Its methods may be called by several
// goroutines, of which each gets a part.
type Subscription struct {
	dir    *Directory
	notify chan struct{} // capacity 1

	// mu guards what follows. It is taken under Directory.mu by writers, and
	// alone by the subscriber.
	mu     sync.Mutex
	owners pending[OwnerKey]
	fronts pending[Name]
	closed bool
}

// pending holds what was not fetched yet, in the order of its first change.
type pending[K comparable] struct {
	list []K
	set  map[K]struct{}
}

func (p *pending[K]) add(k K) {
	if last := len(p.list) - 1; last >= 0 && p.list[last] == k {
		return // mostly, where there are many
	}
	if _, known := p.set[k]; known {
		return
	}
	if p.set == nil {
		p.set = map[K]struct{}{}
	}
	p.set[k] = struct{}{}
	p.list = append(p.list, k)
}

func (p *pending[K]) take() []K {
	list := p.list
	p.list = nil
	if len(list) > maxReused {
		p.set = nil
	} else {
		clear(p.set)
	}
	return list
}

// maxReused is the number of keys up to which the set of a subscription is
// used again: clearing a map costs by what it once held, under the lock.
const maxReused = 256

// Subscribe returns a subscription for which every owner of the moment is
// already a change.
func (d *Directory) Subscribe() *Subscription { return d.subscribe(false) }

// SubscribeFronts returns a subscription that also hears of Services, by
// [Subscription.PollFronts]: every Service of the moment, and every one that a
// route names, is already a change.
func (d *Directory) SubscribeFronts() *Subscription { return d.subscribe(true) }

func (d *Directory) subscribe(fronts bool) *Subscription {
	s := &Subscription{dir: d, notify: make(chan struct{}, 1)}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.subs[s] = struct{}{}
	for _, key := range d.keysLocked() {
		s.add(key)
	}
	if fronts {
		d.frontSubs[s] = struct{}{}
		for name := range d.fronts.byName {
			s.addFront(name)
		}
		for name := range d.routes.of {
			s.addFront(name)
		}
		for name := range d.routes.to {
			s.addFront(name)
		}
	}
	return s
}

// Next waits for changes and returns the keys of the owners that changed since
// the last call, in the order of their first change. A view that is read after
// Next returned is at least as new as the change. It returns the error of ctx,
// or [ErrClosed]; changes that came meanwhile stay for the next call, which
// returns them also under a context that has ended. Next does not wait for
// Services: who hears of them waits for [Subscription.Changed].
func (s *Subscription) Next(ctx context.Context) ([]OwnerKey, error) {
	for {
		if keys, closed := s.take(); len(keys) > 0 {
			return keys, nil
		} else if closed {
			return nil, ErrClosed
		}
		select {
		case <-s.notify:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Poll is Next without the waiting: it returns nil if nothing changed.
func (s *Subscription) Poll() []OwnerKey {
	keys, _ := s.take()
	return keys
}

// PollFronts returns the names of the Services with which something changed
// since the last call, in the order of their first change: the Service itself,
// its slices, a pod behind it, what is known of that pod's owner, or a route
// that has it as a parent or a backend. It need not be there. What is read
// after PollFronts returned is at least as new as the change. It returns nil
// if nothing changed, and always for a subscription of [Directory.Subscribe].
func (s *Subscription) PollFronts() []Name {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fronts.take()
}

// Changed returns a channel that delivers a value after changes came. One
// value may stand for many changes, and one may come without any.
func (s *Subscription) Changed() <-chan struct{} { return s.notify }

// Close ends the subscription and every Next that waits.
func (s *Subscription) Close() {
	s.dir.mu.Lock()
	delete(s.dir.subs, s)
	delete(s.dir.frontSubs, s)
	s.dir.mu.Unlock()
	s.mu.Lock()
	s.closed, s.owners, s.fronts = true, pending[OwnerKey]{}, pending[Name]{}
	s.mu.Unlock()
	s.wake()
}

func (s *Subscription) take() ([]OwnerKey, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		s.wake() // for the next of several that wait
	}
	return s.owners.take(), s.closed
}

func (s *Subscription) add(key OwnerKey) {
	s.mu.Lock()
	if !s.closed {
		s.owners.add(key)
	}
	s.mu.Unlock()
	s.wake()
}

func (s *Subscription) addFront(name Name) {
	s.mu.Lock()
	if !s.closed {
		s.fronts.add(name)
	}
	s.mu.Unlock()
	s.wake()
}

func (s *Subscription) wake() {
	select {
	case s.notify <- struct{}{}:
	default:
	}
}

// changed needs mu. It tells of an owner.
func (d *Directory) changed(key OwnerKey) {
	d.tell(key)
	if rec := d.owners[key]; rec != nil {
		d.tellMates(rec.workload, key)
	}
}

// tell needs mu. It tells of an owner alone.
func (d *Directory) tell(key OwnerKey) {
	for s := range d.subs {
		s.add(key)
	}
}

// changedFront needs mu. It tells of a Service.
func (d *Directory) changedFront(name Name) {
	for s := range d.frontSubs {
		s.addFront(name)
	}
}

// changedPod needs mu. It tells of the pod's owner, and of the Services in
// front of the pod.
func (d *Directory) changedPod(p *Pod) {
	d.changed(p.Owner)
	d.changedBehind(p)
}

// changedKnowledge needs mu. It tells of an owner, and of the Services in front
// of any pod of it.
func (d *Directory) changedKnowledge(key OwnerKey) {
	d.changed(key)
	if rec := d.owners[key]; rec != nil && len(d.frontSubs) > 0 {
		for _, p := range rec.pods {
			d.changedBehind(p)
		}
	}
}

// changedBehind needs mu.
func (d *Directory) changedBehind(p *Pod) {
	if len(d.frontSubs) == 0 {
		return
	}
	for _, st := range d.fronts.behind[p.UID] {
		d.changedFront(st.Key())
	}
}
