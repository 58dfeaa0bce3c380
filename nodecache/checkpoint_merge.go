package nodecache

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"
	"unique"
)

// merge is what is to be written.
type merge struct {
	sections []section
	pieces   [][][]byte // of each section
	size     int        // of the payloads
	dropped  int        // owners for which there was no room
}

func (m *merge) add(s section, pieces ...[]byte) {
	m.sections = append(m.sections, s)
	m.pieces = append(m.pieces, pieces)
	for _, p := range pieces {
		m.size += len(p)
	}
}

// write writes the file.
func (m *merge) write(to io.Writer) error {
	w := newWriter(to)
	for i, s := range m.sections {
		w.section(s, m.pieces[i]...)
	}
	return w.end()
}

// mergeAll merges everything. An error is that of the sections.
func mergeAll(old []section, s Saved) (*merge, error) {
	var m merge
	now := time.Now()
	if err := m.infos(old, s.Infos, now); err != nil {
		return nil, err
	}
	if err := m.past(old, s.Past, now); err != nil {
		return nil, err
	}
	if err := m.learned(old, s.Learned, now); err != nil {
		return nil, err
	}
	m.pods(old, s.Pods)
	m.rest(old)
	return &m, nil
}

// infos merges the sections info and files.
func (m *merge) infos(old []section, infos []SavedInfo, now time.Time) error {
	held, err := parseEntries(find(old, sectionInfo).payload)
	if err != nil {
		return fmt.Errorf("section %s %w", sectionInfo, err)
	}
	blobs, err := parseEntries(find(old, sectionFiles).payload)
	if err != nil {
		return fmt.Errorf("section %s %w", sectionFiles, err)
	}
	before := make(map[string]entry, len(held))
	for _, e := range held {
		before[e.key] = e
	}
	files := make(map[string][]byte, len(blobs)) // by hash
	for _, b := range blobs {
		files[b.key] = b.value
	}
	needed := map[string]struct{}{}
	var info [][]byte
	size := m.size
	put := func(e entry, sums [][][]byte) {
		more := len(e.value) + len(e.key) + 64
		for _, sum := range slices.Concat(sums...) {
			if _, there := needed[string(sum)]; !there {
				more += len(files[string(sum)]) + 64
			}
		}
		if size+more > maxFile/2 { // the other half is for other sections
			m.dropped++
			return
		}
		size += more
		for _, sum := range slices.Concat(sums...) {
			needed[string(sum)] = struct{}{}
		}
		p := e.pieces()
		info = append(info, p[0], p[1])
	}

	hashes := map[unique.Handle[string]][]byte{}
	for _, s := range infos {
		e := entry{key: s.Key.String(), seen: now.Unix()}
		if s.Info != nil && !s.Info.Collected.IsZero() {
			e.stamp = s.Info.Collected.UnixNano()
		}
		if !s.Until.IsZero() {
			e.until = s.Until.Unix()
		}
		if was, ok := before[e.key]; ok {
			delete(before, e.key)
			if was.stamp > e.stamp {
				// Another agent has asked since.
				if sums, ok := sumsOf(&was, files); ok {
					e.stamp, e.value = was.stamp, was.value
					put(e, sums)
					continue
				}
			}
		}
		v := savedOwner{
			Name: s.Name, Workload: s.Workload, Created: s.Created, Oldest: s.Oldest,
			Export: s.Export, Declared: s.Declared, Policy: s.Policy, Behind: s.Behind, Unasked: s.Info == nil,
		}
		if s.Info != nil {
			v.Info = s.Info.ownPorts()
		}
		for p := range v.Info.All() {
			var sums [][]byte
			for _, f := range p.Files {
				sum := hashes[f]
				if sum == nil {
					h := sha256.Sum256([]byte(f.Value()))
					sum = h[:]
					hashes[f] = sum
					files[string(sum)] = []byte(f.Value())
				}
				sums = append(sums, sum)
			}
			v.Files = append(v.Files, sums)
			p.Files = nil
		}
		if e.value, err = json.Marshal(&v); err != nil {
			return err
		}
		put(e, v.Files)
	}
	for _, e := range held {
		if _, foreign := before[e.key]; !foreign {
			continue
		}
		e.seen = min(e.seen, now.Unix()) // a clock may have gone ahead
		if e.until != 0 && e.until <= now.Unix() || now.Unix()-e.seen > int64(foreignKeep/time.Second) {
			continue
		}
		if sums, ok := sumsOf(&e, files); ok {
			put(e, sums)
		}
	}
	m.add(section{name: sectionInfo, kind: kindKeyed}, info...)
	var blobPieces [][]byte
	for sum := range needed {
		e := entry{key: sum, value: files[sum]}
		p := e.pieces()
		blobPieces = append(blobPieces, p[0], p[1])
	}
	m.add(section{name: sectionFiles, kind: kindKeyed}, blobPieces...)
	return nil
}

// ownPorts is a copy whose ports may be changed.
func (i *Info) ownPorts() Info {
	out := *i
	out.Ports, out.Variants = slices.Clone(i.Ports), slices.Clone(i.Variants)
	for n := range out.Variants {
		out.Variants[n].Ports = slices.Clone(out.Variants[n].Ports)
	}
	return out
}

// sumsOf returns the hashes that an entry names; false if one of them has no
// file.
func sumsOf(e *entry, files map[string][]byte) ([][][]byte, bool) {
	var v struct{ Files [][][]byte }
	if json.Unmarshal(e.value, &v) != nil {
		return nil, false
	}
	for _, sum := range slices.Concat(v.Files...) {
		if _, ok := files[string(sum)]; !ok {
			return nil, false
		}
	}
	return v.Files, true
}

// pods takes the unit given or that of the file.
func (m *merge) pods(old []section, u Unit) {
	was := find(old, sectionPods)
	if u.Line != "" && len(u.Data) <= maxFile/4 && (u.Force || was.line != u.Line || was.version <= u.Version) {
		m.add(section{name: sectionPods, kind: kindUnit, line: u.Line, version: u.Version}, u.Data)
	} else if was.name != "" {
		m.add(was, was.payload)
	}
}

// rest keeps the sections that this program does not know, as far as there is
// room.
func (m *merge) rest(old []section) {
	for _, s := range old {
		switch s.name {
		case sectionInfo, sectionFiles, sectionPods, sectionPast, sectionLearned:
		default:
			if m.size+len(s.payload) < maxFile-maxFile/16 {
				m.add(s, s.payload)
			}
		}
	}
}

func find(sections []section, name string) section {
	for _, s := range sections {
		if s.name == name {
			return s
		}
	}
	return section{}
}
