package ads

import (
	"slices"
	"sync"
	"weak"

	"google.golang.org/grpc/mem"
)

// few is the number of pieces up to which a response is a list of them: gRPC
// keeps its own list of what it writes next up to that length, and makes a new
// one for each frame beyond it.
const few = 64

// joiner makes one piece of the resources of a long response. Clients that
// connect at once are sent the same ones, and share it. It remembers the latest
// pieces as long as some response holds them, so that it keeps no memory.
type joiner struct {
	// mu guards what is remembered. It is a leaf.
	mu     sync.Mutex
	recent [32]weak.Pointer[joined]
	next   int // where in recent the next one goes
}

type joined struct {
	entries []*entry
	delta   bool
	bytes   []byte
}

// join returns the pieces of a response that holds the entries, of size bytes in
// all, as they stand in a delta or a SotW response, with room for one more. It
// keeps the entries.
func (j *joiner) join(entries []*entry, size int, delta bool) mem.BufferSlice {
	if len(entries) <= few {
		pieces := make(mem.BufferSlice, 0, len(entries)+1)
		for _, e := range entries {
			pieces = append(pieces, e.piece(delta))
		}
		return pieces
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for i := range j.recent {
		if k := j.recent[i].Value(); k != nil && k.delta == delta && slices.Equal(k.entries, entries) {
			return k.pieces()
		}
	}
	k := &joined{entries: entries, delta: delta, bytes: make([]byte, 0, size)}
	for _, e := range entries {
		k.bytes = append(k.bytes, e.piece(delta).ReadOnlyData()...)
	}
	j.recent[j.next] = weak.Make(k)
	j.next = (j.next + 1) % len(j.recent)
	return k.pieces()
}

// piece is what a response of a kind holds of the entry.
func (e *entry) piece(delta bool) mem.Buffer {
	if delta {
		return e.delta
	}
	return e.sotw
}

// pieces is a list of the one piece, which keeps k.
func (k *joined) pieces() mem.BufferSlice {
	return append(make(mem.BufferSlice, 0, 2), mem.NewBuffer(&k.bytes, shared{}))
}

// shared is the pool of bytes that others hold as well.
type shared struct{}

func (shared) Get(int) *[]byte { panic("nothing is taken from it") }
func (shared) Put(*[]byte)     {}
