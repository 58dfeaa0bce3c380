package resources

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// Named says what the authority of a call names, for callers of one namespace,
// and who there may get the call.
type Named struct {
	// Service and Port are what it names. Service is zero where it is a pod's
	// own address. Port 0 is the one on which the pod serves what is called.
	Service nodecache.Name
	Port    uint16
	// Pod is namespace/name of the one pod that it names; empty for all pods
	// behind the Service.
	Pod string
	// Reason says why it names nothing that can be called; empty if it does.
	Reason string
	// Members are who stands there, with those that get no call and why.
	Members []MemberView
	// Refused is set where of all who stand there it is known that they do not
	// serve what is called.
	Refused bool
	// Pending are the owners of pods there that have not been asked to the end.
	Pending []nodecache.OwnerKey
	// Alias is the authority by which a sidecar that has all clusters calls it;
	// empty where such a sidecar cannot. Known is set where it has a cluster for
	// what is called, Rest where it has none, and one for whatever is not known.
	// Where it has neither Silent says why, if only a word of the port is wanting.
	Alias       string
	Known, Rest bool
	Silent      string
}

// String is what is named, for people.
func (n *Named) String() string {
	switch {
	case n.Service == (nodecache.Name{}):
		return "pod " + n.Pod
	case n.Pod != "":
		return fmt.Sprintf("pod %s behind Service %s", n.Pod, n.Service)
	}
	return fmt.Sprintf("port %d of Service %s", n.Port, n.Service)
}

// Resolve says what the authority names for callers of the namespace, as their
// DNS would, and who there may get calls of the gRPC service: those behind the
// Service without the pods that are known not to serve it. Of an authority that
// [ByName] takes for a path alone it knows nothing.
func (c *Compiler) Resolve(dir Services, namespace, authority, service string) Named {
	r := &refresh{dir: dir, views: map[nodecache.Name]*nodecache.FrontView{}, owners: map[nodecache.OwnerKey]*nodecache.Owner{}}
	host, port := splitAuthority(authority)
	p := r.find(namespace, host, port)
	n := Named{Service: p.service, Port: p.port, Reason: p.reason}
	if p.reason != "" {
		return n
	}
	who := r.crowd(&p, service)
	n.Members, n.Refused, n.Pending = who.views(service), who.refuses(service), who.pending()
	if p.one && len(n.Members) > 0 {
		n.Pod = n.Members[0].Pod
	}
	r.aliased(&n, namespace, &p, who, service)
	c.published(&n, service)
	return n
}

// aliased says how a sidecar with all clusters calls what is named.
func (r *refresh) aliased(n *Named, namespace string, p *place, c crowd, service string) {
	v := r.view(n.Service)
	if v == nil || p.one || n.Service.Namespace != namespace || nodecache.Infrastructure(service) {
		return
	}
	fp, ok := portOf(v.Front, n.Port)
	if !ok || len(v.Ports) == 0 {
		return
	}
	n.Known = slices.Contains(c.services(), service)
	n.Rest = !n.Known && c.silent(fp)
	n.Alias = alias(n.Service, n.Port)
	if !n.Known && !n.Rest && !n.Refused && len(n.Pending) == 0 && len(n.Members) > 0 {
		n.Silent = fmt.Sprintf("nothing says that port %d of Service %s speaks gRPC, and nobody there is known to serve %s", n.Port, n.Service, service)
	}
}

// published corrects what sidecars with all clusters have by what was published
// for them: a cluster stays though nobody is left who could say what he serves.
func (c *Compiler) published(n *Named, service string) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	of, ok := c.aliases[xds.AliasScope(n.Service.Namespace)]
	if !ok || n.Alias == "" {
		return
	}
	has := of[n.Service]
	n.Known = has[atName(n.Alias, service)] != nil
	n.Rest = !n.Known && has[atPrefix+n.Alias] != nil
	if n.Known || n.Rest {
		n.Silent = ""
	}
}

// splitAuthority is what route.lua makes of an authority: in lower case,
// without the dot at the end of the host. port is empty, or a colon and digits.
func splitAuthority(authority string) (host, port string) {
	host = strings.ToLower(authority)
	if i := strings.LastIndexByte(host, ':'); i >= 0 && i < len(host)-1 && strings.Trim(host[i+1:], "0123456789") == "" {
		host, port = host[:i], host[i:]
	}
	host = strings.TrimSuffix(host, ".")
	return host, port
}

// place is what a host and port name.
type place struct {
	service nodecache.Name
	port    uint16 // as named, or by default; 0: the one that serves
	one     bool   // one pod alone is named
	aims    []aim
	reason  string
	// What the answer depends on: Services by name, whether or not they are
	// there, and an address.
	asked []nodecache.Name
	addr  netip.Addr
}

