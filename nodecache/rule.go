package nodecache

import "time"

// RouteKind is the kind of a [Route].
type RouteKind uint8

// The kinds of routes of the Gateway API of which the agent knows.
const (
	HTTPRoute RouteKind = iota
	GRPCRoute
)

// String is the kind as the API has it.
func (k RouteKind) String() string {
	if k == GRPCRoute {
		return "GRPCRoute"
	}
	return "HTTPRoute"
}

// RouteParent is what a [Route] is attached to.
type RouteParent struct {
	// Group and Kind are as the API has them, defaults filled in; both count:
	// a Gateway may have the name of a Service.
	Group, Kind string
	Name        Name
	Section     string // sectionName; empty for all
	Port        uint16 // 0 for all
}

// Service tells whether the parent is a Service.
func (p RouteParent) Service() bool { return p.Group == "" && p.Kind == "Service" }

// RouteRule is one rule of a [Route].
type RouteRule struct {
	Name string
	// Matches is never empty: a rule without any has the one that the API
	// gives it, the path prefix /.
	Matches  []RouteMatch
	Filters  []RouteFilter
	Backends []RouteBackend
	// Timeout and BackendTimeout are timeouts.request and
	// timeouts.backendRequest; negative where the rule has none, 0 for none
	// ever.
	Timeout, BackendTimeout time.Duration
	// Retry is nil where the rule has none.
	Retry *RouteRetry
	// Refused says why the rule cannot be served, as an unknown type of match or
	// filter: the reason of the condition Accepted, as UnsupportedValue; empty
	// where it can. A refused rule matches nothing. Detail says what it is
	// about, for people.
	Refused, Detail string
}

// MatchType says how a value is compared.
type MatchType uint8

// The types of matches. MatchPrefix is by path element, and for paths alone.
const (
	MatchExact MatchType = iota
	MatchPrefix
	MatchRegex
)

// RouteMatch is one match of a [RouteRule]. All of it must hold.
type RouteMatch struct {
	// Path is of an HTTPRoute, empty in a GRPCRoute.
	Path     string
	PathType MatchType
	Verb     string // HTTP method; empty for any
	// Service and Method are of a GRPCRoute; empty for any.
	Service, Method string
	MethodType      MatchType
	Headers         []ValueMatch
	Query           []ValueMatch
}

// ValueMatch compares the value of one header or query parameter.
type ValueMatch struct {
	Name, Value string
	Type        MatchType
}

// RouteBackend is a Service to which a rule sends a share of its calls.
type RouteBackend struct {
	Service Name
	Port    uint16
	// Weight is the share, of the sum over the rule; 0 for no calls.
	Weight  uint32
	Filters []RouteFilter
	// Granted is set where the Service's namespace agrees: it is that of the
	// route, or a ReferenceGrant there permits the reference. A mesh route may
	// refer to other namespaces without (GEP-1294).
	Granted bool
	// Refused is the reason of the condition ResolvedRefs where the reference
	// itself may not be followed (InvalidKind, RefNotPermitted); empty where it
	// may. Its share of the calls fails.
	Refused string
}

// FilterType is the type of a [RouteFilter].
type FilterType uint8

// The filters that are served.
const (
	FilterRequestHeaders FilterType = iota
	FilterResponseHeaders
	FilterRedirect
	FilterRewrite
)

// RouteFilter is one filter of a rule or backend. What does not belong to its
// type is zero.
type RouteFilter struct {
	Type FilterType
	// Set, Add and Remove are of the header filters.
	Set, Add []Header
	Remove   []string
	// The rest is of redirects and rewrites. Port and Status are 0 where the
	// filter names none.
	Scheme, Hostname string
	Port             uint16
	Status           int
	// ReplacePath is the new path (PathFull) or the new prefix (PathPrefix).
	PathOp      PathOp
	ReplacePath string
}

// Header is a header that a filter writes.
type Header struct{ Name, Value string }

// PathOp says what a filter does to the path.
type PathOp uint8

// What a filter does to the path.
const (
	PathKeep PathOp = iota
	PathFull
	PathPrefix
)

// RouteRetry is the retry policy of a rule (GEP-1731).
type RouteRetry struct {
	Codes    []int // HTTP status codes
	Attempts int   // 0 where the rule names none
	Backoff  time.Duration
}
