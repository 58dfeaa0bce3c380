package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/ads"
	"github.com/fingerpost/fingerpost/xds/client"
)

// faulty is the program with the hook that publishes clusters which Envoy
// refuses; see agent/spoil_faults.go.
var faulty = sync.OnceValues(func() (string, error) {
	path := filepath.Join(filepath.Dir(program), "fingerpost-faults")
	out, err := exec.Command("go", "build", "-tags", "faults", "-o", path, "../../cmd/fingerpost").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

// A wrong cluster out of the agent itself: Envoy's refusal shows with its text
// whatever becomes of the agent, and costs neither calls nor other updates.
func TestRefusalOutlivesAgents(t *testing.T) {
	harness.Tool(t, "envoy")
	bin, err := faulty()
	if err != nil {
		t.Fatal(err)
	}
	const spoilt = "prod/shop.v1.Cart"
	eachAPI(t, func(t *testing.T, api string) {
		t.Parallel()
		w, s := shop(t), newSite(t)
		faults := filepath.Join(t.TempDir(), "faults")
		launch := func() *agentProcess {
			cmd := exec.Command(bin, s.args("--source", w.source(), "--takeover")...)
			cmd.Env = append(os.Environ(), "FINGERPOST_TEST_FAULTS="+faults)
			a := s.launch(t, cmd)
			s.atItsOwn(t, a)
			return a
		}
		a := launch().ready()
		conf, errs, code := run(t, "bootstrap", "--format", "envoy", "--ads-socket", s.ads, "--node-id", "prod/web", "--api", api)
		if code != 0 {
			t.Fatal(errs)
		}
		e := &sidecar{Envoy: harness.StartEnvoy(t, conf, harness.EnvoyOptions{Refuses: true}), t: t}
		e.WaitReady(t, soon)
		e.conn = dial(t, fmt.Sprintf("passthrough:127.0.0.1:%d", s.egress))
		reaches(t, e.conn, "shop.v1.Cart", "cart-1-a", "cart-1-b")
		a.connected("prod/web", "cds", "eds", "lds", "rds")
		answered, stop := load(t, e.conn, "shop.v1.Cart")
		cds := func() (status ads.TypeStatus) {
			for _, p := range a.proxies() {
				if p.ID == "prod/web" {
					status = p.Types["cds"]
				}
			}
			return status
		}
		good := cds().Acked

		refuses := func() {
			t.Helper()
			harness.Eventually(t, soon, func() error {
				s := cds()
				if s.Nack == nil || !strings.Contains(s.Nack.Error, spoilt) || len(s.Withheld) != 1 || s.Withheld[0].Name != spoilt {
					return fmt.Errorf("the refusal does not show: %+v", s)
				}
				if s.Acked == s.Nack.Version {
					t.Errorf("the refused version %s is shown as accepted", s.Acked)
				}
				if table := a.must("proxies"); !strings.Contains(table, "rejected (1 withheld)") || !strings.Contains(table, spoilt) {
					return fmt.Errorf("proxies: %s", table)
				}
				return nil
			})
		}
		news := 0
		others := func() {
			t.Helper()
			news++
			name := fmt.Sprintf("shop.v1.New%d", news)
			w.serve(fmt.Sprintf("new%d-1-a", news), []string{name})
			w.serve(fmt.Sprintf("cart-1-more%d", news), []string{"shop.v1.Cart"}) // endpoints of the refused one, too
			w.write()
			reaches(t, e.conn, name, fmt.Sprintf("new%d-1-a", news))
			harness.Eventually(t, soon, func() error {
				if hosts, err := e.hosts(spoilt); err != nil || len(hosts) != 2+news {
					return fmt.Errorf("endpoints %v, %v", hosts, err)
				}
				return nil
			})
			proceeds(t, answered)
		}

		if err := os.WriteFile(faults, []byte(spoilt), 0o644); err != nil {
			t.Fatal(err)
		}
		refuses()
		if got := cds().Acked; got != good {
			t.Errorf("shown as accepted: %q, last accepted: %q", got, good)
		}
		others()
		other := connectRaw(t, s.ads, client.Options{Delta: api == "delta", Node: &corev3.Node{Id: "prod/other"}})
		other.subscribe(xds.Cluster)
		harness.Eventually(t, soon, func() error {
			text, _ := other.Memory().Resources[xds.Cluster][spoilt]
			if text.Body == nil || strings.Contains(string(text.Body.GetValue()), "eds_config") {
				return errors.New("the client that accepts it has it not")
			}
			return nil
		})
		other.close()

		accepted := cds().Acked
		a.kill()
		proceeds(t, answered)
		a = launch().ready()
		refuses()
		// In the state of the world the client brings what it accepted last.
		if got := cds().Acked; api == "sotw" && got != accepted {
			t.Errorf("after a restart: shown as accepted: %q, last accepted: %q", got, accepted)
		}
		others()
		b := launch().ready()
		b.takeover("on")
		a.stop()
		a = b
		refuses()
		others()

		if err := os.Remove(faults); err != nil {
			t.Fatal(err)
		}
		harness.Eventually(t, soon, func() error {
			if s := cds(); s.Nack != nil || s.Withheld != nil || s.Acked == "" || s.Acked != s.Sent {
				return fmt.Errorf("the refusal still stands: %+v", s)
			}
			return nil
		})
		others()
		stop()
		if st := a.status(); st.Nacks != 0 {
			t.Errorf("%d rejected", st.Nacks)
		}
	})
}
