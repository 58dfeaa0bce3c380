package ads

import "math/bits"

// bitset is a set of dense ids that grows on demand. The zero bitset is empty.
type bitset []uint64

func (b bitset) has(id uint32) bool {
	w := int(id >> 6)
	return w < len(b) && b[w]&(1<<(id&63)) != 0
}

func (b *bitset) set(id uint32) {
	w := int(id >> 6)
	if w >= len(*b) {
		*b = append(*b, make(bitset, w+1-len(*b))...)
	}
	(*b)[w] |= 1 << (id & 63)
}

func (b bitset) clear(id uint32) {
	if w := int(id >> 6); w < len(b) {
		b[w] &^= 1 << (id & 63)
	}
}

func (b bitset) empty() bool {
	for _, w := range b {
		if w != 0 {
			return false
		}
	}
	return true
}

func (b bitset) count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}

func (b bitset) intersects(o bitset) bool {
	for i := range min(len(b), len(o)) {
		if b[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

// keep drops what is not in o.
func (b bitset) keep(o bitset) {
	for i := range b {
		if i < len(o) {
			b[i] &= o[i]
		} else {
			b[i] = 0
		}
	}
}

// drop takes everything of o out of b.
func (b bitset) drop(o bitset) {
	for i := range min(len(b), len(o)) {
		b[i] &^= o[i]
	}
}

// add puts everything of o into b.
func (b *bitset) add(o bitset) {
	if len(o) > len(*b) {
		*b = append(*b, make(bitset, len(o)-len(*b))...)
	}
	for i, w := range o {
		(*b)[i] |= w
	}
}

// each calls f for the ids of b that are not in without, in order, until f
// returns false. f may clear the id it is called for.
func (b bitset) each(without bitset, f func(id uint32) bool) {
	for i, w := range b {
		if i < len(without) {
			w &^= without[i]
		}
		for ; w != 0; w &= w - 1 {
			if !f(uint32(i<<6 + bits.TrailingZeros64(w))) {
				return
			}
		}
	}
}

func (b bitset) reset() { clear(b) }
