package nodecache

import (
	"cmp"
	"fmt"
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
	// Ports is sorted by port.
	Ports     []PortInfo
	Origin    Origin
	Collected time.Time
	// Pod is namespace/name of the pod that was asked; empty if unknown.
	Pod string
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
	for _, p := range i.Ports {
		if len(p.Services) > 0 {
			return ""
		}
		line := fmt.Sprintf("port %d: %s", p.Port, p.State)
		if p.Detail != "" {
			line += ": " + p.Detail
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "; ")
}

// ports returns the ports that serve the service, sorted. A nil info has none.
func (i *Info) ports(service string) []uint16 {
	if i == nil {
		return nil
	}
	var ports []uint16
	for _, p := range i.Ports {
		if _, ok := slices.BinarySearchFunc(p.Services, service, compareName); ok {
			ports = append(ports, p.Port)
		}
	}
	return ports
}

func compareName(s Service, name string) int { return strings.Compare(s.Name, name) }

func knowledgeOf(info *Info) Knowledge {
	for _, p := range info.Ports {
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
	var ports []PortInfo
	for _, d := range declared {
		p := PortInfo{Port: d.Port, State: PortServes}
		for _, name := range d.Services {
			p.Services = append(p.Services, Service{Name: name, Undescribed: true})
		}
		ports = append(ports, p)
	}
	out := Info{Origin: OriginDeclared}
	if info != nil {
		out = *info
		for _, p := range info.Ports {
			if !slices.ContainsFunc(declared, func(d Declared) bool { return d.Port == p.Port }) {
				ports = append(ports, p)
			}
		}
		if knowledgeOf(info) == None {
			out.Origin = OriginDeclared
		}
	}
	slices.SortFunc(ports, func(a, b PortInfo) int { return cmp.Compare(a.Port, b.Port) })
	out.Ports = ports
	return &out
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
