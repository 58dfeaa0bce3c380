package collect

import (
	"fmt"
	"strings"
	"testing"

	testpb "google.golang.org/grpc/interop/grpc_testing"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	_ "google.golang.org/protobuf/types/known/timestamppb"
)

// What linkable says of files is what the linker of the protobuf library does
// with them.
func TestFilesThatLinkAreTold(t *testing.T) {
	real := func(fds ...protoreflect.FileDescriptor) (files []*descriptorpb.FileDescriptorProto) {
		for _, fd := range fds {
			files = append(files, protodesc.ToFileDescriptorProto(fd))
		}
		return files
	}
	message := func(name string, types ...string) *descriptorpb.DescriptorProto {
		m := &descriptorpb.DescriptorProto{Name: &name}
		for i, typ := range types {
			m.Field = append(m.Field, &descriptorpb.FieldDescriptorProto{
				Name: proto.String(fmt.Sprint("f", i)), Number: proto.Int32(int32(i + 1)), TypeName: &typ,
				Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(), Type: descriptorpb.FieldDescriptorProto_TYPE_MESSAGE.Enum(),
			})
		}
		return m
	}
	// a.proto has a service, a message M with M.Inner, and what an edit adds.
	a := func(edit func(*descriptorpb.FileDescriptorProto)) []*descriptorpb.FileDescriptorProto {
		m := message("M", ".a.M.Inner")
		m.NestedType = append(m.NestedType, message("Inner"))
		f := &descriptorpb.FileDescriptorProto{
			Name: proto.String("a.proto"), Package: proto.String("a"), Syntax: proto.String("proto3"),
			MessageType: []*descriptorpb.DescriptorProto{m},
			Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("S"), Method: []*descriptorpb.MethodDescriptorProto{
				{Name: proto.String("Do"), InputType: proto.String(".a.M"), OutputType: proto.String(".a.M")},
			}}},
		}
		edit(f)
		return []*descriptorpb.FileDescriptorProto{f}
	}
	b := func(imports ...string) *descriptorpb.FileDescriptorProto {
		return &descriptorpb.FileDescriptorProto{
			Name: proto.String("b.proto"), Package: proto.String("b"), Dependency: imports,
			MessageType: []*descriptorpb.DescriptorProto{message("B")},
		}
	}
	for _, tc := range []struct {
		name  string
		files []*descriptorpb.FileDescriptorProto
		want  bool
	}{
		{"real", real(reflectionpb.File_grpc_reflection_v1_reflection_proto), true},
		{"real, root first", real(testpb.File_grpc_testing_test_proto, testpb.File_grpc_testing_messages_proto, testpb.File_grpc_testing_empty_proto), true},
		{"real, one missing", real(testpb.File_grpc_testing_test_proto, testpb.File_grpc_testing_messages_proto), false},
		{"one file", a(func(*descriptorpb.FileDescriptorProto) {}), true},
		{"imported type", append(a(func(f *descriptorpb.FileDescriptorProto) {
			f.Dependency = []string{"b.proto"}
			f.MessageType = append(f.MessageType, message("N", ".b.B"))
		}), b()), true},
		{"import missing", a(func(f *descriptorpb.FileDescriptorProto) { f.Dependency = []string{"gone.proto"} }), false},
		{"well-known import missing", a(func(f *descriptorpb.FileDescriptorProto) {
			f.Dependency = []string{"google/protobuf/timestamp.proto"}
			f.MessageType = append(f.MessageType, message("N", ".google.protobuf.Timestamp"))
		}), true},
		{"junk syntax", a(func(f *descriptorpb.FileDescriptorProto) { f.Syntax = proto.String("<unknown:0>") }), false},
		{"cycle", append(a(func(f *descriptorpb.FileDescriptorProto) { f.Dependency = []string{"b.proto"} }), b("a.proto")), false},
		{"imports itself", a(func(f *descriptorpb.FileDescriptorProto) { f.Dependency = []string{"a.proto"} }), false},
		{"unresolved type", a(func(f *descriptorpb.FileDescriptorProto) {
			f.MessageType = append(f.MessageType, message("N", ".a.Gone"))
		}), false},
		{"unresolved input", a(func(f *descriptorpb.FileDescriptorProto) { f.Service[0].Method[0].InputType = proto.String(".a.Gone") }), false},
		{"type twice", a(func(f *descriptorpb.FileDescriptorProto) { f.MessageType = append(f.MessageType, message("M")) }), false},
		{"two contents under one file name", append(a(func(*descriptorpb.FileDescriptorProto) {}), a(func(f *descriptorpb.FileDescriptorProto) { f.Package = proto.String("c") })...), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, set := newFileSet(Budget{}.orDefault()), &descriptorpb.FileDescriptorSet{File: tc.files}
			for _, f := range tc.files {
				raw, err := proto.Marshal(f)
				if err != nil {
					t.Fatal(err)
				}
				if err := s.add(raw); err != nil {
					t.Fatal(err)
				}
			}
			// What every library brings is added for the library's verdict.
			for _, f := range tc.files {
				for _, dep := range f.Dependency {
					if wellKnownFile(dep) {
						fd, err := protoregistry.GlobalFiles.FindFileByPath(dep)
						if err != nil {
							t.Fatal(err)
						}
						set.File = append(set.File, protodesc.ToFileDescriptorProto(fd))
					}
				}
			}
			if _, err := protodesc.NewFiles(set); (err == nil) != tc.want {
				t.Errorf("the library says %v", err)
			}
			if got := s.linkable(); got != tc.want {
				t.Errorf("linkable is %v", got)
			}
		})
	}
}

// Names that grow with their nesting, and files of nothing but types, end the
// look and not the memory.
func TestHostileTypesAreNotLinkable(t *testing.T) {
	nested := protowire.AppendString(protowire.AppendTag(nil, messageName, protowire.BytesType), strings.Repeat("n", 400))
	for range 2 * maxNesting {
		nested = append(protowire.AppendBytes(protowire.AppendTag(nil, messageNested, protowire.BytesType), nested), nested[:403]...)
	}
	deep := protowire.AppendBytes(protowire.AppendTag(nil, fileMessage, protowire.BytesType), nested)
	var many []byte
	for i := range 2 * maxTypes {
		name := protowire.AppendString(protowire.AppendTag(nil, messageName, protowire.BytesType), fmt.Sprint("m", i))
		many = protowire.AppendBytes(protowire.AppendTag(many, fileMessage, protowire.BytesType), name)
	}
	for _, raw := range [][]byte{deep, many} {
		s := newFileSet(Budget{}.orDefault())
		if err := s.add(raw); err != nil {
			t.Fatal(err)
		}
		if s.linkable() {
			t.Errorf("%d bytes are said to link", len(raw))
		}
	}
}
