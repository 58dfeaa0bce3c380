package resources

import (
	"cmp"
	"slices"

	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	transcoderv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/grpc_json_transcoder/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
	"github.com/fingerpost/fingerpost/xds/resources/transcode"
)

const transcoderName = "envoy.filters.http.grpc_json_transcoder"

// transcoder stands in the listener and does nothing but on routes that bring
// descriptors: these may change, the listener may not.
func transcoder() *hcmv3.HttpFilter {
	return &hcmv3.HttpFilter{
		Name:     transcoderName,
		Disabled: true,
		ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: pack(&transcoderv3.GrpcJsonTranscoder{
			DescriptorSet: &transcoderv3.GrpcJsonTranscoder_ProtoDescriptorBin{ProtoDescriptorBin: []byte{}},
		})},
	}
}

// program is what the descriptors of one port are worth, by their hash.
type program struct {
	set    *transcode.Set // nil until they are linked, or where they do not link
	config *anypb.Any     // of the filter; nil where nothing is transcoded
	// refused says why they do not link.
	refused string
}

// Unlinked returns the ports whose descriptors should be linked, each once.
// Linking costs CPU: it is done elsewhere, and [Compiler.Linked] told.
func (c *Compiler) Unlinked() []*nodecache.PortInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.unlinked
	c.unlinked = nil
	return out
}

// Linked takes what [transcode.Link] made of a port's descriptors, and returns
// what follows. Descriptors that do not link change nothing.
func (c *Compiler) Linked(dir Services, p *nodecache.PortInfo, set *transcode.Set, err error) xds.Update {
	c.mu.Lock()
	defer c.mu.Unlock()
	prog := c.programs[p.Hash]
	if prog == nil {
		return xds.Update{} // nobody needs it any more
	}
	if err != nil {
		prog.refused = err.Error()
		return xds.Update{}
	}
	if prog.set = set; len(set.Services) == 0 {
		return xds.Update{}
	}
	prog.config = pack(&transcoderv3.GrpcJsonTranscoder{
		DescriptorSet:     &transcoderv3.GrpcJsonTranscoder_ProtoDescriptorBin{ProtoDescriptorBin: set.Descriptors},
		Services:          set.Services,
		ConvertGrpcStatus: true,
		// Of what no rule takes nothing is known: it may be the server's own.
		RequestValidationOptions: &transcoderv3.GrpcJsonTranscoder_RequestValidationOptions{RejectUnknownQueryParameters: true},
	})
	r := c.refresh(dir)
	for _, f := range c.fronts {
		for _, hash := range f.programs {
			if hash == p.Hash {
				r.soil(f.users)
			}
		}
	}
	return r.finish()
}

// programOf returns the hash of the descriptors that count for calls of a
// backend; empty if there are none with HTTP rules. Over a rollout the older
// owner's count as long as it has pods: what only the new one has would fail on
// the others.
func (r *refresh) programOf(id backendID) string {
	v := r.view(id.service)
	if v == nil {
		return ""
	}
	port, ok := portOf(v.Front, id.port)
	if !ok {
		return ""
	}
	var oldest *nodecache.Owner
	var best *nodecache.PortInfo
	for _, m := range v.Members() {
		target, ok := targetOf(m, port)
		pod, there := r.dir.Member(m.Pod)
		if !ok || !there {
			continue
		}
		o := r.owner(pod.Owner)
		if o == nil || o.Info == nil || o == oldest || oldest != nil && compareAges(oldest, o) < 0 {
			continue
		}
		for _, p := range o.Info.For(pod.Pod) {
			if p.Port == target && p.Hash != "" && r.c.knows(&p) {
				oldest, best = o, &p
			}
		}
	}
	if best == nil {
		return ""
	}
	return best.Hash
}

func compareAges(a, b *nodecache.Owner) int {
	return cmp.Or(a.Created.Compare(b.Created), compareKeys(a.Key, b.Key))
}

