package kube

import (
	"context"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// object is what a watch delivers, made small: a *Record, a *namespace, a *front,
// a *slice or a *gatewayObject.
type object interface {
	key() name
	uid() string
}

func (r *Record) uid() string { return r.UID }

// namespace is what is kept of a namespace. Its key has no namespace, which
// every pod's has.
type namespace struct {
	name, id string
	optedOut bool
}

func (n *namespace) key() name   { return name{name: n.name} }
func (n *namespace) uid() string { return "" }

// GetObjectMeta lets client-go key a namespace.
func (n *namespace) GetObjectMeta() metav1.Object { return &metav1.ObjectMeta{Name: n.name} }

// change is what is to become of one name.
type change struct {
	object object // nil: it is gone
	// gone are the UIDs of which the end is known; empty means any.
	gone []string
}

// queue holds, for each name, the one change that sums up what a watch said
// and was not applied yet. A slow worker costs one change a name, never a
// growing list, and the watch never waits for it.
type queue struct {
	wake chan struct{} // capacity 1

	// mu guards what follows. Store.mu may be taken under it.
	mu       sync.Mutex
	pending  map[name]change
	grown    bool   // pending held a whole list
	order    []name // of pending, by the first change not applied yet
	inFlight *name  // taken and not finished
	put      uint64 // names ever put into order
	finished uint64 // of these
	waiters  []waiter
}

// waiter waits until what was put before a moment is applied.
type waiter struct {
	barrier uint64
	done    func()
}

func newQueue() *queue {
	return &queue{wake: make(chan struct{}, 1), pending: map[name]change{}}
}

func (q *queue) upsert(o object) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.set(o.key(), change{object: o})
}

// remove needs no uid where only the name is known to be gone.
func (q *queue) remove(key name, uid string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	c := change{}
	if uid != "" {
		c.gone = []string{uid}
	}
	switch p, waits := q.pending[key]; {
	case !waits:
	case p.object != nil && uid != "" && p.object.uid() != uid:
		return // the late end of a predecessor
	case p.object != nil:
		c.gone = nil // the predecessor went unseen
	case len(p.gone) == 0:
		return
	case uid != "":
		c.gone = append(slices.Clone(p.gone), uid)
	}
	q.set(key, c)
}

// replace puts the objects of a complete list, and the end of every other name
// that is held, was taken or waits and is one that the list would have.
func (q *queue) replace(objects []object, held func() []name, listed func(name) bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	there := make(map[name]struct{}, len(objects))
	for _, o := range objects {
		there[o.key()] = struct{}{}
	}
	q.grown = true
	end := func(key name) {
		if _, ok := there[key]; !ok && listed(key) {
			q.set(key, change{})
		}
	}
	// What is new comes first, so that an owner all of whose pods were
	// exchanged is at no moment without any.
	for _, o := range objects {
		q.set(o.key(), change{object: o})
	}
	for _, key := range held() {
		end(key)
	}
	if q.inFlight != nil {
		end(*q.inFlight)
	}
	for _, key := range slices.Clone(q.order) {
		end(key)
	}
}

// set needs mu.
func (q *queue) set(key name, c change) {
	if _, waits := q.pending[key]; !waits {
		q.order = append(q.order, key)
		q.put++
	}
	q.pending[key] = c
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// work applies changes one after another until ctx ends: readers of the store and
// of the directory wait for one of them at most.
func (q *queue) work(ctx context.Context, apply func(name, change)) {
	for {
		key, ch, ok := q.take(ctx)
		if !ok {
			return
		}
		apply(key, ch)
		q.finish()
	}
}

// take waits for a change. It must be followed by finish. It returns false
// when ctx ends.
func (q *queue) take(ctx context.Context) (name, change, bool) {
	for ctx.Err() == nil {
		q.mu.Lock()
		if len(q.order) > 0 {
			key := q.order[0]
			q.order = q.order[1:]
			c := q.pending[key]
			delete(q.pending, key)
			q.inFlight = &key
			q.mu.Unlock()
			return key, c, true
		}
		q.order = nil
		if q.grown { // a map keeps the room that it once needed
			q.pending, q.grown = map[name]change{}, false
		}
		q.mu.Unlock()
		select {
		case <-q.wake:
		case <-ctx.Done():
		}
	}
	return name{}, change{}, false
}

// finish ends what take began.
func (q *queue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.inFlight = nil
	q.finished++
	q.waiters = slices.DeleteFunc(q.waiters, func(w waiter) bool {
		if w.barrier > q.finished {
			return false
		}
		w.done()
		return true
	})
}

// whenApplied calls done, which must not block, once everything put so far is
// applied. It is called with mu held.
func (q *queue) whenApplied(done func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.finished >= q.put {
		done()
		return
	}
	q.waiters = append(q.waiters, waiter{q.put, done})
}

// idle tells whether everything put so far is applied.
func (q *queue) idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.finished >= q.put
}

func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.order)
}
