package e2e_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fingerpost/fingerpost/agent"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds"
	"github.com/fingerpost/fingerpost/xds/client"
	"github.com/fingerpost/fingerpost/xds/unknown"
)

// calls makes the call as the fault says.
func (w *faultWorld) calls(t *testing.T, f fault) *status.Status {
	t.Helper()
	ctx := deadline(t)
	var conn *grpc.ClientConn
	switch f.by {
	case byEnvoy:
		conn = w.envoy.conn
		if f.authority != "" {
			conn = dial(t, conn.Target(), grpc.WithAuthority(f.authority))
		}
	default:
		authority := f.authority
		if authority == "" {
			authority = "127.0.0.1"
		}
		conn = dial(t, "unix://"+filepath.Join(filepath.Dir(w.site.ads), "unknown.sock"), grpc.WithAuthority(authority))
		ctx = metadata.AppendToOutgoingContext(ctx, unknown.NodeHeader, f.from)
	}
	return status.Convert(conn.Invoke(ctx, f.path, &wrapperspb.StringValue{}, &emptypb.Empty{}))
}

// explainCall asks the agent, in the form for people and in that for machines.
func (a *agentProcess) explainCall(f fault) (line string, e agent.CallExplanation, err error) {
	a.t.Helper()
	args := []string{"explain", "call", "--from", f.from, f.path}
	if f.authority != "" {
		args = append(args, "--authority", f.authority)
	}
	line, _, _ = strings.Cut(a.must(args...), "\n")
	return line, e, json.Unmarshal([]byte(a.must(append(args, "-o", "json")...)), &e)
}

func codeName(c codes.Code) string { return code.Code(c).String() }

// names wants the first line of the explanation to name the fault, with the
// right code, and a call to get just that.
func (w *faultWorld) names(t *testing.T, f fault) {
	t.Helper()
	prefix := fmt.Sprintf("%s calling %s: %s: ", f.from, f.path, codeName(f.code))
	harness.Eventually(t, soon, func() error {
		line, e, err := w.agent.explainCall(f)
		if err != nil {
			return err
		}
		if !strings.HasPrefix(line, prefix) || !strings.Contains(line, f.says) {
			return fmt.Errorf("explain call says\n%s\nwant %s… with %q", line, prefix, f.says)
		}
		if e.Code != codeName(f.code) || e.Do == "" || !strings.HasPrefix(e.Verdict, prefix) {
			return fmt.Errorf("in JSON: %+v", e)
		}
		if f.by == byNobody {
			return nil
		}
		if st := w.calls(t, f); st.Code() != f.code || st.Message() != e.Message {
			return fmt.Errorf("the call gets %s %q; explained was %s %q", st.Code(), st.Message(), e.Code, e.Message)
		}
		return nil
	})
}

