package resources_test

import (
	"testing"

	"github.com/fingerpost/fingerpost/xds/resources"
)

// The rows are those of route.lua, which an Envoy runs.
func TestByNameComputesWhatTheRouteTableDoes(t *testing.T) {
	for _, row := range []struct {
		authority, path  string
		service, cluster string
		byPath           bool
	}{
		{"127.0.0.1:15001", "/pkg.S/M", "pkg.S", "prod/pkg.S", true},
		{"127.0.0.1", "/S/M_1", "S", "prod/S", true},
		{"LocalHost.", "/pkg.S/M", "pkg.S", "prod/pkg.S", true},
		{"localhost.:80", "/pkg.S/M", "pkg.S", "prod/pkg.S", true},
		{"[::1]:15001", "/pkg.S/M", "pkg.S", "prod/pkg.S", true},
		{"::1", "/pkg.S/M", "pkg.S", "at/::1/pkg.S", false}, // ":1" is taken for its port
		{"localhost:", "/pkg.S/M", "pkg.S", "at/localhost:/pkg.S", false},
		{"localhost..", "/pkg.S/M", "pkg.S", "at/localhost./pkg.S", false},
		{"127.0.0.2", "/pkg.S/M", "pkg.S", "at/127.0.0.2/pkg.S", false},
		{"Cart.Prod.:50051", "/pkg.S/M", "pkg.S", "at/cart.prod:50051/pkg.S", false},
		{"", "/pkg.S/M", "pkg.S", "at//pkg.S", false},
		{"127.0.0.1", "/pkg.S", "", "", false},
		{"127.0.0.1", "/a/b/c", "", "", false},
		{"127.0.0.1", "/1pkg.S/M", "", "", false},
		{"127.0.0.1", "/pkg-S/M", "", "", false},
		{"127.0.0.1", "/pkg.S/M.N", "", "", false},
		{"127.0.0.1", "/pkg.S/", "", "", false},
	} {
		r := resources.ByName(resources.Call{Namespace: "prod", Authority: row.authority, Path: row.path})
		if r.Service != row.service || r.Cluster != row.cluster || r.ByPath != row.byPath {
			t.Errorf("authority %q, path %q: %+v, want service %q, cluster %q, by path %v", row.authority, row.path, r, row.service, row.cluster, row.byPath)
		}
		if r.Route != "by-name" || r.VirtualHost != "egress" || r.Why == "" {
			t.Errorf("the rule is %+v", r)
		}
	}
}
