package resources_test

import (
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/xds/resources"
)

// The rows are those of shape1.lua, which an Envoy runs.
func TestByNameComputesWhatTheRouteTableOfShape1Does(t *testing.T) {
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
		r := resources.ByName(resources.Call{Namespace: "prod", Authority: row.authority, Path: row.path, Form: resources.ShapeOne})
		if r.Service != row.service || r.Cluster != row.cluster || r.ByPath != row.byPath {
			t.Errorf("authority %q, path %q: %+v, want service %q, cluster %q, by path %v", row.authority, row.path, r, row.service, row.cluster, row.byPath)
		}
		if r.Route != "by-name" || r.VirtualHost != "egress" || r.Why == "" {
			t.Errorf("the rule is %+v", r)
		}
	}
}

// The rows are those of shape2.lua.
func TestByNameWritesAuthoritiesInTheOneFormThatHasClusters(t *testing.T) {
	for _, row := range []struct{ authority, path, cluster, rest string }{
		{"127.0.0.1:15001", "/pkg.S/M", "prod/pkg.S", ""},
		{"LocalHost.:80", "/pkg.S/M", "prod/pkg.S", ""},
		{"[::1]", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "", ""},
		{"localhost", "/grpc.reflections.v1.S/M", "prod/grpc.reflections.v1.S", ""},
		{"Users", "/pkg.S/M", "at/users.prod:80/pkg.S", "at/users.prod:80"},
		{"users.:50051", "/pkg.S/M", "at/users.prod:50051/pkg.S", "at/users.prod:50051"},
		{"users.shop:50051", "/pkg.S/M", "at/users.shop:50051/pkg.S", "at/users.shop:50051"},
		{"users.prod.svc:50051", "/pkg.S/M", "at/users.prod:50051/pkg.S", "at/users.prod:50051"},
		{"users.prod.svc.cluster.local.:50051", "/pkg.S/M", "at/users.prod:50051/pkg.S", "at/users.prod:50051"},
		{"users.svc:1", "/pkg.S/M", "at/users.svc:1/pkg.S", "at/users.svc:1"},
		{"pod-0.users.prod.svc:1", "/pkg.S/M", "at/pod-0.users.prod.svc:1/pkg.S", "at/pod-0.users.prod.svc:1"},
		{"10.96.0.10:50051", "/pkg.S/M", "at/10.96.0.10:50051/pkg.S", "at/10.96.0.10:50051"},
		{"users:1", "/grpc.health.v1.Health/Check", "at/users.prod:1/grpc.health.v1.Health", "at/users.prod:1"},
		{"users", "/pkg.S", "", ""},
		{"users." + strings.Repeat("x", 300), "/pkg.S/M", "", ""},
		{"users", "/" + strings.Repeat("x", 256) + "/M", "", ""},
	} {
		r := resources.ByName(resources.Call{Namespace: "prod", Authority: row.authority, Path: row.path})
		if r.Cluster != row.cluster || r.Rest != row.rest {
			t.Errorf("authority %.40q, path %.40q: %+v, want cluster %q, rest %q", row.authority, row.path, r, row.cluster, row.rest)
		}
	}
}
