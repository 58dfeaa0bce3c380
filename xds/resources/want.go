package resources

import (
	"net/netip"
	"slices"
	"strings"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	headermutationv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	codecv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/upstream_codec/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
)

// NodeHeader is the request header in which a sidecar says its node id to
// unknown.sock.
const NodeHeader = "fingerpost-node"

// Anybody is the pod in the node id of calls that come by what stands in for a
// cluster, which is the same for all clients of a namespace that fetch their
// clusters on demand. No pod has the name.
const Anybody = "~"

// wants is what clients with clusters on demand have asked for.
type wants struct {
	byName map[wantID]*want
	// Who depends on a Service, there or not, and on an address.
	byService map[nodecache.Name]map[*want]struct{}
	byAddr    map[netip.Addr]map[*want]struct{}
	// redirected are those of redirected calls.
	redirected map[*want]struct{}
	// stale are those whose address's pod changed.
	stale map[*want]struct{}
	// fallbacks counts who needs what stands in for a name.
	fallbacks map[xds.ID]int
}

type wantID struct{ namespace, name string }

// want is a cluster by the name of a Service or a pod that clients of a
// namespace have asked for.
type want struct {
	wantID
	authority, service string
	number             netip.Addr // in place of the authority; of redirected calls
	users              int
	place              place    // as last found
	made               *backend // nil while the name leads nowhere
	dial               *dial    // which this is of; nil: a cluster of Envoys
}

func newWants() wants {
	return wants{
		byName: map[wantID]*want{}, byService: map[nodecache.Name]map[*want]struct{}{},
		byAddr: map[netip.Addr]map[*want]struct{}{}, redirected: map[*want]struct{}{}, stale: map[*want]struct{}{}, fallbacks: map[xds.ID]int{},
	}
}

// parseWanted reads the name of a cluster that a client of the namespace may
// ask for: authority is empty where it is that of a gRPC service alone, or of
// redirected calls.
func parseWanted(namespace, name string) (authority, service string, ok bool) {
	if strings.HasPrefix(name, toPrefix) {
		_, service, ok = parseTo(name)
		return "", service, ok
	}
	if rest, at := strings.CutPrefix(name, atPrefix); at {
		i := strings.LastIndexByte(rest, '/')
		if i < 0 || i > longestAuthority {
			return "", "", false
		}
		authority, service = rest[:i], rest[i+1:]
	} else if service, ok = strings.CutPrefix(name, namespace+"/"); !ok {
		return "", "", false
	}
	return authority, service, len(service) <= longestService && callPath.MatchString("/"+service+"/M")
}

// Want makes what is to be there under the names for one more client of the
// namespace, which has unknown.sock at the path: clusters by Service names, and
// for every name what stands in for it while nobody has it. Names for which
// nobody can ask are passed over, and so are those that nobody has from the
// room'th on; known are the others. It costs what the names cost.
func (c *Compiler) Want(dir Services, namespace, socket string, names []string, room int) (u xds.Update, known []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.refresh(dir)
	for _, name := range names {
		authority, service, ok := parseWanted(namespace, name)
		if !ok {
			continue
		}
		var w *want
		if strings.HasPrefix(name, atPrefix) || strings.HasPrefix(name, toPrefix) {
			id := wantID{namespace, name}
			if w = c.wants.byName[id]; w == nil {
				w = &want{wantID: id, authority: authority, service: service}
				c.wants.byName[id] = w
				if w.number, _, ok = parseTo(name); ok {
					c.wants.redirected[w] = struct{}{}
				}
				r.makeWanted(w, &u)
			}
			w.users++
		}
		if !c.has(namespace, name) {
			if room <= 0 {
				c.unwant(w, &u)
				continue
			}
			room--
		}
		known = append(known, name)
		id := xds.ID{Type: xds.Cluster, Name: name, Scope: xds.FallbackScope(namespace, socket)}
		if c.wants.fallbacks[id]++; c.wants.fallbacks[id] == 1 {
			c.build(id, func() proto.Message { return fallback(namespace, name, socket) }, nil, &u)
		}
	}
	return u, known
}

