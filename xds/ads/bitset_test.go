package ads

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// Random operations on two sets do what they do on maps.
func TestBitsetIsASet(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	const ids = 400
	for range 200 {
		var sets [2]bitset
		models := [2]map[uint32]bool{{}, {}}
		for range 60 {
			i := rng.IntN(2)
			b, m, o, n := &sets[i], models[i], sets[1-i], models[1-i]
			id := uint32(rng.IntN(ids))
			switch rng.IntN(9) {
			case 0, 1, 2, 3:
				b.set(id)
				m[id] = true
			case 4:
				b.clear(id)
				delete(m, id)
			case 5:
				b.drop(o)
				for id := range n {
					delete(m, id)
				}
			case 6:
				b.keep(o)
				for id := range m {
					if !n[id] {
						delete(m, id)
					}
				}
			case 7:
				b.add(o)
				for id := range n {
					m[id] = true
				}
			case 8:
				if rng.IntN(4) == 0 {
					b.reset()
					clear(m)
				}
			}
			var got, want, but, wantBut []uint32
			b.each(bitset{}, func(id uint32) bool { got = append(got, id); return true })
			b.each(sets[1-i], func(id uint32) bool { but = append(but, id); return true })
			both := false
			for id := range uint32(ids) {
				if m[id] != b.has(id) {
					t.Fatalf("has %d: %v", id, b.has(id))
				}
				if m[id] {
					want = append(want, id)
					if both = both || n[id]; !n[id] {
						wantBut = append(wantBut, id)
					}
				}
			}
			if !slices.Equal(got, want) || !slices.Equal(but, wantBut) || b.count() != len(want) || b.intersects(sets[1-i]) != both || b.empty() != (len(want) == 0) {
				t.Fatalf("got %d, want %d; without the other %d, want %d", got, want, but, wantBut)
			}
		}
	}
}

// A set that had one id and has another is looked at there alone, or a change
// would cost each client the more the more names there are.
func TestBitsetOfOneIsOneWord(t *testing.T) {
	var b bitset
	for _, id := range []uint32{100_000, 7, 64_000, 64} {
		b.set(id)
		if b.hi-b.lo != 1 {
			t.Fatalf("%d is one id in %d words", id, b.hi-b.lo)
		}
		b.clear(id)
		if !b.empty() {
			t.Fatal("not empty")
		}
	}
}
