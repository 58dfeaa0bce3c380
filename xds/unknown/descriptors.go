package unknown

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/fingerpost/fingerpost/nodecache"
)

// descriptors finds files for one reflection stream. Files of one name differ
// between programs, so it looks in the files of one port at a time and never
// mixes them. It belongs to one goroutine.
type descriptors struct {
	know      Knowledge
	namespace string
	parsed    map[string]*fileSet // by PortInfo.Hash
	last      *fileSet            // where the last symbol was found
}

// fileSet is what one port's program has.
type fileSet struct {
	files   map[string]file   // by name
	symbols map[string]string // full name to file name
}

type file struct {
	bytes []byte
	deps  []string
}

// bySymbol returns the file that defines a symbol, and what it imports.
func (d *descriptors) bySymbol(symbol string) [][]byte {
	names := d.know.Names(d.namespace)
	// The symbol of a service or of its method is its provider's to explain.
	for _, name := range []string{symbol, parent(symbol)} {
		if _, ok := slices.BinarySearch(names, name); !ok {
			continue
		}
		if files := d.search([]string{name}, bySymbol(symbol)); files != nil {
			return files
		}
	}
	return d.search(names, bySymbol(symbol))
}

// byFilename returns a file and what it imports: from the program of which the
// client saw a file last, else from the first that has one of that name.
func (d *descriptors) byFilename(name string) [][]byte {
	if d.last != nil {
		if files := d.last.closure(name); files != nil {
			return files
		}
	}
	return d.search(d.know.Names(d.namespace), func(*fileSet) string { return name })
}

func bySymbol(symbol string) func(*fileSet) string {
	return func(fs *fileSet) string { return fs.symbols[symbol] }
}

func parent(symbol string) string {
	if i := strings.LastIndexByte(symbol, '.'); i >= 0 {
		return symbol[:i]
	}
	return ""
}

// search returns the files found by find in the first program behind the
// services that has it.
func (d *descriptors) search(services []string, find func(*fileSet) string) [][]byte {
	seen := map[*fileSet]bool{}
	for _, service := range services {
		for _, o := range d.know.Providers(d.namespace, service) {
			for p := range o.Programs() {
				fs := d.parse(p)
				if seen[fs] {
					continue
				}
				seen[fs] = true
				if files := fs.closure(find(fs)); files != nil {
					d.last = fs
					return files
				}
			}
		}
	}
	return nil
}

func (d *descriptors) parse(p *nodecache.PortInfo) *fileSet {
	if fs := d.parsed[p.Hash]; fs != nil && p.Hash != "" {
		return fs
	}
	fs := &fileSet{files: map[string]file{}, symbols: map[string]string{}}
	for _, handle := range p.Files {
		raw := []byte(handle.Value())
		var fd descriptorpb.FileDescriptorProto
		if proto.Unmarshal(raw, &fd) != nil {
			continue // a program may send anything; the rest of it still counts
		}
		fs.files[fd.GetName()] = file{bytes: raw, deps: fd.GetDependency()}
		fs.index(&fd)
	}
	if d.parsed == nil {
		d.parsed = map[string]*fileSet{}
	}
	d.parsed[p.Hash] = fs
	return fs
}

// index notes what a file defines.
func (fs *fileSet) index(fd *descriptorpb.FileDescriptorProto) {
	prefix := ""
	if p := fd.GetPackage(); p != "" {
		prefix = p + "."
	}
	name := fd.GetName()
	add := func(parts ...string) { fs.symbols[prefix+strings.Join(parts, ".")] = name }
	for _, s := range fd.GetService() {
		add(s.GetName())
		for _, m := range s.GetMethod() {
			add(s.GetName(), m.GetName())
		}
	}
	for _, e := range fd.GetEnumType() {
		add(e.GetName())
	}
	for _, x := range fd.GetExtension() {
		add(x.GetName())
	}
	var message func(path string, m *descriptorpb.DescriptorProto)
	message = func(path string, m *descriptorpb.DescriptorProto) {
		path += m.GetName()
		add(path)
		for _, e := range m.GetEnumType() {
			add(path, e.GetName())
		}
		for _, x := range m.GetExtension() {
			add(path, x.GetName())
		}
		for _, n := range m.GetNestedType() {
			message(path+".", n)
		}
	}
	for _, m := range fd.GetMessageType() {
		message("", m)
	}
}

// closure returns the named file and all that it imports, each once, the named
// one first; nil if there is no such file. Imports that the program did not
// send are left out.
func (fs *fileSet) closure(name string) [][]byte {
	if _, ok := fs.files[name]; !ok {
		return nil
	}
	var out [][]byte
	visited := map[string]bool{name: true}
	for queue := []string{name}; len(queue) > 0; queue = queue[1:] {
		f := fs.files[queue[0]]
		out = append(out, f.bytes)
		for _, dep := range f.deps {
			if _, ok := fs.files[dep]; ok && !visited[dep] {
				visited[dep] = true
				queue = append(queue, dep)
			}
		}
	}
	return out
}
