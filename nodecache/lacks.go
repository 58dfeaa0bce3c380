package nodecache

import "slices"

// Lacks tells whether it is known that a pod of the owner does not serve the
// gRPC service on the port: it declares others there, or was found to serve
// others or to speak no plaintext gRPC. Where nothing is known it does not lack
// it, nor does it ever lack the plumbing of every server ([Infrastructure]). A
// nil owner is one of which nothing is known.
func (o *Owner) Lacks(p *Pod, port uint16, service string) bool {
	if Infrastructure(service) {
		return false
	}
	for i := range p.Declared {
		if p.Declared[i].Port == port {
			return !p.Declared[i].has(service)
		}
	}
	if o == nil || o.Info == nil {
		return false
	}
	for _, info := range o.Info.For(p) {
		if info.Port != port {
			continue
		}
		_, serves := slices.BinarySearchFunc(info.Services, service, compareName)
		return !serves && info.State != PortNoReflection && info.State != PortDenied
	}
	return false
}

// On returns what a pod of the owner is known to serve on the port, by its own
// declaration or by what was found, sorted; nil where it is known to serve
// nothing, or nothing is known.
func (o *Owner) On(p *Pod, port uint16) []string {
	for i := range p.Declared {
		if p.Declared[i].Port == port {
			return p.Declared[i].Services
		}
	}
	if o == nil || o.Info == nil {
		return nil
	}
	var names []string
	for _, info := range o.Info.For(p) {
		if info.Port == port {
			for _, s := range info.Services {
				names = append(names, s.Name)
			}
		}
	}
	return names
}