// aim is what stands there, and the port of its own to which calls go.
type aim struct {
	nodecache.FrontMember
	target uint16 // 0: the one that serves
	none   bool   // there is no such port
	addr   netip.Addr
}

// find looks a host up as a pod of the namespace would: by its DNS search list
// (ns.svc.cluster.local, svc.cluster.local, cluster.local), the name itself
// first where it has five dots (ndots:5), and addresses as they are.
func (r *refresh) find(namespace, host, port string) place {
	p := place{}
	if port != "" {
		n, err := strconv.ParseUint(port[1:], 10, 16)
		if err != nil || n == 0 {
			p.reason = fmt.Sprintf("%s is no port", port[1:])
			return p
		}
		p.port = uint16(n)
	}
	if addr, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		r.findAddr(&p, addr.Unmap())
		return p
	}
	for _, c := range searched(namespace, host) {
		p.asked = append(p.asked, c.service)
		v := r.view(c.service)
		if v == nil {
			continue
		}
		if c.pod == "" {
			r.findService(&p, v)
			return p
		}
		if v.Headless && v.External == "" {
			if m, ok := r.podOf(v, c.pod); ok {
				p.one = true
				r.findMembers(&p, v, []nodecache.FrontMember{m})
				return p
			}
		}
	}
	p.reason = "no Service and no pod of a headless Service has the name"
	return p
}

// dnsName is a name under svc.cluster.local.
type dnsName struct {
	service nodecache.Name
	pod     string // of a headless Service
}

func searched(namespace, host string) []dnsName {
	fulls := []string{host + "." + namespace + ".svc." + clusterDomain, host + ".svc." + clusterDomain, host + "." + clusterDomain, host}
	if strings.Count(host, ".") >= 5 {
		fulls = append(fulls[3:], fulls[:3]...)
	}
	var out []dnsName
	for _, full := range fulls {
		rest, ok := strings.CutSuffix(full, ".svc."+clusterDomain)
		labels := strings.Split(rest, ".")
		if !ok || slices.ContainsFunc(labels, func(l string) bool { return !label.MatchString(l) }) {
			continue
		}
		switch len(labels) {
		case 2:
			out = append(out, dnsName{service: nodecache.Name{Namespace: labels[1], Name: labels[0]}})
		case 3:
			out = append(out, dnsName{service: nodecache.Name{Namespace: labels[2], Name: labels[1]}, pod: labels[0]})
		}
	}
	return out
}

// podOf returns the pod that DNS knows by the label: by its host name, which
// for the pods of a StatefulSet is their own, or by its address with dashes.
func (r *refresh) podOf(v *nodecache.FrontView, name string) (nodecache.FrontMember, bool) {
	for _, m := range v.Members() {
		pod, ok := r.dir.Member(m.Pod)
		if !ok || m.Pod == "" {
			continue
		}
		if pod.Name == name || pod.Addr.IsValid() && strings.NewReplacer(".", "-", ":", "-").Replace(pod.Addr.String()) == name {
			return m, true
		}
	}
	return nodecache.FrontMember{}, false
}

func (r *refresh) findAddr(p *place, addr netip.Addr) {
	p.addr = addr
	if name, ok := r.dir.FrontAt(addr); ok {
		p.asked = append(p.asked, name)
		if v := r.view(name); v != nil {
			r.findService(p, v)
			return
		}
	}
	m, ok := r.dir.MemberAt(addr)
	if !ok {
		p.reason = "the address is no Service's and no pod's"
		return
	}
	p.one = true
	p.aims = []aim{{FrontMember: nodecache.FrontMember{Endpoint: nodecache.Endpoint{Pod: m.UID}}, target: p.port, addr: addr}}
}

// findService needs a Service that is there.
func (r *refresh) findService(p *place, v *nodecache.FrontView) {
	p.service = v.Key()
	switch {
	case v.External != "":
		p.reason = fmt.Sprintf("Service %s is but another name for %s (ExternalName), which a sidecar does not follow", v.Key(), v.External)
		return
	case p.port == 0 && len(v.Ports) > 0:
		p.port = defaultPort(v.Front)
	case p.port == 0:
		p.port = 80
	}
	if _, ok := portOf(v.Front, p.port); !ok && !v.Headless {
		var have []string
		for _, fp := range v.Ports {
			have = append(have, strconv.Itoa(int(fp.Port)))
		}
		p.reason = fmt.Sprintf("Service %s has no TCP port %d, it has %s", v.Key(), p.port, strings.Join(have, ", "))
		return
	}
	r.findMembers(p, v, v.Members())
}

