package collect

import (
	"crypto/sha256"
	"errors"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// descriptor is what names need of a FileDescriptorProto. It is read from the
// wire form field by field: nothing is linked, so an unknown syntax, a missing
// import, a cycle or an unresolved type is no reason to lose a name, and a
// hostile file costs no more memory than its bytes.
type descriptor struct {
	name     string
	imports  []string
	services []described
}

type described struct {
	name    string // full name
	methods []string
}

// Field numbers of google/protobuf/descriptor.proto.
const (
	fileName       = 1
	filePackage    = 2
	fileDependency = 3
	fileService    = 6
	serviceName    = 1
	serviceMethod  = 2
	methodName     = 1
)

var errMalformed = errors.New("malformed protobuf message")

// parseDescriptor reads the wire form of a FileDescriptorProto. Names that are
// no identifiers are left out. It returns errBudget as soon as the file alone
// crosses a budget, errMalformed for what is no protobuf message.
func parseDescriptor(raw []byte, b Budget) (descriptor, error) {
	var d descriptor
	var pkg string
	methods := 0
	err := eachField(raw, func(num protowire.Number, v []byte) error {
		switch num {
		case fileName:
			d.name = string(v)
		case filePackage:
			pkg = string(v)
		case fileDependency:
			d.imports = append(d.imports, string(v))
		case fileService:
			s, err := parseService(v, b)
			if err != nil {
				return err
			}
			methods += len(s.methods)
			if ValidName(s.name) {
				d.services = append(d.services, s)
			}
		}
		if len(d.imports) > b.Files || len(d.services) > b.Files || methods > b.Methods {
			return errBudget
		}
		return nil
	})
	if err != nil {
		return descriptor{}, err
	}
	if pkg != "" {
		for i := range d.services {
			d.services[i].name = pkg + "." + d.services[i].name
		}
	}
	d.services = slices.DeleteFunc(d.services, func(s described) bool { return !ValidName(s.name) })
	return d, nil
}

func parseService(raw []byte, b Budget) (described, error) {
	var s described
	err := eachField(raw, func(num protowire.Number, v []byte) error {
		switch num {
		case serviceName:
			s.name = string(v)
		case serviceMethod:
			var name string
			err := eachField(v, func(num protowire.Number, v []byte) error {
				if num == methodName {
					name = string(v)
				}
				return nil
			})
			if err != nil {
				return err
			}
			if ValidName(name) && !strings.Contains(name, ".") {
				s.methods = append(s.methods, name)
			}
			if len(s.methods) > b.Methods {
				return errBudget
			}
		}
		return nil
	})
	return s, err
}

// eachField calls f with every length-delimited field of a message and skips
// the others.
func eachField(raw []byte, f func(protowire.Number, []byte) error) error {
	for len(raw) > 0 {
		num, typ, n := protowire.ConsumeTag(raw)
		if n < 0 {
			return errMalformed
		}
		raw = raw[n:]
		if typ != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(num, typ, raw); n < 0 {
				return errMalformed
			}
			raw = raw[n:]
			continue
		}
		v, n := protowire.ConsumeBytes(raw)
		if n < 0 {
			return errMalformed
		}
		raw = raw[n:]
		if err := f(num, v); err != nil {
			return err
		}
	}
	return nil
}

// maxName bounds a service name; it has to fit into the :path of a call.
const maxName = 512

// maxFileName bounds the name of an import that is asked for.
const maxFileName = 4096

// ValidName tells whether s is a full name: identifiers joined by dots.
func ValidName(s string) bool {
	if s == "" || len(s) > maxName {
		return false
	}
	start := true
	for i := range len(s) {
		c := s[i]
		switch {
		case c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z':
			start = false
		case c >= '0' && c <= '9' && !start:
		case c == '.' && !start:
			start = true
		default:
			return false
		}
	}
	return !start
}

// fileSet holds, within the budget, the distinct files of one attempt. Two files of one name and
// other content are two: each may describe a service that the other lacks.
type fileSet struct {
	budget  Budget
	files   map[fileID][]byte
	names   map[string]bool
	imports map[string]bool
	methods map[string]map[string]bool // by described service
	count   int                        // methods
	junk    int                        // files that could not be read
}

type fileID struct {
	name string
	sum  [sha256.Size]byte
}

func newFileSet(b Budget) *fileSet {
	return &fileSet{
		budget:  b,
		files:   map[fileID][]byte{},
		names:   map[string]bool{},
		imports: map[string]bool{},
		methods: map[string]map[string]bool{},
	}
}

// add takes in a file. The error is that of a crossed budget.
func (s *fileSet) add(raw []byte) error {
	d, err := parseDescriptor(raw, s.budget)
	if errors.Is(err, errBudget) {
		return exhausted("one file")
	} else if err != nil {
		s.junk++
		return nil
	}
	id := fileID{d.name, sha256.Sum256(raw)}
	if _, ok := s.files[id]; ok {
		return nil
	}
	s.files[id] = raw
	s.names[d.name] = true
	for _, name := range d.imports {
		s.imports[name] = true
	}
	for _, svc := range d.services {
		set := s.methods[svc.name]
		if set == nil {
			set = map[string]bool{}
			s.methods[svc.name] = set
		}
		for _, m := range svc.methods {
			if !set[m] {
				set[m] = true
				s.count++
			}
		}
	}
	switch {
	case len(s.files) > s.budget.Files, len(s.imports) > 4*s.budget.Files:
		return exhausted("files")
	case s.count > s.budget.Methods:
		return exhausted("methods")
	case len(s.methods) > s.budget.Files:
		return exhausted("services")
	}
	return nil
}

// missing returns the imports that are not there, sorted.
func (s *fileSet) missing(asked map[string]bool) []string {
	var names []string
	for name := range s.imports {
		// The reflection service's own files are known to come broken or
		// twice, and nobody needs them.
		if !s.names[name] && !asked[name] && len(name) <= maxFileName && !strings.HasPrefix(name, "grpc/reflection/") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
