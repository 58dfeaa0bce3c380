package e2e_test

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
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
			r := newReflections()
			outside, err := demo.StartSample("outside", "127.0.0.1:0", []string{"bank.Accounts"}, r.option())
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
			if n := r.streams(); n != 0 {
				t.Errorf("the host was asked %d times what it serves", n)
			}

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

// The pods of a headless Service are reached by a route through every port of
// its, also where it has none; so are addresses that somebody wrote by hand, and
// a pod that is not Ready of a Service that publishes it. A name outside the
// cluster is not.
func TestRoutesReachWhatStandsBehindOddServices(t *testing.T) {
	m := newMesh(t)
	m.front("web", m.rest("web-1-a", echo("web")))
	one, two := m.rest("one-1-a", echo("one")), m.rest("two-1-a", echo("two"))
	unready, manual := m.rest("unready-1-a", echo("unready")), m.rest("manual-1-a", echo("manual"))
	for _, name := range []string{"headless", "portless", "publishing"} {
		pods := map[string][]*corev1.Pod{"headless": {one, two}, "portless": {one}, "publishing": {unready}}[name]
		m.front(name, pods...)
		m.services[name][0].(*corev1.Service).Spec.ClusterIP = corev1.ClusterIPNone
	}
	m.services["portless"][0].(*corev1.Service).Spec.Ports = nil
	m.services["portless"][1].(*discoveryv1.EndpointSlice).Ports = nil
	notReady(unready)
	m.services["publishing"][0].(*corev1.Service).Spec.PublishNotReadyAddresses = true
	m.front("manual", manual)
	m.services["manual"][0].(*corev1.Service).Spec.Selector = nil
	m.services["manual"][1].(*discoveryv1.EndpointSlice).Endpoints[0].TargetRef = nil
	m.remove(manual)
	outside := external(1, "localhost", 1)
	outside.Spec.Ports = []corev1.ServicePort{{Port: 80}}
	m.services["outside"] = []any{outside}
	port := one.Spec.Containers[0].Ports[0].ContainerPort
	m.route("HTTPRoute", "prod", "odd", "web", fmt.Sprintf(`
  - matches: [{path: {value: /headless}}]
    backendRefs: [{name: headless, port: 80}]
  - matches: [{path: {value: /portless}}]
    backendRefs: [{name: portless, port: %d}]
  - matches: [{path: {value: /publishing}}]
    backendRefs: [{name: publishing, port: 80}]
  - matches: [{path: {value: /manual}}]
    backendRefs: [{name: manual, port: 80}]
  - matches: [{path: {value: /outside}}]
    backendRefs: [{name: outside, port: 80}]
`, port))
	m.put()
	m.sidecar(t, "delta", "prod/me")
	for _, path := range []string{"/portless", "/publishing", "/manual"} {
		who := map[string]string{"/portless": "one", "/publishing": "unready", "/manual": "manual"}[path]
		m.answers(request{host: "web.prod", path: path}, fmt.Sprintf("200 %s GET %s", who, path))
	}
	m.answers(request{host: "web.prod", path: "/outside"}, "500 rule 4 of HTTPRoute prod/odd has no backend that can be called")
	seen := map[string]bool{}
	harness.Eventually(t, soon, func() error {
		code, body, err := m.http(request{host: "web.prod", path: "/headless"})
		seen[fmt.Sprint(code, " ", body)] = true
		if len(seen) < 2 {
			return fmt.Errorf("answered by %v, %w", seen, err)
		}
		return nil
	})
	if !seen["200 one GET /headless"] || !seen["200 two GET /headless"] {
		t.Errorf("the headless Service's calls are answered by %v", seen)
	}
}
