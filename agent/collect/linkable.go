package collect

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// More field numbers of google/protobuf/descriptor.proto.
const (
	fileMessage      = 4
	fileEnum         = 5
	fileExtension    = 7
	fileSyntax       = 12
	messageName      = 1 // as of enums
	messageField     = 2
	messageNested    = 3
	messageEnum      = 4
	messageExtension = 6
	fieldExtendee    = 2
	fieldType        = 6
	methodInput      = 2
	methodOutput     = 3
)

// maxNesting bounds messages within messages, maxTypes the types of one port:
// what has more is not linked.
const (
	maxNesting = 32
	maxTypes   = 1 << 15
)

// linkable tells whether the files should link, one after another with imports
// before importers: each file there once, of a known syntax, no import missing
// nor in a cycle, no type undefined or defined twice. Imports that every
// protobuf library brings may be missing.
//
// It looks at names in the wire form only, so that it costs no more than the
// files' size whatever is in them; who links has the last word.
func (s *fileSet) linkable() bool {
	if s.junk > 0 || len(s.files) == 0 || len(s.files) != len(s.names) {
		return false
	}
	imports := map[string][]string{}
	defined, used := map[string]bool{}, map[string]bool{}
	for id, raw := range s.files {
		l := linker{defined: defined, used: used}
		if !l.file(raw) {
			return false
		}
		imports[id.name] = l.imports
	}
	for name := range used {
		if !defined[name] && !wellKnownType(name) {
			return false
		}
	}
	return acyclic(imports)
}

func wellKnownFile(name string) bool {
	if !strings.HasPrefix(name, "google/") {
		return false
	}
	_, err := protoregistry.GlobalFiles.FindFileByPath(name)
	return err == nil
}

func wellKnownType(name string) bool {
	if !strings.HasPrefix(name, "google.") {
		return false
	}
	_, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	return err == nil
}

// acyclic tells whether the imports are all there and lead nowhere back.
func acyclic(imports map[string][]string) bool {
	// Kahn's order: files whose imports are done, until none is left.
	waits, importers := map[string]int{}, map[string][]string{}
	var ready []string
	for name, deps := range imports {
		for _, dep := range deps {
			if _, ok := imports[dep]; ok {
				waits[name]++
				importers[dep] = append(importers[dep], name)
			} else if !wellKnownFile(dep) {
				return false
			}
		}
		if waits[name] == 0 {
			ready = append(ready, name)
		}
	}
	done := 0
	for ; len(ready) > 0; done++ {
		name := ready[len(ready)-1]
		ready = ready[:len(ready)-1]
		for _, by := range importers[name] {
			if waits[by]--; waits[by] == 0 {
				ready = append(ready, by)
			}
		}
	}
	return done == len(imports)
}

// linker gathers, from one file, what is defined and what is used.
type linker struct {
	imports       []string
	defined, used map[string]bool // full names without the leading dot
	twice         bool
	relative      bool // a type was used that is no full name
}

// file tells whether the file is sound by itself.
func (l *linker) file(raw []byte) bool {
	pkg, known := "", true
	err := eachField(raw, func(num protowire.Number, v []byte) error {
		switch num {
		case filePackage:
			pkg = string(v)
		case fileDependency:
			l.imports = append(l.imports, string(v))
		case fileSyntax:
			known = slices.Contains([]string{"", "proto2", "proto3", "editions"}, string(v))
		}
		return nil
	})
	if err != nil || !known {
		return false
	}
	err = eachField(raw, func(num protowire.Number, v []byte) error {
		switch num {
		case fileMessage:
			return l.message(v, pkg, 0)
		case fileEnum:
			return l.define(v, pkg)
		case fileExtension:
			return l.uses(v, fieldExtendee, fieldType)
		case fileService:
			if err := l.define(v, pkg); err != nil {
				return err
			}
			return eachField(v, func(num protowire.Number, v []byte) error {
				if num == serviceMethod {
					return l.uses(v, methodInput, methodOutput)
				}
				return nil
			})
		}
		return nil
	})
	return err == nil && !l.twice && !l.relative
}

// define notes the name of a message, an enum or a service: field 1 of each.
func (l *linker) define(raw []byte, scope string) error {
	return eachField(raw, func(num protowire.Number, v []byte) error {
		if num == messageName {
			name := join(scope, string(v))
			l.twice = l.twice || l.defined[name]
			l.defined[name] = true
			if len(name) > maxName || len(l.defined) > maxTypes {
				return errBudget
			}
		}
		return nil
	})
}

func (l *linker) message(raw []byte, scope string, depth int) error {
	if depth > maxNesting {
		return errMalformed
	}
	if err := l.define(raw, scope); err != nil {
		return err
	}
	name := ""
	if err := eachField(raw, func(num protowire.Number, v []byte) error {
		if num == messageName {
			name = join(scope, string(v))
		}
		return nil
	}); err != nil {
		return err
	}
	return eachField(raw, func(num protowire.Number, v []byte) error {
		switch num {
		case messageField, messageExtension:
			return l.uses(v, fieldExtendee, fieldType)
		case messageNested:
			return l.message(v, name, depth+1)
		case messageEnum:
			return l.define(v, name)
		}
		return nil
	})
}

// uses notes the types that stand in the given fields. Compilers write them as
// full names behind a dot.
func (l *linker) uses(raw []byte, fields ...protowire.Number) error {
	return eachField(raw, func(num protowire.Number, v []byte) error {
		if slices.Contains(fields, num) {
			name, full := strings.CutPrefix(string(v), ".")
			l.relative = l.relative || !full
			if len(name) > maxName || len(l.used) > maxTypes {
				return errBudget
			}
			l.used[name] = true
		}
		return nil
	})
}

func join(scope, name string) string {
	if scope == "" {
		return name
	}
	return scope + "." + name
}
