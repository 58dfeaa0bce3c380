package collect

import (
	"errors"

	"google.golang.org/grpc/mem"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

var errBudget = errors.New("budget crossed")

// codec is that of protobuf, and looks at the size of an answer before it
// decodes it: 16 MiB of empty entries would take ten times that when decoded.
// One codec serves one attempt.
type codec struct {
	budget Budget
	bytes  int    // received in this attempt
	over   string // which budget was crossed; empty for none
}

// Name is empty: the content type stays the plain application/grpc, which every
// server takes.
func (*codec) Name() string { return "" }

func (*codec) Marshal(v any) (mem.BufferSlice, error) {
	b, err := proto.Marshal(v.(proto.Message))
	if err != nil {
		return nil, err
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

func (c *codec) Unmarshal(data mem.BufferSlice, v any) error {
	c.bytes += data.Len()
	if c.bytes > c.budget.Bytes {
		return c.cross("bytes")
	}
	raw := data.Materialize()
	if n, err := entries(raw); err != nil {
		return err
	} else if n > c.budget.Files {
		return c.cross("entries of one answer")
	}
	if resp, ok := v.(*response); ok {
		if files := filesIn(raw); files != nil {
			resp.MessageResponse = &reflectionpb.ServerReflectionResponse_FileDescriptorResponse{
				FileDescriptorResponse: &reflectionpb.FileDescriptorResponse{FileDescriptorProto: files},
			}
			return nil
		}
	}
	return proto.Unmarshal(raw, v.(proto.Message))
}

// filesIn returns the files of an answer that has nothing else, as parts of the
// answer itself: those of the largest one would not fit twice. It returns nil
// for any other answer.
func filesIn(raw []byte) [][]byte {
	var files [][]byte
	other := false
	err := eachField(raw, func(num protowire.Number, v []byte) error {
		switch num {
		case 4:
			return eachField(v, func(num protowire.Number, v []byte) error {
				if num == 1 {
					files = append(files, v)
				}
				return nil
			})
		case 5, 6, 7: // the other members of the oneof
			other = true
		}
		return nil
	})
	if err != nil || other {
		return nil
	}
	return files
}

func (c *codec) cross(what string) error {
	if c.over == "" {
		c.over = what
	}
	return errBudget
}

// entries counts what a ServerReflectionResponse repeats: the files, services
// and extension numbers, all of them fields one level down.
func entries(raw []byte) (int, error) {
	n := 0
	err := eachField(raw, func(num protowire.Number, v []byte) error {
		switch num {
		case 4, 6: // file_descriptor_response, list_services_response
			return eachField(v, func(protowire.Number, []byte) error { n++; return nil })
		case 5: // all_extension_numbers_response: never asked for, packed
			n += len(v)
		}
		return nil
	})
	return n, err
}