// Each fault is named by the first line, and the code is that of a real call.
func TestExplainCallNamesEachFaultInOneLine(t *testing.T) {
	w := &faultWorld{world: newWorld(t), site: newSite(t)}
	w.unservedFaults()
	w.namedFaults()
	w.authorities()
	w.providedFaults()
	w.agent = w.site.start(t, "--source", w.write().source()).ready()
	for _, f := range w.faults {
		if f.by != byUnknown {
			continue
		}
		reply := map[string]client.Reply{"nack/caller": {Nack: "shop.Web is not to my taste"}, "mute/caller": {Silent: true}}[f.from]
		c := connectRaw(t, w.site.ads, client.Options{Delta: true, Node: &corev3.Node{Id: f.from},
			Reply: func(client.Response) client.Reply { return reply }})
		c.subscribe(xds.Cluster)
	}
	w.envoy = w.site.sidecar(t, "delta", "prod/web")
	for _, s := range []string{"NotReady", "Terminating", "Evicted", "Draining", "Zero", "Fine"} {
		if _, err := say(t, w.envoy.conn, "shop."+s); err != nil {
			t.Fatalf("before anything happens a call of shop.%s gets %v", s, err)
		}
	}
	for _, change := range w.after {
		change()
	}
	w.write()
	for _, f := range w.faults {
		t.Run(f.name, func(t *testing.T) { w.names(t, f) })
	}
	if n := len(w.faults); n < 20 {
		t.Errorf("only %d faults", n)
	}

	t.Run("client refuses later endpoints", func(t *testing.T) {
		var refuse atomic.Bool
		c := connectRaw(t, w.site.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/picky"}, Reply: func(r client.Response) client.Reply {
			if refuse.Load() {
				return client.Reply{Nack: "too many endpoints"}
			}
			return client.Reply{}
		}})
		c.subscribe(xds.Cluster)
		f := fault{from: "prod/picky", path: "/shop.Fine/Say", code: codes.Unavailable, says: "the client does not have the endpoints of prod/shop.Fine yet: not asked for"}
		w.names(t, f)
		c.subscribe(xds.Endpoint, "prod/shop.Fine")
		f.code, f.says = codes.OK, "it goes to 1 endpoint of ReplicaSet/fine"
		w.names(t, f)
		refuse.Store(true)
		w.serve("fine-1-b", []string{"shop.Fine"})
		w.write()
		f.says = "it goes to 2 endpoints of ReplicaSet/fine; by earlier content (endpoints of prod/shop.Fine: rejected at "
		w.names(t, f)
	})
	t.Run("client keeps what it brought", func(t *testing.T) {
		var brought client.Memory
		name := "refused/shop.Web"
		brought.Resources[xds.Cluster] = map[string]client.Resource{name: {Name: name, Version: "1"}}
		c := connectRaw(t, w.site.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "refused/keeper"}, Memory: brought})
		c.subscribe(xds.Cluster)
		w.names(t, fault{from: "refused/keeper", path: "/shop.Web/Say", code: codes.OK, says: "the client goes on with the cluster and endpoints that it has from before; shop.Web in namespace refused: ReplicaSet/refused-1 could not be asked"})
	})
	t.Run("owner is being asked", func(t *testing.T) {
		p, _ := w.serve("slow-1-a", []string{"shop.Slow"}, grpc.StreamInterceptor(hang))
		p.Namespace = "slow"
		c := connectRaw(t, w.site.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "slow/caller"}})
		c.subscribe(xds.Cluster)
		w.write()
		w.names(t, fault{from: "slow/caller", path: "/shop.Slow/Say", code: codes.Unavailable, says: "shop.Slow in namespace slow: ReplicaSet/slow-1 ", by: byUnknown})
	})
	t.Run("client without a sidecar", func(t *testing.T) {
		conn := w.site.proxyless(t, "back/grpc", "shop.Back")
		if _, err := say(t, conn, "shop.Back"); err != nil {
			t.Fatal(err)
		}
		w.names(t, fault{from: "back/grpc", path: "/shop.Back/Say", code: codes.OK, says: "it goes to 1 endpoint of ReplicaSet/back"})
		w.names(t, fault{from: "back/grpc", path: "/shop.Nobody/Say", code: codes.Unavailable, says: "(a gRPC client without a sidecar gives the name up after 15 s)"})
	})
	t.Run("broken source", func(t *testing.T) {
		w.writeRaw("kind: [\n")
		w.names(t, fault{from: "prod/web", path: "/shop.Fine/Say", code: codes.OK, says: "by a state that is ", by: byEnvoy})
		w.write()
		w.names(t, fault{from: "prod/web", path: "/shop.Fine/Say", code: codes.OK, says: "it goes to 2 endpoints of ReplicaSet/fine", by: byEnvoy})
	})
	t.Run("steps", func(t *testing.T) { wantSteps(t, w.agent) })
	t.Run("usage", func(t *testing.T) {
		refused(t, 2, "--from", nil, "explain", "call", "/shop.Fine/Say", "--admin-socket", w.site.admin)
		refused(t, 2, "NAMESPACE/NAME", nil, "explain", "call", "--from", "web", "/shop.Fine/Say", "--admin-socket", w.site.admin)
		refused(t, 2, "xml", nil, "explain", "call", "--from", "prod/web", "/shop.Fine/Say", "-o", "xml", "--admin-socket", w.site.admin)
		refused(t, 2, "arg", nil, "explain", "call", "--from", "prod/web", "--admin-socket", w.site.admin)
	})
	t.Run("completion", func(t *testing.T) {
		for want, args := range map[string][]string{
			"/shop.Fine/\n":        {"explain", "call", "--from", "prod/web", "--admin-socket", w.site.admin, "/shop.F"},
			"nack/caller\n":        {"explain", "call", "--admin-socket", w.site.admin, "--from", "nack/"},
			"prod/drain-1-a\n":     {"explain", "pod", "--admin-socket", w.site.admin, "prod/dr"},
			"shop.v1.Checkout\n":   {"explain", "service", "--admin-socket", w.site.admin, "shop.v1."},
			"back/ReplicaSet/back": {"explain", "workload", "--admin-socket", w.site.admin, "back/"},
		} {
			if out, _, code := run(t, append([]string{"__complete"}, args...)...); code != 0 || !strings.HasPrefix(out, want) {
				t.Errorf("%v completes to %q, exit %d, want %q", args, out, code, want)
			}
		}
	})
	t.Run("workload", func(t *testing.T) { wantWorkloads(t, w.agent) })
	t.Run("workload with another contract", func(t *testing.T) {
		next := w.add(newPod("rival-2-a", nextAddr(), 50051))
		next.Annotations = map[string]string{"fingerpost.dev/services": "50051=shop.More"}
		next.CreationTimestamp = metav1.NewTime(time.Now())
		w.write()
		harness.Eventually(t, soon, func() error {
			out := w.agent.must("explain", "workload", "prod/rival")
			if want := "ReplicaSet/rival-2 adds shop.More and drops shop.Model, compared with uid-rival-1/1"; !strings.Contains(out, want) {
				return fmt.Errorf("explain workload does not say %q:\n%s", want, out)
			}
			return nil
		})
	})
}

