package e2e_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
)

const dumpDir = "../../agent/kube/testdata/cluster-dumps"

// fact is what was counted in a dump, by namespace.
type fact struct {
	Serving, Draining, Owners map[string]int
}

// check compares what the agent shows with what was counted.
func (f *fact) check(a *agentProcess) error {
	owners, pods := map[string]int{}, map[string]int{}
	for _, o := range a.owners() {
		owners[o.Namespace]++
		for _, p := range o.Pods {
			ns, _, _ := strings.Cut(p, "/")
			pods[ns]++
		}
	}
	if !maps.Equal(owners, f.Owners) {
		return fmt.Errorf("owners are %v, want %v", owners, f.Owners)
	}
	want, serving, draining := maps.Clone(f.Serving), 0, 0
	for _, n := range f.Serving {
		serving += n
	}
	for ns, n := range f.Draining {
		want[ns] += n
		draining += n
	}
	if !maps.Equal(pods, want) {
		return fmt.Errorf("pods are %v, want %v", pods, want)
	}
	if s := a.status(); s.Pods != serving+draining {
		return fmt.Errorf("status counts %d pods, want %d", s.Pods, serving+draining)
	}
	_, metrics, err := a.get("/metrics")
	if err != nil {
		return err
	}
	for state, n := range map[string]int{"serving": serving, "draining": draining} {
		if line := fmt.Sprintf("fingerpost_pods{state=%q} %d\n", state, n); !strings.Contains(metrics, line) {
			return fmt.Errorf("the metrics do not say %s", line)
		}
	}
	// The pods of this namespace declare what they serve, on all of them.
	for _, name := range []string{"pay.v1.Payments", "pay.v1.Refunds"} {
		states := map[string]int{}
		for _, s := range a.services() {
			if s.Name == name && s.Namespace == "pay" {
				for _, e := range s.Endpoints {
					states[e.State]++
				}
			}
		}
		if states["serving"] != f.Serving["pay"] || states["draining"] != f.Draining["pay"] {
			return fmt.Errorf("endpoints of %s are %v, want %d serving and %d draining", name, states, f.Serving["pay"], f.Draining["pay"])
		}
	}
	return nil
}

func TestDumpsOfARealClusterAreServedThoughNothingInThemCanBeReached(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(dumpDir, "facts.json"))
	if err != nil {
		t.Fatal(err)
	}
	var facts map[string]*fact
	if err := json.Unmarshal(text, &facts); err != nil {
		t.Fatal(err)
	}
	for name, hole := range map[string]bool{"unreachable": false, "black hole": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s := newWorld(t), newSite(t)
			put := func(dump string) {
				text, err := os.ReadFile(filepath.Join(dumpDir, dump+".yaml"))
				if err != nil {
					t.Fatal(err)
				}
				w.writeRaw(string(text))
			}
			put("steady")
			a := s.launch(t, isolated(t, hole, program, s.args("--source", w.source(), "--node-name", "fp-worker")...)).live()
			// The bound of the gate is 10 s.
			harness.Eventually(t, 20*time.Second, func() error {
				code, body, err := a.get("/ready")
				if err == nil && code != 200 {
					err = fmt.Errorf("/ready: %s", body)
				}
				return err
			})
			c := connectRaw(t, s.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "pay/client"}})
			c.subscribe(xds.Cluster)
			c.subscribe(xds.Endpoint, "pay/pay.v1.Payments")
			// Each dump comes after each other one.
			for _, dump := range []string{"steady", "rollout", "steady", "drain", "rollout", "drain", "steady"} {
				put(dump)
				f := facts[dump]
				harness.Eventually(t, soon, func() error {
					if err := f.check(a); err != nil {
						return fmt.Errorf("%s: %w", dump, err)
					}
					return nil
				})
				c.until(func() error {
					got, err := endpointsIn(c.Memory(), "pay/pay.v1.Payments")
					if want := f.Serving["pay"] + f.Draining["pay"]; err == nil && len(got) != want {
						err = fmt.Errorf("%s: the client has endpoints %v, want %d", dump, got, want)
					}
					return err
				})
			}
			c.has(xds.Cluster, "at/api.pay:8443/pay.v1.Payments", "at/api.pay:8443/pay.v1.Refunds", "at/mainframe.pay:7000", "pay/pay.v1.Payments", "pay/pay.v1.Refunds")
			if got := c.removals(); len(got) != 0 {
				t.Errorf("removed: %v", got)
			}
			if st := a.status(); st.Gate != "open" || st.Source.Error != "" || st.Nacks != 0 {
				t.Errorf("status: %+v", st)
			}
			why, asked := map[bool]string{false: "unreachable: ", true: "silent: no answer to the connect"}[hole], 0
			for _, o := range a.owners() {
				if o.Knowledge == "failed" {
					asked++
					if !strings.Contains(o.Reason, why) {
						t.Errorf("%s has failed because of %q, want %q", o.Name, o.Reason, why)
					}
				}
			}
			if asked == 0 {
				t.Error("nobody was asked")
			}
		})
	}
}
