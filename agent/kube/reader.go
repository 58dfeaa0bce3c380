package kube

import (
	"encoding/binary"
	"net/netip"
)

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

// reader reads varints, and texts with their length before them, off a string,
// in which the texts lie. Where something is not there it has failed, and all
// that is read is empty from then on.
type reader struct {
	rest   string
	failed bool
}

func (r *reader) fail() {
	r.rest, r.failed = "", true
}

func (r *reader) uvarint() uint64 {
	var head [binary.MaxVarintLen64]byte
	v, n := binary.Uvarint(head[:copy(head[:], r.rest)])
	if n <= 0 {
		r.fail()
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

func (r *reader) varint() int64 {
	v := r.uvarint()
	return int64(v>>1) ^ -int64(v&1) // as binary.AppendVarint writes it
}

// count reads a number of bytes, or of things that each take one at least.
func (r *reader) count() int {
	n := r.uvarint()
	if n > uint64(len(r.rest)) {
		r.fail()
		return 0
	}
	return int(n)
}

func (r *reader) bytes(n int) string {
	if n > len(r.rest) {
		r.fail()
		return ""
	}
	s := r.rest[:n]
	r.rest = r.rest[n:]
	return s
}

func (r *reader) text() string { return r.bytes(r.count()) }

func (r *reader) byte() byte {
	b := r.bytes(1)
	if b == "" {
		return 0
	}
	return b[0]
}

func (r *reader) bool() bool {
	b := r.byte()
	if b > 1 {
		r.fail()
	}
	return b == 1
}

// addr reads an address, which may be none, from the text of its bytes.
func (r *reader) addr() netip.Addr {
	raw := r.text()
	if raw == "" {
		return netip.Addr{}
	}
	addr, ok := netip.AddrFromSlice([]byte(raw))
	if !ok {
		r.fail()
	}
	return addr
}
