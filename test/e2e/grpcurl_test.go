package e2e_test

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/fingerpost/fingerpost/test/harness"
)

// grpcurl runs the tool against a sidecar and returns what it prints.
func (s *site) grpcurl(t *testing.T, flags []string, verb ...string) (string, error) {
	t.Helper()
	args := slices.Concat([]string{"-plaintext"}, flags, []string{fmt.Sprintf("127.0.0.1:%d", s.egress)}, verb)
	out, err := exec.CommandContext(deadline(t), harness.Tool(t, "grpcurl"), args...).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// What can be called through a sidecar is what its caller's namespace has.
func TestGrpcurlShowsTheCallersView(t *testing.T) {
	w := newWorld(t)
	w.serve("cart-1-a", []string{"shop.v1.Cart", "shop.v1.Stock"})
	far, _ := w.serve("bank-1-a", []string{"bank.v1.Ledger"})
	far.Namespace = "bank"
	w.write()
	for id, want := range map[string]struct {
		list      string
		describes string
		lacks     string
	}{
		"prod/web":    {"shop.v1.Cart\nshop.v1.Stock", "shop.v1.Cart", "bank.v1.Ledger"},
		"bank/teller": {"bank.v1.Ledger", "bank.v1.Ledger", "shop.v1.Cart"},
	} {
		eachMode(t, func(t *testing.T, api string) {
			s := newSite(t)
			s.start(t, "--source", w.source()).ready()
			s.sidecar(t, api, id)
			must := func(verb ...string) string {
				t.Helper()
				out, err := s.grpcurl(t, nil, verb...)
				if err != nil {
					t.Fatalf("grpcurl %s: %v\n%s", verb, err, out)
				}
				return out
			}
			if got := must("list"); got != want.list {
				t.Errorf("%s is shown\n%s\nwant\n%s", id, got, want.list)
			}
			name := want.describes
			if got, methods := must("list", name), name+".Chat\n"+name+".Say\n"+name+".Watch"; got != methods {
				t.Errorf("the methods of %s are\n%s", name, got)
			}
			if got := must("describe", name); !strings.Contains(got, name+" is a service") || !strings.Contains(got, "rpc Say ( .google.protobuf.StringValue ) returns ( .google.protobuf.StringValue )") {
				t.Errorf("%s is described as\n%s", name, got)
			}
			if got := must("describe"); !strings.Contains(got, name+" is a service") || strings.Contains(got, want.lacks) {
				t.Errorf("all is described as\n%s", got)
			}
			for _, verb := range []string{"list", "describe"} {
				if got, err := s.grpcurl(t, nil, verb, want.lacks); err == nil {
					t.Errorf("%s %s of another namespace: %s", verb, want.lacks, got)
				}
			}
			// What it shows can be called.
			if got, err := s.grpcurl(t, []string{"-d", `"hello"`}, name+"/Say"); err != nil || !strings.Contains(got, "hello") {
				t.Errorf("the call is answered by %s, %v", got, err)
			}
		})
	}
}
