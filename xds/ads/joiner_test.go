package ads

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"google.golang.org/grpc/mem"
)

// Responses of the same entries share their bytes while one of them is on its
// way, and nothing is kept of them after it.
func TestResponsesOfTheSameEntriesShareTheirBytes(t *testing.T) {
	var j joiner
	var all, others []*entry
	size := 0
	for i := range 3 * few {
		e := &entry{delta: mem.SliceBuffer(fmt.Sprintf("<resource-%03d>", i)), sotw: mem.SliceBuffer(fmt.Sprintf("<%03d>", i))}
		all, size = append(all, e), size+e.delta.Len()
	}
	others = append(slices.Clone(all[:len(all)-1]), &entry{delta: all[0].delta, sotw: all[0].sotw})
	join := func(entries []*entry, delta bool) mem.BufferSlice {
		return j.join(slices.Clone(entries), size, delta)
	}
	same := func(a, b mem.BufferSlice) bool { return &a[0].ReadOnlyData()[0] == &b[0].ReadOnlyData()[0] }
	first := join(all, true)
	if !same(first, join(all, true)) {
		t.Error("the bytes of one list are there twice")
	}
	for what, other := range map[string]mem.BufferSlice{
		"another list": join(others, true), "a shorter list": join(all[1:], true), "the other kind": join(all, false),
	} {
		if same(first, other) {
			t.Errorf("%s has the bytes of the first", what)
		}
	}
	runtime.GC()
	if !same(first, join(all, true)) {
		t.Error("bytes that a response holds are forgotten")
	}
	first.Free()
	runtime.KeepAlive(first)
	runtime.GC()
	for i := range j.recent {
		if j.recent[i].Value() != nil {
			t.Error("bytes that no response holds are kept")
		}
	}
}

// A short list is made of the bytes of its entries.
func TestShortResponseCopiesNothing(t *testing.T) {
	var j joiner
	e := &entry{delta: mem.SliceBuffer("resource")}
	pieces := j.join([]*entry{e}, 8, true)
	if len(pieces) != 1 || &pieces[0].ReadOnlyData()[0] != &e.delta.ReadOnlyData()[0] {
		t.Errorf("got %d pieces of other bytes", len(pieces))
	}
}