// Unwant takes back what [Compiler.Want] said for names that it returned.
func (c *Compiler) Unwant(namespace, socket string, names []string) (u xds.Update) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range names {
		c.unwant(c.wants.byName[wantID{namespace, name}], &u)
		id := xds.ID{Type: xds.Cluster, Name: name, Scope: xds.FallbackScope(namespace, socket)}
		if c.wants.fallbacks[id]--; c.wants.fallbacks[id] == 0 {
			delete(c.wants.fallbacks, id)
			u.Remove = append(u.Remove, id)
		}
	}
	return u
}

// unwant needs mu. It takes one user from a want, which may be nil.
func (c *Compiler) unwant(w *want, u *xds.Update) {
	if w == nil {
		return
	}
	if w.users--; w.users == 0 {
		c.wants.depend(w, place{})
		w.publish(nil, u)
		delete(c.wants.byName, w.wantID)
		delete(c.wants.stale, w)
		delete(c.wants.redirected, w)
	}
}

// Found returns those of the names under which clients of the namespace find
// somebody: that of a Service or a pod only while a client wants it.
func (c *Compiler) Found(namespace string, names []string) (found []string) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, name := range names {
		if c.has(namespace, name) {
			found = append(found, name)
		}
	}
	return found
}

// Wanted counts the clusters that clients have asked for by the name of a Service
// or a pod: those that lead to somebody, and those that do not.
func (c *Compiler) Wanted() (found, lost int) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, w := range c.wants.byName {
		if w.made != nil {
			found++
		} else {
			lost++
		}
	}
	return found, lost
}

// has needs mu, for reading at least.
func (c *Compiler) has(namespace, name string) bool {
	if w := c.wants.byName[wantID{namespace, name}]; w != nil {
		return w.made != nil
	}
	service, ok := strings.CutPrefix(name, namespace+"/")
	s := c.services[serviceID{namespace, service}]
	return ok && s != nil && s.cluster != nil
}

// wanted needs mu. It writes what changes for those who depend on the Services,
// or on addresses whose pods changed.
func (r *refresh) wanted(names []nodecache.Name, u *xds.Update) {
	ws := &r.c.wants
	touched := ws.stale
	ws.stale = map[*want]struct{}{}
	for _, name := range names {
		for w := range ws.byService[name] {
			touched[w] = struct{}{}
		}
		if v := r.view(name); v != nil && len(ws.byAddr) > 0 {
			for _, ip := range v.ClusterIPs {
				for w := range ws.byAddr[ip] {
					touched[w] = struct{}{}
				}
			}
		}
	}
	for _, w := range sorted(touched, func(a, b *want) int { return strings.Compare(a.namespace+" "+a.name, b.namespace+" "+b.name) }) {
		r.makeWanted(w, u)
	}
}

// makeWanted needs mu. It finds out where the name leads, and publishes that.
func (r *refresh) makeWanted(w *want, u *xds.Update) {
	if w.dial != nil {
		r.makeDial(w.dial, u)
		return
	}
	var p place
	if !w.number.IsValid() {
		host, port := splitAuthority(w.authority)
		p = r.find(w.namespace, host, port)
	} else if to, ok := r.c.destination(w.number); ok {
		p.port = to.Port()
		r.findAddr(&p, to.Addr().Unmap())
	} else {
		p.reason = "the number is no destination's"
	}
	r.c.wants.depend(w, p)
	var made *backend
	if p.reason == "" {
		if crowd := r.crowd(&p, w.service); !crowd.refuses(w.service) {
			policy, write := r.policy(&p, crowd, w.made), cluster
			if w.service == "" {
				write = callersCluster
			}
			made = r.c.pairOf(w.name, xds.DemandScope(w.namespace), func() *clusterv3.Cluster { return write(w.name, policy) },
				crowd.endpoints(w.service), policy, w.made, u)
		}
	}
	w.publish(made, u)
}

