// Package transcode prepares the descriptors of a program for Envoy's gRPC-JSON
// transcoder. Envoy refuses a whole route table for one descriptor set that
// does not link or one HTTP rule that it cannot register, so everything is
// looked at here first. It is pure, and costs CPU by the size of the
// descriptors.
package transcode

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/fingerpost/fingerpost/nodecache"
)

const (
	// maxFiles bounds what is linked, in bytes.
	maxFiles = 4 << 20
	// maxSet bounds the result, in bytes: it stands in every route that
	// transcodes, and in every sidecar.
	maxSet = 128 << 10
)

// Set is what the transcoder needs of one program. It is immutable.
type Set struct {
	// Descriptors is a serialized FileDescriptorSet, imports before importers,
	// of what Services need and nothing else.
	Descriptors []byte
	// Services are the full names of those that have HTTP rules, sorted. There
	// may be none.
	Services []string
	// Dropped says of each method whose HTTP rule Envoy could not register why.
	Dropped []string
}

// httpTag is the tag of google.api.http in the wire form of method options.
var httpTag = string(protowire.AppendTag(nil, 72295728, protowire.BytesType))

// Annotated tells whether the port's files may hold HTTP rules. It is cheap.
func Annotated(p *nodecache.PortInfo) bool {
	for _, f := range p.Files {
		if strings.Contains(f.Value(), httpTag) {
			return true
		}
	}
	return false
}

// Link returns the set for the services of a port, or says why there is none.
func Link(p *nodecache.PortInfo) (*Set, error) {
	if !p.Linkable {
		return nil, errors.New("its descriptors are not complete: an import or a type is missing, or there twice")
	}
	all, size := map[string]*descriptorpb.FileDescriptorProto{}, 0
	for _, f := range p.Files {
		fd := &descriptorpb.FileDescriptorProto{}
		if err := proto.Unmarshal([]byte(f.Value()), fd); err != nil {
			return nil, fmt.Errorf("a file is not a descriptor: %w", err)
		}
		fd.SourceCodeInfo = nil
		all[fd.GetName()] = fd
		if size += len(f.Value()); size > maxFiles {
			return nil, fmt.Errorf("its descriptors have more than %d bytes", maxFiles)
		}
	}
	sorted, err := order(all, slices.Sorted(maps.Keys(all)))
	if err != nil {
		return nil, err
	}
	linked, err := protodesc.NewFiles(&descriptorpb.FileDescriptorSet{File: sorted})
	if err != nil {
		return nil, fmt.Errorf("its descriptors do not link: %w", err)
	}
	s := &Set{}
	roots := s.choose(p, linked, all)
	if len(roots) == 0 {
		return s, nil
	}
	// What was dropped changed the files, not what they import.
	if sorted, err = order(all, roots); err != nil {
		return nil, err
	}
	s.Descriptors, err = proto.MarshalOptions{Deterministic: true}.Marshal(&descriptorpb.FileDescriptorSet{File: sorted})
	if err != nil {
		return nil, err
	}
	if len(s.Descriptors) > maxSet {
		return nil, fmt.Errorf("the descriptors that transcoding needs have %d bytes, more than %d", len(s.Descriptors), maxSet)
	}
	return s, nil
}

// choose takes the services with HTTP rules, without the rules that Envoy could
// not register, and returns the names of their files.
func (s *Set) choose(p *nodecache.PortInfo, linked *protoregistry.Files, all map[string]*descriptorpb.FileDescriptorProto) []string {
	var roots []string
	taken := map[string]string{} // what a request can look like, by method
	for _, service := range p.Services {
		d, err := linked.FindDescriptorByName(protoreflect.FullName(service.Name))
		sd, ok := d.(protoreflect.ServiceDescriptor)
		if err != nil || !ok {
			continue // undescribed
		}
		fd := all[sd.ParentFile().Path()]
		kept := 0
		for i := range sd.Methods().Len() {
			md := sd.Methods().Get(i)
			options := fd.GetService()[sd.Index()].GetMethod()[i].GetOptions()
			rule, _ := proto.GetExtension(options, annotations.E_Http).(*annotations.HttpRule)
			if rule == nil {
				continue
			}
			if err := register(md, rule, taken); err != nil {
				proto.ClearExtension(options, annotations.E_Http)
				s.Dropped = append(s.Dropped, fmt.Sprintf("%s: %v", md.FullName(), err))
				continue
			}
			kept++
		}
		if kept > 0 {
			s.Services = append(s.Services, service.Name)
			roots = append(roots, fd.GetName())
		}
	}
	return roots
}

// order returns the named files and all that they import, imports first. A
// missing file that every protobuf library brings is added.
func order(all map[string]*descriptorpb.FileDescriptorProto, roots []string) ([]*descriptorpb.FileDescriptorProto, error) {
	var out []*descriptorpb.FileDescriptorProto
	done := map[string]bool{} // false: under way
	var visit func(name string) error
	visit = func(name string) error {
		if finished, seen := done[name]; seen {
			if !finished {
				return fmt.Errorf("%s imports itself", name)
			}
			return nil
		}
		done[name] = false
		fd := all[name]
		if fd == nil {
			known, err := protoregistry.GlobalFiles.FindFileByPath(name)
			if err != nil || !strings.HasPrefix(name, "google/") {
				return fmt.Errorf("the import %q is missing", name)
			}
			fd = protodesc.ToFileDescriptorProto(known)
		}
		for _, dep := range fd.GetDependency() {
			if err := visit(dep); err != nil {
				return err
			}
		}
		done[name] = true
		out = append(out, fd)
		return nil
	}
	for _, name := range roots {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return out, nil
}
