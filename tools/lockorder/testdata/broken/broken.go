// Package broken does with locks what must not be done.
package broken

import (
	"slices"
	"sync"
)

type A struct {
	// mu guards n.
	mu sync.Mutex
	n  int
	b  *B
}

type B struct {
	// mu guards n.
	mu sync.RWMutex
	n  int
	a  *A
}

type Bare struct {
	n  int
	mu sync.Mutex
}

// counter is in no table.
type Counter struct {
	// Mutex guards n.
	sync.Mutex
	n int
}

// all guards nothing.
var all sync.Mutex

// Right takes them in order.
func (a *A) Right() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.b.read()
}

func (b *B) read() int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.n
}

// Apart never has both.
func (b *B) Apart() {
	b.mu.Lock()
	b.mu.Unlock()
	b.a.count()
	go func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		go b.a.count()
	}()
}

// Breathe lets go for a moment.
func (b *B) Breathe() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.away()
}

func (b *B) away() {
	b.mu.Unlock()
	b.a.count()
	b.mu.Lock()
}

func (a *A) count() {
	a.mu.Lock()
	a.n++
	a.mu.Unlock()
}

// Wrong takes them the other way, at once.
func (b *B) Wrong() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.a.mu.Lock() // want A.mu under B.mu
	b.a.mu.Unlock()
}

// Deep does so by what it calls, on one path.
func (b *B) Deep(yes bool) {
	if yes {
		b.mu.RLock()
		defer b.mu.RUnlock()
	}
	b.middle() // want A.mu under B.mu
}

func (b *B) middle() { b.a.count() }

type counts interface{ count() }

// Dynamic does so by an interface, a function value and a library.
func (b *B) Dynamic(c counts, fs []func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c.count() // want A.mu under B.mu
	f := b.a.count
	f()                                         // want A.mu under B.mu
	slices.SortFunc(fs, func(_, _ func()) int { // want A.mu under B.mu
		b.a.count()
		return 0
	})
}

// Twice takes its own again.
func (b *B) Twice() {
	b.mu.RLock()
	defer b.mu.RUnlock()
	b.read() // want B.mu under B.mu
}

// Deferred takes the other before it lets go.
func (b *B) Deferred() {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.a.count() // want A.mu under B.mu
}

// Left keeps it for its caller.
func (b *B) Left() {
	b.hold()
	b.a.count() // want A.mu under B.mu
	b.mu.Unlock()
}

func (b *B) hold() { b.mu.Lock() }

// Embedded and global ones count as well.
func (c *Counter) Add(bare *Bare) {
	c.Lock()
	defer c.Unlock()
	all.Lock() // want broken.all under Counter.Mutex
	defer all.Unlock()
	bare.mu.Lock() // want Bare.mu under Counter.Mutex // want Bare.mu under broken.all
	c.n, bare.n = c.n+1, bare.n+1
	bare.mu.Unlock()
}

var _ counts = (*A)(nil)

// Use makes the interface known.
func Use(a *A, b *B) { b.Dynamic(a, nil) }
