package ads_test

import (
	"bytes"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// Clients that are sent nearly the same long list get just what each of them may
// see, in delta and in the state of the world, whoever is sent it at that time.
func TestLongListsHoldWhatTheirClientMaySee(t *testing.T) {
	w := newWorld(t, ads.Options{View: func(in ads.Introduction) (ads.View, error) {
		n := in.Node
		return ads.View{Scopes: []xds.Scope{xds.NamespaceScope(n.GetId()[:1]), xds.Shared}}, nil
	}})
	w.server.OpenGate()
	names := numbered(300)
	own := cla(names[200], 2) // all that the namespaces see differently
	own.Scope = xds.NamespaceScope("b")
	want := map[string]map[string][]byte{"a": {}, "b": {}}
	for _, n := range names {
		r := cla(n, 1)
		w.set(r)
		want["a"][n], want["b"][n] = r.Body.GetValue(), r.Body.GetValue()
	}
	w.set(own)
	want["b"][own.Name] = own.Body.GetValue()
	type asked struct {
		*stream
		namespace string
	}
	var all []asked
	for _, delta := range []bool{true, false} {
		for _, ns := range []string{"a", "b", "a", "b"} {
			s := w.connect(client.Options{Delta: delta, Node: &corev3.Node{Id: ns + "/pod"}})
			s.sub(eds, names...)
			all = append(all, asked{s, ns})
		}
	}
	for _, s := range all {
		r := s.next()
		if len(r.Resources) != len(names) {
			t.Fatalf("%s: %d resources, want %d", s.namespace, len(r.Resources), len(names))
		}
		for _, got := range r.Resources {
			if !bytes.Equal(got.Body.GetValue(), want[s.namespace][got.Name]) {
				t.Fatalf("%s: another client's %s", s.namespace, got.Name)
			}
		}
	}
}