// knows needs mu. It tells whether the port's descriptors have HTTP rules, and
// asks for them to be linked where they were not yet.
func (c *Compiler) knows(p *nodecache.PortInfo) bool {
	if c.programs[p.Hash] != nil {
		return true
	}
	if !transcode.Annotated(p) {
		return false
	}
	c.programs[p.Hash] = &program{}
	c.unlinked = append(c.unlinked, p)
	return true
}

// transcodes needs mu, for reading at least. It returns the program whose
// descriptors count for the calls of a rule: that of the first backend which
// has one; nil if nothing is transcoded.
func (c *Compiler) transcodes(kind nodecache.RouteKind, rule *nodecache.RouteRule) *program {
	if kind != nodecache.HTTPRoute || slices.ContainsFunc(rule.Filters, func(f nodecache.RouteFilter) bool {
		return f.Type == nodecache.FilterRedirect || f.PathOp != nodecache.PathKeep
	}) {
		return nil // the path of such a call is not what the descriptors say
	}
	for _, b := range rule.Backends {
		if b.Weight == 0 || b.Refused != "" || c.fronts[b.Service] == nil {
			continue
		}
		hash := c.fronts[b.Service].programs[backendID{service: b.Service, port: b.Port}]
		if p := c.programs[hash]; p != nil && p.config != nil {
			return p
		}
	}
	return nil
}

// whyNot needs mu, for reading at least. It says why the descriptors of a
// rule's backends are not used, empty if there are none that might be.
func (c *Compiler) whyNot(rule *nodecache.RouteRule) string {
	for _, b := range rule.Backends {
		if f := c.fronts[b.Service]; f != nil {
			if p := c.programs[f.programs[backendID{service: b.Service, port: b.Port}]]; p != nil && p.refused != "" {
				return b.Service.String() + ": " + p.refused
			}
		}
	}
	return ""
}

// transcodedRoutes are the routes for calls of an entry that were transcoded:
// Envoy looks for a route again then, by the path of the gRPC call. How the
// call came stands in two headers that the filter writes.
func transcodedRoutes(e routetable.Entry, to []share, services []string) ([]*routev3.Route, error) {
	var out []*routev3.Route
	for _, service := range services {
		narrowed := slices.Clone(to)
		for i := range narrowed {
			if narrowed[i].id != (backendID{}) {
				narrowed[i].id = narrowed[i].id.calling(service)
			}
		}
		for _, path := range originalPaths(e.On()) {
			match, err := envoyMatch(e)
			if err != nil {
				return nil, err
			}
			match.PathSpecifier = &routev3.RouteMatch_Prefix{Prefix: "/" + service + "/"}
			match.QueryParameters = nil // they are in the message now
			for _, h := range match.Headers {
				if h.Name == ":method" {
					h.Name = "x-envoy-original-method"
				}
			}
			match.Headers = append(match.Headers, path)
			rs, err := entryActions(e, match, narrowed)
			if err != nil {
				return nil, err
			}
			out = append(out, rs...)
		}
	}
	return out, nil
}

// originalPaths match the path by which a call came, with its query.
func originalPaths(m *nodecache.RouteMatch) []*routev3.HeaderMatcher {
	header := func(by *matcherv3.StringMatcher) *routev3.HeaderMatcher {
		return &routev3.HeaderMatcher{
			Name:                 "x-envoy-original-path",
			HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: by},
		}
	}
	exact := func(p string) *routev3.HeaderMatcher { return header(value(p, nodecache.MatchExact)) }
	begins := func(p string) *routev3.HeaderMatcher {
		return header(&matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: p}})
	}
	prefix := routetable.Prefix(m.Path)
	switch {
	case m.PathType == nodecache.MatchExact:
		return []*routev3.HeaderMatcher{exact(m.Path), begins(m.Path + "?")}
	case m.PathType == nodecache.MatchRegex || prefix == "":
		return []*routev3.HeaderMatcher{begins("/")}
	}
	return []*routev3.HeaderMatcher{exact(prefix), begins(prefix + "/"), begins(prefix + "?")}
}
