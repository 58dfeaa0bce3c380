package e2e_test

import (
	"fmt"
	"testing"
)

// Each edit moves the route, and in the same file drops the Service that it
// left and brings the one to which it goes.
func TestRouteThatLeavesAServiceAsItGoesLosesNoCall(t *testing.T) {
	eachAPI(t, func(t *testing.T, api string) {
		m := newMesh(t)
		m.front("shop")
		backends := map[string][]any{}
		for _, color := range []string{"blue", "green"} {
			p, _ := m.serve(color+"-1-a", []string{"shop.Web"})
			m.front(color, p)
			backends[color] = m.services[color]
		}
		move := func(from, to string) {
			delete(m.services, from)
			m.services[to] = backends[to]
			m.route("GRPCRoute", "prod", "move", "shop", fmt.Sprintf("  - backendRefs: [{name: %s, port: 80}]\n", to))
			m.put()
		}
		move("green", "blue")
		m.sidecar(t, api, "prod/me")
		conn := m.at("shop.prod")
		reaches(t, conn, "shop.Web", "blue-1-a")
		answered, stop := load(t, conn, "shop.Web")
		for range 10 {
			move("blue", "green")
			reaches(t, conn, "shop.Web", "green-1-a")
			move("green", "blue")
			reaches(t, conn, "shop.Web", "blue-1-a")
		}
		stop()
		if answered() < 100 {
			t.Errorf("only %d calls were made", answered())
		}
		m.agent.connected("prod/me", "cds", "eds", "lds", "rds")
	})
}