// findMembers aims at pods of the Service. A headless one is but a name for its
// pods: a port of theirs means itself, as if they were dialled, any other the
// Service's port.
func (r *refresh) findMembers(p *place, v *nodecache.FrontView, ms []nodecache.FrontMember) {
	p.service = v.Key()
	if p.port == 0 {
		p.port = 80
		if len(v.Ports) > 0 {
			p.port = defaultPort(v.Front)
		}
	}
	fp, listed := portOf(v.Front, p.port)
	for _, m := range ms {
		a := aim{FrontMember: m, target: p.port}
		own := v.Headless && slices.ContainsFunc(m.Ports, func(sp nodecache.SlicePort) bool { return sp.Port == p.port })
		if listed && !own {
			target, ok := targetOf(m, fp)
			a.target, a.none = target, !ok
		}
		p.aims = append(p.aims, a)
	}
}

// standee is one that stands at a place.
type standee struct {
	endpoint
	member nodecache.Member // zero where there is no pod
	owner  *nodecache.Owner // nil where there is no pod, or nothing is known
	addrs  []netip.Addr     // where there is no pod
	target uint16
	absent Absence // whatever is called
}

// lacks tells whether it is known not to serve what is called; an empty service
// is any.
func (s *standee) lacks(service string) bool {
	return service != "" && s.member.Pod != nil && s.owner.Lacks(s.member.Pod, s.target, service)
}

// crowd is who stands at a place.
type crowd []standee

// crowd needs what is called only where the place leaves the port open.
func (r *refresh) crowd(p *place, service string) crowd {
	c := make(crowd, len(p.aims))
	for i, a := range p.aims {
		s := &c[i]
		s.addrs, s.target = a.Addrs, a.target
		if pod, ok := r.dir.Member(a.Pod); ok && a.Pod != "" {
			s.member, s.owner = pod, r.owner(pod.Owner)
			if s.target == 0 {
				s.target = servedOn(s.owner, pod, service)
			}
		}
		if a.none {
			s.absent = NoSuchPort
			continue
		}
		if s.endpoint, s.absent = r.placeAt(a.FrontMember, s.target, ""); a.addr.IsValid() && s.absent == "" {
			s.addr = netip.AddrPortFrom(a.addr, s.target)
		}
	}
	return c
}

// servedOn is the port of a pod on which it serves what is called, 80 where
// that is not known.
func servedOn(o *nodecache.Owner, m nodecache.Member, service string) uint16 {
	if o != nil {
		for _, t := range o.Targets(service) {
			if t.Pod.UID == m.UID {
				return t.Addr.Port()
			}
		}
	}
	return 80
}

// endpoints are where calls of a gRPC service go.
func (c crowd) endpoints(service string) []endpoint {
	var es []endpoint
	for i := range c {
		if s := &c[i]; s.absent == "" && !s.lacks(service) {
			es = append(es, s.endpoint)
		}
	}
	return tidy(es)
}

// refuses tells whether it is known of all that a gRPC service is not served
// there. Of a place where nobody is, that is not known.
func (c crowd) refuses(service string) bool {
	lacking := false
	for i := range c {
		s := &c[i]
		switch {
		case s.absent == NoSuchPort:
		case !s.lacks(service):
			return false
		default:
			lacking = true
		}
	}
	return lacking
}

// pending are the owners that have not been asked to the end. Who cannot be
// asked is not waited for.
func (c crowd) pending() []nodecache.OwnerKey {
	var keys []nodecache.OwnerKey
	for i := range c {
		s := &c[i]
		if s.owner != nil && s.absent == "" && unasked(s.owner) && !slices.Contains(keys, s.owner.Key) {
			keys = append(keys, s.owner.Key)
		}
	}
	return keys
}

func unasked(o *nodecache.Owner) bool {
	return o.Info == nil && len(o.Pods) > 0 &&
		(o.Knowledge == nodecache.Collecting || o.Knowledge == nodecache.Unknown && o.WhyNotAsked("") == "")
}

// views shows who stands there, in order.
func (c crowd) views(service string) []MemberView {
	es := c.endpoints(service)
	var out []MemberView
	for i := range c {
		s := &c[i]
		mv := MemberView{Absent: s.absent, Port: s.target}
		if s.member.Pod != nil {
			mv.UID = s.member.UID
		}
		if s.absent == "" && s.lacks(service) {
			mv.Absent = Lacking
		}
		switch {
		case mv.Absent == "":
			mv.EndpointView = s.view()
			if !slices.ContainsFunc(es, func(e endpoint) bool { return e.addr == s.addr && e.pod.UID == s.pod.UID }) {
				mv.Absent = SameAddress
			}
		case s.member.Pod != nil:
			mv.Pod, mv.Node, mv.Owner = s.member.String(), s.member.Node, s.member.Owner
		case len(s.addrs) > 0:
			mv.Address = s.addrs[0].String()
		}
		out = append(out, mv)
	}
	return out
}

// atName is the name of the cluster for calls to an authority.
func atName(authority, service string) string { return atPrefix + authority + "/" + service }

const atPrefix = "at/"

// anyOther stands for a gRPC service that nobody is known to have.
const anyOther = "?"
