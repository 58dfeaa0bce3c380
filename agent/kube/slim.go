package kube

import (
	"bytes"
	"errors"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// slimPod is what client-go decodes where the API server sent a pod: the
// record, with as much of the metadata as a reflector asks for.
type slimPod struct {
	metav1.TypeMeta
	metav1.ObjectMeta // namespace, name, UID, resourceVersion, and one annotation
	record            *Record
}

// slimPodList is a list of them.
type slimPodList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []*slimPod
}

// DeepCopyObject implements runtime.Object. A record is immutable and shared.
func (p *slimPod) DeepCopyObject() runtime.Object {
	q := *p
	p.DeepCopyInto(&q.ObjectMeta)
	return &q
}

// DeepCopyObject implements runtime.Object.
func (l *slimPodList) DeepCopyObject() runtime.Object {
	m := &slimPodList{TypeMeta: l.TypeMeta, ListMeta: *l.DeepCopy()}
	for _, p := range l.Items {
		m.Items = append(m.Items, p.DeepCopyObject().(*slimPod))
	}
	return m
}

// GetListMeta implements metav1.ListMetaAccessor.
func (l *slimPodList) GetListMeta() metav1.ListInterface { return &l.ListMeta }

func (m *objectMeta) annotation(key, value string) {
	if key == metav1.InitialEventsAnnotationKey {
		m.initialEventsEnd = value
	}
}

// slim makes a slimPod of what was read.
func (s *seen) slim(m objectMeta) *slimPod {
	r := s.record()
	p := &slimPod{record: r, ObjectMeta: metav1.ObjectMeta{
		Namespace: r.Namespace, Name: r.Name, UID: types.UID(r.UID), ResourceVersion: strings.Clone(m.version),
	}}
	if m.initialEventsEnd != "" {
		p.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: strings.Clone(m.initialEventsEnd)}
	}
	return p
}

// decodePod reads a Pod message. Nothing in the result refers to b.
func decodePod(b []byte) (*slimPod, error) {
	var s seen
	var m objectMeta
	if err := s.see(b, &m); err != nil {
		return nil, err
	}
	return s.slim(m), nil
}

// decodePodList reads a PodList message. Nothing in the result refers to b.
func decodePodList(b []byte) (*slimPodList, error) {
	l := &slimPodList{}
	err := walk(b, func(field, _ uint64, value []byte) error {
		switch field {
		case 1<<3 | message:
			return l.ListMeta.Unmarshal(value)
		case 2<<3 | message:
			p, err := decodePod(value)
			l.Items = append(l.Items, p)
			return err
		}
		return nil
	})
	return l, err
}

// slimOf makes small what another decoder made of a pod or a list of pods. It
// returns other objects as they are.
func slimOf(o runtime.Object) runtime.Object {
	switch o := o.(type) {
	case *corev1.Pod:
		m := objectMeta{version: o.ResourceVersion}
		for key, value := range o.Annotations {
			m.annotation(key, value)
		}
		return seePod(o).slim(m)
	case *corev1.PodList:
		l := &slimPodList{ListMeta: o.ListMeta}
		for i := range o.Items {
			l.Items = append(l.Items, slimOf(&o.Items[i]).(*slimPod))
		}
		return l
	}
	return o
}

// slimCodecs are codecs that decode slimPod and slimPodList where others decode
// v1.Pod and v1.PodList. All else is as with those.
type slimCodecs struct{ runtime.NegotiatedSerializer }

// SupportedMediaTypes implements runtime.NegotiatedSerializer.
func (c slimCodecs) SupportedMediaTypes() []runtime.SerializerInfo {
	infos := slices.Clone(c.NegotiatedSerializer.SupportedMediaTypes())
	for i := range infos {
		info := &infos[i]
		if info.MediaType != runtime.ContentTypeProtobuf {
			info.Serializer = slimSerializer{info.Serializer}
			continue
		}
		info.Serializer = slimProtobuf{info.Serializer}
		if stream := info.StreamSerializer; stream != nil {
			slim := *stream
			slim.Serializer = slimEvents{stream.Serializer}
			info.StreamSerializer = &slim
		}
	}
	return infos
}

// slimSerializer shrinks what the serializer has decoded.
type slimSerializer struct{ runtime.Serializer }

func (s slimSerializer) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	o, kind, err := s.Serializer.Decode(data, defaults, into)
	if err != nil || into != nil {
		return o, kind, err
	}
	return slimOf(o), kind, nil
}

// protobufMagic begins every object in protobuf; a runtime.Unknown follows.
var protobufMagic = []byte("k8s\x00")

// slimProtobuf decodes pods off the wire.
type slimProtobuf struct{ runtime.Serializer }

func (s slimProtobuf) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if into == nil {
		o, kind, err := decodeSlim(data)
		if o != nil || err != nil {
			return o, kind, err
		}
	}
	return s.Serializer.Decode(data, defaults, into)
}

// decodeSlim returns a nil object where there is no v1 Pod or PodList.
func decodeSlim(data []byte) (runtime.Object, *schema.GroupVersionKind, error) {
	data, ok := bytes.CutPrefix(data, protobufMagic)
	if !ok {
		return nil, nil, nil
	}
	var version, kind, encoding string
	var raw []byte
	err := walk(data, func(field, _ uint64, value []byte) (err error) {
		switch field {
		case 1<<3 | message:
			version, kind, err = seePair(value)
		case 2<<3 | message:
			raw = value
		case 3<<3 | message:
			encoding = text(value)
		}
		return err
	})
	if err != nil || version != "v1" || encoding != "" {
		return nil, nil, nil // the other decoder will say what is wrong
	}
	var o runtime.Object
	switch kind {
	case "Pod":
		o, err = decodePod(raw)
	case "PodList":
		o, err = decodePodList(raw)
	default:
		return nil, nil, nil
	}
	gvk := corev1.SchemeGroupVersion.WithKind(strings.Clone(kind))
	if err != nil {
		return nil, &gvk, err
	}
	return o, &gvk, nil
}

// slimEvents decodes the events of a watch without a copy of what they hold:
// client-go decodes that, too, before it reads the next one into the buffer.
type slimEvents struct{ runtime.Serializer }

var errNoObject = errors.New("watch event without an object")

func (s slimEvents) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	event, ok := into.(*metav1.WatchEvent)
	if !ok {
		return s.Serializer.Decode(data, defaults, into)
	}
	*event = metav1.WatchEvent{}
	err := walk(data, func(field, _ uint64, value []byte) error {
		switch field {
		case 1<<3 | message:
			event.Type = string(value)
		case 2<<3 | message:
			return walk(value, func(field, _ uint64, raw []byte) error {
				if field == 1<<3|message {
					event.Object.Raw = raw
				}
				return nil
			})
		}
		return nil
	})
	if err == nil && len(event.Object.Raw) == 0 {
		err = errNoObject
	}
	if err != nil {
		return nil, nil, err
	}
	return event, defaults, nil
}
