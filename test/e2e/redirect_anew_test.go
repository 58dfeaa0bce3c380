package e2e_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fingerpost/fingerpost/test/harness"
)

// The numbers of destinations are removed while a connection by one of them is
// open, and an agent begins anew. The connection is not taken for one to anybody
// else, and the application is told to make another.
func TestConnectionsByNumbersThatWereRemovedAreMadeAnew(t *testing.T) {
	n, one, _ := redirectedShop(t)
	a := n.agent()
	one.sidecar()
	one.reach("10.96.0.10:80", "shop.Users", "users-1-a users-1-b")
	conn := one.dial("10.96.0.10:80", "users.prod.svc:80")
	if _, err := say(t, conn, "shop.Users"); err != nil {
		t.Fatal(err)
	}
	a.stop()
	if out, errs, code := run(t, "uninstall", "--ads-socket", n.ads, "--admin-socket", n.admin, "--state-dir", "", "--redirect-dir", n.pins); code != 0 {
		t.Fatalf("exit %d, %s%s", code, out, errs)
	}
	n.agent()
	harness.Eventually(t, soon, func() error {
		who, err := say(t, conn, "shop.Users")
		if err == nil && !strings.HasPrefix(who, "users-1-") || err != nil && status.Code(err) != codes.Unavailable {
			t.Fatalf("answered by %q, %v", who, err)
		}
		if clusters := one.envoy.Admin(t, "/listeners?format=json"); err == nil && !strings.Contains(clusters, "capture") {
			return fmt.Errorf("the sidecar listens at %s", clusters)
		}
		return err
	})
	one.reach("10.96.0.11:80", "shop.Users", "canary-1-a")
}
