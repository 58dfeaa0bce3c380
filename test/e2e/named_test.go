package e2e_test

import (
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

func TestUsersAndUsersCanaryKeepTheirOwnPods(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, api string) {
		m := newMesh(t)
		users, _ := m.serve("users-1-a", []string{"shop.Users"})
		canary, _ := m.serve("canary-1-a", []string{"shop.Users"})
		m.front("users", users)
		m.front("users-canary", canary)
		m.put()
		e := m.sidecar(t, api, "prod/me")
		for authority, pod := range map[string]string{
			"users": "users-1-a", "users.prod.": "users-1-a", "Users.prod.svc:80": "users-1-a",
			"users-canary.prod.svc.cluster.local": "canary-1-a", "users-canary:80": "canary-1-a",
		} {
			reaches(t, m.at(authority), "shop.Users", pod)
		}
		reaches(t, e.conn, "shop.Users", "users-1-a") // the older Service provides the name
		e.content()
	})
}

func TestServiceNamedCallReachesAServerWithoutReflection(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, api string) {
		m := newMesh(t)
		mute, _ := m.serve("mute-1-a", []string{"shop.Users"}, refusing(codes.Unimplemented))
		denied, _ := m.serve("denied-1-a", []string{"shop.Users"}, refusing(codes.PermissionDenied))
		m.front("mute", mute)
		m.front("denied", denied)
		m.put()
		e := m.sidecar(t, api, "prod/me")
		reaches(t, m.at("mute"), "shop.Users", "mute-1-a")
		reaches(t, m.at("denied.prod"), "shop.Users", "denied-1-a")
		m.fails("mute", "shop.Nobody", codes.Unimplemented, "unknown service shop.Nobody") // its own word
		if _, err := say(t, e.conn, "shop.Users"); err == nil {
			t.Error("the name alone reaches somebody")
		}
		if got := m.agent.must("explain", "call", "--from", "prod/me", "--authority", "mute", "/shop.Users/Say"); !strings.Contains(got, "OK: it goes to 1 endpoint of port 80 of Service prod/mute, none of which is known to implement shop.Users") {
			t.Errorf("explain call:\n%s", got)
		}
		e.content()
	})
}

func TestPodKnownNotToImplementTheServiceGetsNoneOfItsCalls(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	full, _ := m.serve("full-1-a", []string{"shop.Users", "shop.Admin"})
	half, server := m.serve("half-1-a", []string{"shop.Users"})
	mute, _ := m.serve("mute-1-a", []string{"shop.Users", "shop.Admin"}, refusing(codes.PermissionDenied))
	m.front("users", full, half, mute)
	m.put()
	m.sidecar(t, "delta", "prod/me")
	users := m.at("users")
	reaches(t, users, "shop.Users", "full-1-a", "half-1-a", "mute-1-a")
	reaches(t, users, "shop.Admin", "full-1-a", "mute-1-a")
	if n := server.Calls("shop.Admin"); n != 0 {
		t.Errorf("the pod that lacks it was called %d times", n)
	}
	got := m.agent.must("explain", "call", "--from", "prod/me", "--authority", "users", "/shop.Admin/Say")
	for _, want := range []string{"OK: it goes to 2 endpoints of port 80 of Service prod/users; not to pod prod/half-1-a (it is known not to implement shop.Admin", "cluster of at/users/shop.Admin: acknowledged"} {
		if !strings.Contains(got, want) {
			t.Errorf("explain call does not say %q:\n%s", want, got)
		}
	}
}

// Raw clients have the clusters by Service names of their own namespace, and
// those of a release before see what they saw then.
func TestRawClientsHaveClustersByServiceNames(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	users, _ := m.serve("users-1-a", []string{"shop.Users"})
	m.front("users", users)
	m.put()
	names := func(meta map[string]any) []string {
		md, err := structpb.NewStruct(meta)
		if err != nil {
			t.Fatal(err)
		}
		c := connectRaw(t, m.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/client", Metadata: md}})
		c.subscribe(xds.Cluster)
		c.subscribe(xds.Endpoint, "prod/shop.Users")
		c.endpoints("prod/shop.Users", addressOf(users))
		return c.names(xds.Cluster)
	}
	if got, want := names(nil), []string{"at/users.prod:80/shop.Users", "prod/shop.Users"}; !slices.Equal(got, want) {
		t.Errorf("clusters are %v, want %v", got, want)
	}
	if got, want := names(map[string]any{"fingerpost.dev/shape": "1"}), []string{"prod/shop.Users"}; !slices.Equal(got, want) {
		t.Errorf("of shape 1 clusters are %v, want %v", got, want)
	}
}
