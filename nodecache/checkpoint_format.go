package nodecache

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
)

// The file of a checkpoint: what it is, its version, sections, an end mark with
// their number. Integers are little-endian, lengths uvarints.
//
//	"fingerpost checkpoint\n" version:uint32
//	( 1:uint8 name kind:uint8 line version:uint64 length:uint64 payload crc:uint32 )*
//	0:uint8 sections:uint32
//
// The sum, CRC-32C, covers its section from the first byte on. A section says
// itself how it is merged, so that a program which does not know its name can
// keep it: of kind unit the higher version wins, of kind keyed the newer entry
// of each key. The payload of a keyed section is a sequence of entries:
//
//	key stamp:int64 seen:int64 until:int64 value
const (
	fileMagic   = "fingerpost checkpoint\n"
	fileVersion = 1

	kindUnit  = 1
	kindKeyed = 2

	// maxFile bounds what is written and what is read: a file that is larger
	// is not ours.
	maxFile = 256 << 20
	// maxName bounds names, lines and keys.
	maxName = 4 << 10
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// section is one section as it stands in the file.
type section struct {
	name string
	kind byte
	// line names what the versions of a unit belong to: versions are compared
	// within one line only.
	line    string
	version uint64
	payload []byte
}

// entry is one entry of a keyed section.
type entry struct {
	key   string
	stamp int64 // Unix nanoseconds: of two entries the later one is newer
	seen  int64 // Unix seconds: when a writer last held the entry
	until int64 // Unix seconds: when the entry ends; 0 is never
	value []byte
}

// futureError says that a file is of a later version.
type futureError struct{ version uint32 }

func (e *futureError) Error() string {
	return fmt.Sprintf("is of version %d, and this program knows version %d", e.version, fileVersion)
}

// parseFile reads a whole file. What it returns refers to data.
func parseFile(data []byte) ([]section, error) {
	rest, ok := bytes.CutPrefix(data, []byte(fileMagic))
	if !ok || len(rest) < 4 {
		return nil, fmt.Errorf("is not a checkpoint")
	}
	if v := binary.LittleEndian.Uint32(rest); v != fileVersion {
		return nil, &futureError{v}
	}
	var sections []section
	for r := (reader{rest[4:]}); ; {
		begin := r.rest
		switch r.byte() {
		case 1:
		case 0:
			if n := r.uint32(); r.rest == nil || len(r.rest) > 0 || int(n) != len(sections) {
				return nil, fmt.Errorf("has a wrong end")
			}
			return sections, nil
		default:
			return nil, fmt.Errorf("is cut off or damaged behind section %d", len(sections))
		}
		s := section{name: string(r.bytes(maxName)), kind: r.byte(), line: string(r.bytes(maxName)), version: r.uint64()}
		s.payload = r.take(r.uint64())
		size := len(begin) - len(r.rest)
		if sum := r.uint32(); r.rest == nil || sum != crc32.Checksum(begin[:size], castagnoli) {
			return nil, fmt.Errorf("is damaged in section %d", len(sections)+1)
		}
		for _, o := range sections {
			if o.name == s.name {
				return nil, fmt.Errorf("has section %q twice", s.name)
			}
		}
		sections = append(sections, s)
	}
}

// parseEntries reads the payload of a keyed section. What it returns refers to
// data.
func parseEntries(data []byte) ([]entry, error) {
	var entries []entry
	for r := (reader{data}); len(r.rest) > 0; {
		e := entry{key: string(r.bytes(maxName)), stamp: int64(r.uint64()), seen: int64(r.uint64()), until: int64(r.uint64())}
		e.value = r.bytes(maxFile)
		if r.rest == nil {
			return nil, fmt.Errorf("is damaged in entry %d", len(entries)+1)
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// reader takes from the front. Its rest is nil after it was asked for more than
// there was, and what it returns is zero from then on.
type reader struct{ rest []byte }

func (r *reader) take(n uint64) []byte {
	if r.rest == nil || n > uint64(len(r.rest)) {
		r.rest = nil
		return nil
	}
	b := r.rest[:n:n]
	r.rest = r.rest[n:]
	return b
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0xff
}

func (r *reader) uint32() uint32 {
	if b := r.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (r *reader) bytes(most uint64) []byte {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 || n > most {
		r.rest = nil
		return nil
	}
	r.rest = r.rest[size:]
	return r.take(n)
}

// writer writes a file. The first error stays.
type writer struct {
	to       io.Writer
	sum      hash.Hash32
	sections uint32
	size     int64
	err      error
}

func newWriter(to io.Writer) *writer {
	w := &writer{to: to, sum: crc32.New(castagnoli)}
	w.write(binary.LittleEndian.AppendUint32([]byte(fileMagic), fileVersion))
	return w
}

func (w *writer) write(b []byte) {
	if w.err != nil {
		return
	}
	_, _ = w.sum.Write(b)
	var n int
	n, w.err = w.to.Write(b)
	w.size += int64(n)
}

// section writes a section whose payload has the pieces one after another.
func (w *writer) section(s section, pieces ...[]byte) {
	w.sections++
	w.sum.Reset()
	size := uint64(0)
	for _, p := range pieces {
		size += uint64(len(p))
	}
	head := appendBytes([]byte{1}, s.name)
	head = appendBytes(append(head, s.kind), s.line)
	head = binary.LittleEndian.AppendUint64(head, s.version)
	w.write(binary.LittleEndian.AppendUint64(head, size))
	for _, p := range pieces {
		w.write(p)
	}
	w.write(binary.LittleEndian.AppendUint32(nil, w.sum.Sum32()))
}

// end writes the end mark.
func (w *writer) end() error {
	w.write(binary.LittleEndian.AppendUint32([]byte{0}, w.sections))
	return w.err
}

// pieces are an entry in the form of the file, the value as it is.
func (e *entry) pieces() [2][]byte {
	head := appendBytes(nil, e.key)
	head = binary.LittleEndian.AppendUint64(head, uint64(e.stamp))
	head = binary.LittleEndian.AppendUint64(head, uint64(e.seen))
	head = binary.LittleEndian.AppendUint64(head, uint64(e.until))
	return [2][]byte{binary.AppendUvarint(head, uint64(len(e.value))), e.value}
}

func appendBytes[T string | []byte](to []byte, b T) []byte {
	return append(binary.AppendUvarint(to, uint64(len(b))), b...)
}
