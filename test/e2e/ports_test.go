package e2e_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"

	"github.com/fingerpost/fingerpost/demo"
)

// external is an ExternalName Service of prod that was created in the minute and
// says that the port of the host serves the bank.
func external(minute int, host string, port int) *corev1.Service {
	svc := service("outside", minute, "api")[0].(*corev1.Service)
	svc.Annotations = map[string]string{"fingerpost.dev/services": fmt.Sprintf("%d=bank.Accounts", port)}
	svc.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: host}
	return svc
}

// Calls leave the pods for the host and come back to them without a lost one.
// The host is localhost, which no DNS server has to know.
func TestExternalNameTakesCallsWhileItsServiceIsTheOldest(t *testing.T) {
	for name, connect := range map[string]func(*testing.T, *site) *grpc.ClientConn{
		"delta": func(t *testing.T, s *site) *grpc.ClientConn { return s.sidecar(t, "delta", "prod/web").conn },
		"sotw":  func(t *testing.T, s *site) *grpc.ClientConn { return s.sidecar(t, "sotw", "prod/web").conn },
		"grpc":  func(t *testing.T, s *site) *grpc.ClientConn { return s.proxyless(t, "prod/web", "bank.Accounts") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s := newWorld(t), newSite(t)
			outside, err := demo.StartSample("outside", "127.0.0.1:0", []string{"bank.Accounts"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(outside.Stop)
			inside, _ := w.serve("bank-1-a", []string{"bank.Accounts"})
			write := func(more ...any) {
				w.more = append(service("bank", 2, "api", inside), more...)
				w.write()
			}
			write()
			a := s.start(t, "--source", w.source()).ready()
			conn := connect(t, s)
			reaches(t, conn, "bank.Accounts", "bank-1-a")
			answered, stop := load(t, conn, "bank.Accounts")
			younger, older := external(3, "localhost", outside.Port()), external(1, "localhost", outside.Port())
			for range 3 {
				write(younger)
				a.provided("bank.Accounts", "bank-1-a, 1 claimants")
				reaches(t, conn, "bank.Accounts", "bank-1-a")
				write(older)
				a.provided("bank.Accounts", ", 1 claimants")
				reaches(t, conn, "bank.Accounts", "outside")
				proceeds(t, answered)
			}
			stop()

			at := fmt.Sprintf("localhost:%d", outside.Port())
			for _, v := range a.services() {
				if v.Name == "bank.Accounts" && (len(v.Endpoints) != 1 || v.Endpoints[0].Address != at || v.Endpoints[0].Pod != "" || v.Endpoints[0].State != "serving") {
					t.Errorf("endpoints %+v", v.Endpoints)
				}
			}
			if got := a.must("explain", "service", "bank.Accounts"); !strings.Contains(got, at+", by its DNS name, serving") {
				t.Errorf("explain service:\n%s", got)
			}
			got := a.must("explain", "call", "--from", "prod/web", "/bank.Accounts/Say")
			for _, want := range []string{"OK: it goes to 1 endpoint of Service/outside", at + ", by its DNS name"} {
				if !strings.Contains(got, want) {
					t.Errorf("explain call does not say %q:\n%s", want, got)
				}
			}
			if st := a.status(); st.Nacks != 0 {
				t.Errorf("%d refusals", st.Nacks)
			}
			// Without its annotation the Service gets no more calls.
			bare := *older
			bare.Annotations = nil
			write(&bare)
			reaches(t, conn, "bank.Accounts", "bank-1-a")
		})
	}
}
