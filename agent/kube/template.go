package kube

import (
	"encoding/binary"
	"runtime"
	"slices"
	"strings"
	"sync"
	"weak"

	"github.com/fingerpost/fingerpost/nodecache"
)

// template is what the pods of one owner have in common, mostly all of them: it
// is made once for them. It is immutable.
type template struct {
	nodecache.Common
	// optedOut and collectOn are the pods' own word on being asked.
	optedOut, collectOn bool
	// key is all that the template was made of; see seen.templateKey.
	key string
}

// templates are all that are in use, by key.
var templates = shelf{held: map[string]weak.Pointer[template]{}}

// shelf lends templates for as long as somebody refers to them.
type shelf struct {
	// mu guards held.
	mu   sync.Mutex
	held map[string]weak.Pointer[template]
}

// get returns the template of the key, nil if templateKey has not made it. The
// template does not refer to it.
func (x *shelf) get(key []byte) *template {
	x.mu.Lock()
	defer x.mu.Unlock()
	if t := x.held[string(key)].Value(); t != nil {
		return t
	}
	t := newTemplate(string(key))
	if t != nil {
		x.held[t.key] = weak.Make(t)
		runtime.AddCleanup(t, x.forget, t.key)
	}
	return t
}

// forget is called some time after the last reference has gone.
func (x *shelf) forget(key string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.held[key].Value() == nil { // else there is a new one
		delete(x.held, key)
	}
}

// templateKey appends to b what a pod shares with the others of its owner, in a
// form that newTemplate reads. It puts the images in order.
func (s *seen) templateKey(b []byte) []byte {
	text := func(s string) { b = appendText(b, s) }
	text(s.namespace)
	for _, hash := range [...]string{s.templateHash, s.revisionHash, s.rolloutsHash} {
		text(hash)
	}
	// A mirror pod's controller is its Node, which all static pods of the node
	// share: it says nothing of the program.
	if s.controlled && s.controller.kind != "Node" {
		text(s.controller.kind)
		text(s.controller.name)
		text(s.controller.uid)
	} else {
		text("Pod")
		text(s.name)
		text(s.uid)
	}
	for _, a := range [...]annotation{s.grpcPort, s.services, s.collect, s.export, s.locality, s.upstreams} {
		if b = appendBool(b, a.there); a.there {
			text(a.value)
		}
	}
	b = s.policy.append(b)
	for _, ports := range [...][]int32{s.named, s.probed} {
		b = binary.AppendUvarint(b, uint64(len(ports)))
		for _, port := range ports {
			b = binary.AppendVarint(b, int64(port))
		}
	}
	for i, id := range s.images {
		// Runtimes put a scheme and the repository before the digest.
		s.images[i] = id[strings.LastIndexByte(id, '@')+1:]
	}
	slices.Sort(s.images)
	for _, id := range s.images {
		text(id)
	}
	return b
}

// newTemplate makes the template of a key, nil if it is none. Its strings mostly
// lie in the key.
func newTemplate(key string) *template {
	r := reader{rest: key}
	var s seen
	s.namespace, s.templateHash, s.revisionHash, s.rolloutsHash = r.text(), r.text(), r.text(), r.text()
	kind, name, uid := r.text(), r.text(), r.text()
	for _, a := range [...]*annotation{&s.grpcPort, &s.services, &s.collect, &s.export, &s.locality, &s.upstreams} {
		if a.there = r.bool(); a.there {
			a.value = r.text()
		}
	}
	s.policy.read(&r)
	for _, ports := range [...]*[]int32{&s.named, &s.probed} {
		for range r.count() {
			*ports = append(*ports, int32(r.varint()))
		}
	}
	for len(r.rest) > 0 {
		s.images = append(s.images, r.text())
	}
	if r.failed {
		return nil
	}
	t := &template{key: key}
	t.Namespace = s.namespace
	t.Owner.UID, t.Owner.Revision = uid, s.templateHash
	if t.Owner.Revision == "" {
		t.Owner.Revision = s.revisionHash
	}
	hash := s.templateHash
	if hash == "" {
		hash = s.rolloutsHash
	}
	t.OwnerName = kind + "/" + name
	t.Workload = nodecache.Workload{Namespace: t.Namespace, Kind: kind, Name: name}
	if hash != "" && kind != "Pod" {
		t.Workload.Name = strings.TrimSuffix(name, "-"+hash)
	}
	t.Images = images(s.images)
	t.Hints = t.hints(&s)
	t.Declared = t.declared(s.services, t.Hints)
	t.Export = t.exports(s.export)
	t.Locality = t.locality(s.locality)
	t.Upstreams = t.upstreams(s.upstreams)
	t.optedOut, t.collectOn = t.collect(s.collect)
	var ignore []string
	t.Policy, ignore = parsePolicy(&s.policy)
	t.Ignored = append(t.Ignored, ignore...)
	return t
}

// images names what the containers run: the digests among their image IDs,
// which are sorted. It is empty as long as one has not started.
func images(ids []string) string {
	if slices.Contains(ids, "") {
		return ""
	}
	return strings.Join(ids, " ")
}
