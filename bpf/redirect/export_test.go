package redirect

import "github.com/cilium/ebpf"

// Programs are the names of what is attached, with where.
func Programs() map[string]ebpf.AttachType {
	all := map[string]ebpf.AttachType{}
	for _, h := range hooks {
		all[h.name] = h.attach
	}
	return all
}

// Maps are the names of the pinned maps.
func Maps() []string { return pinnedMaps }

// OpenAs is Open of a version of this program that has other maps.
func OpenAs(o Options, change func(*ebpf.CollectionSpec)) (*Redirector, error) {
	was := load
	defer func() { load = was }()
	load = func() (*ebpf.CollectionSpec, error) {
		spec, err := loadRedirect()
		if err == nil {
			change(spec)
		}
		return spec, err
	}
	return Open(o)
}

// SetNext says which number is given next.
func (r *Redirector) SetNext(address uint32) { r.numbers.next = address }

// First and Last are the ends of the numbers.
const (
	First = first
	Last  = last
)
