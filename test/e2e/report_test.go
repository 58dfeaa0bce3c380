package e2e_test

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
	"github.com/fingerpost/fingerpost/xds/resources"
)

// reporter starts an agent in a pod of the manifests' namespace.
func (c *cluster) reporter(node string) *agentProcess {
	c.t.Helper()
	s := newSite(c.t)
	cmd := exec.Command(program, s.args(append(c.args(), "--node-name", node)...)...)
	cmd.Env = append(os.Environ(), "POD_NAMESPACE=fingerpost")
	return s.launch(c.t, cmd).ready()
}

// declared creates a pod without a server that declares what it serves.
func (c *cluster) declared(id, services string) *corev1.Pod {
	c.t.Helper()
	p := newPod(id, "", 50051)
	p.Annotations = map[string]string{"fingerpost.dev/services": services}
	return c.create(p, nextAddr())
}

// reports waits until the agent's status says so of its reports.
func (a *agentProcess) reports(prefix string) {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		if state := a.part("reports"); !strings.HasPrefix(state, prefix) {
			return fmt.Errorf("reports: %q, want %q", state, prefix)
		}
		return nil
	})
}

// counts waits until a metric has the value.
func (a *agentProcess) counts(metric, want string) {
	a.t.Helper()
	harness.Eventually(a.t, soon, func() error {
		if got := a.metric(metric); got != want {
			return fmt.Errorf("%s is %s, want %s", metric, got, want)
		}
		return nil
	})
}

