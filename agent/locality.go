package agent

import (
	"fmt"

	"github.com/fingerpost/fingerpost/xds/resources"
)

// localityState is what status says of the part.
func (a *Agent) localityState() string {
	switch asked, placed := a.compiler.Locality(); {
	case !asked:
		return "off: --locality even, and no pod asks for another"
	case !placed:
		return fmt.Sprintf("on: nobody says in which zone node %q is; zone means even, and node knows of nodes alone", a.config.nodeName())
	}
	return "on"
}

// spread says how calls are spread over the endpoints of a cluster.
func (e *Explanation) spread(c *resources.Compiler, what string, views []resources.EndpointView) {
	if says := c.Spread(views); says != "" {
		e.fact(what, "%s", says)
	}
}
