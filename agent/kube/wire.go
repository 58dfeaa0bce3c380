package kube

import (
	"time"
	"unsafe"

	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
)

// A pod on the wire is some kilobytes, of which a record needs a few fields:
// they are read where they lie, and everything else is stepped over. The
// numbers are those of generated.proto in k8s.io/api/core/v1 and
// k8s.io/apimachinery/pkg/apis/meta/v1; a field that comes with a type other
// than its own is stepped over, too.

const (
	varint  = uint64(protowire.VarintType)
	message = uint64(protowire.BytesType)
)

// walk calls each for every field of a message: with number<<3|type, and what
// the field holds if it is a varint or has a length.
func walk(b []byte, each func(field, n uint64, value []byte) error) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		var v uint64
		var value []byte
		switch typ {
		case protowire.VarintType:
			v, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			value, n = protowire.ConsumeBytes(b)
		default:
			n = protowire.ConsumeFieldValue(num, typ, b)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if err := each(uint64(num)<<3|uint64(typ), v, value); err != nil {
			return err
		}
	}
	return nil
}

// text is the bytes as a string, for as long as nobody writes to them.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// see reads a Pod message. The strings lie in b, and those of m, too.
func (s *seen) see(b []byte, m *objectMeta) error {
	return walk(b, func(field, _ uint64, value []byte) error {
		switch field {
		case 1<<3 | message:
			return s.seeMeta(value, m)
		case 2<<3 | message:
			return s.seeSpec(value)
		case 3<<3 | message:
			return s.seeStatus(value)
		}
		return nil
	})
}

// objectMeta is what a reflector itself wants to know.
type objectMeta struct {
	version string // resourceVersion
	// initialEventsEnd is the value of the annotation of that name, which the
	// bookmark has that ends a streamed list.
	initialEventsEnd string
}

func (s *seen) seeMeta(b []byte, m *objectMeta) error {
	return walk(b, func(field, _ uint64, value []byte) error {
		switch field {
		case 1<<3 | message:
			s.name = text(value)
		case 3<<3 | message:
			s.namespace = text(value)
		case 5<<3 | message:
			s.uid = text(value)
		case 6<<3 | message:
			m.version = text(value)
		case 8<<3 | message:
			return seeTime(value, &s.created)
		case 9<<3 | message:
			s.deleted = true
		case 11<<3 | message:
			key, v, err := seePair(value)
			s.label(key, v)
			return err
		case 12<<3 | message:
			key, v, err := seePair(value)
			s.annotation(key, v)
			m.annotation(key, v)
			return err
		case 13<<3 | message:
			return s.seeOwner(value)
		}
		return nil
	})
}

// seeTime leaves out fractions of a second, as the API's own decoder does.
func seeTime(b []byte, t *time.Time) error {
	*t = time.Time{}
	if len(b) == 0 {
		return nil
	}
	var seconds int64
	err := walk(b, func(field, n uint64, _ []byte) error {
		if field == 1<<3|varint {
			seconds = int64(n)
		}
		return nil
	})
	*t = time.Unix(seconds, 0).UTC()
	return err
}

// seePair reads an entry of a map of strings.
func seePair(b []byte) (key, value string, err error) {
	err = walk(b, func(field, _ uint64, v []byte) error {
		switch field {
		case 1<<3 | message:
			key = text(v)
		case 2<<3 | message:
			value = text(v)
		}
		return nil
	})
	return key, value, err
}

func (s *seen) seeOwner(b []byte) error {
	if s.controlled {
		return nil
	}
	var kind, name, uid string
	controller := false
	err := walk(b, func(field, n uint64, value []byte) error {
		switch field {
		case 1<<3 | message:
			kind = text(value)
		case 3<<3 | message:
			name = text(value)
		case 4<<3 | message:
			uid = text(value)
		case 6<<3 | varint:
			controller = n != 0
		}
		return nil
	})
	if controller {
		s.controlled = true
		s.controller.kind, s.controller.name, s.controller.uid = kind, name, uid
	}
	return err
}

func (s *seen) seeSpec(b []byte) error {
	return walk(b, func(field, n uint64, value []byte) error {
		switch field {
		case 2<<3 | message:
			return s.seeContainer(value, false)
		case 10<<3 | message:
			s.node = text(value)
		case 11<<3 | varint:
			s.hostNetwork = n != 0
		case 20<<3 | message:
			return s.seeContainer(value, true)
		}
		return nil
	})
}

// seeContainer reads a container. Of init containers only those count that
// restart always, which is known last.
func (s *seen) seeContainer(b []byte, init bool) error {
	named, always := len(s.named), false
	var probes [3]int32
	err := walk(b, func(field, _ uint64, value []byte) error {
		switch field {
		case 6<<3 | message:
			return s.seePort(value)
		case 10<<3 | message:
			return seeProbe(value, &probes[0])
		case 11<<3 | message:
			return seeProbe(value, &probes[1])
		case 22<<3 | message:
			return seeProbe(value, &probes[2])
		case 24<<3 | message:
			always = text(value) == string(corev1.ContainerRestartPolicyAlways)
		}
		return nil
	})
	if init && !always {
		s.named = s.named[:named]
		return err
	}
	for _, port := range probes {
		if port != 0 {
			s.probed = append(s.probed, port)
		}
	}
	return err
}

func (s *seen) seePort(b []byte) error {
	var name, protocol string
	var port int32
	err := walk(b, func(field, n uint64, value []byte) error {
		switch field {
		case 1<<3 | message:
			name = text(value)
		case 3<<3 | varint:
			port = int32(n)
		case 4<<3 | message:
			protocol = text(value)
		}
		return nil
	})
	s.port(name, protocol, port)
	return err
}

// seeProbe reads the port of a probe by gRPC.
func seeProbe(b []byte, port *int32) error {
	return walk(b, func(field, _ uint64, handler []byte) error {
		if field != 1<<3|message {
			return nil
		}
		return walk(handler, func(field, _ uint64, grpc []byte) error {
			if field != 4<<3|message {
				return nil
			}
			return walk(grpc, func(field, n uint64, _ []byte) error {
				if field == 1<<3|varint {
					*port = int32(n)
				}
				return nil
			})
		})
	})
}

func (s *seen) seeStatus(b []byte) error {
	return walk(b, func(field, _ uint64, value []byte) error {
		switch field {
		case 1<<3 | message:
			s.phase = text(value)
		case 2<<3 | message:
			kind, status, err := seePair(value) // as type and status are numbered
			s.condition(kind, status)
			return err
		case 6<<3 | message:
			s.ip = text(value)
		case 8<<3 | message:
			return s.seeContainerStatus(value)
		case 12<<3 | message:
			ip, _, err := seePair(value)
			s.ips = append(s.ips, ip)
			return err
		}
		return nil
	})
}

// seeContainerStatus reads an image ID. One that is absent counts, too: such a
// container has not started.
func (s *seen) seeContainerStatus(b []byte) error {
	id := ""
	err := walk(b, func(field, _ uint64, value []byte) error {
		if field == 7<<3|message {
			id = text(value)
		}
		return nil
	})
	s.images = append(s.images, id)
	return err
}
