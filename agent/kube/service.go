package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fingerpost/fingerpost/nodecache"
)

// front is what is kept of a Service. It is immutable.
type front struct {
	*nodecache.Front
}

func (f *front) key() name   { return name{f.Namespace, f.Name} }
func (f *front) uid() string { return f.UID }

// GetObjectMeta lets client-go key a Service.
func (f *front) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: f.Namespace, Name: f.Name}
}

// slice is what is kept of an EndpointSlice. It is immutable.
type slice struct {
	*nodecache.Slice
}

func (s *slice) key() name   { return name{s.Namespace, s.Name} }
func (s *slice) uid() string { return s.UID }

// GetObjectMeta lets client-go key a slice.
func (s *slice) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name}
}

// ConvertService makes the record of a Service. Nothing in it refers to the
// Service. Of its ports those of TCP are kept: gRPC needs it.
func ConvertService(s *corev1.Service) *nodecache.Front {
	f := &nodecache.Front{
		UID:       strings.Clone(string(s.UID)),
		Namespace: shared(s.Namespace),
		Name:      strings.Clone(s.Name),
		Type:      shared(string(s.Spec.Type)),
		Selects:   len(s.Spec.Selector) > 0,
		NotReady:  s.Spec.PublishNotReadyAddresses,
		External:  strings.Clone(strings.TrimSuffix(s.Spec.ExternalName, ".")),
		Created:   s.CreationTimestamp.UTC(),
	}
	if f.Type == "" {
		f.Type = string(corev1.ServiceTypeClusterIP)
	}
	ips := s.Spec.ClusterIPs
	if len(ips) == 0 && s.Spec.ClusterIP != "" {
		ips = []string{s.Spec.ClusterIP}
	}
	for _, ip := range ips {
		if ip == corev1.ClusterIPNone {
			f.Headless = true
		} else if a, ok := parseAddr(ip); ok {
			f.ClusterIPs = append(f.ClusterIPs, a)
		}
	}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if p.Protocol != "" && p.Protocol != corev1.ProtocolTCP || p.Port < 1 || p.Port > 65535 {
			continue
		}
		f.Ports = append(f.Ports, nodecache.FrontPort{Name: shared(p.Name), AppProtocol: shared(value(p.AppProtocol)), Port: uint16(p.Port)})
	}
	declare(f, s.Annotations)
	return f
}

// declare reads what the Service says of the places that are no pods.
func declare(f *nodecache.Front, annotations map[string]string) {
	text, there := annotations[ServicesAnnotation]
	locality, prefers := annotations[LocalityAnnotation]
	if !there {
		if prefers {
			f.Ignored = ignored(LocalityAnnotation, locality, "pods say themselves who calls them first: write it on them")
		}
		return
	}
	var why error
	switch {
	case f.External != "":
		if why = checkHost(f.External); why == nil {
			var ports []nodecache.Hint
			for _, p := range f.Ports {
				ports = append(ports, nodecache.Hint{Port: p.Port})
			}
			f.Declared, why = parseDeclared(text, ports)
		}
	case f.Selects:
		why = errors.New("pods say themselves what they serve")
	default:
		f.Declared, why = parseDeclared(text, []nodecache.Hint{{}})
	}
	if why != nil {
		f.Ignored = ignored(ServicesAnnotation, text, why.Error())
		return
	}
	var bad string
	if prefers {
		if f.Locality, bad = parseLocality(locality); bad != "" {
			f.Ignored = ignored(LocalityAnnotation, locality, bad)
		}
	}
	if to, there := annotations[ExportAnnotation]; there {
		var bad []string
		if f.Export, bad = parseExport(to); len(bad) > 0 {
			f.Ignored = ignored(ExportAnnotation, to, strings.Join(bad, "; "))
		}
	}
	var texts policyTexts
	for key, text := range annotations {
		texts.see(key, text)
	}
	var ignore []string
	if f.Policy, ignore = parsePolicy(&texts); f.Ignored != "" {
		ignore = append([]string{f.Ignored}, ignore...)
	}
	f.Ignored = strings.Join(ignore, "; ")
}

// checkHost returns an error for what is no DNS name (RFC 1123), or what a
// resolver could take for an IPv4 address in one of its old forms: that of a
// name whose last label is a number (WHATWG URL, "ends in a number").
func checkHost(name string) error {
	if why := validation.IsDNS1123Subdomain(name); len(why) > 0 {
		return fmt.Errorf("externalName %.70q is not a DNS name: %s", name, why[0])
	}
	last := name[strings.LastIndexByte(name, '.')+1:]
	if strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") {
		return fmt.Errorf("externalName %.70q is an address, not a DNS name: write it into an EndpointSlice of a Service without a selector", name)
	}
	return nil
}