// wantSteps looks at what stands below the first line.
func wantSteps(t *testing.T, a *agentProcess) {
	out := a.must("explain", "call", "--from", "prod/web", "/shop.Mixed/Say")
	for _, want := range []string{
		"identity", "prod/web, claimed by node.id (not proved: ",
		"client", "connected since ",
		`route "by-name" of virtual host "egress"`,
		"prod/shop.Mixed: of the caller's own namespace",
		"1: ReplicaSet/mixed, without a Service",
		"ReplicaSet/mixed-1, known, learned by self at ", "heterogeneous, with 1 variant",
		"cluster of prod/shop.Mixed: acknowledged at ", "endpoints of prod/shop.Mixed: acknowledged at ",
		`pod prod/mixed-1-a on node "n1", serving`,
		`pod prod/mixed-1-b on node "n1": the owner's pods run different images`,
		"code", "OK", "do", "nothing",
		"collect-ended: ReplicaSet/mixed-1: known", "service-added: prod/shop.Mixed: provided by ReplicaSet/mixed",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("explain call does not say %q:\n%s", want, out)
		}
	}
	if out := a.must("explain", "call", "--from", "prod/web", "/shop.Next/Say"); !strings.Contains(out, "presumed from ReplicaSet/next-1 (uid-next-1/1), since its own collect does not disprove it") {
		t.Errorf("explain call does not say by whom it is presumed:\n%s", out)
	}
	e := wantKeys(t, "call", decoded(t, a, "explain", "call", "--from", "nack/caller", "/shop.Web/Say"),
		"verdict", "facts", "from", "authority", "path", "code", "message", "cause", "do", "route", "shares", "cluster", "endpoints", "absent", "decisions")
	var kinds []string
	for _, d := range e["decisions"].([]any) {
		kinds = append(kinds, d.(map[string]any)["kind"].(string))
	}
	for _, want := range []string{"nack", "quarantine", "collect-begun", "collect-ended", "service-added", "pods"} {
		if !slices.Contains(kinds, want) {
			t.Errorf("no decision of the kind %q: %v", want, kinds)
		}
	}
	ends := list(t, "endpoints", e["endpoints"], 1)
	wantKeys(t, "endpoint", ends[0], "address", "pod", "node", "state")
	if code, body, err := a.get("/decisions?service=shop.Zero&last=1"); err != nil || code != http.StatusOK || !strings.Contains(body, "service-added: prod/shop.Zero") {
		t.Errorf("/decisions: %d, %s, %v", code, body, err)
	}
	if code, body, err := a.get("/decisions?owner=ReplicaSet/zero&namespace=prod"); err != nil || code != http.StatusOK || !strings.Contains(body, "pods of ReplicaSet/zero-1: ") {
		t.Errorf("/decisions: %d, %s, %v", code, body, err)
	}
	if code, _, err := a.get("/decisions?last=x"); err != nil || code == http.StatusOK {
		t.Errorf("/decisions?last=x: %d, %v", code, err)
	}
	if out := a.must("explain", "call", "--from", "prod/web", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"); !strings.Contains(out, ": OK: server reflection is answered by the agent") {
		t.Errorf("reflection: %s", out)
	}
}

