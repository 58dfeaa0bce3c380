package collect

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"slices"
	"strings"
	"unique"

	"github.com/fingerpost/fingerpost/nodecache"
)

// serviceNames returns the valid names that are not infrastructure, sorted and
// each once, and how many were no names.
func serviceNames(listed []string) (names []string, junk int) {
	for _, name := range listed {
		switch {
		case !ValidName(name):
			junk++
		case !nodecache.Infrastructure(name):
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), junk
}

// fill completes the info of a port that listed the names.
func fill(p *nodecache.PortInfo, names []string, files *fileSet) {
	p.State = nodecache.PortEmpty
	if len(names) > 0 {
		p.State = nodecache.PortServes
	}
	for _, name := range names {
		methods, ok := files.methods[name]
		p.Services = append(p.Services, nodecache.Service{
			Name:        name,
			Methods:     slices.Sorted(maps.Keys(methods)),
			Undescribed: !ok,
		})
	}
	for _, raw := range files.files {
		p.Files = append(p.Files, unique.Make(string(raw)))
	}
	slices.SortFunc(p.Files, func(a, b unique.Handle[string]) int {
		return strings.Compare(a.Value(), b.Value())
	})
	p.Linkable = files.linkable()
	p.Hash = hash(p)
}

// hash is of everything that a port serves. Every part goes in with its
// length, so that no two contents run together.
func hash(p *nodecache.PortInfo) string {
	h := sha256.New()
	number := func(n int) {
		var b [8]byte
		binary.BigEndian.PutUint64(b[:], uint64(n))
		h.Write(b[:])
	}
	text := func(s string) {
		number(len(s))
		h.Write([]byte(s))
	}
	number(len(p.Services))
	for _, s := range p.Services {
		text(s.Name)
		number(len(s.Methods))
		for _, m := range s.Methods {
			text(m)
		}
		if s.Undescribed {
			number(1)
		} else {
			number(0)
		}
	}
	number(len(p.Files))
	for _, f := range p.Files {
		text(f.Value())
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}
