package nodecache

import (
	"context"
	"sync"
)

// Subscription hears of every change of the directory. Changes of one owner
// that were not fetched yet are one: a slow subscriber costs a set of keys and
// blocks nobody. Its methods may be called by several goroutines, of which
// each gets a part.
type Subscription struct {
	dir    *Directory
	notify chan struct{} // capacity 1

	// mu guards what follows. It is taken under Directory.mu by writers, and
	// alone by the subscriber.
	mu      sync.Mutex
	pending []OwnerKey // in the order of their first change
	set     map[OwnerKey]struct{}
	closed  bool
}

// maxReused is the number of keys up to which the set of a subscription is
// used again: clearing a map costs by what it once held, under the lock.
const maxReused = 256

// Subscribe returns a subscription for which every owner of the moment is
// already a change.
func (d *Directory) Subscribe() *Subscription {
	s := &Subscription{dir: d, notify: make(chan struct{}, 1), set: map[OwnerKey]struct{}{}}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.subs[s] = struct{}{}
	for _, key := range d.keysLocked() {
		s.add(key)
	}
	return s
}

// Next waits for changes and returns the keys of the owners that changed since
// the last call, in the order of their first change. A view that is read after
// Next returned is at least as new as the change. It returns the error of ctx,
// or [ErrClosed]; changes that came meanwhile stay for the next call, which
// returns them also under a context that has ended.
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

// Changed returns a channel that delivers a value after changes came. One
// value may stand for many changes, and one may come without any.
func (s *Subscription) Changed() <-chan struct{} { return s.notify }

// Close ends the subscription and every Next that waits.
func (s *Subscription) Close() {
	s.dir.mu.Lock()
	delete(s.dir.subs, s)
	s.dir.mu.Unlock()
	s.mu.Lock()
	s.closed, s.pending, s.set = true, nil, map[OwnerKey]struct{}{}
	s.mu.Unlock()
	s.wake()
}

func (s *Subscription) take() ([]OwnerKey, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := s.pending
	s.pending = nil
	if len(keys) > maxReused {
		s.set = map[OwnerKey]struct{}{}
	} else {
		clear(s.set)
	}
	if s.closed {
		s.wake() // for the next of several that wait
	}
	return keys, s.closed
}

func (s *Subscription) add(key OwnerKey) {
	s.mu.Lock()
	last := len(s.pending) - 1
	known := last >= 0 && s.pending[last] == key // mostly, where there are many
	if !known {
		_, known = s.set[key]
	}
	added := !known && !s.closed
	if added {
		s.set[key] = struct{}{}
		s.pending = append(s.pending, key)
	}
	s.mu.Unlock()
	if added { // who was woken for a key that waits has yet to take it
		s.wake()
	}
}

func (s *Subscription) wake() {
	select {
	case s.notify <- struct{}{}:
	default:
	}
}