// ConvertSlice makes the record of an EndpointSlice. Nothing in it refers to
// the slice. A condition that is missing means what KEP-752 and KEP-1672 say.
func ConvertSlice(s *discoveryv1.EndpointSlice) *nodecache.Slice {
	r := &nodecache.Slice{
		UID:       strings.Clone(string(s.UID)),
		Namespace: shared(s.Namespace),
		Name:      strings.Clone(s.Name),
		Service:   shared(s.Labels[discoveryv1.LabelServiceName]),
		AnyPort:   len(s.Ports) == 0,
	}
	for _, p := range s.Ports {
		switch {
		case p.Protocol != nil && *p.Protocol != "" && *p.Protocol != corev1.ProtocolTCP:
		case p.Port == nil:
			r.AnyPort = true
		case *p.Port >= 1 && *p.Port <= 65535:
			r.Ports = append(r.Ports, nodecache.SlicePort{
				Name: shared(value(p.Name)), AppProtocol: shared(value(p.AppProtocol)), Port: uint16(*p.Port),
			})
		}
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		ready := e.Conditions.Ready == nil || *e.Conditions.Ready
		out := nodecache.Endpoint{
			Ready: ready, Serving: ready,
			Terminating: e.Conditions.Terminating != nil && *e.Conditions.Terminating,
			Zone:        shared(value(e.Zone)),
		}
		if e.Conditions.Serving != nil {
			out.Serving = *e.Conditions.Serving
		}
		if ref := e.TargetRef; ref != nil && ref.UID != "" && (ref.Kind == "" || ref.Kind == "Pod") {
			out.Pod = strings.Clone(string(ref.UID))
		} else if out.Addrs = addrs(e.Addresses); len(out.Addrs) == 0 {
			continue // names
		}
		r.Endpoints = append(r.Endpoints, out)
	}
	r.Endpoints = slices.Clip(r.Endpoints)
	return r
}

func addrs(texts []string) []netip.Addr {
	var as []netip.Addr
	for _, text := range texts {
		if a, ok := parseAddr(text); ok {
			as = append(as, a)
		}
	}
	return as
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// shared is a copy of s that is one for all equal ones, as long as another
// handle refers to it.
func shared(s string) string { return unique.Make(s).Value() }

// UpsertService makes the directory hold the Service.
func (s *Store) UpsertService(f *nodecache.Front) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if f.Ignored != "" {
		s.reportOnce(f.Ignored, "service", f.String())
	}
	s.dir.UpsertFront(f)
	s.republish(f.Namespace)
}

// RemoveService forgets the Service of the name, if its UID is one of uids;
// with no uids, whatever its UID.
func (s *Store) RemoveService(namespace, service string, uids ...string) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.dir.RemoveFront(nodecache.Name{Namespace: namespace, Name: service}, uids...)
	s.republish(namespace)
}

// UpsertSlice makes the directory hold the slice.
func (s *Store) UpsertSlice(r *nodecache.Slice) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.dir.UpsertSlice(r)
	s.republish(r.Namespace)
}

// grown returns the slice with the endpoints beside its own that the directory
// holds under its name and that it takes away.
func (s *Store) grown(r *nodecache.Slice) *nodecache.Slice {
	v := s.dir.Front(nodecache.Name{Namespace: r.Namespace, Name: r.Service})
	if v == nil {
		return r
	}
	out := *r
	for _, old := range v.Slices {
		if old.Name != r.Name {
			continue
		}
		for _, e := range old.Endpoints {
			there := func(n nodecache.Endpoint) bool { return n.Pod == e.Pod && slices.Equal(n.Addrs, e.Addrs) }
			if !slices.ContainsFunc(r.Endpoints, there) {
				out.Endpoints = append(slices.Clip(out.Endpoints), e)
			}
		}
	}
	return &out
}

// RemoveSlice forgets the slice of the name, if its UID is one of uids; with no
// uids, whatever its UID.
func (s *Store) RemoveSlice(namespace, slice string, uids ...string) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.dir.RemoveSlice(nodecache.Name{Namespace: namespace, Name: slice}, uids...)
	s.republish(namespace)
}

// published needs writing. It returns the record as it is behind the Services
// of the moment: one that is not Ready serves where all of them publish it.
func (s *Store) published(r *Record) *Record {
	if !r.Unready && (r.State != nodecache.Absent || r.Reason != ReasonNotReady) {
		delete(s.unready, r.UID)
		return r
	}
	s.unready[r.UID] = r.key()
	yes := s.dir.Published(r.UID)
	if yes == r.Unready {
		return r
	}
	record := *r
	record.Unready, record.State, record.Reason = yes, nodecache.Absent, ReasonNotReady
	if yes {
		record.State, record.Reason = nodecache.Serving, ""
	}
	return &record
}

// republish needs writing. It goes over the pods of the namespace that are not
// Ready: mostly there are few.
func (s *Store) republish(namespace string) {
	for uid, key := range s.unready {
		if key.namespace != namespace {
			continue
		}
		s.mu.RLock()
		r := s.pods[key]
		s.mu.RUnlock()
		if r != nil && r.UID == uid && s.dir.Published(uid) != r.Unready {
			s.upsert(r)
		}
	}
}

func (s *Store) serviceNames() []name { return plain(s.dir.FrontNames()) }
func (s *Store) sliceNames() []name   { return plain(s.dir.SliceNames()) }

func nameOf(n name) nodecache.Name { return nodecache.Name{Namespace: n.namespace, Name: n.name} }

func plain(names []nodecache.Name) []name {
	out := make([]name, len(names))
	for i, n := range names {
		out[i] = name{n.Namespace, n.Name}
	}
	return out
}