// says waits until the namespace has exactly these Events, as "reason object".
func (c *cluster) says(want ...string) {
	c.t.Helper()
	harness.Eventually(c.t, soon, func() error {
		l, err := c.Client.CoreV1().Events(c.ns).List(c.t.Context(), metav1.ListOptions{FieldSelector: "source=fingerpost"})
		if err != nil {
			return err
		}
		var got []string
		for _, e := range l.Items {
			got = append(got, fmt.Sprintf("%s %s %s/%s x%d: %s", e.Type, e.Reason, e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Count, e.Message))
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("events:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		return nil
	})
}

func TestOneAgentWritesWhatARolloutChanges(t *testing.T) {
	c := newCluster(t)
	old := c.declared("web-1-a", "50051=shop.v1.Cart,shop.v1.Old")
	c.declared("zoo-1-a", "50051=shop.v1.Cart")
	agents := []*agentProcess{c.reporter("n1"), c.reporter("n2")}
	agents[0].reports("on: writer")
	agents[1].reports("on: follower of n1-")
	claimed := "Warning ServiceClaimed ReplicaSet/zoo-1 x1: serves shop.v1.Cart, which ReplicaSet/web, without a Service provides in this namespace: calls that name nothing but the service go there"
	c.says(claimed)

	harness.Eventually(t, soon, func() error { // times of creation are whole seconds
		if time.Since(old.CreationTimestamp.Time) < 2*time.Second {
			return fmt.Errorf("pod %s is too young", old.Name)
		}
		return nil
	})
	p := newPod("web-2-a", "", 50051)
	p.Annotations = map[string]string{"fingerpost.dev/collect": "false"}
	p = c.create(p, nextAddr())
	patch := []byte(`{"metadata":{"annotations":{"fingerpost.dev/services":"50051=shop.v1.Cart,shop.v1.New"}}}`)
	if _, err := c.Client.CoreV1().Pods(c.ns).Patch(t.Context(), p.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	before := "uid-web-1/1"
	said := []string{
		"Normal ServicesAdded ReplicaSet/web-2 x1: serves what the revision before it, " + before + ", served not: shop.v1.New",
		claimed,
		"Warning ServicesDropped ReplicaSet/web-2 x1: serves no longer what the revision before it, " + before + ", served: shop.v1.Old",
	}
	c.says(said...)
	for _, a := range agents {
		a.counts(`fingerpost_contract_changes_total{kind="added"}`, "1")
		a.counts(`fingerpost_contract_changes_total{kind="dropped"}`, "1")
		owners := a.owners()
		i := slices.IndexFunc(owners, func(o agent.OwnerView) bool { return o.Namespace == c.ns && o.Name == "ReplicaSet/web-2" })
		if i < 0 || !slices.Equal(owners[i].Added, []string{"shop.v1.New"}) || !slices.Equal(owners[i].Dropped, []string{"shop.v1.Old"}) || owners[i].Previous != before {
			t.Errorf("owners: %+v", owners)
		}
		if table := a.must("owners"); !strings.Contains(table, "+shop.v1.New, -shop.v1.Old") {
			t.Errorf("owners:\n%s", table)
		}
		if n := strings.Count(a.log.String(), "a new revision serves other services"); n != 1 {
			t.Errorf("told %d times in the log, want once", n)
		}
	}
	agents[0].counts(`fingerpost_events_total{result="written"}`, "3")
	agents[1].counts(`fingerpost_events_total{result="written"}`, "0")

	// Agents that start again are elected at once, since the others let go, and
	// repeat nothing.
	for _, a := range agents {
		a.stop()
	}
	again := c.reporter("n2")
	again.reports("on: writer")
	again.counts(`fingerpost_events_total{result="known"}`, "1") // the claim, which lasts
	again.counts(`fingerpost_events_total{result="written"}`, "0")
	c.says(said...)
	if strings.Contains(again.log.String(), "a new revision") {
		t.Error("a restart tells of an old rollout")
	}
}

// Each agent tells of what clients of its own node rejected.
func TestRejectedConfigurationIsAnEventOfThePod(t *testing.T) {
	c := newCluster(t)
	c.declared("cart-1-a", "50051=shop.v1.Cart")
	web := c.create(newPod("web-1-a", "", 50051), nextAddr())
	elsewhere := newPod("web-1-b", "", 50051)
	elsewhere.Spec.NodeName = "n2"
	c.create(elsewhere, nextAddr())
	writer, follower := c.reporter("n9"), c.reporter("n1")
	writer.reports("on: writer")
	follower.reports("on: follower of n9-")
	for _, id := range []string{c.ns + "/web-1-b", c.ns + "/nobody", c.ns + "/web-1-a"} {
		for range 2 {
			raw := connectRaw(t, follower.ads, client.Options{
				Delta: true, Node: &corev3.Node{Id: id},
				Reply: func(client.Response) client.Reply { return client.Reply{Nack: "no such thing"} },
			})
			raw.subscribe(xds.Cluster)
			harness.Eventually(t, soon, func() error {
				for _, p := range follower.proxies() {
					if p.ID == id && p.Types["cds"].Nack != nil {
						return nil
					}
				}
				return fmt.Errorf("%s has rejected nothing", id)
			})
			raw.close()
		}
	}
	c.says("Warning ConfigurationRejected Pod/" + web.Name + " x1: the pod's client rejected a response of type cds and keeps what it accepted before: no such thing")
	follower.counts(`fingerpost_events_total{result="written"}`, "1")
	writer.counts(`fingerpost_events_total{result="written"}`, "0")
}

// Reports are off for a reason, and everything else works.
func TestReportsAreOffForANamedReason(t *testing.T) {
	c := newCluster(t)
	c.declared("web-1-a", "50051=shop.v1.Cart")
	a := newSite(t).start(t, c.args()...).ready() // in a namespace where it has no rights
	a.reports("off: lease fingerpost-system/fingerpost-reports: ")
	if n := strings.Count(a.log.String(), "reports are not written"); n != 1 {
		t.Errorf("told %d times, want once", n)
	}
	if i := slices.IndexFunc(a.services(), func(s resources.ServiceView) bool { return s.Namespace == c.ns && s.Name == "shop.v1.Cart" }); i < 0 {
		t.Error("the agent serves nothing")
	}
	w := newWorld(t)
	w.add(newPod("web-1-a", "127.0.0.1", 1))
	f := newSite(t).start(t, "--source", w.write().source()).live()
	f.reports("off: a file source has no API server")
}