// publish takes note of what was made; nil ends what was there.
func (w *want) publish(made *backend, u *xds.Update) {
	if made == nil && w.made != nil {
		u.Remove = append(u.Remove, w.made.cluster.ID, w.made.cla.ID)
	}
	w.made = made
}

// depend notes on what the answer to a want depends.
func (ws *wants) depend(w *want, p place) {
	for _, name := range w.place.asked {
		if delete(ws.byService[name], w); len(ws.byService[name]) == 0 {
			delete(ws.byService, name)
		}
	}
	if delete(ws.byAddr[w.place.addr], w); len(ws.byAddr[w.place.addr]) == 0 {
		delete(ws.byAddr, w.place.addr)
	}
	w.place = place{asked: p.asked, addr: p.addr}
	for _, name := range p.asked {
		if ws.byService[name] == nil {
			ws.byService[name] = map[*want]struct{}{}
		}
		ws.byService[name][w] = struct{}{}
	}
	if p.addr.IsValid() {
		if ws.byAddr[p.addr] == nil {
			ws.byAddr[p.addr] = map[*want]struct{}{}
		}
		ws.byAddr[p.addr][w] = struct{}{}
	}
}

// moved notes whose addresses an owner's change concerns.
func (ws *wants) moved(old *owner, view *nodecache.Owner) {
	if len(ws.byAddr) == 0 {
		return
	}
	views := []*nodecache.Owner{view}
	if old != nil {
		views = append(views, old.view)
	}
	for _, o := range views {
		if o == nil {
			continue
		}
		for _, m := range o.Pods {
			for _, a := range append(slices.Clone(m.More), m.Addr) {
				for w := range ws.byAddr[a.Unmap()] {
					ws.stale[w] = struct{}{}
				}
			}
		}
	}
}

// fallback stands in for a cluster that nobody has: Envoy asks once for a name,
// and a call to one that is answered with nothing waits for its time-out from
// then on (tried with Envoy 1.40). The socket's server says what is known.
func fallback(namespace, name, socket string) *clusterv3.Cluster {
	c := cluster(name, nil)
	c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC}
	c.EdsClusterConfig, c.OutlierDetection, c.CommonLbConfig = nil, nil, nil
	c.LoadAssignment = &endpointv3.ClusterLoadAssignment{ClusterName: name, Endpoints: []*endpointv3.LocalityLbEndpoints{{
		LbEndpoints: []*endpointv3.LbEndpoint{{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{
			Address: &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: socket}}},
		}}}},
	}}}
	options := &upstreamv3.HttpProtocolOptions{
		// A connection that stays would be most of what a name costs.
		CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{MaxRequestsPerConnection: number(1)},
		UpstreamProtocolOptions: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
					Http2ProtocolOptions: &corev3.Http2ProtocolOptions{},
				},
			},
		},
		HttpFilters: SaysNode(namespace + "/" + Anybody),
	}
	c.TypedExtensionProtocolOptions = map[string]*anypb.Any{httpProtocolOptions: pack(options)}
	return c
}

// SaysNode are the upstream filters of a cluster that leads to unknown.sock. The
// header that they write tells the agent who calls; the application's own, if it
// sends one, does not count.
func SaysNode(id string) []*hcmv3.HttpFilter {
	return []*hcmv3.HttpFilter{
		{
			Name: "envoy.filters.http.header_mutation",
			ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: pack(&headermutationv3.HeaderMutation{
				Mutations: &headermutationv3.Mutations{RequestMutations: []*mutationv3.HeaderMutation{{
					Action: &mutationv3.HeaderMutation_Append{Append: &corev3.HeaderValueOption{
						Header: &corev3.HeaderValue{
							Key: NodeHeader,
							// A percent sign would begin a command operator.
							Value: strings.ReplaceAll(id, "%", "%%"),
						},
						AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
					}},
				}}},
			})},
		},
		{
			Name:       "envoy.filters.http.upstream_codec",
			ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: pack(&codecv3.UpstreamCodec{})},
		},
	}
}
