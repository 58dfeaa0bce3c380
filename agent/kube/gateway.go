package kube

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	kjson "k8s.io/apimachinery/pkg/util/json"

	"github.com/fingerpost/fingerpost/agent/gateway"
)

// gatewayObject is what client-go decodes where the API server sent an object
// of the Gateway API: what is kept of it, with as much of the metadata as a
// reflector asks for. It is immutable.
type gatewayObject struct {
	metav1.TypeMeta
	metav1.ObjectMeta // namespace, name, UID, resourceVersion, and one annotation
	is                *gateway.Object
}

func (o *gatewayObject) key() name   { return name{o.Namespace, o.Name} }
func (o *gatewayObject) uid() string { return string(o.UID) }

// DeepCopyObject implements runtime.Object.
func (o *gatewayObject) DeepCopyObject() runtime.Object {
	p := *o
	o.DeepCopyInto(&p.ObjectMeta)
	return &p
}

// gatewayList is a list of them.
type gatewayList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []*gatewayObject
}

// DeepCopyObject implements runtime.Object.
func (l *gatewayList) DeepCopyObject() runtime.Object {
	m := &gatewayList{TypeMeta: l.TypeMeta, ListMeta: *l.DeepCopy()}
	for _, o := range l.Items {
		m.Items = append(m.Items, o.DeepCopyObject().(*gatewayObject))
	}
	return m
}

// GetListMeta implements metav1.ListMetaAccessor.
func (l *gatewayList) GetListMeta() metav1.ListInterface { return &l.ListMeta }

// gatewayCodecs are codecs that decode objects of the Gateway API. One of which
// the spec cannot be read is still an object: it must not end the list that it
// stands in.
type gatewayCodecs struct{ runtime.NegotiatedSerializer }

// SupportedMediaTypes implements runtime.NegotiatedSerializer. Custom resources
// come in JSON.
func (c gatewayCodecs) SupportedMediaTypes() []runtime.SerializerInfo {
	infos := slices.Clone(c.NegotiatedSerializer.SupportedMediaTypes())
	for i := range infos {
		infos[i].Serializer = gatewaySerializer{infos[i].Serializer}
	}
	return infos
}

type gatewaySerializer struct{ runtime.Serializer }

func (s gatewaySerializer) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if into == nil {
		if o, gvk, err := decodeGateway(data); o != nil || err != nil {
			return o, gvk, err
		}
	}
	return s.Serializer.Decode(data, defaults, into)
}

// decodeGateway returns a nil object where there is none of the Gateway API.
func decodeGateway(data []byte) (runtime.Object, *schema.GroupVersionKind, error) {
	var head typeMeta
	if err := kjson.Unmarshal(data, &head); err != nil || head.group() != gateway.Group {
		return nil, nil, nil // the other decoder will say what is wrong
	}
	gvk := schema.FromAPIVersionAndKind(head.APIVersion, head.Kind)
	kind, isList := strings.CutSuffix(head.Kind, "List")
	if !isList {
		o, err := newGatewayObject(kind, data)
		if err != nil {
			return nil, &gvk, err
		}
		return o, &gvk, nil
	}
	var list struct {
		Metadata metav1.ListMeta   `json:"metadata"`
		Items    []json.RawMessage `json:"items"`
	}
	if err := kjson.Unmarshal(data, &list); err != nil {
		return nil, &gvk, err
	}
	l := &gatewayList{ListMeta: list.Metadata}
	for _, item := range list.Items {
		o, err := newGatewayObject(kind, item)
		if err != nil {
			return nil, &gvk, err
		}
		l.Items = append(l.Items, o)
	}
	return l, &gvk, nil
}

func newGatewayObject(kind string, data []byte) (*gatewayObject, error) {
	is, err := gateway.Decode(kind, data)
	if err != nil {
		return nil, err
	}
	return &gatewayObject{is: is, ObjectMeta: metav1.ObjectMeta{
		Namespace: is.Namespace, Name: is.Name.Name, UID: types.UID(is.UID), ResourceVersion: is.Version, Annotations: is.Annotations,
	}}, nil
}

// gatewayNames returns the names of the objects of a kind that are held.
func (s *Store) gatewayNames(kind string) func() []name {
	return func() []name { return plain(s.routes.Names(kind)) }
}

func (s *Store) applyGateway(kind string) func(name, change) {
	return func(key name, ch change) {
		switch o := ch.object.(type) {
		case *gatewayObject:
			s.routes.Upsert(o.is)
		case nil:
			s.routes.Remove(kind, nameOf(key), ch.gone...)
		default:
			panic(fmt.Sprintf("%T among routes", o)) // the lane's watch is typed
		}
	}
}
