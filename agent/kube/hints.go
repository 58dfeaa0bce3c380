package kube

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fingerpost/fingerpost/nodecache"
)

// Why a port is hinted: the values of nodecache.Hint.Why that pods give.
const (
	WhyAnnotation = "annotation"
	WhyPortName   = "port name"
	WhyProbe      = "grpc probe"
)

// maxNotes bounds what is said of one annotation: who makes a pod decides how
// much of it makes no sense, and it is kept, logged and told in Events.
const maxNotes = 16

// note records that an annotation, or a part of it, is ignored.
func (t *template) note(annotation, value, format string, args ...any) {
	n := 0
	for _, text := range t.Ignored {
		if strings.HasPrefix(text, ofAnnotation(annotation)) {
			n++
		}
	}
	switch {
	case n < maxNotes:
		t.Ignored = append(t.Ignored, ignored(annotation, value, fmt.Sprintf(format, args...)))
	case n == maxNotes:
		t.Ignored = append(t.Ignored, ofAnnotation(annotation)+"more of it is ignored")
	}
}

func ofAnnotation(annotation string) string { return "annotation " + annotation + ": " }

func ignored(annotation, value, why string) string {
	return fmt.Sprintf("%s%q is ignored: %s", ofAnnotation(annotation), cut(value, 200), cut(why, 1000))
}

// cut is the text, or the most bytes of it that are shown.
func cut(text string, most int) string {
	if len(text) > most {
		return strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}

// hints gathers the positive signs that the pod itself gives. Of several for
// one port the first counts.
func (t *template) hints(s *seen) []nodecache.Hint {
	var hints []nodecache.Hint
	add := func(port int32, why string) {
		if port < 1 || port > 65535 {
			return
		}
		p := uint16(port)
		if !slices.ContainsFunc(hints, func(h nodecache.Hint) bool { return h.Port == p }) {
			hints = append(hints, nodecache.Hint{Port: p, Why: why})
		}
	}
	if s.grpcPort.there {
		for text := range strings.SplitSeq(s.grpcPort.value, ",") {
			port, err := parsePort(text)
			if err != nil {
				t.note(GRPCPortAnnotation, s.grpcPort.value, "%v", err)
				continue
			}
			add(int32(port), WhyAnnotation)
		}
	}
	for _, port := range s.named {
		add(port, WhyPortName)
	}
	for _, port := range s.probed {
		add(port, WhyProbe)
	}
	slices.SortFunc(hints, func(a, b nodecache.Hint) int { return cmp.Compare(a.Port, b.Port) })
	return slices.Clip(hints)
}

// declared reads the services annotation. One that cannot be understood in
// full is ignored in full: half a declaration would take services away.
func (t *template) declared(a annotation, hints []nodecache.Hint) []nodecache.Declared {
	if !a.there {
		return nil
	}
	ds, err := parseDeclared(a.value, hints)
	if err != nil {
		t.note(ServicesAnnotation, a.value, "%v", err)
		return nil
	}
	return ds
}

// parseDeclared reads PORT=SERVICE,SERVICE;PORT=SERVICE. A port may stand
// before any service and holds until the next port or semicolon; where none
// stands, the only one of the hints is meant.
func parseDeclared(value string, hints []nodecache.Hint) ([]nodecache.Declared, error) {
	byPort := map[uint16][]string{}
	for group := range strings.SplitSeq(value, ";") {
		var port uint16
		for entry := range strings.SplitSeq(group, ",") {
			service := entry
			if text, rest, found := strings.Cut(entry, "="); found {
				p, err := parsePort(text)
				if err != nil {
					return nil, err
				}
				port, service = p, rest
			}
			service = strings.TrimSpace(service)
			if !validService(service) {
				return nil, fmt.Errorf("%q is not the full name of a service", service)
			}
			if port == 0 {
				if len(hints) != 1 {
					return nil, fmt.Errorf("service %q has no port, and there are %d that it could be on", service, len(hints))
				}
				port = hints[0].Port
			}
			byPort[port] = append(byPort[port], service)
		}
	}
	ds := make([]nodecache.Declared, 0, len(byPort))
	for port, services := range byPort {
		services = slices.DeleteFunc(services, nodecache.Infrastructure)
		if len(services) == 0 {
			return nil, fmt.Errorf("port %d has no service that could be routed", port)
		}
		slices.Sort(services)
		ds = append(ds, nodecache.Declared{Port: port, Services: slices.Compact(services)})
	}
	slices.SortFunc(ds, func(a, b nodecache.Declared) int { return cmp.Compare(a.Port, b.Port) })
	return ds, nil
}

func parsePort(text string) (uint16, error) {
	port, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
	if err != nil || port == 0 {
		return 0, fmt.Errorf("%q is not a port (1 to 65535)", strings.TrimSpace(text))
	}
	return uint16(port), nil
}

// validService tells whether the name is one of the protobuf language: letters,
// digits and underscores between dots.
func validService(name string) bool {
	for part := range strings.SplitSeq(name, ".") {
		if part == "" || part[0] >= '0' && part[0] <= '9' {
			return false
		}
		for i := range len(part) {
			c := part[i]
			if c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
				return false
			}
		}
	}
	return true
}

// exports reads to whom the pod's services are exported.
func (t *template) exports(a annotation) string {
	if !a.there {
		return ""
	}
	to, bad := parseExport(a.value)
	for _, why := range bad {
		t.note(ExportAnnotation, a.value, "%s", why)
	}
	return to
}

// parseExport reads a list of namespaces, and says what in it is none.
func parseExport(value string) (export string, bad []string) {
	var to []string
	for ns := range strings.SplitSeq(value, ",") {
		switch ns = strings.TrimSpace(ns); {
		case ns == nodecache.ExportAll:
			return nodecache.ExportAll, bad
		case ns == "":
		case len(validation.IsDNS1123Label(ns)) > 0:
			bad = append(bad, fmt.Sprintf("%q is not a namespace", ns))
		default:
			to = append(to, ns)
		}
	}
	if to == nil {
		return nodecache.ExportNone, bad
	}
	slices.Sort(to)
	return strings.Join(slices.Compact(to), ","), bad
}

// collect reads what the pod says of being asked.
func (t *template) collect(a annotation) (off, on bool) {
	switch {
	case !a.there:
	case a.value == "false":
		off = true
	case a.value == "true":
		on = true
	default:
		t.note(CollectAnnotation, a.value, `it is neither "true" nor "false"`)
	}
	return off, on
}
