package nodecache

import (
	"bytes"
	"io"
)

// Sizes returns the number of entries of every map of the directory that has
// any, for tests that nothing is left behind.
func (d *Directory) Sizes() map[string]int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	sizes := map[string]int{
		"owners": len(d.owners), "pods": len(d.pods), "claims": len(d.claims), "rivals": len(d.rivals),
		"infos": len(d.infos), "routes": len(d.routes.byUID), "routesOf": len(d.routes.of), "routesTo": len(d.routes.to),
		"subs": len(d.subs), "frontSubs": len(d.frontSubs), "workloads": len(d.workloads),
		"fronts": len(d.fronts.byName), "slices": len(d.fronts.slices), "behind": len(d.fronts.behind), "rememberers": len(d.fronts.rememberers),
	}
	for s, n := range d.states {
		sizes["state "+PodState(s).String()] = n
	}
	for name, n := range sizes {
		if n == 0 {
			delete(sizes, name)
		}
	}
	return sizes
}

// Section is a section of a checkpoint, for tests that write what this program
// does not know.
type Section struct {
	Name    string
	Kind    byte
	Version uint64
	Payload string
}

// WriteCheckpoint writes a file of these sections.
func WriteCheckpoint(to io.Writer, sections ...Section) error {
	w := newWriter(to)
	for _, s := range sections {
		w.section(section{name: s.Name, kind: s.Kind, version: s.Version}, []byte(s.Payload))
	}
	return w.end()
}

// ReadCheckpoint returns the sections of a file.
func ReadCheckpoint(data []byte) ([]Section, error) {
	sections, err := parseFile(data)
	var out []Section
	for _, s := range sections {
		out = append(out, Section{s.name, s.kind, s.version, string(s.payload)})
	}
	return out, err
}

// DecodeCheckpoint is Load of a file's bytes.
func DecodeCheckpoint(data []byte) (*Saved, error) {
	sections, err := parseFile(data)
	if err != nil {
		return nil, err
	}
	return decode(sections)
}

// MergeCheckpoint is Save into a file of these bytes.
func MergeCheckpoint(old []byte, s Saved) ([]byte, error) {
	sections, err := parseFile(old)
	if err != nil {
		return nil, err
	}
	m, err := mergeAll(sections, s)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = m.write(&b)
	return b.Bytes(), err
}

// MaxCheckpoint is the size from which on a file is not read.
const MaxCheckpoint = maxFile