func wantWorkloads(t *testing.T, a *agentProcess) {
	for name, want := range map[string][]string{
		"prod/late":             {"ReplicaSet/late of namespace prod serves shop.NotReady with 0 pods; absent: pod prod/late-1-a (is not ready)", "ReplicaSet/late-1 (uid-late-1/1) with 0 pods, known, learned by self at "},
		"prod/ReplicaSet/zero":  {"serves shop.Zero with 0 pods", "pods of ReplicaSet/zero-1: "},
		"prod/Deployment/mixed": {"serves shop.Mixed, shop.Other with 2 pods"},
		"prod/rival":            {"gets no calls; another workload provides shop.Model", "ReplicaSet/rival-1 stands behind prod/rival"},
		"prod/shared":           {"with 1 pod; absent: pod prod/shared-1-a (another pod that is alive has its address"},
		"unready/unready":       {"serves nothing that is known; absent: pod unready/unready-1-a (is not ready)"},
		"prod/next":             {"serves shop.Next with 1 pod", "ReplicaSet/next-2 serves shop.Next, presumed from ReplicaSet/next-1 (uid-next-1/1)"},
		"tls/tls":               {"serves nothing that is known; absent: pod tls/tls-1-a (port ", "collect-ended: ReplicaSet/tls-1: none: port "},
	} {
		out := a.must("explain", "workload", name)
		line, rest, _ := strings.Cut(out, "\n")
		if !strings.Contains(line, want[0]) {
			t.Errorf("explain workload %s says %q, want %q", name, line, want[0])
		}
		for _, w := range want[1:] {
			if !strings.Contains(rest, w) {
				t.Errorf("explain workload %s does not say %q:\n%s", name, w, out)
			}
		}
	}
	refused(t, 1, "there is no workload prod/none", nil, "explain", "workload", "prod/none", "--admin-socket", a.admin)
	refused(t, 2, "NAMESPACE/NAME", nil, "explain", "workload", "none", "--admin-socket", a.admin)
}

// As long as nobody is answered, that is the fault of every call.
func TestExplainCallSaysThatTheGateIsClosed(t *testing.T) {
	t.Parallel()
	t.Run("owners are asked", func(t *testing.T) {
		w := &faultWorld{world: newWorld(t), site: newSite(t)}
		w.serve("slow-1-a", []string{"shop.Slow"}, grpc.StreamInterceptor(hang))
		w.agent = w.site.start(t, "--source", w.write().source()).live()
		c := connectRaw(t, w.site.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/web"}})
		c.subscribe(xds.Cluster)
		w.names(t, fault{from: "prod/web", path: "/shop.Slow/Say", code: codes.Unavailable, says: "the gate is closed: 1 owners not known yet: prod/ReplicaSet/slow-1 (collecting)", by: byUnknown})
	})
	t.Run("source that cannot be read", func(t *testing.T) {
		w := &faultWorld{world: newWorld(t), site: newSite(t)}
		kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
		text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c","clusters":[{"name":"c","cluster":{"server":"http://%s:1"}}],
			"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{}}]}`, nextAddr())
		if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		w.agent = w.site.start(t, "--source", "kube", "--kubeconfig", kubeconfig).live()
		c := connectRaw(t, w.site.ads, client.Options{Delta: true, Node: &corev3.Node{Id: "prod/web"}})
		c.subscribe(xds.Cluster)
		w.names(t, fault{from: "prod/web", path: "/shop.Web/Say", code: codes.Unavailable, says: "connection refused", by: byUnknown})
		w.names(t, fault{from: "prod/web", path: "/shop.Web/Say", code: codes.Unavailable, says: "the gate is closed: the source has not synced: ", by: byUnknown})
	})
}
