package ads

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/fingerpost/fingerpost/xds"
)

// message is a response on its way to the client. Its resources are bytes that
// all clients share: however many connect at once, nothing of a resource is
// copied for one of them before the connection takes it.
type message struct {
	t          xds.Type
	version    string // version_info or system_version_info
	nonce      string
	resources  mem.BufferSlice // as they stand in a response of the stream's kind, see joiner
	count      int             // of the resources
	removed    []string        // delta
	identifier string          // SotW: control_plane.identifier; empty: none
}

// GetTypeUrl is the type_url of the response, under the name that it has with
// the generated messages.
func (m *message) GetTypeUrl() string { return m.t.URL() }

// encode writes the rest of the response after the resources: fields may stand
// in any order. Both kinds have the first three under the same numbers.
func (m *message) encode() mem.BufferSlice {
	const versionField, urlField, nonceField, removedField, controlPlaneField, identifierField = 1, 4, 5, 6, 6, 1
	b := make([]byte, 0, 128) // where nothing is removed, it fits
	text := func(n protowire.Number, s string) {
		b = protowire.AppendTag(b, n, protowire.BytesType)
		b = protowire.AppendString(b, s)
	}
	text(versionField, m.version)
	text(urlField, m.t.URL())
	text(nonceField, m.nonce)
	for _, name := range m.removed {
		text(removedField, name)
	}
	if m.identifier != "" {
		b = protowire.AppendTag(b, controlPlaneField, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(protowire.SizeTag(identifierField)+protowire.SizeBytes(len(m.identifier))))
		text(identifierField, m.identifier)
	}
	return append(m.resources, mem.SliceBuffer(b))
}

// codec encodes a [message] by itself; everything else is the other's.
type codec struct{ encoding.CodecV2 }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if m, ok := v.(*message); ok {
		return m.encode(), nil
	}
	return c.CodecV2.Marshal(v)
}
