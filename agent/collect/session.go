package collect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/nodecache"
)

// The methods of the two versions. Their messages are the same on the wire, so
// those of v1 do for both.
const (
	methodV1      = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
	methodV1Alpha = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
)

type (
	request  = reflectionpb.ServerReflectionRequest
	response = reflectionpb.ServerReflectionResponse
)

// session asks one server, one question at a time, on one stream at a time.
// Answers are taken in order and never matched with original_request, which
// not every server sets. One goroutine uses it.
type session struct {
	ctx    context.Context
	cc     *grpc.ClientConn
	budget Budget
	codec  *codec
	files  *fileSet

	method  string
	stream  grpc.BidiStreamingClient[request, response] // nil: none is open
	cancel  context.CancelFunc                          // of the stream
	streams int                                         // opened with this method
	stray   int                                         // answers of another kind than asked for
}

// maxStray bounds the answers that nobody asked for.
const maxStray = 64

// errMiss ends a question without an answer: the next one may be asked.
var errMiss = errors.New("no answer to this question")

// errNoMore indicates that the server should not be asked further; what was
// learned stands.
var errNoMore = errors.New("no more questions")

// list returns the names that the server lists, by v1 or, where it does not
// know that, v1alpha on the same connection.
func (s *session) list() ([]string, error) {
	names, first := s.listBy(methodV1)
	if first == nil {
		return names, nil
	}
	if err := s.final(first); err != nil {
		return nil, err
	}
	names, second := s.listBy(methodV1Alpha)
	if second == nil {
		return names, nil
	}
	if err := s.final(second); err != nil {
		return nil, err
	}
	a, b := status.Convert(first), status.Convert(second)
	unknown := func(st *status.Status) bool { return st.Code() == codes.Unimplemented || plainHTTP(st) }
	switch {
	case plainHTTP(a) && plainHTTP(b):
		return nil, &refusal{nodecache.PortNotGRPC, "speaks HTTP/2 and no gRPC"}
	case unknown(a) && unknown(b):
		return nil, &refusal{nodecache.PortNoReflection, "knows no reflection service"}
	case a.Code() != codes.Unimplemented:
		return nil, &Failure{Class: Unavailable, Detail: oneLine("reflection v1", a)}
	}
	return nil, &Failure{Class: Unavailable, Detail: oneLine("reflection v1alpha", b)}
}

// final turns an error after which v1alpha need not be tried into the error of
// the attempt; nil if it may be tried.
func (s *session) final(err error) error {
	var f *Failure
	if errors.As(err, &f) {
		return f
	}
	st := status.Convert(err)
	switch code := st.Code(); {
	case denied(code):
		return &refusal{nodecache.PortDenied, oneLine("reflection", st)}
	case code == codes.Unimplemented, code == codes.Unknown, code == codes.Internal, code == codes.Unavailable:
		return nil
	}
	return &Failure{Class: Unavailable, Detail: oneLine("reflection", st)}
}

// plainHTTP tells whether a status stands for an answer that was no gRPC:
// another content type and no server error of its own. The transport says so in
// words only.
func plainHTTP(st *status.Status) bool {
	_, rest, ok := strings.Cut(st.Message(), "unexpected HTTP status code received from server: ")
	return ok && !strings.HasPrefix(rest, "5")
}

func oneLine(what string, st *status.Status) string {
	msg := strings.Join(strings.Fields(st.Message()), " ")
	if len(msg) > 200 {
		msg = strings.ToValidUTF8(msg[:200], "") + "..."
	}
	return fmt.Sprintf("%s: %s: %s", what, st.Code(), msg)
}

func (s *session) listBy(method string) ([]string, error) {
	s.drop()
	s.method, s.streams = method, 0
	resp, err := s.exchange(&request{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}, func(r *response) bool {
		return r.GetListServicesResponse() != nil
	})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, svc := range resp.GetListServicesResponse().GetService() {
		names = append(names, svc.GetName())
	}
	return names, nil
}

// describe asks for the file of every service that no file has described yet.
func (s *session) describe(names []string) error {
	for _, name := range names {
		if s.files.methods[name] != nil {
			continue
		}
		err := s.ask(&request{MessageRequest: &reflectionpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: name}})
		if errors.Is(err, errNoMore) {
			return nil
		} else if err != nil && !errors.Is(err, errMiss) {
			return err
		}
	}
	return nil
}

// complete asks for imports that no answer brought, as servers that send one
// file at a time need.
func (s *session) complete() error {
	asked := map[string]bool{}
	for {
		missing := s.files.missing(asked)
		if len(missing) == 0 {
			return nil
		}
		for _, name := range missing {
			if s.files.names[name] {
				continue
			}
			asked[name] = true
			if len(asked) > s.budget.Files {
				return exhausted("files")
			}
			err := s.ask(&request{MessageRequest: &reflectionpb.ServerReflectionRequest_FileByFilename{FileByFilename: name}})
			if errors.Is(err, errNoMore) {
				return nil
			} else if err != nil && !errors.Is(err, errMiss) {
				return err
			}
		}
	}
}

