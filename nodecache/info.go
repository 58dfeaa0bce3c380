package nodecache

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"
	"unique"
)

// Knowledge says what is known of what an owner serves.
type Knowledge uint8

const (
	// Unknown: nobody has asked yet. It never removes anything. It is the
	// zero value.
	Unknown Knowledge = iota
	// Collecting: a collect is under way.
	Collecting
	// Known: the owner has services.
	Known
	// None: the owner was asked, or need not be asked, and has no service
	// that could be called.
	None
	// Failed: asking failed and will be tried again.
	Failed
)

// String is unknown, collecting, known, none or failed.
func (k Knowledge) String() string {
	return [...]string{"unknown", "collecting", "known", "none", "failed"}[k]
}

// Settled tells whether the knowledge is the end of asking, so that the
// absence of a service from it is evidence.
func (k Knowledge) Settled() bool { return k == Known || k == None }

// Origin says where an [Info] came from.
type Origin string

// The origins. The empty Origin stands for no knowledge.
const (
	OriginSelf       Origin = "self"
	OriginPeer       Origin = "peer"
	OriginCheckpoint Origin = "checkpoint"
	OriginDeclared   Origin = "declared"
)

// PortState says what a port turned out to be.
type PortState string

// The port states. Only PortServes has services.
const (
	PortServes       PortState = "grpc"
	PortEmpty        PortState = "empty"         // answers, and lists no service but infrastructure
	PortNoReflection PortState = "no-reflection" // speaks gRPC and knows no reflection
	PortDenied       PortState = "denied"        // refuses reflection to us
	PortTLS          PortState = "tls"           // speaks TLS
	PortNotGRPC      PortState = "not-grpc"      // speaks something else
)

// Info is what was learned of an owner. It is immutable and shared.
type Info struct {
	// Ports is sorted by port. It holds for every pod that no variant names.
	Ports     []PortInfo
	Origin    Origin
	Collected time.Time
	// Pod is namespace/name of the pod that was asked; empty if unknown.
	Pod string
	// Images are the [Pod.Images] on which Ports was seen, sorted; empty where
	// that is not known.
	Images []string
	// Variants are the pods that serve something else than Ports, at most
	// [MaxVariants]. An owner that has some is heterogeneous.
	Variants []Variant
}

// MaxVariants bounds the variants of an owner. What goes beyond is not kept.
const MaxVariants = 8

// Variant is what some pods of an owner serve where it differs from what the
// others do.
type Variant struct {
	// Images is the [Pod.Images] for which it holds. Where Pod is set, that
	// pod's word was another than that of pods with the same images.
	Images string
	// Pod is the UID of the one pod for which it holds; empty for all pods with
	// the images.
	Pod string
	// Ports is sorted by port.
	Ports     []PortInfo
	Collected time.Time
	// From is namespace/name of the pod that was asked.
	From string
}

// For returns what is known of a pod of the owner, sorted by port: the word of
// its own, else of its images, else what holds for the owner.
func (i *Info) For(p *Pod) []PortInfo { return i.program(i.index(p)) }

// Variant returns the variant that holds for a pod of the owner, nil where the
// info itself does.
func (i *Info) Variant(p *Pod) *Variant {
	if n := i.index(p); n >= 0 {
		return &i.Variants[n]
	}
	return nil
}

// index is that of the variant of a pod, -1 where it has none.
func (i *Info) index(p *Pod) int {
	at := -1
	for n := range i.Variants {
		switch v := &i.Variants[n]; {
		case v.Pod == p.UID && v.Pod != "":
			return n
		case v.Pod == "" && v.Images == p.Images:
			at = n
		}
	}
	return at
}

func (i *Info) program(index int) []PortInfo {
	if index < 0 {
		return i.Ports
	}
	return i.Variants[index].Ports
}

// All yields every port of the info, those of its variants after the others.
func (i *Info) All() iter.Seq[*PortInfo] {
	return func(yield func(*PortInfo) bool) {
		for v := -1; v < len(i.Variants); v++ {
			for ports, p := i.program(v), 0; p < len(ports); p++ {
				if !yield(&ports[p]) {
					return
				}
			}
		}
	}
}

// PortInfo is what was learned of one port.
type PortInfo struct {
	Port  uint16
	State PortState
	// Detail is one line that says more of a state without services.
	Detail string
	// Services is sorted by name.
	Services []Service
	// Files are serialized FileDescriptorProtos, equal ones shared between
	// all owners; sorted, without duplicates.
	Files []unique.Handle[string]
	// Linkable tells whether Files look complete and sound enough to be linked,
	// as transcoding needs. Names and methods do not depend on it.
	Linkable bool
	// Hash is a hash of Services and Files, equal for equal content on every
	// node.
	Hash string
}

// Service is a gRPC service that a port serves.
type Service struct {
	Name string
	// Methods is sorted; empty if Undescribed.
	Methods []string
	// Undescribed services were listed without a descriptor. They are routed
	// all the same.
	Undescribed bool
}

// Reason says in one line why the info has no services; empty if it has.
func (i *Info) Reason() string {
	var lines []string
	for p := range i.All() {
		if len(p.Services) > 0 {
			return ""
		}
		line := fmt.Sprintf("port %d: %s", p.Port, p.State)
		if p.Detail != "" {
			line += ": " + p.Detail
		}
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "; ")
}

// portsOf returns those of the ports that serve the service, sorted.
func portsOf(infos []PortInfo, service string) []uint16 {
	var ports []uint16
	for _, p := range infos {
		if _, ok := slices.BinarySearchFunc(p.Services, service, compareName); ok {
			ports = append(ports, p.Port)
		}
	}
	return ports
}

func compareName(s Service, name string) int { return strings.Compare(s.Name, name) }

func knowledgeOf(info *Info) Knowledge {
	for p := range info.All() {
		if len(p.Services) > 0 {
			return Known
		}
	}
	return None
}

// withDeclared returns info (nil if there is none) as it is for one who may
// see no pods: a declared port stands in it with the services declared.
func withDeclared(info *Info, declared []Declared) *Info {
	if len(declared) == 0 {
		return info
	}
	out := Info{Origin: OriginDeclared}
	if info != nil {
		out = *info
		if knowledgeOf(info) == None {
			out.Origin = OriginDeclared
		}
	}
	out.Ports = addDeclared(out.Ports, declared)
	out.Variants = slices.Clone(out.Variants)
	for n := range out.Variants {
		out.Variants[n].Ports = addDeclared(out.Variants[n].Ports, declared)
	}
	return &out
}

func addDeclared(learned []PortInfo, declared []Declared) []PortInfo {
	var ports []PortInfo
	for _, d := range declared {
		p := PortInfo{Port: d.Port, State: PortServes}
		for _, name := range d.Services {
			p.Services = append(p.Services, Service{Name: name, Undescribed: true})
		}
		ports = append(ports, p)
	}
	for _, p := range learned {
		if !slices.ContainsFunc(declared, func(d Declared) bool { return d.Port == p.Port }) {
			ports = append(ports, p)
		}
	}
	slices.SortFunc(ports, func(a, b PortInfo) int { return cmp.Compare(a.Port, b.Port) })
	return ports
}

// Infrastructure tells whether a service belongs to the plumbing that every
// server has (health, reflection, channelz): such a service is never served by
// its path alone.
func Infrastructure(service string) bool {
	for _, p := range [...]string{"grpc.health.", "grpc.reflection.", "grpc.channelz."} {
		if strings.HasPrefix(service, p) {
			return true
		}
	}
	return false
}
