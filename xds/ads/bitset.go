package ads

import "math/bits"

// bitset is a set of dense ids that grows on demand. The zero bitset is empty.
// Most sets hold a few ids of very many, so each knows where its first and last
// may be: to look at one costs what is between them.
type bitset struct {
	words  []uint64
	lo, hi int // all words outside [lo, hi) are zero
}

func (b bitset) has(id uint32) bool {
	w := int(id >> 6)
	return w < len(b.words) && b.words[w]&(1<<(id&63)) != 0
}

func (b *bitset) set(id uint32) {
	w := int(id >> 6)
	b.span(w, w+1)
	b.words[w] |= 1 << (id & 63)
}

// span makes the words of [lo, hi) ones that may be other than zero.
func (b *bitset) span(lo, hi int) {
	if hi > len(b.words) {
		b.words = append(b.words, make([]uint64, hi-len(b.words))...)
	}
	if b.lo == b.hi {
		b.lo, b.hi = lo, hi
		return
	}
	b.lo, b.hi = min(b.lo, lo), max(b.hi, hi)
}

func (b bitset) clear(id uint32) {
	if w := int(id >> 6); w < len(b.words) {
		b.words[w] &^= 1 << (id & 63)
	}
}

func (b *bitset) empty() bool {
	for b.lo < b.hi && b.words[b.lo] == 0 {
		b.lo++
	}
	return b.lo == b.hi
}

func (b bitset) count() (n int) {
	for _, w := range b.words[b.lo:b.hi] {
		n += bits.OnesCount64(w)
	}
	return n
}

func (b bitset) intersects(o bitset) bool {
	for i := max(b.lo, o.lo); i < min(b.hi, o.hi); i++ {
		if b.words[i]&o.words[i] != 0 {
			return true
		}
	}
	return false
}

// keep drops what is not in o.
func (b bitset) keep(o bitset) {
	for i := b.lo; i < b.hi; i++ {
		if i < len(o.words) {
			b.words[i] &= o.words[i]
		} else {
			b.words[i] = 0
		}
	}
}

// drop takes everything of o out of b.
func (b bitset) drop(o bitset) {
	for i := max(b.lo, o.lo); i < min(b.hi, o.hi); i++ {
		b.words[i] &^= o.words[i]
	}
}

// add puts everything of o into b.
func (b *bitset) add(o bitset) {
	if o.lo == o.hi {
		return
	}
	b.span(o.lo, o.hi)
	for i := o.lo; i < o.hi; i++ {
		b.words[i] |= o.words[i]
	}
}

// each calls f for the ids of b that are not in without, in order, until f
// returns false. f may clear the id it is called for.
func (b bitset) each(without bitset, f func(id uint32) bool) {
	for i := b.lo; i < b.hi; i++ {
		w := b.words[i]
		if i < len(without.words) {
			w &^= without.words[i]
		}
		for ; w != 0; w &= w - 1 {
			if !f(uint32(i<<6 + bits.TrailingZeros64(w))) {
				return
			}
		}
	}
}

func (b *bitset) reset() {
	clear(b.words[b.lo:b.hi])
	b.lo, b.hi = 0, 0
}
