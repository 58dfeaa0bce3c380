package unknown

import (
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
)

// reflection tells whether a method is that of server reflection, of either
// version.
func reflection(service, method string) bool {
	return method == "ServerReflectionInfo" &&
		(service == "grpc.reflection.v1.ServerReflection" || service == "grpc.reflection.v1alpha.ServerReflection")
}

// reflect answers server reflection for what a namespace can call. The
// messages of v1 and v1alpha are the same on the wire.
func (s *Server) reflect(namespace string, stream grpc.ServerStream) error {
	select {
	case s.reflecting <- struct{}{}:
		defer func() { <-s.reflecting }()
	default:
		return status.Errorf(codes.ResourceExhausted, "%d reflection streams are open; try again", cap(s.reflecting))
	}
	d := descriptors{know: s.know, namespace: namespace}
	for {
		var req reflectionv1.ServerReflectionRequest
		if err := stream.RecvMsg(&req); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		resp := &reflectionv1.ServerReflectionResponse{ValidHost: req.GetHost(), OriginalRequest: &req}
		d.answer(&req, resp)
		if err := stream.SendMsg(resp); err != nil {
			return err
		}
	}
}

func (d *descriptors) answer(req *reflectionv1.ServerReflectionRequest, resp *reflectionv1.ServerReflectionResponse) {
	switch r := req.GetMessageRequest().(type) {
	case *reflectionv1.ServerReflectionRequest_ListServices:
		list := &reflectionv1.ListServiceResponse{}
		for _, name := range d.know.Names(d.namespace) {
			list.Service = append(list.Service, &reflectionv1.ServiceResponse{Name: name})
		}
		resp.MessageResponse = &reflectionv1.ServerReflectionResponse_ListServicesResponse{ListServicesResponse: list}
	case *reflectionv1.ServerReflectionRequest_FileContainingSymbol:
		fill(resp, d.bySymbol(r.FileContainingSymbol), "symbol", r.FileContainingSymbol)
	case *reflectionv1.ServerReflectionRequest_FileByFilename:
		fill(resp, d.byFilename(r.FileByFilename), "file", r.FileByFilename)
	default:
		refuse(resp, codes.Unimplemented, "only services, symbols and files are answered")
	}
}

func fill(resp *reflectionv1.ServerReflectionResponse, files [][]byte, kind, name string) {
	if len(files) == 0 {
		refuse(resp, codes.NotFound, kind+" "+name+" is not known")
		return
	}
	resp.MessageResponse = &reflectionv1.ServerReflectionResponse_FileDescriptorResponse{
		FileDescriptorResponse: &reflectionv1.FileDescriptorResponse{FileDescriptorProto: files},
	}
}

func refuse(resp *reflectionv1.ServerReflectionResponse, code codes.Code, text string) {
	resp.MessageResponse = &reflectionv1.ServerReflectionResponse_ErrorResponse{
		ErrorResponse: &reflectionv1.ErrorResponse{ErrorCode: int32(code), ErrorMessage: text},
	}
}
