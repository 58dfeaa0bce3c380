package resources

import (
	"fmt"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/xds/resources/routetable"
)

// Unservable says of the rules of a route, by their index, why Envoy could not
// take them: then calls that match pass them by, or fail. Rules that were
// refused when the route was read are not among them.
func Unservable(r *nodecache.Route) map[int]error {
	out := map[int]error{}
	there := func(nodecache.Name, uint16) (nodecache.FrontPort, bool) { return nodecache.FrontPort{}, true }
	for i := range r.Rules {
		if r.Rules[i].Refused != "" {
			continue
		}
		for m := range r.Rules[i].Matches {
			e := routetable.Entry{Route: r, Rule: i, Match: m}
			if _, err := entryRoutes(e, shares(e, there)); err != nil {
				out[i] = fmt.Errorf("match %d: %w", m, err)
				break
			}
		}
	}
	return out
}

// Callable tells whether routes send calls to the port of the Service, which
// may be nil.
func Callable(f *nodecache.Front, port uint16) bool {
	_, ok := portOf(f, port)
	return ok
}