// ask sends a question for files and takes in those that come. It returns
// errMiss, errNoMore or the error of the attempt.
func (s *session) ask(req *request) error {
	resp, err := s.exchange(req, func(r *response) bool { return r.GetFileDescriptorResponse() != nil })
	if err != nil {
		var f *Failure
		var answer inBand
		if errors.As(err, &f) || errors.Is(err, errNoMore) {
			return err
		} else if errors.As(err, &answer) {
			return errMiss
		}
		switch st := status.Convert(err); {
		case denied(st.Code()):
			return errNoMore
		case st.Code() == codes.Unavailable || st.Code() == codes.Canceled:
			return &Failure{Class: Unavailable, Detail: oneLine("reflection", st)}
		}
		// Some servers end the stream where others answer that a symbol or a
		// file is not there.
		return errMiss
	}
	for _, raw := range resp.GetFileDescriptorResponse().GetFileDescriptorProto() {
		if err := s.files.add(raw); err != nil {
			return err
		}
	}
	return nil
}

// inBand is an error that the server answered without ending the stream.
type inBand struct{ *status.Status }

func (e inBand) Error() string              { return e.Err().Error() }
func (e inBand) GRPCStatus() *status.Status { return e.Status }

// exchange sends one request and returns the first answer of the wanted kind.
// An error is a *Failure where the attempt must end, errNoMore where no stream
// may be opened any more, else a status: the server's, or that of an answer in
// band. A stream that ended is reopened by the next exchange.
func (s *session) exchange(req *request, want func(*response) bool) (*response, error) {
	if s.stream == nil {
		if s.streams == s.budget.Streams {
			return nil, errNoMore
		}
		s.streams++
		if err := s.open(); err != nil {
			return nil, s.broken(err)
		}
	}
	// An error of Send is io.EOF; Recv has the status.
	if err := s.stream.Send(req); err != nil && !errors.Is(err, io.EOF) {
		return nil, s.broken(err)
	}
	for {
		resp, err := s.stream.Recv()
		if err != nil {
			return nil, s.broken(err)
		}
		if e := resp.GetErrorResponse(); e != nil {
			// An error with code OK has been seen; it is no answer either.
			return nil, inBand{status.New(cmp.Or(codes.Code(e.GetErrorCode()), codes.Unknown), e.GetErrorMessage())}
		}
		if resp.MessageResponse == nil {
			return nil, inBand{status.New(codes.Unknown, "an answer without content")}
		}
		if want(resp) {
			return resp, nil
		}
		if s.stray++; s.stray > maxStray {
			return nil, &Failure{Class: Nonsense, Detail: "sends answers that were not asked for"}
		}
	}
}

func (s *session) open() error {
	ctx, cancel := context.WithCancel(s.ctx)
	st, err := s.cc.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, s.method,
		grpc.ForceCodecV2(s.codec), grpc.MaxCallRecvMsgSize(s.budget.Answer))
	if err != nil {
		cancel()
		return err
	}
	s.stream, s.cancel = &grpc.GenericClientStream[request, response]{ClientStream: st}, cancel
	return nil
}

// broken drops the stream and says what its error means.
func (s *session) broken(err error) error {
	s.drop()
	if s.codec.over != "" {
		return exhausted(s.codec.over)
	}
	if errors.Is(context.Cause(s.ctx), errWall) {
		return &Failure{Class: Deadline, Detail: fmt.Sprintf("no complete answer within %s", s.budget.Wall)}
	}
	if errors.Is(err, io.EOF) {
		return status.Error(codes.Unknown, "the stream ended without an answer")
	}
	switch st := status.Convert(err); st.Code() {
	case codes.DeadlineExceeded:
		return &Failure{Class: Deadline, Detail: oneLine("reflection", st)}
	case codes.ResourceExhausted:
		return &Failure{Class: Exhausted, Detail: oneLine("reflection", st)}
	}
	return err
}

// drop leaves the stream at once.
func (s *session) drop() {
	if s.stream != nil {
		s.cancel()
		s.stream = nil
	}
}

// close half-closes the stream and gives the server a moment to end it in
// good order. An open stream, idle or not, would hold up the server's graceful
// stop.
func (s *session) close() {
	if s.stream == nil {
		return
	}
	stop := time.AfterFunc(drainBound, s.cancel)
	defer stop.Stop()
	defer s.drop()
	if s.stream.CloseSend() != nil {
		return
	}
	for range maxStray {
		if _, err := s.stream.Recv(); err != nil {
			return
		}
	}
}
