package e2e_test

import (
	"context"
	"fmt"
	"net"
	"testing"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/reflection"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	corev1 "k8s.io/api/core/v1"
)

// library starts a server of lib.v1.<service>, whose methods have HTTP rules:
// Get takes /v1/<service>/<id>, Put a body, and Root one that Envoy could not
// register. The answer says in the named field who got what. Two libraries have
// one file and one message of the same name.
func (m *mesh) library(id, service, field string) *corev1.Pod {
	m.t.Helper()
	text := func(name string, number int32) *descriptorpb.FieldDescriptorProto {
		return &descriptorpb.FieldDescriptorProto{
			Name: proto.String(name), JsonName: proto.String(name), Number: proto.Int32(number),
			Type: descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum(), Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
		}
	}
	method := func(name string, rule *annotations.HttpRule) *descriptorpb.MethodDescriptorProto {
		o := &descriptorpb.MethodOptions{}
		proto.SetExtension(o, annotations.E_Http, rule)
		return &descriptorpb.MethodDescriptorProto{Name: proto.String(name), InputType: proto.String(".lib.v1.Item"), OutputType: proto.String(".lib.v1.Item"), Options: o}
	}
	files := &protoregistry.Files{}
	for _, fd := range []protoreflect.FileDescriptor{descriptorpb.File_google_protobuf_descriptor_proto, annotations.File_google_api_http_proto, annotations.File_google_api_annotations_proto} {
		if err := files.RegisterFile(fd); err != nil {
			m.t.Fatal(err)
		}
	}
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("lib.proto"), Package: proto.String("lib.v1"), Syntax: proto.String("proto3"),
		Dependency:  []string{"google/api/annotations.proto"},
		MessageType: []*descriptorpb.DescriptorProto{{Name: proto.String("Item"), Field: []*descriptorpb.FieldDescriptorProto{text("id", 1), text(field, 2)}}},
		Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String(service), Method: []*descriptorpb.MethodDescriptorProto{
			method("Get", &annotations.HttpRule{Pattern: &annotations.HttpRule_Get{Get: "/v1/" + service + "/{id}"}}),
			method("Put", &annotations.HttpRule{Pattern: &annotations.HttpRule_Put{Put: "/v1/" + service + "/{id}"}, Body: "*"}),
			method("Root", &annotations.HttpRule{Pattern: &annotations.HttpRule_Get{Get: "/"}}),
		}}},
	}, files)
	if err == nil {
		err = files.RegisterFile(file)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	item := file.Messages().ByName("Item")
	get := func(what string) grpc.MethodDesc {
		return grpc.MethodDesc{MethodName: what, Handler: func(_ any, _ context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			in := dynamicpb.NewMessage(item)
			if err := dec(in); err != nil {
				return nil, err
			}
			asked := in.Get(item.Fields().ByName("id")).String()
			if asked == "none" {
				return nil, status.Error(codes.NotFound, "no such item")
			}
			in.Set(item.Fields().ByName(protoreflect.Name(field)), protoreflect.ValueOfString(id+" "+what))
			return in, nil
		}}
	}
	lis, err := net.Listen("tcp", nextAddr()+":0")
	if err != nil {
		m.t.Fatal(err)
	}
	s := grpc.NewServer()
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: "lib.v1." + service, HandlerType: (*any)(nil), Metadata: "lib.proto",
		Methods: []grpc.MethodDesc{get("Get"), get("Put"), get("Root")},
	}, m)
	reflectionv1.RegisterServerReflectionServer(s, reflection.NewServerV1(reflection.ServerOptions{
		Services: s, DescriptorResolver: files, ExtensionResolver: protoregistry.GlobalTypes,
	}))
	go func() { _ = s.Serve(lis) }()
	m.t.Cleanup(s.Stop)
	at := lis.Addr().(*net.TCPAddr)
	return m.add(newPod(id, at.IP.String(), at.Port))
}

func TestJSONCallsAreTranscodedByCollectedDescriptors(t *testing.T) {
	m := newMesh(t)
	m.front("books", m.library("books-1-a", "Books", "title"))
	m.front("films", m.library("films-1-a", "Films", "label"))
	m.front("writer", m.library("writer-1-a", "Films", "label"))
	m.front("web", m.rest("web-1-a", echo("web")))
	m.put()
	e := m.sidecar(t, "delta", "prod/me")
	reachesMethod := func(authority, path string, want codes.Code) {
		t.Helper()
		if err := m.at(authority).Invoke(deadline(t), path, &annotations.HttpRule{}, &annotations.HttpRule{}); status.Code(err) != want {
			t.Errorf("%s at %s: %v, want %v", path, authority, err, want)
		}
	}
	listeners := e.dump()["dynamic_listeners egress"]

	m.route("HTTPRoute", "prod", "library", "web", `
  - matches: [{path: {value: /v1/Books}}]
    backendRefs: [{name: books, port: 80}]
  - matches: [{path: {value: /v1/Films}, headers: [{name: x-old, value: "yes"}]}]
    backendRefs: [{name: nobody, port: 80}]
  - matches: [{path: {value: /v1/Films}, method: PUT}]
    backendRefs: [{name: writer, port: 80}]
  - matches: [{path: {value: /v1/Films}}]
    backendRefs: [{name: films, port: 80}]
  - backendRefs: [{name: web, port: 80}]
`)
	m.put()
	for _, r := range []struct {
		r    request
		want string
	}{
		{request{path: "/v1/Books/7"}, `200 {"id":"7","title":"books-1-a Get"}`},
		{request{path: "/v1/Films/8"}, `200 {"id":"8","label":"films-1-a Get"}`},
		{request{path: "/v1/Films/8", verb: "PUT"}, `200 {"id":"8","label":"writer-1-a Put"}`},
		{request{path: "/v1/Books/none"}, `404 {"code":5,"message":"no such item"}`},
		{request{path: "/v1/Films/8", headers: map[string]string{"x-old": "yes"}}, "500 rule 1 of HTTPRoute prod/library has no backend that can be called"},
		{request{path: "/v1/web"}, "200 web GET /v1/web"},
		{request{path: "/v1/Books2"}, "200 web GET /v1/Books2"},
	} {
		r.r.host = "web.prod"
		m.answers(r.r, r.want)
	}
	if code, body, err := m.http(request{host: "web.prod", path: "/v1/Books/7?color=red"}); code != 400 {
		t.Errorf("an unknown parameter: %d %s, %v; want 400", code, body, err)
	}
	// The routes of transcoded calls take no others.
	reachesMethod("web.prod", "/lib.v1.Books/Get", codes.Unavailable) // to the REST server, by the last rule
	e.quiet(listeners)
	m.agent.connected("prod/me", "cds", "eds", "lds", "rds")

	// A restart changes nothing: the descriptors are linked before the first
	// answer.
	before := e.dump()
	m.agent.stop()
	m.agent = m.start(t, "--source", m.source()).ready()
	m.agent.connected("prod/me")
	m.answers(request{host: "web.prod", path: "/v1/Books/7"}, `200 {"id":"7","title":"books-1-a Get"}`)
	same(t, "after a restart", before, e.dump())
	for _, kind := range []string{"cds", "eds", "lds", "rds"} {
		if n := m.agent.metric(fmt.Sprintf("fingerpost_ads_resources_total{type=%q}", kind)); n != "0" {
			t.Errorf("%s: %s resources were sent to a client that has them", kind, n)
		}
	}
	e.quiet(listeners)
}
